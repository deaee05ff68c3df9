"""The nodes: a small group for head and operator, and the GPU group with its EFA interfaces."""

from __future__ import annotations

import base64

import pulumi
import pulumi_aws as aws

from infra.cluster import Cluster
from infra.iam import trust
from infra.instances import InstanceType
from infra.network import Network
from infra.settings import StackSettings

GPU_TAINT_KEY = "nvidia.com/gpu"
GPU_TAINT_VALUE = "present"

NODE_POLICIES = (
    "arn:aws:iam::aws:policy/AmazonEKSWorkerNodePolicy",
    "arn:aws:iam::aws:policy/AmazonEKS_CNI_Policy",
    "arn:aws:iam::aws:policy/AmazonEC2ContainerRegistryPullOnly",
    # The Ray image comes from the public registry, which allows one unauthenticated pull a second.
    "arn:aws:iam::aws:policy/AmazonElasticContainerRegistryPublicReadOnly",
)

# nodeadm puts containerd, kubelet and pod logs on a RAID 0 of the instance's own disks. EKS merges this
# part with its own, so the group keeps the managed AMI.
NVME_NODE_CONFIG = """MIME-Version: 1.0
Content-Type: multipart/mixed; boundary="BOUNDARY"

--BOUNDARY
Content-Type: application/node.eks.aws

apiVersion: node.eks.aws/v1alpha1
kind: NodeConfig
spec:
  instance:
    localStorage:
      strategy: RAID0

--BOUNDARY--
"""


class NodeRole(pulumi.ComponentResource):
    """The IAM role of all nodes: join the cluster, move addresses, pull images. Jobs use another one."""

    arn: pulumi.Output[str]

    def __init__(self, name: str, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("efa:infra:NodeRole", name, None, opts)
        role = aws.iam.Role(
            f"{name}-node",
            assume_role_policy=trust("ec2.amazonaws.com"),
            opts=pulumi.ResourceOptions(parent=self),
        )
        for policy in NODE_POLICIES:
            aws.iam.RolePolicyAttachment(
                f"{name}-node-{policy.rpartition('/')[2]}",
                role=role.name,
                policy_arn=policy,
                opts=pulumi.ResourceOptions(parent=self),
            )
        self.arn = role.arn
        self.register_outputs({"arn": self.arn})


class SystemNodes(pulumi.ComponentResource):
    """Nodes for the Ray head, CoreDNS and the operator, in the GPU zone: no traffic between zones."""

    group: aws.eks.NodeGroup

    def __init__(
        self,
        name: str,
        settings: StackSettings,
        cluster: Cluster,
        network: Network,
        role: NodeRole,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("efa:infra:SystemNodes", name, None, opts)
        template = aws.ec2.LaunchTemplate(
            f"{name}-system",
            update_default_version=True,
            block_device_mappings=[_root_disk(settings.system_disk_gib)],
            metadata_options=_imds_v2(),
            tag_specifications=_tag_specifications(settings, f"{name}-system"),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.group = aws.eks.NodeGroup(
            f"{name}-system",
            cluster_name=cluster.name,
            node_role_arn=role.arn,
            subnet_ids=[network.private_subnet_ids[settings.gpu_zone]],
            ami_type="AL2023_x86_64_STANDARD",
            version=settings.kubernetes_version,
            release_version=settings.ami_release,
            instance_types=[settings.system_instance_type],
            capacity_type="ON_DEMAND",
            scaling_config=_fixed(settings.system_count),
            update_config=aws.eks.NodeGroupUpdateConfigArgs(max_unavailable=1),
            node_repair_config=aws.eks.NodeGroupNodeRepairConfigArgs(enabled=settings.node_repair),
            launch_template=_latest(template),
            labels={"role": "system"},
            opts=pulumi.ResourceOptions(
                parent=self,
                # Nodes join only with their policies, a route to the internet and vpc-cni in place.
                depends_on=[cluster.control_plane, role, network],
                custom_timeouts=pulumi.CustomTimeouts(create="30m", delete="30m"),
            ),
        )
        self.register_outputs({"nodeGroup": self.group.node_group_name})


class GpuNodes(pulumi.ComponentResource):
    """GPU nodes with EFA, in exactly one zone.

    The launch template carries one EFA interface per network card. EFA traffic is matched by security-group
    reference only: the group's own security group names itself for ingress and for egress (0.0.0.0/0 does
    not cover it).
    """

    group: aws.eks.NodeGroup

    def __init__(
        self,
        name: str,
        settings: StackSettings,
        cluster: Cluster,
        network: Network,
        role: NodeRole,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("efa:infra:GpuNodes", name, None, opts)
        self._name = name
        self._settings = settings
        self._child = pulumi.ResourceOptions(parent=self)
        security_group, rules = self._create_efa_security_group(network)
        template = self._create_launch_template(cluster, security_group)
        self.group = aws.eks.NodeGroup(
            f"{name}-gpu",
            cluster_name=cluster.name,
            node_role_arn=role.arn,
            subnet_ids=[network.private_subnet_ids[settings.gpu_zone]],
            ami_type="AL2023_x86_64_NVIDIA",
            version=settings.kubernetes_version,
            release_version=settings.ami_release,
            # A capacity block wants the instance type in the launch template, and it may stand in one place
            # only.
            instance_types=None if self._capacity_block else [settings.gpu_instance_type],
            capacity_type=_capacity_type(settings),
            scaling_config=self._scaling(),
            # Terminate first: a reservation, a quota or a placement group seldom has room for a spare node.
            update_config=aws.eks.NodeGroupUpdateConfigArgs(max_unavailable=1, update_strategy="MINIMAL"),
            node_repair_config=aws.eks.NodeGroupNodeRepairConfigArgs(enabled=settings.node_repair),
            launch_template=_latest(template),
            labels={"role": "gpu", "nvidia.com/gpu.present": "true"},
            taints=[
                aws.eks.NodeGroupTaintArgs(key=GPU_TAINT_KEY, value=GPU_TAINT_VALUE, effect="NO_SCHEDULE")
            ],
            tags=self._autoscaler_tags(),
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=[cluster.control_plane, role, network, *rules],
                # A second GPU group beside the first would need twice the capacity.
                delete_before_replace=True,
                # The autoscaler owns the number of nodes then.
                ignore_changes=["scalingConfig.desiredSize"] if settings.autoscaling else None,
                # EKS gives up on missing capacity after about 20 minutes.
                custom_timeouts=pulumi.CustomTimeouts(create="40m", update="90m", delete="40m"),
            ),
        )
        self.register_outputs({"nodeGroup": self.group.node_group_name})

    @property
    def _instance(self) -> InstanceType:
        return self._settings.instance

    @property
    def _capacity_block(self) -> bool:
        return self._settings.purchase == "capacity-block"

    def _create_efa_security_group(
        self, network: Network
    ) -> tuple[aws.ec2.SecurityGroup, list[pulumi.Resource]]:
        group = aws.ec2.SecurityGroup(
            f"{self._name}-efa",
            vpc_id=network.vpc_id,
            description="EFA traffic between GPU nodes",
            tags={"Name": f"{self._name}-efa"},
            opts=pulumi.ResourceOptions(
                parent=self,
                # Interfaces that the VPC CNI leaves behind keep the group in use for some minutes.
                custom_timeouts=pulumi.CustomTimeouts(delete="30m"),
            ),
        )
        rules: list[pulumi.Resource] = [
            aws.vpc.SecurityGroupIngressRule(
                f"{self._name}-efa-ingress",
                security_group_id=group.id,
                referenced_security_group_id=group.id,
                ip_protocol="-1",
                description="EFA from the other GPU nodes",
                opts=self._child,
            ),
            aws.vpc.SecurityGroupEgressRule(
                f"{self._name}-efa-egress",
                security_group_id=group.id,
                referenced_security_group_id=group.id,
                ip_protocol="-1",
                description="EFA to the other GPU nodes",
                opts=self._child,
            ),
        ]
        return group, rules

    def _create_launch_template(
        self, cluster: Cluster, security_group: aws.ec2.SecurityGroup
    ) -> aws.ec2.LaunchTemplate:
        settings = self._settings
        placement_group = self._create_placement_group() if settings.purchase == "on-demand" else None
        return aws.ec2.LaunchTemplate(
            f"{self._name}-gpu",
            update_default_version=True,
            # Neither image nor bootstrap: EKS adds those of the AMI type, and keeps the group upgradable.
            instance_type=settings.gpu_instance_type if self._capacity_block else None,
            user_data=_encode(NVME_NODE_CONFIG) if settings.local_nvme else None,
            block_device_mappings=[_root_disk(settings.gpu_disk_gib)],
            metadata_options=_imds_v2(),
            # Security groups belong to the interfaces: EC2 refuses them beside network interfaces.
            network_interfaces=self._network_interfaces([cluster.security_group_id, security_group.id]),
            placement=(
                aws.ec2.LaunchTemplatePlacementArgs(group_name=placement_group.name)
                if placement_group
                else None
            ),
            capacity_reservation_specification=_reservation(settings),
            instance_market_options=(
                aws.ec2.LaunchTemplateInstanceMarketOptionsArgs(market_type="capacity-block")
                if self._capacity_block
                else None
            ),
            tag_specifications=_tag_specifications(settings, f"{self._name}-gpu"),
            opts=self._child,
        )

    def _create_placement_group(self) -> aws.ec2.PlacementGroup:
        """On demand only: with a reservation, a forced group loses part of the reserved capacity."""
        return aws.ec2.PlacementGroup(f"{self._name}-gpu", strategy="cluster", opts=self._child)

    def _network_interfaces(
        self, security_groups: list[pulumi.Output[str]]
    ) -> list[aws.ec2.LaunchTemplateNetworkInterfaceArgs]:
        """One interface per network card. A type without EFA has the plain primary interface."""
        if not self._instance.efa_interfaces:
            return [
                aws.ec2.LaunchTemplateNetworkInterfaceArgs(
                    device_index=0,
                    network_card_index=0,
                    security_groups=security_groups,
                    associate_public_ip_address="false",
                    delete_on_termination="true",
                )
            ]
        return [
            aws.ec2.LaunchTemplateNetworkInterfaceArgs(
                device_index=interface.device_index,
                network_card_index=interface.card,
                interface_type=interface.kind,
                security_groups=security_groups,
                # Only the primary interface can ask for an address, and only where it is the only one.
                associate_public_ip_address="false" if len(self._instance.efa_interfaces) == 1 else None,
                delete_on_termination="true",
            )
            for interface in self._instance.efa_interfaces
        ]

    def _scaling(self) -> aws.eks.NodeGroupScalingConfigArgs:
        if not self._settings.autoscaling:
            return _fixed(self._settings.gpu_count)
        return aws.eks.NodeGroupScalingConfigArgs(
            min_size=self._settings.gpu_min_count,
            max_size=self._settings.gpu_count,
            desired_size=self._settings.gpu_min_count,
        )

    def _autoscaler_tags(self) -> dict[str, str] | None:
        """What the cluster autoscaler looks for, and what it needs to start from zero nodes."""
        if not self._settings.autoscaling:
            return None
        template = "k8s.io/cluster-autoscaler/node-template"
        return {
            "k8s.io/cluster-autoscaler/enabled": "true",
            f"k8s.io/cluster-autoscaler/{self._settings.name}": "owned",
            f"{template}/label/role": "gpu",
            f"{template}/taint/{GPU_TAINT_KEY}": f"{GPU_TAINT_VALUE}:NoSchedule",
            f"{template}/resources/nvidia.com/gpu": str(self._settings.gpus),
            f"{template}/resources/vpc.amazonaws.com/efa": str(self._settings.efa),
        }


def _root_disk(gib: int) -> aws.ec2.LaunchTemplateBlockDeviceMappingArgs:
    return aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
        device_name="/dev/xvda",
        ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
            volume_type="gp3",
            volume_size=gib,
            encrypted="true",
            delete_on_termination="true",
        ),
    )


def _imds_v2() -> aws.ec2.LaunchTemplateMetadataOptionsArgs:
    """IMDSv2 with one hop: pods cannot reach the node's credentials, they have Pod Identity."""
    return aws.ec2.LaunchTemplateMetadataOptionsArgs(
        http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=1
    )


def _tag_specifications(
    settings: StackSettings, name: str
) -> list[aws.ec2.LaunchTemplateTagSpecificationArgs]:
    """Default tags of the provider do not reach what an instance brings along."""
    tags = {**settings.instance_tags, "Name": name}
    return [
        aws.ec2.LaunchTemplateTagSpecificationArgs(resource_type=kind, tags=tags)
        for kind in ("instance", "volume", "network-interface")
    ]


def _capacity_type(settings: StackSettings) -> str:
    return {"spot": "SPOT", "capacity-block": "CAPACITY_BLOCK"}.get(settings.purchase, "ON_DEMAND")


def _reservation(
    settings: StackSettings,
) -> aws.ec2.LaunchTemplateCapacityReservationSpecificationArgs | None:
    if settings.reservation_id is None:
        return None
    return aws.ec2.LaunchTemplateCapacityReservationSpecificationArgs(
        capacity_reservation_target=aws.ec2.LaunchTemplateCapacityReservationSpecificationCapacityReservationTargetArgs(
            capacity_reservation_id=settings.reservation_id
        )
    )


def _fixed(count: int) -> aws.eks.NodeGroupScalingConfigArgs:
    return aws.eks.NodeGroupScalingConfigArgs(min_size=0, max_size=count, desired_size=count)


def _latest(template: aws.ec2.LaunchTemplate) -> aws.eks.NodeGroupLaunchTemplateArgs:
    return aws.eks.NodeGroupLaunchTemplateArgs(
        id=template.id, version=template.latest_version.apply(lambda version: str(int(version)))
    )


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
