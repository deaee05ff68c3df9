"""The cluster autoscaler: nodes for the workers that Ray asks for."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra.cluster import Cluster
from infra.device_plugins import release, selector
from infra.iam import document, pod_trust
from infra.settings import StackSettings
from infra.versions import CLUSTER_AUTOSCALER_REPOSITORY, CLUSTER_AUTOSCALER_VERSION
from infra.workload import ClusterTarget

SERVICE_ACCOUNT = "cluster-autoscaler"


class Autoscaler(pulumi.ComponentResource):
    """Helm release and role: it sees all groups (those calls know no resources) and changes this cluster's
    only."""

    ready: list[pulumi.Resource]

    def __init__(self, name: str, settings: StackSettings, cluster: Cluster, target: ClusterTarget) -> None:
        super().__init__("efa:infra:Autoscaler", name, None, target.component())
        child = pulumi.ResourceOptions(parent=cluster)
        role = aws.iam.Role(
            f"{name}-autoscaler",
            assume_role_policy=pod_trust(settings.name, "kube-system", SERVICE_ACCOUNT),
            opts=child,
        )
        policy = aws.iam.RolePolicy(
            f"{name}-autoscaler",
            role=role.name,
            policy=cluster.arn.apply(lambda arn: _may_scale(arn, settings.name)),
            opts=child,
        )
        identity = aws.eks.PodIdentityAssociation(
            f"{name}-autoscaler",
            cluster_name=cluster.name,
            namespace="kube-system",
            service_account=SERVICE_ACCOUNT,
            role_arn=role.arn,
            opts=pulumi.ResourceOptions(parent=cluster, depends_on=[policy]),
        )
        operator = release(
            self,
            target,
            f"{name}-cluster-autoscaler",
            chart="cluster-autoscaler",
            version=CLUSTER_AUTOSCALER_VERSION,
            repository=CLUSTER_AUTOSCALER_REPOSITORY,
            namespace="kube-system",
            values={
                "autoDiscovery": {"clusterName": settings.name},
                "awsRegion": settings.region,
                "nodeSelector": selector(settings.system_selector),
                "rbac": {"serviceAccount": {"name": SERVICE_ACCOUNT}},
                # Five minutes without work, as Ray's own limit; a GPU node is too dear to keep for the
                # default ten.
                "extraArgs": {"scale-down-unneeded-time": "5m", "skip-nodes-with-local-storage": "false"},
            },
            depends_on=[identity],
        )
        self.ready = [operator]
        self.register_outputs({})


def _may_scale(cluster_arn: str, name: str) -> str:
    account = cluster_arn.split(":")[4]
    partition = cluster_arn.split(":")[1]
    groups = f"arn:{partition}:autoscaling:*:{account}:autoScalingGroup:*:autoScalingGroupName/*"
    return document(
        [
            {
                "Sid": "See",
                "Effect": "Allow",
                "Action": [
                    "autoscaling:DescribeAutoScalingGroups",
                    "autoscaling:DescribeAutoScalingInstances",
                    "autoscaling:DescribeLaunchConfigurations",
                    "autoscaling:DescribeScalingActivities",
                    "autoscaling:DescribeTags",
                    "ec2:DescribeImages",
                    "ec2:DescribeInstanceTypes",
                    "ec2:DescribeLaunchTemplateVersions",
                    "ec2:GetInstanceTypesFromInstanceRequirements",
                ],
                "Resource": "*",
            },
            {
                "Sid": "SeeNodeGroups",
                "Effect": "Allow",
                "Action": "eks:DescribeNodegroup",
                "Resource": f"{cluster_arn.replace(':cluster/', ':nodegroup/')}/*",
            },
            {
                "Sid": "Scale",
                "Effect": "Allow",
                "Action": [
                    "autoscaling:SetDesiredCapacity",
                    "autoscaling:TerminateInstanceInAutoScalingGroup",
                ],
                "Resource": groups,
                "Condition": {"StringEquals": {f"aws:ResourceTag/k8s.io/cluster-autoscaler/{name}": "owned"}},
            },
        ]
    )
