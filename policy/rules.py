"""The rules themselves, on plain properties: the engine runs them in the pack, tests on recorded graphs.

Properties have the names of the provider's own schema (camelCase).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.raycluster_spec import violations as kuberay_violations

REQUIRED_TAGS = ("project", "stack", "owner")
GPU_TAINT = "nvidia.com/gpu"
ANYWHERE = ("0.0.0.0/0", "::/0")

LAUNCH_TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"
NODE_GROUP = "aws:eks/nodeGroup:NodeGroup"
INGRESS_RULE = "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"
EGRESS_RULE = "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule"
RAY_CLUSTER = "kubernetes:ray.io/v1:RayCluster"

# Calls that describe and know no resources; AWS accepts "*" only.
READ_ONLY_PREFIXES = ("Describe", "Get", "List")


@dataclass(frozen=True)
class Seen:
    """A resource as a rule sees it."""

    type: str
    name: str
    props: Mapping[str, Any]
    provider: str = ""


@dataclass(frozen=True)
class Rule:
    """A rule on one resource. ``types`` limits it; empty: all."""

    name: str
    description: str
    types: tuple[str, ...]
    check: Callable[[Seen], Iterable[str]]
    mandatory: bool = True

    def violations(self, resource: Seen) -> list[str]:
        if self.types and resource.type not in self.types:
            return []
        return list(self.check(resource))


@dataclass(frozen=True)
class StackRule:
    """A rule on all resources together."""

    name: str
    description: str
    check: Callable[[Sequence[Seen]], Iterable[str]]


def _no_load_balancer(resource: Seen) -> Iterable[str]:
    if resource.type.startswith(("aws:lb/", "aws:alb/", "aws:elb/")):
        yield f"{resource.name}: no load balancer here; the dashboard is reached by exec"
    elif resource.type == "kubernetes:core/v1:Service" and _spec(resource).get("type") in (
        "LoadBalancer",
        "NodePort",
    ):
        yield f"{resource.name}: a Service of type {_spec(resource)['type']} opens a port; use ClusterIP"


def _no_open_ingress(resource: Seen) -> Iterable[str]:
    props = resource.props
    sources = [props.get("cidrIpv4"), props.get("cidrIpv6")]
    for rule in props.get("ingress") or ():
        sources += [*(rule.get("cidrBlocks") or ()), *(rule.get("ipv6CidrBlocks") or ())]
    for source in sources:
        if source in ANYWHERE:
            yield f"{resource.name}: ingress from {source}; name the networks that need it"


def _closed_endpoint(resource: Seen) -> Iterable[str]:
    props = resource.props
    vpc = props.get("vpcConfig") or {}
    public = props.get("endpointPublicAccess", vpc.get("endpointPublicAccess", True))
    cidrs = props.get("publicAccessCidrs") or vpc.get("publicAccessCidrs") or []
    if public and (not cidrs or any(cidr in ANYWHERE for cidr in cidrs)):
        yield f"{resource.name}: the Kubernetes API is open to the world; set publicAccessCidrs"


def _imds_v2(resource: Seen) -> Iterable[str]:
    options = resource.props.get("metadataOptions") or {}
    if options.get("httpTokens") != "required":
        yield f"{resource.name}: metadataOptions.httpTokens must be required (IMDSv2)"
    if options.get("httpPutResponseHopLimit", 2) > 1:
        yield f"{resource.name}: httpPutResponseHopLimit must be 1, or pods get the node's credentials"


def _encrypted_disks(resource: Seen) -> Iterable[str]:
    mappings = resource.props.get("blockDeviceMappings") or ()
    if not mappings:
        yield f"{resource.name}: no disk is described: the default of 20 GiB cannot hold the image"
    for mapping in mappings:
        disk = mapping.get("ebs") or {}
        if str(disk.get("encrypted")).lower() != "true":
            yield f"{resource.name}: {mapping.get('deviceName')} is not encrypted"
        if disk.get("volumeType") != "gp3":
            yield f"{resource.name}: {mapping.get('deviceName')} is {disk.get('volumeType')}, use gp3"


def _interfaces(resource: Seen) -> Iterable[str]:
    """What EC2 demands of EFA interfaces; wrong ones fail when the first instance starts, or hang NCCL."""
    props = resource.props
    interfaces = props.get("networkInterfaces") or ()
    if interfaces and (props.get("vpcSecurityGroupIds") or props.get("securityGroupNames")):
        yield f"{resource.name}: security groups belong to the network interfaces, EC2 refuses both"
    cards = [interface.get("networkCardIndex", 0) for interface in interfaces]
    if len(cards) != len(set(cards)):
        yield f"{resource.name}: two interfaces on one network card: {cards}"
    for interface in interfaces:
        card, kind = interface.get("networkCardIndex", 0), interface.get("interfaceType")
        if card == 0 and kind == "efa-only":
            yield f"{resource.name}: the primary interface carries the node's traffic and cannot be efa-only"
        if interface.get("deviceIndex") != (0 if card == 0 else 1):
            yield f"{resource.name}: deviceIndex of card {card} must be {0 if card == 0 else 1}"


def _gpu_group(resource: Seen) -> Iterable[str]:
    props = resource.props
    if "NVIDIA" not in str(props.get("amiType")):
        return
    taints = [taint.get("key") for taint in props.get("taints") or ()]
    if GPU_TAINT not in taints:
        yield f"{resource.name}: GPU nodes need the taint {GPU_TAINT}, or any pod may fill them"
    if len(props.get("subnetIds") or ()) != 1:
        yield f"{resource.name}: EFA works inside one zone: exactly one subnet"
    if not (props.get("launchTemplate") or {}):
        yield f"{resource.name}: EFA interfaces need a launch template"


def _tags(resource: Seen) -> Iterable[str]:
    tags = ((resource.props.get("defaultTags") or {}) if resource.props else {}) or {}
    tags = json.loads(tags) if isinstance(tags, str) else tags
    missing = [tag for tag in REQUIRED_TAGS if not (tags.get("tags") or {}).get(tag)]
    if missing:
        yield f"{resource.name}: defaultTags lacks {', '.join(missing)}; audit and budget find things by them"


def _bucket_private(resource: Seen) -> Iterable[str]:
    for key in ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets"):
        if resource.props.get(key) is not True:
            yield f"{resource.name}: {key} must be true"


def _bucket_kept(resource: Seen) -> Iterable[str]:
    if resource.props.get("forceDestroy"):
        yield f"{resource.name}: forceDestroy deletes every checkpoint with the stack"


def _narrow_policy(resource: Seen) -> Iterable[str]:
    policy = resource.props.get("policy")
    if not isinstance(policy, str):
        return
    for statement in json.loads(policy)["Statement"]:
        if statement["Effect"] != "Allow":
            continue
        actions = _list(statement["Action"])
        for action in actions:
            if action.partition(":")[2].startswith("*") or action == "*":
                yield f"{resource.name}: action {action} allows everything; name the calls"
        changing = [a for a in actions if not a.partition(":")[2].startswith(READ_ONLY_PREFIXES)]
        if "*" in _list(statement.get("Resource", [])) and changing:
            yield f"{resource.name}: {', '.join(changing)} on every resource; name the resources"


def _no_managed_admin(resource: Seen) -> Iterable[str]:
    arn = str(resource.props.get("policyArn", ""))
    if arn.rpartition("/")[2] in ("AdministratorAccess", "PowerUserAccess") or arn.endswith("FullAccess"):
        yield f"{resource.name}: {arn} is far more than a node or a job needs"


def _explicit_provider(resource: Seen) -> Iterable[str]:
    if resource.type.startswith(("aws:", "kubernetes:")) and resource.provider.startswith("default"):
        yield f"{resource.name}: uses a default provider, so another region or another cluster by accident"


def _no_dynamic_volume(resource: Seen) -> Iterable[str]:
    if _spec(resource).get("storageClassName", "default") != "":
        yield f"{resource.name}: a claim with a storage class leaves a disk behind that no stack knows"


def _ray_cluster(resource: Seen) -> Iterable[str]:
    spec = _spec(resource)
    name = (resource.props.get("metadata") or {}).get("name", resource.name)
    yield from (f"{name}: {violation}" for violation in kuberay_violations(name, spec))
    head = spec["headGroupSpec"]
    start = head.get("rayStartParams", {})
    if start.get("dashboard-host") != "127.0.0.1":
        yield f"{name}: dashboard-host must be 127.0.0.1: the job API runs anything it is sent"
    if (spec.get("authOptions") or {}).get("mode") != "token":
        yield f"{name}: authOptions.mode must be token"
    if start.get("num-gpus") != "0":
        yield f"{name}: the head has no GPU: num-gpus must be 0"
    for group in (head, *spec.get("workerGroupSpecs", ())):
        yield from _ray_pod(name, group["template"]["spec"])


def _ray_pod(name: str, pod: Mapping[str, Any]) -> Iterable[str]:
    if pod.get("hostNetwork") or any("hostPath" in volume for volume in pod.get("volumes", ())):
        yield f"{name}: a pod with the node's network or files"
    for container in pod["containers"]:
        image = container["image"]
        tag = image.rpartition("/")[2].partition("@")[0].partition(":")[2]
        if "@" not in image and tag in ("", "latest"):
            yield f"{name}: {container['name']} runs {image}: name a full tag or a digest"
        if (container.get("securityContext") or {}).get("privileged"):
            yield f"{name}: {container['name']} is privileged"
        if container["resources"].get("requests") != container["resources"].get("limits"):
            yield f"{name}: {container['name']} has requests other than limits, Ray counts the limits"


def _efa_security_group(resources: Sequence[Seen]) -> Iterable[str]:
    """EFA traffic matches a security group's own id only, in both directions."""
    has_efa = any(
        interface.get("interfaceType") in ("efa", "efa-only")
        for resource in resources
        if resource.type == LAUNCH_TEMPLATE
        for interface in resource.props.get("networkInterfaces") or ()
    )
    if not has_efa:
        return
    for direction, type_ in (("ingress", INGRESS_RULE), ("egress", EGRESS_RULE)):
        names_itself = any(
            resource.props.get("referencedSecurityGroupId")
            and resource.props["referencedSecurityGroupId"] == resource.props.get("securityGroupId")
            and str(resource.props.get("ipProtocol")) == "-1"
            for resource in resources
            if resource.type == type_
        )
        if not names_itself:
            yield (
                f"nodes have EFA but no security group allows all {direction} of its own: "
                "NCCL hangs or fails with error 4126"
            )


def _spec(resource: Seen) -> Mapping[str, Any]:
    return resource.props.get("spec") or {}


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


RULES: tuple[Rule, ...] = (
    Rule("no-load-balancer", "Nothing of a stack listens on a public port.", (), _no_load_balancer),
    Rule(
        "no-open-ingress",
        "No security group takes traffic from anywhere.",
        (INGRESS_RULE, "aws:ec2/securityGroup:SecurityGroup"),
        _no_open_ingress,
    ),
    Rule(
        "closed-endpoint",
        "The Kubernetes API is reached from named networks.",
        ("eks:index:Cluster", "aws:eks/cluster:Cluster"),
        _closed_endpoint,
    ),
    Rule("imds-v2", "Instances want IMDSv2, one hop.", (LAUNCH_TEMPLATE,), _imds_v2),
    Rule("encrypted-disks", "Disks are encrypted gp3.", (LAUNCH_TEMPLATE,), _encrypted_disks),
    Rule("efa-interfaces", "EFA interfaces as EC2 accepts them.", (LAUNCH_TEMPLATE,), _interfaces),
    Rule("gpu-nodes", "GPU nodes are tainted and in one zone.", (NODE_GROUP,), _gpu_group),
    Rule("default-tags", "Everything carries project, stack and owner.", ("pulumi:providers:aws",), _tags),
    Rule(
        "private-bucket",
        "Buckets block all public access.",
        ("aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock",),
        _bucket_private,
    ),
    Rule(
        "kept-bucket",
        "Destroying a stack keeps its checkpoints.",
        ("aws:s3/bucket:Bucket",),
        _bucket_kept,
        mandatory=False,
    ),
    Rule(
        "narrow-iam",
        "Policies name calls and resources.",
        ("aws:iam/rolePolicy:RolePolicy", "aws:iam/policy:Policy"),
        _narrow_policy,
    ),
    Rule(
        "no-admin-policy",
        "No role has an administrator's policy.",
        ("aws:iam/rolePolicyAttachment:RolePolicyAttachment",),
        _no_managed_admin,
    ),
    Rule("explicit-provider", "Every resource names its provider.", (), _explicit_provider),
    Rule(
        "no-dynamic-volume",
        "No claim provisions a volume.",
        ("kubernetes:core/v1:PersistentVolumeClaim",),
        _no_dynamic_volume,
    ),
    Rule("ray-cluster", "RayClusters are closed, pinned and valid.", (RAY_CLUSTER,), _ray_cluster),
)

STACK_RULES: tuple[StackRule, ...] = (
    StackRule("efa-security-group", "EFA has its security group, both ways.", _efa_security_group),
)
