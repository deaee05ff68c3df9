"""`finetune zones`: where an instance type can be had: offers, quota, spot score, price, and a real try.

An offer says only that AWS sells the type in a zone. `probe` is the one proof of capacity: it makes a capacity
reservation, which bills as soon as it exists, and cancels it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError
from rich.table import Table

from infra.instances import INSTANCES, PRICE_TABLE_DATE, InstanceType
from infra.settings import PROJECT
from operations.doctor_aws import ZONES_WITHOUT_EKS, zones_offering
from operations.quotas import quota_limit, quota_of
from training.errors import FinetuneError, UsageError

PARALLEL_REGIONS = 8
# A reservation that could not be cancelled ends by itself; EC2 ends it within an hour of this time.
PROBE_LIFETIME = timedelta(hours=1)
# EC2 bills a reservation by the second and at least a minute (EC2 user guide, "capacity-reservations-pricing").
LEAST_BILLED_HOURS = 1 / 60


@dataclass(frozen=True)
class Zone:
    """One zone that offers the type, or a region that does not tell (`problem`). Quotas are in nodes of the type."""

    region: str
    zone: str | None = None
    zone_id: str | None = None
    eks: bool = True
    on_demand_nodes: int | None = None
    spot_nodes: int | None = None
    spot_score: int | None = None
    hourly_usd: float | None = None
    problem: str | None = None
    capacity: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "region": self.region,
            "zone": self.zone,
            "zone_id": self.zone_id,
            "eks": self.eks,
            "on_demand_nodes": self.on_demand_nodes,
            "spot_nodes": self.spot_nodes,
            "spot_score": self.spot_score,
            "hourly_usd": self.hourly_usd,
            "problem": self.problem,
            "capacity": self.capacity,
        }

    def fits(self, nodes: int) -> bool:
        """On demand: the zone takes a control plane, and the quota the nodes, as far as it is known."""
        return (
            self.zone is not None
            and self.eks
            and (self.on_demand_nodes is None or self.on_demand_nodes >= nodes)
        )


@dataclass(frozen=True)
class ZoneReport:
    """All zones of all regions asked, the best first."""

    instance: InstanceType
    nodes: int
    zones: tuple[Zone, ...]

    @property
    def best(self) -> Zone | None:
        for zone in self.zones:
            if zone.fits(self.nodes) and zone.capacity in (None, "free"):
                return zone
        return None

    def to_dict(self) -> dict[str, Any]:
        """The report as ``finetune zones --json`` prints it."""
        return {
            "instance_type": self.instance.name,
            "nodes": self.nodes,
            "zones": [zone.to_dict() for zone in self.zones],
            "settings": self.settings(),
        }

    def settings(self) -> dict[str, Any] | None:
        """The settings that put a stack into the best zone; None where no zone fits."""
        best = self.best
        if best is None:
            return None
        others = [
            z.zone for z in self.zones if z.region == best.region and z.zone != best.zone and z.eks and z.zone
        ]
        zones = sorted([best.zone or "", *others[:1]])
        return {"region": best.region, "zones": zones, "gpuZone": best.zone}

    def view(self) -> Table:
        table = Table(
            title=f"{self.nodes} x {self.instance.name}, prices of {PRICE_TABLE_DATE}",
            title_justify="left",
            box=None,
            padding=(0, 3, 0, 0),
            caption=self._caption(),
            caption_justify="left",
        )
        for column in ("zone", "id", "on demand", "spot", "spot score", "USD a node and hour", "capacity"):
            table.add_column(column)
        for zone in self.zones:
            if zone.problem:
                table.add_row(zone.region, "", zone.problem)
                continue
            table.add_row(
                str(zone.zone),
                f"{zone.zone_id}{'' if zone.eks else ' (no EKS)'}",
                _nodes(zone.on_demand_nodes),
                _nodes(zone.spot_nodes),
                "-" if zone.spot_score is None else f"{zone.spot_score} of 10",
                "-" if zone.hourly_usd is None else f"{zone.hourly_usd:.4f}",
                zone.capacity or "not tried (--probe)",
            )
        return table

    def _caption(self) -> str:
        settings = self.settings()
        if settings is None:
            return (
                f"No zone fits {self.nodes} nodes: raise the quota (finetune doctor says how), ask for fewer "
                "(--nodes), or look elsewhere (--region)."
            )
        commands = [f"pulumi config set region {settings['region']}"]
        commands += [
            f"pulumi config set --path 'zones[{i}]' {zone}" for i, zone in enumerate(settings["zones"])
        ]
        commands.append(f"pulumi config set gpuZone {settings['gpuZone']}")
        return "The first that fits:\n  " + "\n  ".join(commands)


def _nodes(count: int | None) -> str:
    return "unknown" if count is None else f"{count} node{'' if count == 1 else 's'}"


def instance_of(name: str) -> InstanceType:
    """Raises UsageError for a type that is not in the catalog."""
    if name not in INSTANCES:
        raise UsageError(f"--instance {name}: not in the catalog; it has {', '.join(INSTANCES)}")
    return INSTANCES[name]


def find_zones(
    session: boto3.Session, instance: InstanceType, nodes: int, regions: Sequence[str] = ()
) -> ZoneReport:
    """Asks every region (default: those with a known price of the type) and sorts: fitting first, then by price and
    spot score.

    Raises:
        UsageError: when AWS does not accept the credentials.
    """
    asked = list(dict.fromkeys(regions)) or sorted(instance.price_usd_per_hour) or ["us-east-1", "us-west-2"]
    make: Any = session.client
    try:
        make("sts", region_name=asked[0]).get_caller_identity()
    except (BotoCoreError, ClientError) as error:
        raise UsageError(
            f"AWS does not accept the credentials ({error}). Log in (aws sso login, or AWS_PROFILE) and try again"
        ) from None
    scores = _spot_scores(make("ec2", region_name=asked[0]), instance.name, nodes, asked)
    clients = [
        (region, make("ec2", region_name=region), make("service-quotas", region_name=region))
        for region in asked
    ]
    with ThreadPoolExecutor(PARALLEL_REGIONS) as pool:
        found = pool.map(lambda one: _zones_of(one[0], one[1], one[2], instance), clients)
        zones = [replace(zone, spot_score=scores.get(zone.zone_id)) for region in found for zone in region]
    zones.sort(
        key=lambda zone: (
            zone.problem is not None,
            not zone.fits(nodes),
            zone.hourly_usd if zone.hourly_usd is not None else float("inf"),
            -(zone.spot_score or 0),
            zone.zone or zone.region,
        )
    )
    return ZoneReport(instance, nodes, tuple(zones))


def _zones_of(region: str, ec2: Any, quotas: Any, instance: InstanceType) -> list[Zone]:
    try:
        offering = zones_offering(ec2, instance.name)
        if not offering:
            return [Zone(region, problem="not offered")]
        described = ec2.describe_availability_zones(ZoneNames=offering)["AvailabilityZones"]
    except ClientError as error:
        return [Zone(region, problem=error.response.get("Error", {}).get("Code", "refused"))]
    except BotoCoreError as error:
        return [Zone(region, problem=str(error))]
    on_demand, spot = (_nodes_of_quota(quotas, instance, market) for market in ("on-demand", "spot"))
    return [
        Zone(
            region,
            zone["ZoneName"],
            zone["ZoneId"],
            zone["ZoneId"] not in ZONES_WITHOUT_EKS,
            on_demand,
            spot,
            None,
            instance.price_usd_per_hour.get(region),
        )
        for zone in described
        if zone["State"] == "available"
    ]


def _nodes_of_quota(quotas: Any, instance: InstanceType, market: Any) -> int | None:
    """Nodes of the type that the quota allows when nothing else runs; None where it cannot be read."""
    try:
        return quota_limit(quotas, quota_of(instance.name, market)) // instance.vcpu
    except (ClientError, BotoCoreError, LookupError):
        return None


def _spot_scores(ec2: Any, instance_type: str, nodes: int, regions: Sequence[str]) -> dict[str | None, int]:
    """Spot placement score (1 to 10) by zone id; nothing where it cannot be read."""
    try:
        pages = ec2.get_paginator("get_spot_placement_scores").paginate(
            InstanceTypes=[instance_type],
            TargetCapacity=nodes,
            SingleAvailabilityZone=True,
            RegionNames=list(regions),
        )
        return {
            score["AvailabilityZoneId"]: score["Score"]
            for page in pages
            for score in page["SpotPlacementScores"]
            if "AvailabilityZoneId" in score
        }
    except (ClientError, BotoCoreError):
        return {}


def probe_price(report: ZoneReport) -> float | None:
    """The least that `probe` bills if every zone has capacity, in USD; None without a known price."""
    zones = _to_probe(report)
    if any(zone.hourly_usd is None for zone in zones):
        return None
    return sum((zone.hourly_usd or 0.0) * report.nodes * LEAST_BILLED_HOURS for zone in zones)


def probe(session: boto3.Session, report: ZoneReport) -> ZoneReport:
    """Tries the zones that fit, in order, up to the first with capacity: reserves all nodes there and cancels.

    Raises:
        FinetuneError: when a reservation could not be cancelled; it says how to do it.
    """
    make: Any = session.client
    tried: dict[str | None, str] = {}
    for zone in _to_probe(report):
        tried[zone.zone] = _try(make("ec2", region_name=zone.region), report, zone)
        if tried[zone.zone] == "free":
            break
    zones = tuple(replace(zone, capacity=tried.get(zone.zone)) for zone in report.zones)
    return replace(report, zones=zones)


def _to_probe(report: ZoneReport) -> list[Zone]:
    return list(_fitting(report))


def _fitting(report: ZoneReport) -> Iterator[Zone]:
    for zone in report.zones:
        if zone.fits(report.nodes):
            yield zone


def _try(ec2: Any, report: ZoneReport, zone: Zone) -> str:
    tags = {"project": PROJECT, "purpose": "finetune-zones-probe"}
    try:
        made = ec2.create_capacity_reservation(
            InstanceType=report.instance.name,
            InstancePlatform="Linux/UNIX",
            AvailabilityZone=zone.zone,
            InstanceCount=report.nodes,
            EndDateType="limited",
            EndDate=datetime.now(UTC) + PROBE_LIFETIME,
            # Targeted: no instance of anybody slips into it while it exists.
            InstanceMatchCriteria="targeted",
            TagSpecifications=[
                {
                    "ResourceType": "capacity-reservation",
                    "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
                }
            ],
        )
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        return "none now" if code == "InsufficientInstanceCapacity" else code
    reservation = made["CapacityReservation"]["CapacityReservationId"]
    try:
        cancelled = ec2.cancel_capacity_reservation(CapacityReservationId=reservation)["Return"]
    except (ClientError, BotoCoreError) as error:
        raise _not_cancelled(reservation, zone, str(error)) from None
    if not cancelled:
        raise _not_cancelled(reservation, zone, "EC2 answered no")
    return "free"


def _not_cancelled(reservation: str, zone: Zone, reason: str) -> FinetuneError:
    return FinetuneError(
        f"Reservation {reservation} in {zone.zone} was made but could not be cancelled ({reason}). It bills until it "
        f"is, and ends by itself in one to two hours. Cancel it now:\n"
        f"  aws ec2 cancel-capacity-reservation --capacity-reservation-id {reservation} --region {zone.region}"
    )
