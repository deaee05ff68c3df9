"""`finetune sleep`, `wake` and `extend`: the GPU nodes go and come back, and the time at which they go by themselves.

All three call AWS directly, so that they take a moment and need no Pulumi. They change only what the next ``pulumi up``
leaves alone: it compares the program with its state, and in both the group still has its size; what `extend` writes
into the settings file is what it set in AWS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import yaml
from botocore.exceptions import BotoCoreError, ClientError

from infra.outputs import StackOutputs
from infra.settings import PROJECT, SettingsError, StackSettings, parse_settings
from training.errors import FinetuneError, UsageError

T = TypeVar("T")

GPU_LABEL = ("role", "gpu")
# Pulumi's autonaming puts seven hexadecimal digits behind the name of the schedule.
_SCHEDULE = "{name}-expiry-[0-9a-f]{{7}}"


@dataclass(frozen=True)
class GpuGroup:
    """The EKS node group of the GPU nodes, and how many it has, wants, and may have."""

    cluster: str
    name: str
    minimum: int
    desired: int
    maximum: int


@dataclass(frozen=True)
class Resized:
    """What `sleep` or `wake` did to the group."""

    stack: str
    group: GpuGroup
    nodes: int

    @property
    def changed(self) -> bool:
        return self.nodes != self.group.desired

    def to_dict(self) -> dict[str, Any]:
        return {
            "stack": self.stack,
            "cluster": self.group.cluster,
            "node_group": self.group.name,
            "nodes_before": self.group.desired,
            "nodes": self.nodes,
        }

    def render(self) -> str:
        group = self.group
        if not self.changed:
            return f"{group.name}: has {self.nodes} GPU nodes already, nothing was changed."
        if self.nodes == 0:
            return (
                f"{group.name}: {group.desired} GPU nodes go; within minutes they bill no more. A capacity reservation "
                "or block bills on, and so do control plane, NAT gateway and system node (finetune cost).\n"
                f"Back with: finetune wake --stack {self.stack}"
            )
        return (
            f"{group.name}: {self.nodes} GPU nodes start; the RayCluster follows once they have pulled the image. "
            f"finetune submit waits for them; finetune doctor --stack {self.stack} says what keeps them away."
        )


def gpu_group(eks: Any, cluster: str) -> GpuGroup:
    """The group whose nodes have the label role=gpu.

    Raises:
        UsageError: there is no such cluster in this account and region, or no such group in it.
    """
    try:
        pages = eks.get_paginator("list_nodegroups").paginate(clusterName=cluster)
        names = [name for page in pages for name in page["nodegroups"]]
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") != "ResourceNotFoundException":
            raise
        raise UsageError(
            f"There is no EKS cluster {cluster} in {eks.meta.region_name} of this account: deploy it (pulumi up), or "
            "log in to its account (AWS_PROFILE)."
        ) from None
    for name in names:
        group = eks.describe_nodegroup(clusterName=cluster, nodegroupName=name)["nodegroup"]
        if group.get("labels", {}).get(GPU_LABEL[0]) == GPU_LABEL[1]:
            scaling = group["scalingConfig"]
            return GpuGroup(cluster, name, scaling["minSize"], scaling["desiredSize"], scaling["maxSize"])
    raise UsageError(f"EKS cluster {cluster} has no node group with the label {'='.join(GPU_LABEL)}.")


def sleep(session: Any, target: StackOutputs, unfinished_jobs: Callable[[], Sequence[str]] | None) -> Resized:
    """Scales the GPU group to zero. `unfinished_jobs`: ids of jobs that run or wait; None: whatever runs is cut off.

    Raises:
        UsageError: while a job runs; or there is no such cluster.
        FinetuneError: when EKS refuses.
    """
    eks = _eks(session, target)
    group = _calling(lambda: gpu_group(eks, target.cluster_name))
    if unfinished_jobs is not None and group.desired:
        jobs = unfinished_jobs()
        if jobs:
            raise UsageError(
                f"{', '.join(jobs)} runs on the GPU nodes. Stop it (finetune stop), let it end (finetune submit "
                "--then sleep does both in one), or cut it off with --now."
            )
    return _resize(eks, target.stack, group, 0)


def wake(session: Any, target: StackOutputs) -> Resized:
    """Scales the GPU group to its full size, that of the last ``pulumi up``.

    Raises:
        UsageError: there is no such cluster.
        FinetuneError: when EKS refuses.
    """
    eks = _eks(session, target)
    group = _calling(lambda: gpu_group(eks, target.cluster_name))
    return _resize(eks, target.stack, group, group.maximum)


def _eks(session: Any, target: StackOutputs) -> Any:
    if target.region is None:
        raise UsageError(
            f"Stack {target.stack} brings its own cluster: its nodes are not this project's to switch off."
        )
    return session.client("eks", region_name=target.region)


def _resize(eks: Any, stack: str, group: GpuGroup, nodes: int) -> Resized:
    resized = Resized(stack, group, nodes)
    if resized.changed:
        scaling = {"minSize": min(group.minimum, nodes), "maxSize": group.maximum, "desiredSize": nodes}
        _calling(
            lambda: eks.update_nodegroup_config(
                clusterName=group.cluster, nodegroupName=group.name, scalingConfig=scaling
            )
        )
    return resized


def _calling(call: Callable[[], T]) -> T:
    """The call, its refusal in words."""
    try:
        return call()
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        message = error.response.get("Error", {}).get("Message", "")
        if code == "ResourceInUseException":
            raise FinetuneError(
                f"EKS is changing the node group right now ({message}). Try again in a few minutes."
            ) from None
        raise FinetuneError(f"AWS refuses {error.operation_name}: {code}: {message}") from None
    except BotoCoreError as error:
        raise UsageError(
            f"AWS does not accept the credentials or does not answer ({error}). Log in (aws sso login, or AWS_PROFILE)."
        ) from None


@dataclass(frozen=True)
class Extension:
    """What `extend` did. `schedule` None: AWS has no schedule yet, ``pulumi up`` makes it."""

    stack: str
    was: datetime | None
    expires: datetime
    schedule: str | None
    hours_left: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "stack": self.stack,
            "was": self.was.isoformat() if self.was else None,
            "expires": self.expires.isoformat(),
            "hours_left": round(self.hours_left, 2),
            "schedule": self.schedule,
        }

    def render(self) -> str:
        when = f"Stack {self.stack}: the GPU nodes go at {self.expires:%Y-%m-%d %H:%M %Z}, in {self.hours_left:.1f} h"
        if self.schedule is None:
            return f"{when}, once the schedule exists: pulumi up --stack {self.stack}"
        slept = self.was is not None and self.was <= self.expires - timedelta(hours=self.hours_left)
        asleep = (
            f"\nThe old time has passed, so they are gone: finetune wake --stack {self.stack}"
            if slept
            else ""
        )
        return f"{when}. It holds from now on; finetune status shows it after the next pulumi up.{asleep}"


def extend(session: Any, path: Path, hours: float, now: datetime | None = None) -> Extension:
    """Moves the expiry of a stack by `hours`, from the old time or, where that has passed, from now: first the schedule
    in AWS, then the settings file.

    Raises:
        UsageError: for a broken settings file, or one of a stack that is not on AWS.
        FinetuneError: when AWS refuses; the file is then as it was.
    """
    if not 0 < hours <= 24 * 365:
        raise UsageError(f"--hours {hours:g}: more than 0 and at most a year (8760)")
    now = now or datetime.now(UTC)
    text = _read(path)
    was = _current(text, path)
    start = max(now, was) if was else now
    expires = _to_minute(start + timedelta(hours=hours))
    changed = _with_expiry(text, expires)
    settings = _settings(changed, path)
    scheduler = session.client("scheduler", region_name=settings.region)
    schedule = _calling(lambda: _move_schedule(scheduler, settings, expires))
    path.write_text(changed, encoding="utf-8")
    return Extension(settings.stack, was, expires, schedule, (expires - now).total_seconds() / 3600)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _config(text: str, path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not YAML: {error}") from None
    config = document.get("config") if isinstance(document, dict) else None
    if not isinstance(config, dict):
        raise UsageError(f"{path}: a stack file with a config block is needed, such as Pulumi.dev.yaml")
    prefix = f"{PROJECT}:"
    return {
        str(key).removeprefix(prefix): value for key, value in config.items() if str(key).startswith(prefix)
    }


def _current(text: str, path: Path) -> datetime | None:
    """The expiry as it stands in the file; one that has passed is what `extend` is for, so settings are not parsed."""
    value = _config(text, path).get("expires")
    if value in (None, ""):
        return None
    try:
        found = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError as error:
        raise UsageError(
            f"{path}: expires: {error}; a time such as 2026-12-01T18:00:00+01:00 is needed"
        ) from None
    if found.tzinfo is None:
        raise UsageError(f"{path}: expires = {value}: the offset is missing, as in 2026-12-01T18:00:00+01:00")
    return found


def _settings(text: str, path: Path) -> StackSettings:
    stack = path.name.removeprefix("Pulumi.").removesuffix(path.suffix)
    try:
        return parse_settings(_config(text, path), stack, path)
    except SettingsError as error:
        raise UsageError(str(error)) from None


def _to_minute(time: datetime) -> datetime:
    """The next full minute."""
    whole = time.replace(second=0, microsecond=0)
    return whole if whole == time else whole + timedelta(minutes=1)


def _with_expiry(text: str, expires: datetime) -> str:
    """The file with the new time, all else as it was, comments too."""
    line = f'{PROJECT}:expires: "{expires.isoformat()}"'
    pattern = re.compile(rf"^(?P<indent>[ \t]*)[\"']?{re.escape(PROJECT)}:expires[\"']?[ \t]*:[^\n]*$", re.M)
    if pattern.search(text):
        return pattern.sub(lambda match: match["indent"] + line, text)
    return re.sub(r"^config:[^\n]*\n", lambda match: f"{match[0]}  {line}\n", text, count=1, flags=re.M)


def _move_schedule(scheduler: Any, settings: StackSettings, expires: datetime) -> str | None:
    """The name of the moved schedule, None where there is none yet."""
    pattern = _SCHEDULE.format(name=re.escape(settings.name))
    pages = scheduler.get_paginator("list_schedules").paginate(NamePrefix=f"{settings.name}-expiry-")
    found = [one for page in pages for one in page["Schedules"] if re.fullmatch(pattern, one["Name"])]
    if not found:
        return None
    name, group = found[0]["Name"], found[0].get("GroupName", "default")
    schedule = scheduler.get_schedule(Name=name, GroupName=group)
    kept = {key: schedule[key] for key in ("Description", "FlexibleTimeWindow", "Target") if key in schedule}
    scheduler.update_schedule(
        Name=name,
        GroupName=group,
        ScheduleExpression=f"at({expires.astimezone(UTC):%Y-%m-%dT%H:%M:%S})",
        ScheduleExpressionTimezone="UTC",
        State="ENABLED",
        **kept,
    )
    return name
