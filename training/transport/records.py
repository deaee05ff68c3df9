"""Files that a run leaves in ``nccl/<attempt>/`` beside its NCCL logs: ``ranks.json`` and ``counters.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

RANKS_FILE = "ranks.json"
COUNTERS_FILE = "counters.json"

Backend = Literal["nccl", "gloo"]


class EvidenceError(ValueError):
    """A file of evidence is absent or cannot be read as what it should be; the text says which and why."""


class RankRecord(BaseModel):
    """One rank of the job, as the rank itself knows it.

    ``host`` is the name that NCCL puts into ``%h``: the host name up to its first dot. ``pid`` is the process
    id inside the container, the one that NCCL puts into ``%p``. ``backend`` is what carries the collectives.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    """Counters of one host's EFA devices, and the bytes its collectives must have sent across the network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    devices: dict[str, DeviceCounters]
    expected_bytes: int | None = Field(default=None, ge=0)
    problems: tuple[str, ...] = ()
