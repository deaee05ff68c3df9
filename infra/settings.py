"""Typed settings of a stack: the only reader of Pulumi's configuration.

``load_settings`` reads the running program's configuration, ``read_settings_file`` a
``Pulumi.<stack>.yaml``. Both end in ``parse_settings``, which checks every key and every combination before
a resource exists and reports all mistakes at once. Keys are in camelCase there and in snake_case here.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel

from infra.instances import (
    DAEMONS_CPU_MILLIS,
    DAEMONS_MEMORY_MIB,
    INSTANCES,
    SYSTEM_INSTANCES,
    InstanceType,
    NodeShape,
)
from infra.versions import KUBERAY_VERSION, KUBERNETES_VERSIONS, RAY_IMAGE, RAY_IMAGE_TAG, RAY_VERSION

PROJECT = "efa-finetune"


@dataclass(frozen=True)
class Observers:
    """What the pods that observe a stack request: together on the system nodes, and on each GPU node."""

    system_cpu_millis: int
    system_memory_mib: int
    gpu_cpu_millis: int
    gpu_memory_mib: int


# The longest physical name that AWS or pulumi-eks derives is the control plane's role:
# NAME-eksRole-role-xxxxxxx, and an IAM role may have 64 characters.
MAX_CLUSTER_NAME = 64 - len("-eksRole-role") - len("-0123456")
# KubeRay's limit for RayCluster names (MaxRayClusterNameLength).
MAX_RAY_CLUSTER_NAME = 53
# What aws-node, kube-proxy, CoreDNS, the pod identity agent, the monitoring agent and the operator request
# together.
SYSTEM_PODS_CPU_MILLIS = 700
SYSTEM_PODS_MEMORY_MIB = 1300
# The container that KubeRay adds to the head when it autoscales.
AUTOSCALER_CPU_MILLIS = 500
AUTOSCALER_MEMORY_MIB = 512
# What observability adds, summed over the requests in infra/observability.py: on the system nodes, and on each
# GPU node.
MONITORING_NAMESPACE = "monitoring"
OBSERVERS: Mapping[str, Observers] = {
    "none": Observers(0, 0, 0, 0),
    "prometheus": Observers(300, 1600, 80, 128),
    "cloudwatch": Observers(200, 256, 350, 256),
}
# About ten days of the series of three nodes, at two bytes a sample (estimated 2026-12-01).
PROMETHEUS_DISK_GIB = 5
# The VPC CNI keeps a spare network interface full of addresses on each node: 2 x 30 on g6.12xlarge.
ADDRESSES_PER_NODE = 60

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
FROZEN_TAG = re.compile(r".*v\d+\.\d+\.\d+$")
MOVING_TAG = re.compile(r"^(latest|.*v\d+(\.\d+)?|.*-cuda)$")
IAM_ARN = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:(role|user)/[\w+=,.@/-]+")
DOCUMENTATION_NETWORKS = tuple(
    ipaddress.IPv4Network(n) for n in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")
)

Observability = Literal["none", "prometheus", "cloudwatch"]
Purchase = Literal["on-demand", "reservation", "capacity-block", "spot"]


@dataclass(frozen=True)
class Problem:
    """One mistake: the key in camelCase, the value found, what is allowed, what to do."""

    key: str
    value: Any
    allowed: str
    fix: str

    def render(self, where: str) -> str:
        return f"{self.key} = {json.dumps(self.value, default=str)} ({where}): {self.allowed}. {self.fix}"


class SettingsError(Exception):
    """All mistakes in the settings of a stack, one line each."""

    def __init__(self, problems: Sequence[Problem], source: SettingsSource | None = None) -> None:
        source = source or SettingsSource()
        self.problems = tuple(problems)
        lines = [f"{len(self.problems)} mistake(s) in the settings of {source.describe()}:"]
        lines += [
            f"  - {problem.render(source.where(problem.key))}{source.command(problem.key)}"
            for problem in self.problems
        ]
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class SettingsSource:
    """Where settings came from, to point at the line of a mistake."""

    stack: str = "this stack"
    path: Path | None = None

    def describe(self) -> str:
        return f"stack {self.stack}" + (f" ({self.path})" if self.path else "")

    def where(self, key: str) -> str:
        if self.path is None or not self.path.is_file():
            return f"configuration of stack {self.stack}"
        pattern = re.compile(rf"^\s*[\"']?{re.escape(PROJECT)}:{re.escape(key)}[\"']?\s*:")
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), start=1):
            if pattern.match(line):
                return f"{self.path}:{number}"
        return f"the default: {self.path} does not set it"

    def command(self, key: str) -> str:
        """The command that sets the key, for the end of a message."""
        name = next((n for n in StackSettings.model_fields if to_camel(n) == key), None)
        if name is None:
            return ""
        many = get_origin(StackSettings.model_fields[name].annotation) is tuple
        setting = f"--path '{key}[0]'" if many else key
        return f" To set it: pulumi config set {setting} VALUE --stack {self.stack}"


def _network(value: str) -> str:
    try:
        ipaddress.IPv4Network(value)
    except ValueError as error:
        raise ValueError(f"an IPv4 network such as 10.0.0.0/16 is needed: {error}") from error
    return value


def _digest(value: str) -> str:
    if not DIGEST.fullmatch(value):
        raise ValueError("a digest is sha256: and 64 hexadecimal digits")
    return value


def _dns_label(value: str) -> str:
    if not DNS_1035.fullmatch(value) or len(value) > 63:
        raise ValueError("lower-case letters, digits and '-', a letter first, 63 characters at most")
    return value


def _selector(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9./_-]+=[A-Za-z0-9._-]*", value):
        raise ValueError("a node label as KEY=VALUE")
    return value


def _principal(value: str) -> str:
    if not IAM_ARN.fullmatch(value):
        raise ValueError("the ARN of an IAM role or user, such as arn:aws:iam::123456789012:role/admin")
    return value


def _job_secret(value: str) -> str:
    name, separator, secret = value.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("VARIABLE=SECRET, the environment variable and the name of the Secret that has it")
    if re.fullmatch(r"[0-9a-f]{32,}", secret):
        raise ValueError(
            "VARIABLE=SECRET, where SECRET is the name of a Kubernetes Secret and not its content"
        )
    _dns_label(secret)
    return value


def _aware(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("a time with its offset is needed, such as 2026-12-01T18:00:00+01:00")
    return value


def _zero_or_least(least: float) -> Callable[[float], float]:
    def check(value: float) -> float:
        if 0 < value < least:
            raise ValueError(f"0, or {least} at least")
        return value

    return check


Network = Annotated[str, AfterValidator(_network)]
Label = Annotated[str, AfterValidator(_dns_label)]
Selector = Annotated[str, AfterValidator(_selector)]
Principal = Annotated[str, AfterValidator(_principal)]
JobSecret = Annotated[str, AfterValidator(_job_secret)]
LogType = Literal["api", "audit", "authenticator", "controllerManager", "scheduler"]


class StackSettings(BaseModel):
    """Everything that a stack can be told. Each field is a key of ``Pulumi.yaml`` with the same default."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    stack: str = Field(description="name of the stack; given by Pulumi", exclude=True)

    # What this stack is
    target: Literal["aws", "existing"] = Field(
        "aws", description="aws: everything; existing: only the workload"
    )
    owner: str = Field("", description="who answers for the stack and its bill; a tag on everything")
    expires: Annotated[datetime, AfterValidator(_aware)] | None = Field(
        None, description="ISO 8601 time with offset at which the GPU nodes go, even if no laptop is on"
    )
    cluster_name: Label | None = Field(None, description="EKS cluster name; empty: efa-STACK")

    # AWS
    region: str = Field("us-west-2", description="AWS region")
    account_id: Annotated[str, Field(pattern=r"^\d{12}$")] | None = Field(
        None, description="the only account that may be touched; an update or a destroy refuses another one"
    )

    # Network
    vpc_cidr: Network = Field("10.0.0.0/16", description="addresses of the VPC")
    service_cidr: Network = Field("172.20.0.0/16", description="addresses of Kubernetes services")
    peered_cidrs: tuple[Network, ...] = Field(
        (), description="networks that the VPC must not overlap (VPN, peers)"
    )
    zones: tuple[str, ...] = Field(
        ("us-west-2a", "us-west-2b"), description="availability zones; EKS wants two"
    )
    gpu_zone: str = Field("us-west-2a", description="the one zone of the GPU nodes; finetune zones finds it")
    nat_per_zone: bool = Field(False, description="one NAT gateway per zone instead of one in the GPU zone")
    flow_logs: bool = Field(False, description="VPC flow logs to CloudWatch")

    # Control plane
    kubernetes_version: str = Field("1.35", description="Kubernetes version of control plane and nodes")
    public_endpoint: bool = Field(True, description="reach the Kubernetes API from outside of the VPC")
    public_cidrs: tuple[Network, ...] = Field((), description="addresses that may reach the public endpoint")
    allow_any_address: bool = Field(False, description="explicit yes to 0.0.0.0/0 in publicCidrs")
    admins: tuple[Principal, ...] = Field((), description="IAM principals that administer the cluster")
    users: tuple[Principal, ...] = Field((), description="IAM principals that may submit jobs, nothing else")
    control_plane_logs: tuple[LogType, ...] = Field(
        ("api", "audit", "authenticator", "controllerManager", "scheduler"), description="control-plane logs"
    )
    log_retention_days: Literal[1, 3, 5, 7, 14, 30, 60, 90, 180, 365] = Field(
        30, description="days logs are kept"
    )
    secrets_encryption: bool = Field(
        False, description="encrypt Kubernetes secrets with a KMS key of this stack"
    )
    deletion_protection: bool = Field(False, description="AWS refuses to delete the cluster while this is on")

    # Nodes
    system_instance_type: str = Field(
        "m7i.xlarge", description="instance type of the node for head and operator"
    )
    system_count: Annotated[int, Field(ge=1, le=10)] = Field(1, description="number of system nodes")
    system_disk_gib: Annotated[int, Field(ge=50, le=1000)] = Field(
        80, description="root disk of a system node"
    )
    gpu_instance_type: str = Field("g6.12xlarge", description="instance type of the GPU nodes")
    gpu_count: Annotated[int, Field(ge=1, le=256)] = Field(
        2, description="number of GPU nodes and of Ray workers"
    )
    gpu_min_count: Annotated[int, Field(ge=0, le=256)] = Field(0, description="least nodes with autoscaling")
    gpu_disk_gib: Annotated[int, Field(ge=100, le=16384)] = Field(200, description="root disk of a GPU node")
    autoscaling: bool = Field(
        False, description="let Ray and the cluster autoscaler change the number of GPU nodes"
    )
    local_nvme: bool = Field(
        False, description="put images and scratch on the node's own NVMe disks (RAID 0)"
    )
    purchase: Purchase = Field("on-demand", description="on-demand, reservation, capacity-block or spot")
    reservation_id: str | None = Field(None, description="id of the capacity reservation or block (cr-...)")
    require_efa: bool = Field(True, description="refuse types without EFA and jobs that do not use it")
    ami_release: str | None = Field(
        None, description="pinned release of the node image; empty: newest at creation"
    )
    node_repair: bool = Field(True, description="let EKS replace nodes that its agent finds broken")
    gpu_hourly_usd: Annotated[float, Field(ge=0, le=10000)] = Field(
        0.0, description="what one GPU node really costs an hour (spot, block, discount); 0: the price table"
    )

    # Storage
    force_destroy: bool = Field(False, description="destroy deletes the bucket with all checkpoints in it")
    checkpoint_retention_days: Annotated[int, Field(ge=1, le=3650)] = Field(
        14, description="days after which a deleted or superseded checkpoint cannot be recovered any more"
    )
    run_retention_days: Annotated[int, Field(ge=0, le=3650)] = Field(
        0, description="days after which whole run folders below runs/ expire; 0: never"
    )
    fsx: bool = Field(False, description="FSx for Lustre linked to the bucket, mounted at /fsx")
    fsx_capacity_gib: Annotated[int, Field(ge=1200, le=1_000_000)] = Field(
        1200, description="1200 or a multiple of 2400"
    )
    storage_uri: str | None = Field(None, description="target existing: where runs go, s3://bucket or a path")
    storage_endpoint_url: str | None = Field(None, description="target existing: S3-compatible endpoint")
    storage_secret: Label | None = Field(
        None, description="target existing: Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    )

    # Existing cluster
    kubeconfig: str | None = Field(None, description="target existing: path of the kubeconfig")
    kube_context: str | None = Field(None, description="target existing: context of the kubeconfig")
    create_namespace: bool = Field(True, description="make the namespace; false: it exists")
    system_selector: Selector = Field(
        "role=system", description="label of the nodes for the head and the operator"
    )
    gpu_selector: Selector = Field("role=gpu", description="label of the nodes for the workers")

    # Workload
    namespace: Label = Field("ray-train", description="namespace of the RayCluster")
    service_account: Label = Field("ray-train", description="service account of head and workers")
    ray_cluster: Label = Field("train", description="name of the RayCluster")
    ray_version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")] = Field(
        RAY_VERSION, description="Ray version of the image"
    )
    image: str = Field(RAY_IMAGE, description="image repository of head and workers")
    image_tag: str = Field(RAY_IMAGE_TAG, description="full tag of the image")
    image_digest: Annotated[str, AfterValidator(_digest)] | None = Field(
        None, description="sha256:... of the image; exact where a tag is not"
    )
    hub_secret: Label | None = Field(
        None, description="Secret of the namespace with HF_TOKEN, for models and data that need an account"
    )
    job_secrets: tuple[JobSecret, ...] = Field(
        (),
        description="VARIABLE=SECRET: more variables for jobs from Secrets of the namespace, such as "
        "WANDB_API_KEY=trackers",
    )
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = Field(
        "IfNotPresent", description="Always costs a registry round trip per start"
    )
    head_cpu: Annotated[float, Field(ge=0.1, le=1024)] = Field(2.0, description="cores of the Ray head")
    head_memory_gib: Annotated[float, Field(ge=0.5, le=65536)] = Field(8.0, description="GiB of the Ray head")
    worker_cpu: Annotated[float, Field(ge=0, le=1024), AfterValidator(_zero_or_least(0.1))] = Field(
        0.0, description="cores of a Ray worker; 0: from the catalog"
    )
    worker_memory_gib: Annotated[float, Field(ge=0, le=65536), AfterValidator(_zero_or_least(0.5))] = Field(
        0.0, description="GiB of a Ray worker; 0: from the catalog"
    )
    head_scratch_gib: Annotated[int, Field(ge=1, le=65536)] = Field(
        20, description="size of /tmp/ray of the head"
    )
    worker_scratch_gib: Annotated[int, Field(ge=0, le=65536)] = Field(
        0, description="size of /tmp/ray of a worker; 0: half of the disk"
    )
    gpus_per_worker: Annotated[int, Field(ge=-1, le=64)] = Field(
        -1, description="target existing: GPUs of a worker; -1: from the catalog"
    )
    efa_per_worker: Annotated[int, Field(ge=-1, le=64)] = Field(
        -1, description="target existing: EFA interfaces of a worker; -1: from the catalog"
    )
    network_policies: bool = Field(True, description="default-deny network policies around the Ray pods")
    device_plugins: bool = Field(True, description="install the NVIDIA and EFA device plugins")
    kuberay: bool = Field(True, description="install KubeRay; false: the cluster has it")
    kuberay_chart: str = Field(
        "kuberay-operator", description="name of the chart, or path of a chart on disk"
    )
    kuberay_version: str = Field(KUBERAY_VERSION, description="version of the KubeRay chart")
    kuberay_image: str | None = Field(None, description="repository:tag of the operator; empty: the chart's")
    kuberay_crds: str | None = Field(None, description="folder with the CRDs; empty: those of this project")

    # Observability
    observability: Observability = Field(
        "none",
        description="none; prometheus: Prometheus, Grafana and exporters in the cluster; cloudwatch: AWS's add-on",
    )

    # Guardrails
    budget_monthly_usd: Annotated[int, Field(ge=0, le=100_000_000)] = Field(
        0, description="AWS Budgets limit a month; 0: no budget"
    )
    budget_emails: tuple[str, ...] = Field((), description="who hears of it at 80 % and 100 %")

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        problems = _broken_rules(self, frozenset())
        if problems:
            raise SettingsError(problems, SettingsSource(self.stack))
        return self

    @property
    def name(self) -> str:
        """Name of the EKS cluster and first part of every physical name."""
        return self.cluster_name or f"efa-{self.stack}"

    @property
    def on_aws(self) -> bool:
        return self.target == "aws"

    @property
    def instance(self) -> InstanceType:
        return INSTANCES[self.gpu_instance_type]

    @property
    def system_shape(self) -> NodeShape:
        return SYSTEM_INSTANCES[self.system_instance_type]

    @property
    def gpus(self) -> int:
        """GPUs of one worker."""
        return self.instance.gpus if self.gpus_per_worker < 0 else self.gpus_per_worker

    @property
    def efa(self) -> int:
        """EFA interfaces of one worker."""
        return self.instance.efa if self.efa_per_worker < 0 else self.efa_per_worker

    @property
    def observers(self) -> Observers:
        return OBSERVERS[self.observability]

    @property
    def worker_cpu_millis(self) -> int:
        return round((self.worker_cpu or self.instance.worker_cpu) * 1000)

    @property
    def worker_memory_mib(self) -> int:
        return round((self.worker_memory_gib or self.instance.worker_memory_gib) * 1024)

    @property
    def head_cpu_millis(self) -> int:
        return round(self.head_cpu * 1000)

    @property
    def head_memory_mib(self) -> int:
        return round(self.head_memory_gib * 1024)

    @property
    def worker_scratch(self) -> int:
        """GiB of a worker's scratch volume."""
        return self.worker_scratch_gib or self.gpu_disk_gib // 2

    @property
    def image_reference(self) -> str:
        """The image as a pod names it; a digest wins over the tag but leaves it readable."""
        reference = f"{self.image}:{self.image_tag}"
        return f"{reference}@{self.image_digest}" if self.image_digest else reference

    @property
    def required_transport(self) -> Literal["efa", "any"]:
        return "efa" if self.require_efa and self.efa > 0 else "any"

    @property
    def secret_variables(self) -> dict[str, str]:
        """Environment variables of the Ray pods that come from a Secret of the namespace, with its name. The key in the
        Secret is the variable's name."""
        named = {"HF_TOKEN": self.hub_secret} if self.hub_secret else {}
        if self.storage_secret:
            named |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), self.storage_secret)
        return named | {
            name: secret for name, _, secret in (item.partition("=") for item in self.job_secrets)
        }

    @property
    def tags(self) -> dict[str, str]:
        """Tags of everything this stack owns."""
        tags = {"project": PROJECT, "stack": self.stack, "owner": self.owner}
        if self.expires:
            tags["expires"] = self.expires.isoformat()
        return tags

    @property
    def instance_tags(self) -> dict[str, str]:
        """Tags of instances, disks and interfaces. Without the expiry: they are part of the launch
        template, and moving the expiry must not replace the nodes under a running job."""
        return {key: value for key, value in self.tags.items() if key != "expires"}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed but seldom wanted."""
        found: list[str] = []
        if (
            not self.image_digest
            and MOVING_TAG.match(self.image_tag)
            and not FROZEN_TAG.match(self.image_tag)
        ):
            found.append(
                f"imageTag {self.image_tag} moves: two nodes may run two images. Use a full tag such as "
                f"{RAY_IMAGE_TAG}, or set imageDigest."
            )
        if self.on_aws and self.force_destroy:
            found.append("forceDestroy is on: pulumi destroy deletes the bucket with every checkpoint in it.")
        return tuple(found)


type_rule = Callable[[StackSettings], Sequence[Problem]]
_RULES: list[tuple[tuple[str, ...], type_rule]] = []


def _rule(*fields: str) -> Callable[[type_rule], type_rule]:
    """Registers a check of several fields; it is left out while one of them is not valid by itself."""

    def register(check: type_rule) -> type_rule:
        _RULES.append((fields, check))
        return check

    return register


def _broken_rules(settings: StackSettings, invalid: frozenset[str]) -> list[Problem]:
    return [
        problem for fields, check in _RULES if not invalid.intersection(fields) for problem in check(settings)
    ]


@_rule("target", "zones")
def _two_zones(s: StackSettings) -> list[Problem]:
    if not s.on_aws:
        return []
    if len(set(s.zones)) < 2:
        return [
            Problem("zones", list(s.zones), "EKS needs two different zones at least", "Add a second zone.")
        ]
    if len(set(s.zones)) != len(s.zones) or len(s.zones) > 6:
        return [Problem("zones", list(s.zones), "two to six different zones", "Name each zone once.")]
    return []


@_rule("target", "zones", "gpu_zone")
def _gpu_zone_known(s: StackSettings) -> list[Problem]:
    if not s.on_aws or s.gpu_zone in s.zones:
        return []
    allowed = f"one of zones: {', '.join(s.zones)}"
    return [Problem("gpuZone", s.gpu_zone, allowed, f"Choose one, or add {s.gpu_zone} to zones.")]


@_rule("target", "region", "zones")
def _zones_of_region(s: StackSettings) -> list[Problem]:
    wrong = [zone for zone in s.zones if not re.fullmatch(re.escape(s.region) + r"[a-z]", zone)]
    if not s.on_aws or not wrong:
        return []
    return [
        Problem(
            "zones", list(s.zones), f"zones of region {s.region}: {s.region}a, ...", "Change zones or region."
        )
    ]


@_rule("target", "vpc_cidr", "gpu_count", "system_count")
def _vpc_size(s: StackSettings) -> list[Problem]:
    if not s.on_aws:
        return []
    vpc = ipaddress.IPv4Network(s.vpc_cidr)
    if not 16 <= vpc.prefixlen <= 20:
        return [
            Problem(
                "vpcCidr", s.vpc_cidr, "a network from /16 to /20", "Use 10.0.0.0/16 if nothing forbids it."
            )
        ]
    # A private subnet is an eighth of the VPC, and AWS keeps five addresses of each subnet.
    addresses = vpc.num_addresses // 8 - 5
    needed = (s.gpu_count + s.system_count) * ADDRESSES_PER_NODE
    if addresses < needed:
        allowed = (
            f"its private subnets have {addresses} addresses each and {s.gpu_count} GPU nodes need {needed}"
        )
        return [Problem("vpcCidr", s.vpc_cidr, allowed, "Use a larger network or fewer nodes.")]
    return []


@_rule("target", "vpc_cidr", "service_cidr", "peered_cidrs")
def _no_overlap(s: StackSettings) -> list[Problem]:
    if not s.on_aws:
        return []
    vpc = ipaddress.IPv4Network(s.vpc_cidr)
    others = [("serviceCidr", s.service_cidr), *(("peeredCidrs", cidr) for cidr in s.peered_cidrs)]
    return [
        Problem(
            "vpcCidr", s.vpc_cidr, f"no overlap with {key} {cidr}", "Choose another range for one of the two."
        )
        for key, cidr in others
        if vpc.overlaps(ipaddress.IPv4Network(cidr))
    ]


@_rule("service_cidr")
def _service_size(s: StackSettings) -> list[Problem]:
    network = ipaddress.IPv4Network(s.service_cidr)
    if 12 <= network.prefixlen <= 24 and network.is_private:
        return []
    return [Problem("serviceCidr", s.service_cidr, "a private network from /12 to /24", "Use 172.20.0.0/16.")]


@_rule("gpu_instance_type", "require_efa")
def _instance_known(s: StackSettings) -> list[Problem]:
    instance = INSTANCES.get(s.gpu_instance_type)
    with_efa = ", ".join(name for name, known in INSTANCES.items() if known.efa)
    if instance is None:
        near = difflib.get_close_matches(s.gpu_instance_type, INSTANCES, n=1)
        fix = f"Did you mean {near[0]}?" if near else "Use a type of the catalog (infra/instances.py)."
        return [Problem("gpuInstanceType", s.gpu_instance_type, f"one of {', '.join(INSTANCES)}", fix)]
    if s.require_efa and not instance.efa:
        fix = "Choose such a type, or set requireEfa to false."
        return [Problem("gpuInstanceType", s.gpu_instance_type, f"a type with EFA: {with_efa}", fix)]
    return []


@_rule("system_instance_type")
def _system_known(s: StackSettings) -> list[Problem]:
    if s.system_instance_type in SYSTEM_INSTANCES:
        return []
    allowed = f"one of {', '.join(SYSTEM_INSTANCES)}"
    return [Problem("systemInstanceType", s.system_instance_type, allowed, "Use m7i.xlarge.")]


@_rule("purchase", "reservation_id")
def _reservation(s: StackSettings) -> list[Problem]:
    by_id = s.purchase in ("reservation", "capacity-block")
    if by_id and not s.reservation_id:
        allowed = f"the id of the {s.purchase}, cr-..., is needed with purchase {s.purchase}"
        return [Problem("reservationId", s.reservation_id, allowed, "Set it, or buy on-demand.")]
    if not by_id and s.reservation_id:
        allowed = f"no reservation with purchase {s.purchase}"
        return [
            Problem(
                "reservationId", s.reservation_id, allowed, "Set purchase to reservation, or drop the id."
            )
        ]
    if s.reservation_id and not re.fullmatch(r"cr-[0-9a-f]{8,17}", s.reservation_id):
        return [
            Problem(
                "reservationId", s.reservation_id, "an id such as cr-0123456789abcdef0", "Correct the id."
            )
        ]
    return []


@_rule("purchase", "gpu_instance_type")
def _capacity_block_only(s: StackSettings) -> list[Problem]:
    instance = INSTANCES.get(s.gpu_instance_type)
    if (
        instance is None
        or not instance.capacity_block_only
        or s.purchase in ("capacity-block", "reservation")
    ):
        return []
    allowed = f"capacity-block or reservation: AWS does not sell {instance.name} on demand"
    return [Problem("purchase", s.purchase, allowed, "Set purchase and reservationId.")]


@_rule("autoscaling", "purchase", "gpu_min_count", "gpu_count")
def _autoscaling(s: StackSettings) -> list[Problem]:
    problems: list[Problem] = []
    if s.gpu_min_count and not s.autoscaling:
        fix = "Set autoscaling to true, or drop it."
        problems.append(Problem("gpuMinCount", s.gpu_min_count, "0 without autoscaling", fix))
    if s.gpu_min_count > s.gpu_count:
        allowed = f"gpuCount ({s.gpu_count}) at most"
        problems.append(Problem("gpuMinCount", s.gpu_min_count, allowed, "Lower it or raise gpuCount."))
    if s.autoscaling and s.purchase == "capacity-block":
        allowed = "no autoscaling with a capacity block, which is paid whether nodes run or not"
        problems.append(Problem("autoscaling", s.autoscaling, allowed, "Set it to false."))
    return problems


@_rule("target", "head_cpu", "head_memory_gib", "system_instance_type", "autoscaling", "observability")
def _head_fits(s: StackSettings) -> list[Problem]:
    shape = SYSTEM_INSTANCES.get(s.system_instance_type)
    if not s.on_aws or shape is None:
        return []
    cpu = shape.allocatable_cpu_millis - SYSTEM_PODS_CPU_MILLIS - s.autoscaling * AUTOSCALER_CPU_MILLIS
    memory = shape.allocatable_memory_mib - SYSTEM_PODS_MEMORY_MIB - s.autoscaling * AUTOSCALER_MEMORY_MIB
    cpu -= s.observers.system_cpu_millis
    memory -= s.observers.system_memory_mib
    fix = "Lower it or choose a larger systemInstanceType."
    problems: list[Problem] = []
    if s.head_cpu_millis > cpu:
        allowed = f"{shape.name} leaves {cpu / 1000:g} cores for the head"
        problems.append(Problem("headCpu", s.head_cpu, allowed, fix))
    if s.head_memory_mib > memory:
        allowed = f"{shape.name} leaves {memory / 1024:.1f} GiB for the head"
        problems.append(Problem("headMemoryGib", s.head_memory_gib, allowed, fix))
    return problems


@_rule("target", "worker_cpu", "worker_memory_gib", "gpu_instance_type", "observability")
def _worker_fits(s: StackSettings) -> list[Problem]:
    instance = INSTANCES.get(s.gpu_instance_type)
    if not s.on_aws or instance is None:
        return []
    cpu = instance.allocatable_cpu_millis - DAEMONS_CPU_MILLIS - s.observers.gpu_cpu_millis
    memory = instance.allocatable_memory_mib - instance.huge_pages_mib - DAEMONS_MEMORY_MIB
    memory -= s.observers.gpu_memory_mib
    from_catalog = "Lower it, or set it to 0 to take the catalog's."
    problems: list[Problem] = []
    if s.worker_cpu_millis > cpu:
        allowed = f"{instance.name} leaves {cpu / 1000:g} cores for the worker"
        problems.append(Problem("workerCpu", s.worker_cpu, allowed, from_catalog))
    if s.worker_memory_mib > memory:
        beside = f" beside observability {s.observability}" if s.observability != "none" else ""
        allowed = f"{instance.name} leaves {memory / 1024:.1f} GiB for the worker{beside}"
        fix = from_catalog if s.worker_memory_gib else f"Set it to {memory // 1024} at most."
        problems.append(Problem("workerMemoryGib", s.worker_memory_gib, allowed, fix))
    return problems


@_rule(
    "target",
    "worker_scratch_gib",
    "gpu_disk_gib",
    "head_scratch_gib",
    "system_disk_gib",
    "local_nvme",
    "observability",
)
def _scratch_fits(s: StackSettings) -> list[Problem]:
    problems: list[Problem] = []
    metrics = PROMETHEUS_DISK_GIB if s.observability == "prometheus" else 0
    # 40 GiB: the image unpacked (about 25 GiB) and the system itself; kubelet evicts from 85 % on.
    for key, wanted, disk, disk_key, others in (
        ("workerScratchGib", s.worker_scratch, s.gpu_disk_gib, "gpuDiskGib", 0),
        ("headScratchGib", s.head_scratch_gib, s.system_disk_gib, "systemDiskGib", metrics),
    ):
        left = int(disk * 0.85) - 40 - others
        if s.on_aws and not s.local_nvme and wanted > left:
            allowed = f"{left} GiB at most of a disk of {disk} GiB"
            problems.append(Problem(key, wanted, allowed, f"Lower it or raise {disk_key}."))
    return problems


@_rule("target", "gpus_per_worker", "efa_per_worker")
def _catalog_on_aws(s: StackSettings) -> list[Problem]:
    return [
        Problem(key, value, "-1 on AWS: the catalog knows it", "Set it to -1.")
        for key, value in (("gpusPerWorker", s.gpus_per_worker), ("efaPerWorker", s.efa_per_worker))
        if s.on_aws and value >= 0
    ]


@_rule("require_efa", "efa_per_worker", "gpu_instance_type", "target")
def _efa_on_existing(s: StackSettings) -> list[Problem]:
    if s.on_aws or not s.require_efa or s.gpu_instance_type not in INSTANCES or s.efa > 0:
        return []
    return [
        Problem(
            "efaPerWorker", s.efa_per_worker, "1 or more while EFA is required", "Set requireEfa to false."
        )
    ]


@_rule("kubernetes_version")
def _version_offered(s: StackSettings) -> list[Problem]:
    if s.kubernetes_version in KUBERNETES_VERSIONS:
        return []
    allowed = f"one of {', '.join(KUBERNETES_VERSIONS)}, the versions with pinned add-ons"
    fix = f"Use {KUBERNETES_VERSIONS[-1]}."
    return [Problem("kubernetesVersion", s.kubernetes_version, allowed, fix)]


@_rule("kuberay", "kuberay_chart", "kuberay_version", "kuberay_crds")
def _crds_of_the_chart(s: StackSettings) -> list[Problem]:
    """A field that a CRD does not know is dropped from the RayCluster without a word."""
    on_disk = "/" in s.kuberay_chart
    if not s.kuberay or on_disk or s.kuberay_crds or s.kuberay_version == KUBERAY_VERSION:
        return []
    allowed = f"{KUBERAY_VERSION}, the release of the CRDs in infra/crds"
    fix = f"Use that, or set kuberayCrds to a folder with those of {s.kuberay_version} (docs/operations.md)."
    return [Problem("kuberayVersion", s.kuberay_version, allowed, fix)]


@_rule("target", "ami_release", "kubernetes_version")
def _ami_release(s: StackSettings) -> list[Problem]:
    if s.ami_release is None or not s.on_aws:
        return []
    if re.fullmatch(re.escape(s.kubernetes_version) + r"\.\d+-\d{8}", s.ami_release):
        return []
    allowed = f"a release of Kubernetes {s.kubernetes_version}, such as {s.kubernetes_version}.0-20260714"
    return [Problem("amiRelease", s.ami_release, allowed, "Correct it, or leave it empty for the newest.")]


@_rule("expires")
def _not_expired(s: StackSettings) -> list[Problem]:
    if s.expires is None or s.expires > datetime.now(UTC):
        return []
    fix = "Extend it with: finetune extend --hours N, or clear it."
    return [Problem("expires", s.expires.isoformat(), "a time that is still to come", fix)]


@_rule("target", "public_endpoint", "public_cidrs", "allow_any_address")
def _public_access(s: StackSettings) -> list[Problem]:
    if not s.on_aws:
        return []
    anywhere = [c for c in s.public_cidrs if ipaddress.IPv4Network(c).prefixlen == 0]
    if anywhere and not s.allow_any_address:
        fix = "Name your own addresses, or set allowAnyAddress to true."
        return [Problem("publicCidrs", list(s.public_cidrs), "no 0.0.0.0/0 without an explicit yes", fix)]
    if s.public_endpoint and not s.public_cidrs:
        fix = (
            "Add your address as ADDRESS/32, or set publicEndpoint to false and work from inside of the VPC."
        )
        return [Problem("publicCidrs", [], "at least one network while the endpoint is public", fix)]
    if not s.public_endpoint and s.public_cidrs:
        fix = "Set publicEndpoint to true, or remove the networks."
        return [Problem("publicCidrs", list(s.public_cidrs), "empty while publicEndpoint is false", fix)]
    return []


@_rule("target", "cluster_name")
def _name_length(s: StackSettings) -> list[Problem]:
    if len(s.name) > MAX_CLUSTER_NAME:
        allowed = f"{MAX_CLUSTER_NAME} characters at most, since AWS names derived from it are limited to 64"
        return [Problem("clusterName", s.name, allowed, "Set a shorter clusterName.")]
    if not DNS_1035.fullmatch(s.name):
        allowed = "lower-case letters, digits and '-', a letter first"
        return [Problem("clusterName", s.name, allowed, "Set clusterName: the stack's name does not fit.")]
    return []


@_rule("ray_cluster")
def _ray_name_length(s: StackSettings) -> list[Problem]:
    if len(s.ray_cluster) <= MAX_RAY_CLUSTER_NAME:
        return []
    allowed = f"{MAX_RAY_CLUSTER_NAME} characters at most (KubeRay)"
    return [Problem("rayCluster", s.ray_cluster, allowed, "Shorten it.")]


@_rule("target", "owner")
def _owner(s: StackSettings) -> list[Problem]:
    if not s.on_aws or re.fullmatch(r"[\w .:/=+@-]{1,256}", s.owner):
        return []
    return [
        Problem("owner", s.owner, "a name or address, as a tag value of AWS", "Say who answers for the bill.")
    ]


@_rule("target", "kubeconfig", "kube_context", "storage_uri")
def _existing_cluster(s: StackSettings) -> list[Problem]:
    given = [
        ("kubeconfig", s.kubeconfig),
        ("kubeContext", s.kube_context),
        ("storageUri", s.storage_uri),
        ("storageEndpointUrl", s.storage_endpoint_url),
        ("storageSecret", s.storage_secret),
    ]
    if s.on_aws:
        return [
            Problem(key, value, "empty with target aws", "Remove it, or set target to existing.")
            for key, value in given
            if value
        ]
    problems: list[Problem] = []
    if not s.kubeconfig:
        fix = "Set the path: the ambient one is never used."
        problems.append(
            Problem("kubeconfig", s.kubeconfig, "a kubeconfig is needed with target existing", fix)
        )
    if not s.storage_uri or not re.match(r"(s3://[a-z0-9]|/)", s.storage_uri):
        allowed = "s3://bucket[/prefix] or an absolute path that all pods mount"
        problems.append(Problem("storageUri", s.storage_uri, allowed, "Say where runs go."))
    if s.storage_endpoint_url and not re.match(r"https?://[^/\s]+", s.storage_endpoint_url):
        fix = "Correct it, for example http://10.0.0.5:9000."
        problems.append(Problem("storageEndpointUrl", s.storage_endpoint_url, "an http or https URL", fix))
    aws_only = [("fsx", s.fsx), ("autoscaling", s.autoscaling), ("expires", s.expires)]
    problems += [
        Problem(key, value, "only with target aws", "Remove it.") for key, value in aws_only if value
    ]
    return problems


@_rule("target", "observability", "namespace")
def _observability(s: StackSettings) -> list[Problem]:
    if s.observability == "cloudwatch" and not s.on_aws:
        allowed = "none or prometheus with target existing: the CloudWatch add-on is one of EKS"
        return [Problem("observability", s.observability, allowed, "Set it to prometheus or to none.")]
    if s.observability == "prometheus" and s.namespace == MONITORING_NAMESPACE:
        allowed = f"another one than {MONITORING_NAMESPACE}, which observability prometheus makes"
        return [Problem("namespace", s.namespace, allowed, "Choose another namespace for the RayCluster.")]
    return []


@_rule("job_secrets", "hub_secret", "storage_secret")
def _job_secrets_once(s: StackSettings) -> list[Problem]:
    names = [item.partition("=")[0] for item in s.job_secrets]
    reserved = {"HF_TOKEN": ("hubSecret", s.hub_secret)}
    reserved |= dict.fromkeys(
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), ("storageSecret", s.storage_secret)
    )
    problems = [
        Problem("jobSecrets", name, "each variable once", "Keep one Secret for it.")
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    for name in names:
        key, value = reserved.get(name, ("", None))
        if value:
            problems.append(Problem("jobSecrets", name, f"{key} sets it already", "Keep one of the two."))
    return problems


@_rule("fsx_capacity_gib")
def _fsx_capacity(s: StackSettings) -> list[Problem]:
    if s.fsx_capacity_gib == 1200 or s.fsx_capacity_gib % 2400 == 0:
        return []
    return [Problem("fsxCapacityGib", s.fsx_capacity_gib, "1200 or a multiple of 2400", "Round it up.")]


@_rule("budget_monthly_usd", "budget_emails")
def _budget(s: StackSettings) -> list[Problem]:
    if bool(s.budget_monthly_usd) != bool(s.budget_emails):
        allowed = "a limit and at least one address, or neither"
        return [
            Problem("budgetEmails", list(s.budget_emails), allowed, "Set budgetMonthlyUsd and budgetEmails.")
        ]
    return [
        Problem("budgetEmails", email, "e-mail addresses", "Correct the address.")
        for email in s.budget_emails
        if not re.fullmatch(r"[^@\s]+@[^@\s]+\.[^@\s]+", email)
    ]


def private_subnets(settings: StackSettings) -> list[ipaddress.IPv4Network]:
    """One private subnet per zone, in their order: the first eighths of the VPC."""
    eighths = list(ipaddress.IPv4Network(settings.vpc_cidr).subnets(prefixlen_diff=3))
    return eighths[: len(settings.zones)]


def public_subnets(settings: StackSettings) -> list[ipaddress.IPv4Network]:
    """One public subnet per zone, in their order: parts of the last eighth of the VPC."""
    last = list(ipaddress.IPv4Network(settings.vpc_cidr).subnets(prefixlen_diff=3))[-1]
    return list(last.subnets(prefixlen_diff=3))[: len(settings.zones)]


def undeployable(settings: StackSettings) -> list[Problem]:
    """What a preview may show but an update must refuse: the addresses of the example file, and no account.

    Without the account, a destroy with the credentials of another one would find nothing there, empty the state, and
    leave everything billing.
    """
    account = Problem(
        "accountId",
        None,
        "the 12 digits of the AWS account that this stack may touch, so that no other one ever is",
        "`aws sts get-caller-identity --query Account --output text` says that of your credentials.",
    )
    missing = [account] if settings.on_aws and settings.account_id is None else []
    return missing + [
        Problem(
            "publicCidrs",
            cidr,
            "a network that exists: this one is reserved for documentation, nobody could reach the cluster",
            "Put your own address there, as ADDRESS/32.",
        )
        for cidr in settings.public_cidrs
        if any(ipaddress.IPv4Network(cidr).subnet_of(reserved) for reserved in DOCUMENTATION_NETWORKS)
    ]


def storage_endpoint(settings: StackSettings) -> tuple[str, int] | None:
    """Host and port of the S3-compatible endpoint, where one is set."""
    if settings.storage_endpoint_url is None:
        return None
    url = urlsplit(settings.storage_endpoint_url)
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


def _wanted(annotation: Any) -> str:
    """What a field accepts, in words."""
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(annotation))
    return ""


def _optional(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)


def _decode(annotation: Any, value: Any) -> Any:
    """A value as Pulumi stores it: numbers and lists as text, empty text for no value."""
    if value == "" and _optional(annotation):
        return None
    if isinstance(value, str) and get_origin(annotation) is tuple:
        try:
            return json.loads(value) if value.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f'a list such as \'["a", "b"]\' is needed ({error})') from error
    if isinstance(value, str) and get_origin(annotation) is Literal and value.isdigit():
        return int(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and annotation is str:
        return str(value)
    return value


def parse_settings(values: Mapping[str, Any], stack: str, path: Path | None = None) -> StackSettings:
    """Settings from configuration values (keys in camelCase, without the project's name).

    Raises:
        SettingsError: all mistakes at once.
    """
    source = SettingsSource(stack, path)
    fields = {
        to_camel(name): (name, field) for name, field in StackSettings.model_fields.items() if name != "stack"
    }
    problems: list[Problem] = []
    good: dict[str, Any] = {}
    invalid: set[str] = set()
    for key, value in values.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            fix = f"Did you mean {near[0]}?" if near else "Pulumi.yaml lists all keys."
            problems.append(Problem(key, value, "not a setting of this project", fix))
            continue
        name, field = fields[key]
        annotation: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        try:
            good[name] = TypeAdapter[Any](annotation).validate_python(_decode(field.annotation, value))
        except (ValidationError, ValueError) as error:
            invalid.add(name)
            problems.append(
                Problem(
                    key,
                    value,
                    _explain(error, field.annotation),
                    f"The default is {json.dumps(field.default, default=str)}.",
                )
            )
    if problems:
        partial = StackSettings.model_construct(stack=stack, **good)
        problems += _broken_rules(partial, frozenset(invalid))
        raise SettingsError(problems, source)
    try:
        return StackSettings(stack=stack, **good)
    except SettingsError as error:
        raise SettingsError(error.problems, source) from None


def _explain(error: ValidationError | ValueError, annotation: Any) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    wanted = _wanted(annotation)
    messages = [entry["msg"].removeprefix("Value error, ") for entry in error.errors()]
    return wanted or "; ".join(dict.fromkeys(messages))


def read_settings_file(path: Path) -> StackSettings:
    """Settings of a ``Pulumi.<stack>.yaml``.

    Raises:
        SettingsError: for mistakes in it, or when it is no stack file.
    """
    stack = path.name.removeprefix("Pulumi.").removesuffix(path.suffix)
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(
            [Problem("file", str(path), f"cannot be read: {error}", "Name a stack file.")]
        ) from error
    config = document.get("config") if isinstance(document, dict) else None
    if not isinstance(config, dict):
        fix = "Name a file such as Pulumi.dev.yaml."
        raise SettingsError([Problem("file", str(path), "a stack file with a config block is needed", fix)])
    prefix = f"{PROJECT}:"
    values = {
        str(key).removeprefix(prefix): value for key, value in config.items() if str(key).startswith(prefix)
    }
    return parse_settings(values, stack, path)


def load_settings() -> StackSettings:
    """Settings of the stack whose program is running.

    Raises:
        SettingsError: all mistakes at once.
    """
    import pulumi
    from pulumi.runtime.config import CONFIG, get_config_env

    prefix = f"{PROJECT}:"
    keys = {key for key in {**get_config_env(), **CONFIG.get()} if key.startswith(prefix)}
    config = pulumi.Config(PROJECT)
    names = sorted(key.removeprefix(prefix) for key in keys)
    values = {name: config.get(name) for name in names}
    stack = pulumi.get_stack()
    path = Path(pulumi.runtime.get_root_directory() or ".") / f"Pulumi.{stack}.yaml"
    return parse_settings(values, stack, path if path.is_file() else None)
