"""vCPU quotas of EC2, and what of them is in use.

EC2 limits running instances by vCPUs, one quota per group of families and per way of buying. Codes are the same in
every region; names are those of the Service Quotas console (read 2026-12). Which quota P6 spot instances count against
is not documented: none is named for them here. A capacity block is bought with its instances and has no vCPU quota.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from botocore.exceptions import ClientError

from infra.instances import INSTANCES, SYSTEM_INSTANCES

Market = Literal["on-demand", "spot"]


@dataclass(frozen=True)
class Quota:
    """One quota: its code and name, and the instance families that it counts."""

    code: str
    name: str
    families: str

    def counts(self, instance_type: str) -> bool:
        return re.fullmatch(self.families, instance_type.partition(".")[0]) is not None


_G = r"(g|vt|gr)\d.*"
_P = r"p\d.*"
_STANDARD = r"(a|c|d|h|i|m|r|t|z)\d.*|(im|is|d3en|hpc).*"
QUOTAS: Mapping[Market, tuple[Quota, ...]] = {
    "on-demand": (
        Quota("L-DB2E81BA", "Running On-Demand G and VT instances", _G),
        Quota("L-417A185B", "Running On-Demand P instances", _P),
        Quota("L-1216C47A", "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances", _STANDARD),
    ),
    "spot": (
        Quota("L-3819A6DF", "All G and VT Spot Instance Requests", _G),
        Quota("L-C4BD4855", "All P5 Spot Instance Requests", r"p5.*"),
        Quota("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests", r"p[234].*"),
        Quota(
            "L-34B43A08",
            "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
            _STANDARD,
        ),
    ),
}


def quota_of(instance_type: str, market: Market) -> Quota:
    """The quota that an instance type counts against.

    Raises:
        LookupError: for a family that the table does not have; the message is for people.
    """
    for quota in QUOTAS[market]:
        if quota.counts(instance_type):
            return quota
    raise LookupError(f"{instance_type}: no {market} quota is known for its family")


def vcpus_of(instance_type: str) -> int:
    """vCPUs of a type of the catalog."""
    shape = INSTANCES.get(instance_type) or SYSTEM_INSTANCES[instance_type]
    return shape.vcpu


def quota_limit(quotas: Any, quota: Quota) -> int:
    """vCPUs that the account may run at once in the region of the client (`service-quotas`).

    Raises:
        ClientError: when Service Quotas does not answer.
    """
    wanted = {"ServiceCode": "ec2", "QuotaCode": quota.code}
    try:
        answer = quotas.get_service_quota(**wanted)
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") != "NoSuchResourceException":
            raise
        # An account that never had this quota raised may have only AWS's default.
        answer = quotas.get_aws_default_service_quota(**wanted)
    return int(answer["Quota"]["Value"])


@dataclass(frozen=True)
class Running:
    """One running instance: type, vCPUs, how it was bought, and its tags."""

    instance_type: str
    vcpus: int
    market: Market
    tags: Mapping[str, str]


def running_instances(ec2: Any) -> list[Running]:
    """What runs, or is about to, in the region of the client. Instances in a capacity block are left out: they do not
    count against the on-demand quota."""
    return list(_running(ec2))


def _running(ec2: Any) -> Iterator[Running]:
    states = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    for page in ec2.get_paginator("describe_instances").paginate(Filters=states):
        for reservation in page["Reservations"]:
            for instance in reservation["Instances"]:
                lifecycle = instance.get("InstanceLifecycle")
                if lifecycle == "capacity-block":
                    continue
                cpu = instance.get("CpuOptions", {})
                yield Running(
                    instance["InstanceType"],
                    cpu.get("CoreCount", 0) * cpu.get("ThreadsPerCore", 0)
                    or _catalog_vcpus(instance["InstanceType"]),
                    "spot" if lifecycle == "spot" else "on-demand",
                    {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])},
                )


def _catalog_vcpus(instance_type: str) -> int:
    shape = INSTANCES.get(instance_type) or SYSTEM_INSTANCES.get(instance_type)
    return shape.vcpu if shape else 0
