"""What a stack costs an hour, from the graph that its program registers.

On-demand list prices of what bills by the hour. Traffic, requests, stored objects and logs bill by use and
are not in it; ``CostReport.by_use`` names them. An unknown price is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.instances import INSTANCES, PRICE_TABLE_DATE, SYSTEM_INSTANCES
from infra.settings import StackSettings, read_settings_file

if TYPE_CHECKING:
    from infra.recorder import Graph, Resource

HOURS_PER_MONTH = 730

# USD, list prices of AWS's public price pages on PRICE_TABLE_DATE. The three regions have the same ones.
_UNITED_STATES = ("us-east-1", "us-east-2", "us-west-2")
_SERVICE_PRICES: Mapping[str, float] = {
    "EKS control plane, hour": 0.10,
    "NAT gateway, hour": 0.045,
    "public IPv4 address, hour": 0.005,
    "gp3 disk, GiB and month": 0.08,
    "KMS key, month": 1.00,
    "FSx for Lustre persistent 125 MB/s/TiB, GiB and month": 0.145,
}
SERVICE_PRICES: Mapping[str, Mapping[str, float]] = dict.fromkeys(_UNITED_STATES, _SERVICE_PRICES)

# Types that AWS charges nothing for by the hour. A type that is neither here nor priced is refused.
FREE_TYPES = frozenset(
    {
        "aws:budgets/budget:Budget",
        "aws:cloudwatch/logGroup:LogGroup",
        "aws:ec2/flowLog:FlowLog",
        "aws:ec2/internetGateway:InternetGateway",
        "aws:ec2/launchTemplate:LaunchTemplate",
        "aws:ec2/placementGroup:PlacementGroup",
        "aws:ec2/routeTable:RouteTable",
        "aws:ec2/routeTableAssociation:RouteTableAssociation",
        "aws:ec2/securityGroup:SecurityGroup",
        "aws:ec2/subnet:Subnet",
        "aws:ec2/vpc:Vpc",
        "aws:eks/addon:Addon",
        "aws:eks/podIdentityAssociation:PodIdentityAssociation",
        "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation",
        "aws:iam/role:Role",
        "aws:iam/rolePolicy:RolePolicy",
        "aws:iam/rolePolicyAttachment:RolePolicyAttachment",
        "aws:s3/bucket:Bucket",
        "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration",
        "aws:s3/bucketOwnershipControls:BucketOwnershipControls",
        "aws:s3/bucketPolicy:BucketPolicy",
        "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock",
        "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration",
        "aws:s3/bucketVersioning:BucketVersioning",
        "aws:scheduler/schedule:Schedule",
        "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule",
        "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule",
    }
)
BY_USE: tuple[str, ...] = (
    "S3 objects and requests",
    "traffic through the NAT gateway (0.045 USD/GB) and between zones",
    "CloudWatch logs (0.50 USD/GB)",
)
OBSERVED_BY_USE = ("CloudWatch Container Insights, by observation: metrics of nodes, pods, GPUs and EFA",)


class UnknownPriceError(Exception):
    """Prices that the table does not have."""

    def __init__(self, unknown: Iterable[str], region: str) -> None:
        self.unknown = tuple(dict.fromkeys(unknown))
        lines = "\n  - ".join(self.unknown)
        super().__init__(
            f"no known price in {region} (table of {PRICE_TABLE_DATE}) for:\n  - {lines}\n"
            "Nothing is guessed: set gpuHourlyUsd to what a GPU node really costs, or add the price to "
            "infra/instances.py or infra/cost.py."
        )


@dataclass(frozen=True)
class CostLine:
    """One part of the price: ``quantity`` of something at ``unit_usd`` an hour each."""

    name: str
    quantity: float
    unit_usd: float

    @property
    def hourly_usd(self) -> float:
        return self.quantity * self.unit_usd


@dataclass(frozen=True)
class CostReport:
    """Price of a stack an hour and its parts."""

    region: str
    lines: tuple[CostLine, ...]
    table_date: str = PRICE_TABLE_DATE
    by_use: tuple[str, ...] = BY_USE

    @property
    def hourly_usd(self) -> float:
        return sum(line.hourly_usd for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as ``finetune cost --json`` prints it."""
        return {
            "hourly_usd": round(self.hourly_usd, 4),
            "lines": [
                {
                    "name": line.name,
                    "quantity": line.quantity,
                    "unit_usd": line.unit_usd,
                    "hourly_usd": round(line.hourly_usd, 6),
                }
                for line in self.lines
            ],
            "region": self.region,
            "table_date": self.table_date,
            "by_use": list(self.by_use),
        }


def cost_of_settings_file(path: Path) -> CostReport:
    """Price of the stack that a ``Pulumi.<stack>.yaml`` describes.

    Raises:
        SettingsError: for mistakes in the file.
        UnknownPriceError: for prices that the table does not have.
    """
    return price(read_settings_file(path))


def price(settings: StackSettings) -> CostReport:
    """Price of a stack, from a recording of its program. A cluster of somebody else costs this stack nothing.

    Raises:
        UnknownPriceError: for prices that the table does not have.
    """
    from infra.recorder import record

    # Objects in the cluster cost nothing, and the CRDs are most of the work of a recording.
    return price_graph(record(settings.model_copy(update={"kuberay": False})), settings)


def price_graph(graph: Graph, settings: StackSettings) -> CostReport:
    """Price of recorded resources; ``settings`` gives region and the price that was agreed for GPU nodes.

    Raises:
        UnknownPriceError: for prices that the table does not have.
    """
    pricing = _Pricing(graph, settings)
    for resource in graph.resources:
        if resource.type.startswith("aws:") and resource.custom:
            pricing.add(resource)
    if pricing.unknown:
        raise UnknownPriceError(pricing.unknown, settings.region)
    by_use = (*BY_USE, *OBSERVED_BY_USE) if settings.observability == "cloudwatch" else BY_USE
    return CostReport(settings.region, tuple(pricing.lines), by_use=by_use)


class _Pricing:
    """Collects lines and what has no price."""

    def __init__(self, graph: Graph, settings: StackSettings) -> None:
        self._graph = graph
        self._settings = settings
        self.lines: list[CostLine] = []
        self.unknown: list[str] = []
        self._pricers: Mapping[str, Callable[[Resource], None]] = {
            "aws:eks/cluster:Cluster": lambda r: self._service(
                r, "EKS control plane", 1, "EKS control plane, hour"
            ),
            "aws:eks/nodeGroup:NodeGroup": self._node_group,
            "aws:ec2/natGateway:NatGateway": lambda r: self._service(
                r, "NAT gateway", 1, "NAT gateway, hour"
            ),
            "aws:ec2/eip:Eip": lambda r: self._service(
                r, "public IPv4 address", 1, "public IPv4 address, hour"
            ),
            "aws:kms/key:Key": lambda r: self._monthly(r, "KMS key", 1, "KMS key, month"),
            "aws:fsx/lustreFileSystem:LustreFileSystem": self._lustre,
            "aws:ec2/vpcEndpoint:VpcEndpoint": self._endpoint,
        }

    def add(self, resource: Resource) -> None:
        pricer = self._pricers.get(resource.type)
        if pricer:
            pricer(resource)
        elif resource.type not in FREE_TYPES:
            self.unknown.append(f"{resource.type} ({resource.name})")

    def _service(self, resource: Resource, label: str, quantity: float, key: str, divisor: float = 1) -> None:
        prices = SERVICE_PRICES.get(self._settings.region)
        if prices is None:
            self.unknown.append(key)
            return
        self.lines.append(CostLine(f"{label} ({resource.name})", quantity, prices[key] / divisor))

    def _monthly(self, resource: Resource, label: str, quantity: float, key: str) -> None:
        self._service(resource, label, quantity, key, HOURS_PER_MONTH)

    def _endpoint(self, resource: Resource) -> None:
        if resource.inputs["vpcEndpointType"] != "Gateway":
            self.unknown.append(f"VPC endpoint {resource.inputs['serviceName']} ({resource.name})")

    def _lustre(self, resource: Resource) -> None:
        key = "FSx for Lustre persistent 125 MB/s/TiB, GiB and month"
        self._monthly(resource, "FSx for Lustre", resource.inputs["storageCapacity"], key)

    def _node_group(self, resource: Resource) -> None:
        template = self._launch_template(resource)
        types = resource.inputs.get("instanceTypes") or [template.inputs["instanceType"]]
        # With autoscaling the price is that of all nodes that may run.
        count = resource.inputs["scalingConfig"]["maxSize"]
        unit = self._node_price(types[0], resource.inputs.get("capacityType", "ON_DEMAND"))
        if unit is not None:
            self.lines.append(CostLine(f"{types[0]} ({resource.name})", count, unit))
        gib = template.inputs["blockDeviceMappings"][0]["ebs"]["volumeSize"]
        self._monthly(resource, "gp3 disks, GiB", count * gib, "gp3 disk, GiB and month")

    def _launch_template(self, node_group: Resource) -> Resource:
        for urn in node_group.property_dependencies["launchTemplate"]:
            resource = self._graph.by_urn[urn]
            if resource.type == "aws:ec2/launchTemplate:LaunchTemplate":
                return resource
        raise LookupError(f"node group {node_group.name} has no launch template in the graph")

    def _node_price(self, instance_type: str, capacity_type: str) -> float | None:
        settings = self._settings
        if instance_type in INSTANCES and settings.gpu_hourly_usd:
            return settings.gpu_hourly_usd
        if capacity_type != "ON_DEMAND":
            self.unknown.append(f"{instance_type} as {capacity_type.lower().replace('_', ' ')}")
            return None
        shape = INSTANCES.get(instance_type) or SYSTEM_INSTANCES.get(instance_type)
        unit = shape.price_usd_per_hour.get(settings.region) if shape else None
        if unit is None:
            self.unknown.append(f"{instance_type} on demand")
        return unit
