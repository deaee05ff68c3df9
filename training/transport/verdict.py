"""The verdict: which network carried the collectives of one attempt, and what proves it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

Verdict = Literal["efa", "tcp", "mixed", "none", "unknown"]
Require = Literal["efa", "any"]


class Evidence(BaseModel):
    model_config = ConfigDict(frozen=True)
    file: str
    line: int
    text: str


class Diagnosis(BaseModel):
    model_config = ConfigDict(frozen=True)
    kind: str
    seen: str
    where: str
    change: str


class RankTransport(BaseModel):
    model_config = ConfigDict(frozen=True)
    rank: int
    host: str
    pid: int
    local_rank: int
    provider: str | None
    network: str | None
    internode_channels: int
    gpudirect: bool | None
    evidence: tuple[Evidence, ...]


class NodeTransport(BaseModel):
    model_config = ConfigDict(frozen=True)
    host: str
    tx_bytes: int | None
    rx_bytes: int | None
    expected_bytes: int | None
    counters: dict[str, int]
    agrees: bool | None
    note: str


class TransportReport(BaseModel):
    model_config = ConfigDict(frozen=True)
    verdict: Verdict
    reason: str
    attempt: str
    required: Require
    ranks: tuple[RankTransport, ...]
    nodes: tuple[NodeTransport, ...]
    diagnosis: tuple[Diagnosis, ...]


def judge(attempt_dir: Path, *, require: Require, gpudirect_required: bool = False) -> TransportReport:
    """Judge ``nccl/<attempt>/``. Never raises for bad evidence: that is ``unknown`` with the reason."""
    raise NotImplementedError


def exit_status(report: TransportReport, require: Require) -> Literal[0, 13, 14]:
    """0 proven or not required, 13 another transport than required, 14 unknown."""
    raise NotImplementedError
