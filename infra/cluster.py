"""The control plane: one EKS cluster, reached by IAM, with pinned add-ons."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pulumi
import pulumi_aws as aws
import pulumi_eks as eks
import pulumi_kubernetes as k8s

from infra.network import Network
from infra.outputs import KubeAccess
from infra.settings import StackSettings
from infra.versions import ADDONS

USERS_GROUP = "finetune-users"
ADMIN_POLICY = "arn:aws:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"


class Cluster(pulumi.ComponentResource):
    """EKS control plane without a default node group, its log group, its add-ons and a Kubernetes provider.

    The log group exists before the cluster and goes after it, so that its retention is ours and EKS does
    not leave an endless one behind. ``vpc-cni`` (with network policies) and ``kube-proxy`` come with the
    cluster, before any node.
    """

    name: pulumi.Output[str]
    arn: pulumi.Output[str]
    endpoint: pulumi.Output[str]
    certificate_authority_data: pulumi.Output[str]
    security_group_id: pulumi.Output[str]
    control_plane: eks.Cluster
    kubernetes: k8s.Provider

    def __init__(
        self,
        name: str,
        settings: StackSettings,
        network: Network,
        aws_provider: aws.Provider,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("efa:infra:Cluster", name, None, opts)
        self._name = name
        self._settings = settings
        self._child = pulumi.ResourceOptions(parent=self)
        self._addons = ADDONS[settings.kubernetes_version]

        log_group = aws.cloudwatch.LogGroup(
            f"{name}-control-plane",
            # EKS writes to exactly this name and would make a group without retention if it were missing.
            name=f"/aws/eks/{name}/cluster",
            retention_in_days=settings.log_retention_days,
            opts=self._child,
        )
        self.control_plane = self._create_control_plane(network, aws_provider, log_group)
        cluster = self.control_plane.eks_cluster
        self.name = cluster.apply(lambda c: c.name)
        self.arn = cluster.apply(lambda c: c.arn)
        self.endpoint = cluster.apply(lambda c: c.endpoint)
        self.certificate_authority_data = cluster.apply(lambda c: c.certificate_authority).apply(_data)
        self.security_group_id = cluster.apply(lambda c: c.vpc_config).apply(_security_group)

        self._create_addon("eks-pod-identity-agent", self._addons.pod_identity_agent, [])
        self._create_addon("eks-node-monitoring-agent", self._addons.node_monitoring_agent, [])
        self.kubernetes = self._create_kubernetes_provider()
        self.register_outputs({"name": self.name, "arn": self.arn, "endpoint": self.endpoint})

    def create_coredns(self, nodes: Sequence[pulumi.Resource]) -> aws.eks.Addon:
        """CoreDNS, once there are nodes that take it: without any it is DEGRADED after 20 minutes."""
        return self._create_addon("coredns", self._addons.coredns, nodes)

    @property
    def access(self) -> pulumi.Output[dict[str, Any]]:
        """``KubeAccess`` of the cluster, as plain values."""
        region = self._settings.region
        return pulumi.Output.all(
            name=self.name, server=self.endpoint, ca=self.certificate_authority_data
        ).apply(
            lambda cluster: KubeAccess(
                server=cluster["server"],
                certificate_authority_data=cluster["ca"],
                exec_command=_get_token(cluster["name"], region),
            ).model_dump(mode="json")
        )

    def _create_control_plane(
        self, network: Network, aws_provider: aws.Provider, log_group: aws.cloudwatch.LogGroup
    ) -> eks.Cluster:
        settings = self._settings
        key = self._create_secrets_key() if settings.secrets_encryption else None
        return eks.Cluster(
            self._name,
            name=self._name,
            version=settings.kubernetes_version,
            vpc_id=network.vpc_id,
            private_subnet_ids=list(network.private_subnet_ids.values()),
            skip_default_node_group=True,
            # Nodes use the security group that EKS makes; the component would add two of its own that no
            # node has.
            skip_default_security_groups=True,
            authentication_mode=eks.AuthenticationMode.API,
            access_entries=self._access_entries(),
            endpoint_private_access=True,
            endpoint_public_access=settings.public_endpoint,
            public_access_cidrs=list(settings.public_cidrs) if settings.public_endpoint else None,
            enabled_cluster_log_types=list(settings.control_plane_logs),
            encryption_config_key_arn=key.arn if key else None,
            deletion_protection=settings.deletion_protection,
            kubernetes_service_ip_address_range=settings.service_cidr,
            create_oidc_provider=False,
            bootstrap_self_managed_addons=False,
            vpc_cni_options=eks.VpcCniOptionsArgs(
                addon_version=self._addons.vpc_cni,
                enable_network_policy=True,
                resolve_conflicts_on_create=eks.ResolveConflictsOnCreate.OVERWRITE,
                resolve_conflicts_on_update=eks.ResolveConflictsOnUpdate.OVERWRITE,
            ),
            kube_proxy_addon_options=eks.KubeProxyAddonOptionsArgs(
                version=self._addons.kube_proxy,
                resolve_conflicts_on_create=eks.ResolveConflictsOnCreate.OVERWRITE,
                resolve_conflicts_on_update=eks.ResolveConflictsOnUpdate.OVERWRITE,
            ),
            # The component would install CoreDNS before there is a node for it.
            coredns_addon_options=eks.CoreDnsAddonOptionsArgs(enabled=False),
            opts=pulumi.ResourceOptions(
                parent=self, providers={"aws": aws_provider}, depends_on=[log_group, network]
            ),
        )

    def _access_entries(self) -> dict[str, eks.AccessEntryArgs]:
        """The creator is an administrator through EKS itself; these are the others."""
        entries: dict[str, eks.AccessEntryArgs] = {}
        for principal in self._settings.admins:
            entries[f"admin-{_short(principal)}"] = eks.AccessEntryArgs(
                principal_arn=principal,
                access_policies={
                    "admin": eks.AccessPolicyAssociationArgs(
                        policy_arn=ADMIN_POLICY,
                        access_scope=aws.eks.AccessPolicyAssociationAccessScopeArgs(type="cluster"),
                    )
                },
            )
        for principal in self._settings.users:
            entries[f"user-{_short(principal)}"] = eks.AccessEntryArgs(
                principal_arn=principal, kubernetes_groups=[USERS_GROUP]
            )
        return entries

    def _create_secrets_key(self) -> aws.kms.Key:
        return aws.kms.Key(
            f"{self._name}-secrets",
            description=f"Kubernetes secrets of EKS cluster {self._name}",
            enable_key_rotation=True,
            deletion_window_in_days=7,
            opts=self._child,
        )

    def _create_addon(self, addon: str, version: str, nodes: Sequence[pulumi.Resource]) -> aws.eks.Addon:
        return aws.eks.Addon(
            f"{self._name}-{addon}",
            cluster_name=self.name,
            addon_name=addon,
            addon_version=version,
            resolve_conflicts_on_create="OVERWRITE",
            resolve_conflicts_on_update="OVERWRITE",
            opts=pulumi.ResourceOptions(parent=self, depends_on=[self.control_plane, *nodes]),
        )

    def _create_kubernetes_provider(self) -> k8s.Provider:
        kubeconfig = self.access.apply(
            lambda access: json.dumps(KubeAccess.model_validate(access).kubeconfig(self._name))
        )
        return k8s.Provider(
            f"{self._name}-kubernetes",
            kubeconfig=kubeconfig,
            enable_server_side_apply=True,
            # Otherwise a changed kubeconfig looks like another cluster, and every object would be replaced.
            cluster_identifier=self.arn,
            # Access entries belong to the component: nothing can be applied before they are there.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[self.control_plane]),
        )


def _data(certificate_authority: Any) -> str:
    return certificate_authority.data


def _security_group(vpc_config: Any) -> str:
    return vpc_config.cluster_security_group_id


def _get_token(cluster: str, region: str) -> tuple[str, ...]:
    """The command that prints a short-lived token; nothing secret is stored."""
    return ("aws", "eks", "get-token", "--cluster-name", cluster, "--region", region, "--output", "json")


def _short(principal: str) -> str:
    """The last part of an ARN, for the name of a resource: two accounts may have a role of one name."""
    account, _, path = principal.removeprefix("arn:").split("::", 1)[1].partition(":")
    return f"{account}-{path.replace('/', '-')}"
