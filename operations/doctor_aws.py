"""What `finetune doctor` looks at in AWS: whose account it is, and whether the stack's nodes can be had in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from infra.settings import StackSettings
from operations.checks import Check, Job, fail, ok, run_checks, warn
from operations.quotas import (
    Market,
    Quota,
    Running,
    quota_limit,
    quota_of,
    running_instances,
    vcpus_of,
)

# Zones in which EKS puts no control plane (EKS user guide, "network-reqs", read 2026-12).
ZONES_WITHOUT_EKS = frozenset({"use1-az3", "usw1-az2", "cac1-az3"})


def check_aws(session: boto3.Session, settings: StackSettings) -> list[Check]:
    """Credentials first; without them nothing else can be asked."""
    credentials = list(_credentials(session, settings))
    if any(check.status == "fail" for check in credentials):
        return credentials
    look = _Look(session, settings)
    jobs: list[Job] = [
        ("zones", look.zones),
        ("instance type", look.instance_type),
        ("zone offering", look.offering),
        ("quota", look.quotas),
        ("node groups", look.node_groups),
    ]
    if settings.reservation_id:
        jobs.append(("reservation", look.reservation))
    return credentials + run_checks(jobs)


def _credentials(session: boto3.Session, settings: StackSettings) -> Iterator[Check]:
    log_in = "aws sso login  (or set AWS_PROFILE to a profile of the account)"
    try:
        caller = _client(session, "sts", settings).get_caller_identity()
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        yield fail("credentials", f"AWS refuses them: {code}", log_in)
        return
    except BotoCoreError as error:
        yield fail("credentials", f"none that work: {error}", log_in)
        return
    yield ok("credentials", caller["Arn"])
    account, wanted = caller["Account"], settings.account_id
    if wanted is None:
        yield warn(
            "account",
            f"{account}; the stack is bound to no account: `pulumi up` refuses that",
            f"pulumi config set accountId {account} --stack {settings.stack}",
        )
    elif account != wanted:
        yield fail(
            "account",
            f"the credentials are of account {account}, the stack belongs to {wanted}",
            f"export AWS_PROFILE=PROFILE-OF-{wanted}",
        )
    else:
        yield ok("account", account)


def _client(session: boto3.Session, service: str, settings: StackSettings) -> Any:
    make: Any = session.client
    return make(service, region_name=settings.region)


class _Look:
    """The checks of one region, with the clients that they share."""

    def __init__(self, session: boto3.Session, settings: StackSettings) -> None:
        self._settings = settings
        self._ec2 = _client(session, "ec2", settings)
        self._quotas = _client(session, "service-quotas", settings)
        self._eks = _client(session, "eks", settings)

    def zones(self) -> Iterator[Check]:
        settings = self._settings
        found = {
            zone["ZoneName"]: zone for zone in self._ec2.describe_availability_zones()["AvailabilityZones"]
        }
        usable = [
            name
            for name, zone in found.items()
            if zone["State"] == "available" and zone["ZoneId"] not in ZONES_WITHOUT_EKS
        ]
        wrong = [zone for zone in settings.zones if zone not in usable]
        if wrong:
            yield fail(
                "zones",
                f"{', '.join(wrong)}: not a zone of {settings.region} that EKS can use in this account; "
                f"those are {', '.join(sorted(usable))}",
                f"pulumi config set --path 'zones[0]' {sorted(usable)[0]} --stack {settings.stack}",
            )
        else:
            ids = ", ".join(f"{zone} ({found[zone]['ZoneId']})" for zone in settings.zones)
            yield ok("zones", ids)

    def instance_type(self) -> Iterator[Check]:
        """The catalog against what EC2 says of the type: a wrong number of interfaces fails at launch."""
        known = self._settings.instance
        try:
            described = self._ec2.describe_instance_types(InstanceTypes=[known.name])["InstanceTypes"][0]
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") != "InvalidInstanceType":
                raise
            yield fail(
                "instance type",
                f"{known.name} does not exist in {self._settings.region}",
                f"finetune zones --instance {known.name}",
            )
            return
        network = described["NetworkInfo"]
        efa = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0) if network["EfaSupported"] else 0
        gpus = sum(gpu["Count"] for gpu in described.get("GpuInfo", {}).get("Gpus", []))
        vcpus = described["VCpuInfo"]["DefaultVCpus"]
        facts = f"{vcpus} vCPUs, {gpus} GPUs, {efa} EFA interfaces"
        if (vcpus, gpus) != (known.vcpu, known.gpus) or efa < known.efa:
            yield fail(
                "instance type",
                f"EC2 says {known.name} has {facts}; the catalog {known.vcpu} vCPUs, {known.gpus} GPUs, "
                f"{known.efa} EFA interfaces",
                "correct the type in infra/instances.py",
            )
        else:
            yield ok("instance type", f"{known.name}: {facts}")

    def offering(self) -> Iterator[Check]:
        settings = self._settings
        name = settings.gpu_instance_type
        zones = zones_offering(self._ec2, name)
        if settings.gpu_zone in zones:
            yield ok(
                "zone offering", f"{name} is offered in {settings.gpu_zone} (an offer is not free capacity)"
            )
            return
        where = f"offered in {', '.join(zones)}" if zones else f"not offered anywhere in {settings.region}"
        better = next((zone for zone in zones if zone in settings.zones), zones[0] if zones else None)
        fix = (
            f"pulumi config set gpuZone {better} --stack {settings.stack}"
            if better
            else f"finetune zones --instance {name}"
        )
        yield fail("zone offering", f"{name} is not offered in {settings.gpu_zone}: {where}", fix)

    def quotas(self) -> Iterator[Check]:
        """vCPUs of what the stack has and will have, and of what else runs, against the account's limits."""
        settings = self._settings
        running = running_instances(self._ec2)
        wanted: list[tuple[str, int, Market]] = [
            (settings.system_instance_type, settings.system_count, "on-demand")
        ]
        if settings.purchase == "capacity-block":
            yield ok("quota of the GPU nodes", "a capacity block is bought with its instances: no vCPU quota")
        else:
            market: Market = "spot" if settings.purchase == "spot" else "on-demand"
            wanted.insert(0, (settings.gpu_instance_type, settings.gpu_count, market))
        for instance_type, count, market in wanted:
            yield self._quota(instance_type, count, market, running)

    def _quota(self, instance_type: str, count: int, market: Market, running: Sequence[Running]) -> Check:
        settings = self._settings
        try:
            quota: Quota = quota_of(instance_type, market)
        except LookupError as error:
            console = "https://console.aws.amazon.com/servicequotas/home/services/ec2/quotas"
            return warn(f"quota of {instance_type}", str(error), f"look it up: {console}")
        limit = quota_limit(self._quotas, quota)
        needs = count * vcpus_of(instance_type)
        others = sum(
            one.vcpus
            for one in running
            if one.market == market and quota.counts(one.instance_type) and not self._is_ours(one)
        )
        name = f"quota {quota.name}"
        facts = (
            f"{limit} vCPUs, {others} used by others, {needs} needed for {count} x {instance_type} "
            f"in {settings.region}"
        )
        if others + needs <= limit:
            return ok(name, facts)
        return fail(
            name,
            f"{facts}: {others + needs - limit} too few",
            f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {quota.code} "
            f"--desired-value {others + needs} --region {settings.region}  (takes hours to days)",
        )

    def _is_ours(self, running: Running) -> bool:
        tags = self._settings.instance_tags
        return all(running.tags.get(key) == tags[key] for key in ("project", "stack"))

    def node_groups(self) -> Iterator[Check]:
        """What EKS itself says of the groups: here stands why nodes do not come. Nothing before the first update."""
        cluster, settings = self._settings.name, self._settings
        try:
            pages = self._eks.get_paginator("list_nodegroups").paginate(clusterName=cluster)
            names = [name for page in pages for name in page["nodegroups"]]
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") != "ResourceNotFoundException":
                raise
            return
        for name in names:
            group = self._eks.describe_nodegroup(clusterName=cluster, nodegroupName=name)["nodegroup"]
            size, status = group["scalingConfig"]["desiredSize"], group["status"]
            issues = group.get("health", {}).get("issues", [])
            look = (
                f"aws eks describe-nodegroup --cluster-name {cluster} --nodegroup-name {name} "
                f"--region {settings.region}"
            )
            if issues:
                said = "; ".join(f"{one['code']}: {one['message']}" for one in issues)
                yield fail(f"node group {name}", said, _mend(issues, look))
            elif status in ("CREATE_FAILED", "DELETE_FAILED", "DEGRADED"):
                yield fail(f"node group {name}", f"{status}, without a reason", look)
            else:
                yield ok(f"node group {name}", f"{status.lower()}, {size} nodes wanted")

    def reservation(self) -> Iterator[Check]:
        settings = self._settings
        wanted = settings.reservation_id
        set_other = f"pulumi config set reservationId cr-... --stack {settings.stack}"
        look = f"aws ec2 describe-capacity-reservations --region {settings.region}"
        try:
            answer = self._ec2.describe_capacity_reservations(CapacityReservationIds=[wanted])
        except ClientError as error:
            if not error.response.get("Error", {}).get("Code", "").startswith("InvalidCapacityReservationId"):
                raise
            yield fail(
                "reservation", f"{wanted} does not exist in {settings.region}", f"{look}; then {set_other}"
            )
            return
        found = answer["CapacityReservations"][0]
        kind = found.get("ReservationType", "default")
        wanted_kind = "capacity-block" if settings.purchase == "capacity-block" else "default"
        problems = [
            f"{what} {has}, the stack wants {wants}"
            for what, has, wants in (
                ("its type is", found["InstanceType"], settings.gpu_instance_type),
                ("its zone is", found["AvailabilityZone"], settings.gpu_zone),
                ("it is of kind", kind, wanted_kind),
            )
            if has != wants
        ]
        if problems:
            yield fail("reservation", f"{wanted}: {'; '.join(problems)}", f"{look}; then {set_other}")
            return
        yield self._reservation_state(found, look)

    def _reservation_state(self, found: dict[str, Any], look: str) -> Check:
        settings = self._settings
        name, state = found["CapacityReservationId"], found["State"]
        free, total = found["AvailableInstanceCount"], found["TotalInstanceCount"]
        ends = f", ends {found['EndDate']:%Y-%m-%d %H:%M %Z}" if "EndDate" in found else ""
        facts = f"{name}: {state}, {free} of {total} free{ends}"
        if state in ("scheduled", "pending", "payment-pending"):
            return warn("reservation", f"{facts}: nodes start once it is active", look)
        if state != "active":
            return fail("reservation", f"{facts}: no node can start in it", look)
        ours = sum(
            self._is_ours(one) and one.instance_type == found["InstanceType"]
            for one in running_instances(self._ec2)
        )
        # In a capacity block the stack's nodes are not among running_instances; what is taken there is its own.
        mine = total - free if settings.purchase == "capacity-block" else min(ours, total - free)
        if free + mine < settings.gpu_count:
            return fail(
                "reservation",
                f"{facts}: {settings.gpu_count} are needed",
                f"aws ec2 modify-capacity-reservation --capacity-reservation-id {name} "
                f"--instance-count {total - free - mine + settings.gpu_count} --region {settings.region}",
            )
        return ok("reservation", facts)


def _mend(issues: Sequence[dict[str, Any]], look: str) -> str:
    text = " ".join(f"{one['code']} {one['message']}" for one in issues)
    if "InsufficientInstanceCapacity" in text or "AsgInstanceLaunchFailures" in text:
        return "finetune zones --probe  (another gpuZone, or a reservation); docs/recovery.md, No capacity"
    return look


def zones_offering(ec2: Any, instance_type: str) -> list[str]:
    """Zones of the client's region that offer the type, sorted."""
    offers = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [instance_type]}]
    )
    return sorted(offer["Location"] for page in offers for offer in page["InstanceTypeOfferings"])
