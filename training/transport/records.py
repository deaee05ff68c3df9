"""Files that a run leaves in ``nccl/<attempt>/`` beside its NCCL logs: ``ranks.json`` and
``counters.json``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

RANKS_FILE = "ranks.json"
COUNTERS_FILE = "counters.json"

Backend = Literal["nccl", "gloo"]


class EvidenceError(ValueError):
    """A file of evidence is absent or is not what it should be; the text says which file and why."""


class RankRecord(BaseModel):
    """One rank of the job, as the rank itself knows it.

    ``host`` is the name that NCCL puts into ``%h``: the host name up to its first dot. ``pid`` is the process
    id inside the container, the one that NCCL puts into ``%p``. ``backend`` is what carries the collectives.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    rank: int = Field(ge=0)
    host: str = Field(min_length=1)
    pid: int = Field(gt=0)
    local_rank: int = Field(ge=0)
    backend: Backend = "nccl"


class NodeCounters(BaseModel):
    """EFA hardware counters of one node at one moment: device -> counter -> value (bytes, packets or events).

    ``problems`` says, in sentences, which devices or counters could not be read and why.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    devices: dict[str, dict[str, int]]
    problems: tuple[str, ...] = ()


class DeviceCounters(BaseModel):
    """Counters of one EFA device before and after the job: counter -> value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    before: dict[str, int]
    after: dict[str, int]


class HostCounters(BaseModel):
    """Counters of one host's EFA devices, and the bytes its collectives must have sent to other hosts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    devices: dict[str, DeviceCounters]
    expected_bytes: int | None = Field(default=None, ge=0)
    problems: tuple[str, ...] = ()


_RANKS = TypeAdapter(tuple[RankRecord, ...])


def load_ranks(directory: Path) -> tuple[RankRecord, ...]:
    """The ranks of ``ranks.json`` in rank order.

    Raises EvidenceError when the file is absent, unreadable or no complete, consistent list of ranks.
    """
    path = directory / RANKS_FILE
    try:
        ranks = _RANKS.validate_python(_read_json(path))
    except ValidationError as error:
        raise EvidenceError(f"{path.name}: {_first_error(error)}") from error
    if not ranks:
        raise EvidenceError(f"{path.name} lists no rank")
    missing = sorted(set(range(max(r.rank for r in ranks) + 1)) - {r.rank for r in ranks})
    if missing:
        raise EvidenceError(f"{path.name} lacks rank {_join(missing)} of {max(r.rank for r in ranks) + 1}")
    for what, values in (
        ("rank", Counter(str(r.rank) for r in ranks)),
        ("process", Counter(f"{r.host} pid {r.pid}" for r in ranks)),
    ):
        twice = [value for value, count in values.items() if count > 1]
        if twice:
            raise EvidenceError(f"{path.name} lists {what} {_join(twice)} more than once")
    return tuple(sorted(ranks, key=lambda r: r.rank))


def load_counters(directory: Path) -> dict[str, HostCounters]:
    """``counters.json``: host -> device -> before/after -> counter -> value, with ``expected_bytes`` per
    host.

    ``expected_bytes`` and ``problems`` stand beside a host's devices; a top-level ``expected_bytes`` object
    (host -> bytes) is read too. Raises EvidenceError when the file is absent or not of that shape.
    """
    path = directory / COUNTERS_FILE
    content = _read_json(path)
    if not isinstance(content, dict):
        raise EvidenceError(f"{path.name} is no JSON object of hosts")
    hosts = dict(cast("dict[str, Any]", content))
    expected = hosts.pop("expected_bytes", {})
    if not isinstance(expected, dict):
        raise EvidenceError(f"{path.name}: expected_bytes is no object of hosts")
    expected = cast("dict[str, Any]", expected)
    counters: dict[str, HostCounters] = {}
    for host, entry in hosts.items():
        if not isinstance(entry, dict):
            raise EvidenceError(f"{path.name}: {host} is no object of devices")
        devices = dict(cast("dict[str, Any]", entry))
        host_expected = devices.pop("expected_bytes", expected.get(host))
        problems = devices.pop("problems", ())
        try:
            counters[host] = HostCounters(devices=devices, expected_bytes=host_expected, problems=problems)
        except ValidationError as error:
            raise EvidenceError(f"{path.name}: {host}: {_first_error(error)}") from error
    return counters


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EvidenceError(f"{path.name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise EvidenceError(f"{path.name} cannot be read: {error}") from error


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']} (found {first['input']!r})"


def _join(values: list[int] | list[str]) -> str:
    return ", ".join(str(value) for value in values)
