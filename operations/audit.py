"""What of a stack still exists in its AWS account, and so may still bill: found by tag and by name, not by state.

A destroy that failed, a node group whose volumes outlived it, a load balancer that a controller made: none of them is
in Pulumi's state. ``audit`` looks at the account itself. It lists a resource only when

- it carries the tags that the stack puts on everything (``project`` and ``stack``), or the tag by which EKS and its
  controllers mark what belongs to the cluster, or
- it has the name that AWS or this project derives from the cluster's name, exactly, or
- it lies in a VPC that is the stack's by one of these;

and never when its own tags name another project or stack. It reads only; each finding comes with the command that
removes it. Findings that Pulumi still manages are left out by passing ``managed``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from infra.cost import HOURS_PER_MONTH, SERVICE_PRICES
from infra.instances import INSTANCES, SYSTEM_INSTANCES
from infra.settings import PROJECT, StackSettings

# USD, list prices of us-west-2 on AWS's public price pages (2026-07): what a stack never has, but may leave behind.
LOAD_BALANCER_HOUR = 0.0225
CLASSIC_LOAD_BALANCER_HOUR = 0.025
S3_GIB_MONTH = 0.023
LOGS_GIB_MONTH = 0.03
SNAPSHOT_GIB_MONTH = 0.05

GIB = 1024**3
# Counting the versions of a bucket stops here: a first figure, not an inventory.
MAX_COUNTED_VERSIONS = 20_000

# The last part of a generated name: Pulumi's autonaming.
_SUFFIX = "-[0-9a-f]{7}"
_ROLES = ("eksRole-role", "node", "job", "expiry", "flow-logs", "autoscaler")
_CLUSTER_TAGS = (
    *("eks:cluster-name", "aws:eks:cluster-name", "elbv2.k8s.aws/cluster", "cluster.k8s.amazonaws.com/name"),
    *("KubernetesCluster", "ebs.csi.aws.com/cluster-name"),
)


@dataclass(frozen=True)
class AuditScope:
    """Whose resources are looked for. `stack` and `project` are tag values, `cluster` begins all physical names."""

    stack: str
    cluster: str
    region: str
    project: str = PROJECT

    @classmethod
    def of(cls, settings: StackSettings) -> AuditScope:
        return cls(settings.stack, settings.name, settings.region)


@dataclass(frozen=True)
class Leftover:
    """One resource that still exists. `hourly_usd` None: no price known or billed by use, `cost` says it in words."""

    kind: str
    id: str
    name: str
    found_by: str
    hourly_usd: float | None
    cost: str
    command: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "id": self.id,
            "name": self.name,
            "found_by": self.found_by,
            "hourly_usd": self.hourly_usd,
            "cost": self.cost,
            "command": self.command,
        }


@dataclass(frozen=True)
class AuditReport:
    """All findings, the dearest first. `unreadable` names what could not be looked at: then clean means nothing."""

    scope: AuditScope
    leftovers: tuple[Leftover, ...]
    unreadable: tuple[str, ...] = ()

    @property
    def hourly_usd(self) -> float:
        return sum(one.hourly_usd or 0.0 for one in self.leftovers)

    @property
    def clean(self) -> bool:
        return not self.leftovers and not self.unreadable

    def to_dict(self) -> dict[str, Any]:
        """The report as ``finetune audit --json`` prints it."""
        return {
            "stack": self.scope.stack,
            "cluster": self.scope.cluster,
            "region": self.scope.region,
            "hourly_usd": round(self.hourly_usd, 4),
            "leftovers": [one.to_dict() for one in self.leftovers],
            "unreadable": list(self.unreadable),
        }

    def render(self) -> str:
        """For people: one block a finding, the command in its own line so that it can be copied."""
        where = f"stack {self.scope.stack} (cluster {self.scope.cluster}) in {self.scope.region}"
        lines = [f"{len(self.leftovers)} resource(s) of {where} exist, {self.hourly_usd:.2f} USD an hour:"]
        if not self.leftovers:
            lines = [f"Nothing of {where} is left."]
        for one in self.leftovers:
            lines += [
                "",
                f"{one.kind} {one.id}" + (f" ({one.name})" if one.name and one.name != one.id else ""),
                f"  cost:   {one.cost}",
                f"  known by: {one.found_by}",
                f"  remove: {one.command}",
            ]
        if self.unreadable:
            lines += [
                "",
                "Not looked at, so the list may be incomplete:",
                *(f"  {one}" for one in self.unreadable),
            ]
        return "\n".join(lines)


def managed_ids(state: Mapping[str, Any]) -> frozenset[str]:
    """Ids and ARNs of the resources in a stack's state (``pulumi stack export``), for ``managed``."""
    deployment = state.get("deployment", state)
    found: set[str] = set()
    for resource in deployment.get("resources") or []:
        outputs = resource.get("outputs") or {}
        found |= {value for value in (resource.get("id"), outputs.get("arn"), outputs.get("name")) if value}
    return frozenset(found)


def audit(
    session: boto3.Session, scope: AuditScope, *, managed: Collection[str] = frozenset()
) -> AuditReport:
    """Looks at the account of the session's credentials, in the scope's region, and at its IAM roles and budgets.

    Raises:
        ClientError: the credentials are not accepted at all.
    """
    session.client("sts", region_name=scope.region).get_caller_identity()
    look = _Look(session, scope)
    leftovers: list[Leftover] = []
    unreadable: list[str] = []
    for what, finder in _FINDERS:
        try:
            leftovers += finder(look)
        except ClientError as error:
            unreadable.append(f"{what}: {_code(error)} ({error.operation_name})")
        except BotoCoreError as error:
            unreadable.append(f"{what}: {error}")
    unmanaged = [one for one in leftovers if one.id not in managed and one.name not in managed]
    unmanaged.sort(key=lambda one: (-(one.hourly_usd or 0.0), one.kind, one.id))
    return AuditReport(scope, tuple(unmanaged), tuple(unreadable))


@dataclass
class _Look:
    """What the finders share: clients, and whether something is the stack's."""

    session: boto3.Session
    scope: AuditScope
    _clients: dict[str, Any] = field(default_factory=dict[str, Any])
    _vpcs: dict[str, str] | None = None

    def client(self, service: str) -> Any:
        if service not in self._clients:
            make: Callable[..., Any] = self.session.client
            self._clients[service] = make(service, region_name=self.scope.region)
        return self._clients[service]

    def pages(self, service: str, operation: str, key: str, **arguments: Any) -> Iterator[Any]:
        client = self.client(service)
        if client.can_paginate(operation):
            for page in client.get_paginator(operation).paginate(**arguments):
                yield from page.get(key) or []
        else:
            yield from getattr(client, operation)(**arguments).get(key) or []

    @property
    def vpcs(self) -> dict[str, str]:
        """The stack's VPCs and by what they are known."""
        if self._vpcs is None:
            self._vpcs = {}
            for vpc in self.pages("ec2", "describe_vpcs", "Vpcs"):
                reason = self.by_tags(_tags(vpc))
                if reason:
                    self._vpcs[vpc["VpcId"]] = reason
        return self._vpcs

    def by_tags(self, tags: Mapping[str, str]) -> str:
        scope = self.scope
        if tags.get("project") == scope.project and tags.get("stack") == scope.stack:
            return f"tags project={scope.project}, stack={scope.stack}"
        if self.is_foreign(tags):
            return ""
        if tags.get(f"kubernetes.io/cluster/{scope.cluster}") == "owned":
            return f"tag kubernetes.io/cluster/{scope.cluster}=owned"
        for key in _CLUSTER_TAGS:
            if tags.get(key) == scope.cluster:
                return f"tag {key}={scope.cluster}"
        return ""

    def is_foreign(self, tags: Mapping[str, str]) -> bool:
        """The tags name another stack, or another project's stack."""
        wanted = {"project": self.scope.project, "stack": self.scope.stack}
        return any(key in tags and tags[key] != value for key, value in wanted.items())

    def by_vpc(self, vpc: str | None, tags: Mapping[str, str]) -> str:
        if vpc in self.vpcs and not self.is_foreign(tags):
            return f"in VPC {vpc} of this stack"
        return ""

    def by_name(self, name: str, *patterns: str, tags: Mapping[str, str] | None = None) -> str:
        """`patterns` are regular expressions in which CLUSTER stands for the cluster's name."""
        if self.is_foreign(tags or {}):
            return ""
        for pattern in patterns:
            if re.fullmatch(pattern.replace("CLUSTER", re.escape(self.scope.cluster)), name):
                return f"name {name}"
        return ""

    def price(self, key: str) -> float | None:
        return SERVICE_PRICES.get(self.scope.region, {}).get(key)

    def aws(self, command: str) -> str:
        return f"aws {command} --region {self.scope.region}"


def _code(error: ClientError) -> str:
    return error.response.get("Error", {}).get("Code", "")


def _tags(resource: Mapping[str, Any]) -> dict[str, str]:
    found = resource.get("Tags") or resource.get("TagList") or resource.get("TagSet") or []
    return {one["Key"]: one["Value"] for one in found}


def _name(tags: Mapping[str, str]) -> str:
    return tags.get("Name", "")


def _hourly(price: float | None, quantity: float = 1.0) -> tuple[float | None, str]:
    if price is None:
        return None, "bills by the hour; no price known in this region"
    total = price * quantity
    return total, f"{total:.4f} USD an hour ({total * HOURS_PER_MONTH:.2f} a month)"


def _monthly(price: float | None, quantity: float, what: str) -> tuple[float | None, str]:
    if price is None:
        return None, f"{what}; no price known in this region"
    total = price * quantity
    return total / HOURS_PER_MONTH, f"{total:.2f} USD a month ({what})"


def _blocks(what: str) -> tuple[float, str]:
    return 0.0, f"nothing, but it keeps {what} from being deleted"


_FREE = (0.0, "nothing")


def _clusters(look: _Look) -> Iterator[Leftover]:
    for name in look.pages("eks", "list_clusters", "clusters"):
        cluster = look.client("eks").describe_cluster(name=name)["cluster"]
        tags = cluster.get("tags") or {}
        reason = look.by_tags(tags) or look.by_name(name, "CLUSTER", tags=tags)
        if not reason:
            continue
        for group in look.pages("eks", "list_nodegroups", "nodegroups", clusterName=name):
            yield Leftover(
                "EKS node group",
                f"{name}:{group}",
                group,
                f"belongs to cluster {name}",
                0.0,
                "nothing itself; its instances bill, and they come back while it exists",
                look.aws(f"eks delete-nodegroup --cluster-name {name} --nodegroup-name {group}"),
            )
        usd, cost = _hourly(look.price("EKS control plane, hour"))
        yield Leftover(
            "EKS cluster", name, name, reason, usd, cost, look.aws(f"eks delete-cluster --name {name}")
        )


def _instances(look: _Look) -> Iterator[Leftover]:
    for reservation in look.pages("ec2", "describe_instances", "Reservations"):
        for one in reservation["Instances"]:
            tags = _tags(one)
            reason = look.by_tags(tags) or look.by_vpc(one.get("VpcId"), tags)
            if not reason or one["State"]["Name"] in ("terminated", "shutting-down"):
                continue
            kind = one["InstanceType"]
            shape = INSTANCES.get(kind) or SYSTEM_INSTANCES.get(kind)
            usd, cost = _hourly(shape.price_usd_per_hour.get(look.scope.region) if shape else None)
            if one["State"]["Name"] == "stopped":
                usd, cost = 0.0, "nothing while it is stopped; its volumes bill"
            command = look.aws(f"ec2 terminate-instances --instance-ids {one['InstanceId']}")
            yield Leftover(f"instance {kind}", one["InstanceId"], _name(tags), reason, usd, cost, command)


def _volumes(look: _Look) -> Iterator[Leftover]:
    for one in look.pages("ec2", "describe_volumes", "Volumes"):
        tags = _tags(one)
        reason = look.by_tags(tags)
        if not reason or one["State"] == "in-use":
            continue
        what = f"{one['Size']} GiB {one.get('VolumeType', '')}".strip()
        usd, cost = _monthly(look.price("gp3 disk, GiB and month"), one["Size"], what)
        command = look.aws(f"ec2 delete-volume --volume-id {one['VolumeId']}")
        yield Leftover("EBS volume", one["VolumeId"], _name(tags), reason, usd, cost, command)


def _snapshots(look: _Look) -> Iterator[Leftover]:
    for one in look.pages("ec2", "describe_snapshots", "Snapshots", OwnerIds=["self"]):
        tags = _tags(one)
        reason = look.by_tags(tags)
        if reason:
            usd, cost = _monthly(
                SNAPSHOT_GIB_MONTH, one["VolumeSize"], f"at most, {one['VolumeSize']} GiB snapshot"
            )
            command = look.aws(f"ec2 delete-snapshot --snapshot-id {one['SnapshotId']}")
            yield Leftover("EBS snapshot", one["SnapshotId"], _name(tags), reason, usd, cost, command)


def _load_balancers(look: _Look) -> Iterator[Leftover]:
    for arn, one, reason in _balancing(look, "describe_load_balancers", "LoadBalancers", "LoadBalancerArn"):
        usd, cost = _hourly(LOAD_BALANCER_HOUR)
        command = look.aws(f"elbv2 delete-load-balancer --load-balancer-arn {arn}")
        yield Leftover(
            "load balancer", arn, one["LoadBalancerName"], reason, usd, f"{cost}, and traffic", command
        )


def _target_groups(look: _Look) -> Iterator[Leftover]:
    for arn, one, reason in _balancing(look, "describe_target_groups", "TargetGroups", "TargetGroupArn"):
        command = look.aws(f"elbv2 delete-target-group --target-group-arn {arn}")
        yield Leftover("target group", arn, one["TargetGroupName"], reason, *_FREE, command)


def _balancing(look: _Look, call: str, key: str, arn_key: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """What of elbv2 was left behind: its ARN, what AWS says of it, and why it is the stack's."""
    found = {one[arn_key]: one for one in look.pages("elbv2", call, key)}
    tags_of = _load_balancer_tags(look, list(found))
    for arn, one in found.items():
        tags = tags_of.get(arn, {})
        reason = look.by_tags(tags) or look.by_vpc(one.get("VpcId"), tags)
        if reason:
            yield arn, one, reason


def _load_balancer_tags(look: _Look, arns: list[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for start in range(0, len(arns), 20):  # the limit of the call
        answer = look.client("elbv2").describe_tags(ResourceArns=arns[start : start + 20])
        for one in answer["TagDescriptions"]:
            found[one["ResourceArn"]] = _tags(one)
    return found


def _classic_load_balancers(look: _Look) -> Iterator[Leftover]:
    for one in look.pages("elb", "describe_load_balancers", "LoadBalancerDescriptions"):
        name = one["LoadBalancerName"]
        described = look.client("elb").describe_tags(LoadBalancerNames=[name])["TagDescriptions"]
        tags = _tags(described[0]) if described else {}
        reason = look.by_tags(tags) or look.by_vpc(one.get("VPCId"), tags)
        if reason:
            usd, cost = _hourly(CLASSIC_LOAD_BALANCER_HOUR)
            command = look.aws(f"elb delete-load-balancer --load-balancer-name {name}")
            yield Leftover("classic load balancer", name, name, reason, usd, f"{cost}, and traffic", command)


def _nat_gateways(look: _Look) -> Iterator[Leftover]:
    for one in look.pages("ec2", "describe_nat_gateways", "NatGateways"):
        tags = _tags(one)
        reason = look.by_tags(tags) or look.by_vpc(one.get("VpcId"), tags)
        if reason and one["State"] not in ("deleted", "deleting"):
            usd, cost = _hourly(look.price("NAT gateway, hour"))
            command = look.aws(f"ec2 delete-nat-gateway --nat-gateway-id {one['NatGatewayId']}")
            yield Leftover(
                "NAT gateway", one["NatGatewayId"], _name(tags), reason, usd, f"{cost}, and traffic", command
            )


def _addresses(look: _Look) -> Iterator[Leftover]:
    for one in look.client("ec2").describe_addresses()["Addresses"]:
        tags = _tags(one)
        reason = look.by_tags(tags)
        if reason:
            usd, cost = _hourly(look.price("public IPv4 address, hour"))
            command = look.aws(f"ec2 release-address --allocation-id {one['AllocationId']}")
            name = one.get("PublicIp", "")
            yield Leftover("elastic IP address", one["AllocationId"], name, reason, usd, cost, command)


def _interfaces(look: _Look) -> Iterator[Leftover]:
    """Only those that nothing uses: the others go with what they belong to."""
    for one in look.pages("ec2", "describe_network_interfaces", "NetworkInterfaces"):
        tags = _tags(one)
        reason = look.by_tags(tags) or look.by_vpc(one.get("VpcId"), tags)
        if reason and one["Status"] == "available":
            id = one["NetworkInterfaceId"]
            command = look.aws(f"ec2 delete-network-interface --network-interface-id {id}")
            cost = _blocks("its subnet, security group and VPC")
            yield Leftover("network interface", id, one.get("Description", ""), reason, *cost, command)


def _file_systems(look: _Look) -> Iterator[Leftover]:
    for one in look.pages("fsx", "describe_file_systems", "FileSystems"):
        tags = _tags(one)
        reason = look.by_tags(tags) or look.by_vpc(one.get("VpcId"), tags)
        if reason and one["Lifecycle"] != "DELETING":
            price = look.price("FSx for Lustre persistent 125 MB/s/TiB, GiB and month")
            usd, cost = _monthly(price, one["StorageCapacity"], f"{one['StorageCapacity']} GiB")
            id = one["FileSystemId"]
            command = look.aws(f"fsx delete-file-system --file-system-id {id}")
            yield Leftover("FSx for Lustre", id, _name(tags), reason, usd, cost, command)


def _networks(look: _Look) -> Iterator[Leftover]:
    """The VPC and the security groups in it, last in the order of removal."""
    for vpc, reason in look.vpcs.items():
        inside = {"Name": "vpc-id", "Values": [vpc]}
        for group in look.pages("ec2", "describe_security_groups", "SecurityGroups", Filters=[inside]):
            if group["GroupName"] != "default" and not look.is_foreign(_tags(group)):
                id = group["GroupId"]
                command = look.aws(f"ec2 delete-security-group --group-id {id}")
                why = look.by_tags(_tags(group)) or f"in VPC {vpc} of this stack"
                yield Leftover("security group", id, group["GroupName"], why, *_blocks("its VPC"), command)
        for subnet in look.pages("ec2", "describe_subnets", "Subnets", Filters=[inside]):
            id = subnet["SubnetId"]
            command = look.aws(f"ec2 delete-subnet --subnet-id {id}")
            why = look.by_tags(_tags(subnet)) or f"in VPC {vpc} of this stack"
            yield Leftover("subnet", id, _name(_tags(subnet)), why, *_blocks("its VPC"), command)
        for gateway in look.pages(
            "ec2",
            "describe_internet_gateways",
            "InternetGateways",
            Filters=[{"Name": "attachment.vpc-id", "Values": [vpc]}],
        ):
            id = gateway["InternetGatewayId"]
            command = (
                look.aws(f"ec2 detach-internet-gateway --internet-gateway-id {id} --vpc-id {vpc}")
                + " && "
                + look.aws(f"ec2 delete-internet-gateway --internet-gateway-id {id}")
            )
            why = look.by_tags(_tags(gateway)) or f"attached to VPC {vpc} of this stack"
            yield Leftover("internet gateway", id, _name(_tags(gateway)), why, *_blocks("its VPC"), command)
        command = look.aws(f"ec2 delete-vpc --vpc-id {vpc}")
        yield Leftover("VPC", vpc, "", reason, 0.0, "nothing, but an account may have only five", command)


def _launch_templates(look: _Look) -> Iterator[Leftover]:
    for one in look.pages("ec2", "describe_launch_templates", "LaunchTemplates"):
        tags, name = _tags(one), one["LaunchTemplateName"]
        reason = look.by_tags(tags) or look.by_name(name, f"CLUSTER-(system|gpu){_SUFFIX}", tags=tags)
        if reason:
            id = one["LaunchTemplateId"]
            command = look.aws(f"ec2 delete-launch-template --launch-template-id {id}")
            yield Leftover("launch template", id, name, reason, *_FREE, command)


def _placement_groups(look: _Look) -> Iterator[Leftover]:
    for one in look.client("ec2").describe_placement_groups()["PlacementGroups"]:
        tags, name = _tags(one), one["GroupName"]
        reason = look.by_tags(tags) or look.by_name(name, f"CLUSTER-gpu{_SUFFIX}", tags=tags)
        if reason and one.get("State") not in ("deleted", "deleting"):
            command = look.aws(f"ec2 delete-placement-group --group-name {name}")
            yield Leftover("placement group", name, name, reason, *_FREE, command)


def _log_groups(look: _Look) -> Iterator[Leftover]:
    """EKS writes to its group late and makes it again after a destroy; Pulumi's state knows nothing of that one."""
    patterns = (
        "/aws/eks/CLUSTER/cluster",
        f"CLUSTER-flow-logs{_SUFFIX}",
        "/aws/containerinsights/CLUSTER/.+",
    )
    for one in look.pages("logs", "describe_log_groups", "logGroups"):
        name = one["logGroupName"]
        arn = one["arn"].removesuffix(":*")
        tags = look.client("logs").list_tags_for_resource(resourceArn=arn).get("tags") or {}
        reason = look.by_tags(tags) or look.by_name(name, *patterns, tags=tags)
        if reason:
            stored = one.get("storedBytes", 0) / GIB
            usd, cost = _monthly(LOGS_GIB_MONTH, stored, f"{stored:.2f} GiB stored")
            command = look.aws(f"logs delete-log-group --log-group-name {name}")
            yield Leftover("log group", name, name, reason, usd, cost, command)


def _schedules(look: _Look) -> Iterator[Leftover]:
    for one in look.pages("scheduler", "list_schedules", "Schedules"):
        reason = look.by_name(one["Name"], f"CLUSTER-expiry{_SUFFIX}")
        if reason:
            group = one.get("GroupName", "default")
            command = look.aws(f"scheduler delete-schedule --name {one['Name']} --group-name {group}")
            yield Leftover("schedule", one["Name"], one["Name"], reason, *_FREE, command)


def _buckets(look: _Look) -> Iterator[Leftover]:
    for one in look.client("s3").list_buckets().get("Buckets") or []:
        name = one["Name"]
        tags = _bucket_tags(look, name)
        reason = look.by_tags(tags) or look.by_name(name, f"CLUSTER-runs{_SUFFIX}", tags=tags)
        if not reason:
            continue
        versions, old, size, more = _count_versions(look, name)
        at_least = "at least " if more else ""
        what = f"{at_least}{versions} object version(s), {old} of them old or deleted, {size / GIB:.2f} GiB"
        usd, cost = _monthly(S3_GIB_MONTH, size / GIB, what)
        yield Leftover("S3 bucket", name, name, reason, usd, cost, _bucket_command(look, name, versions))


def _bucket_tags(look: _Look, bucket: str) -> dict[str, str]:
    try:
        return _tags(look.client("s3").get_bucket_tagging(Bucket=bucket))
    except ClientError as error:
        # A bucket without tags, and one of another owner or region that cannot be read: judged by its name.
        if _code(error) in (
            "NoSuchTagSet",
            "AccessDenied",
            "PermanentRedirect",
            "NoSuchBucket",
        ):
            return {}
        raise


def _count_versions(look: _Look, bucket: str) -> tuple[int, int, int, bool]:
    """(versions, old versions and delete markers, bytes, whether there are more)."""
    versions = old = size = 0
    for page in look.client("s3").get_paginator("list_object_versions").paginate(Bucket=bucket):
        for one in page.get("Versions") or []:
            versions += 1
            old += not one["IsLatest"]
            size += one["Size"]
        markers = len(page.get("DeleteMarkers") or [])
        versions, old = versions + markers, old + markers
        if versions >= MAX_COUNTED_VERSIONS:
            return versions, old, size, True
    return versions, old, size, False


def _bucket_command(look: _Look, bucket: str, versions: int) -> str:
    remove = look.aws(f"s3api delete-bucket --bucket {bucket}")
    if not versions:
        return remove
    query = "{Objects: [Versions || `[]`, DeleteMarkers || `[]`][].{Key: Key, VersionId: VersionId}}"
    listing = (
        f"aws s3api list-object-versions --bucket {bucket} --max-items 1000 --query '{query}' --output json"
    )
    empty = look.aws(f's3api delete-objects --bucket {bucket} --delete "$({listing})"')
    again = f"; repeat it {-(-versions // 1000)} times" if versions > 1000 else ""
    return f"{empty}{again}; then {remove}"


def _keys(look: _Look) -> Iterator[Leftover]:
    for one in look.pages("kms", "list_keys", "Keys"):
        metadata = look.client("kms").describe_key(KeyId=one["KeyId"])["KeyMetadata"]
        if metadata.get("KeyManager", "CUSTOMER") != "CUSTOMER" or metadata["KeyState"] == "PendingDeletion":
            continue
        listed = look.client("kms").list_resource_tags(KeyId=one["KeyId"]).get("Tags") or []
        tags = {tag["TagKey"]: tag["TagValue"] for tag in listed}
        reason = look.by_tags(tags)
        if reason:
            usd, cost = _monthly(look.price("KMS key, month"), 1, "one key")
            command = look.aws(
                f"kms schedule-key-deletion --key-id {one['KeyId']} --pending-window-in-days 7"
            )
            yield Leftover(
                "KMS key", one["KeyId"], metadata.get("Description", ""), reason, usd, cost, command
            )


def _roles(look: _Look) -> Iterator[Leftover]:
    pattern = f"CLUSTER-({'|'.join(_ROLES)}){_SUFFIX}"
    for one in look.pages("iam", "list_roles", "Roles"):
        name = one["RoleName"]
        if not look.by_name(name, pattern):
            continue
        listed = look.client("iam").list_role_tags(RoleName=name).get("Tags") or []
        tags = {tag["Key"]: tag["Value"] for tag in listed}
        reason = look.by_tags(tags) or look.by_name(name, pattern, tags=tags)
        if reason:
            yield Leftover("IAM role", name, name, reason, *_FREE, _role_command(look, name))


def _role_command(look: _Look, role: str) -> str:
    """A role goes only without its policies."""
    iam = look.client("iam")
    steps = [
        f"aws iam detach-role-policy --role-name {role} --policy-arn {one['PolicyArn']}"
        for one in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]
    ]
    steps += [
        f"aws iam delete-role-policy --role-name {role} --policy-name {name}"
        for name in iam.list_role_policies(RoleName=role)["PolicyNames"]
    ]
    return " && ".join([*steps, f"aws iam delete-role --role-name {role}"])


def _budgets(look: _Look) -> Iterator[Leftover]:
    account = look.client("sts").get_caller_identity()["Account"]
    for one in look.pages("budgets", "describe_budgets", "Budgets", AccountId=account):
        name = one["BudgetName"]
        reason = look.by_name(name, f"CLUSTER-monthly{_SUFFIX}")
        if reason:
            command = f"aws budgets delete-budget --account-id {account} --budget-name {name}"
            yield Leftover("budget", name, name, reason, *_FREE, command)


_FINDERS: tuple[tuple[str, Callable[[_Look], Iterable[Leftover]]], ...] = (
    ("EKS clusters and node groups", _clusters),
    ("instances", _instances),
    ("FSx file systems", _file_systems),
    ("load balancers", _load_balancers),
    ("classic load balancers", _classic_load_balancers),
    ("target groups", _target_groups),
    ("NAT gateways", _nat_gateways),
    ("elastic IP addresses", _addresses),
    ("EBS volumes", _volumes),
    ("EBS snapshots", _snapshots),
    ("KMS keys", _keys),
    ("S3 buckets", _buckets),
    ("log groups", _log_groups),
    ("network interfaces", _interfaces),
    ("launch templates", _launch_templates),
    ("placement groups", _placement_groups),
    ("schedules", _schedules),
    ("budgets", _budgets),
    ("IAM roles", _roles),
    ("VPCs", _networks),
)
