"""What a rank does for the transport gate: log NCCL to its own file, say who it is, read the EFA counters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from training.transport.records import Backend, NodeCounters, RankRecord

SYSFS_ROOT = Path("/sys/class/infiniband")


def prepare_rank_env(
    run_nccl_dir: Path, attempt: str, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Environment that makes NCCL log to one file per process; set it before torch initializes NCCL."""
    raise NotImplementedError


def rank_record(rank: int, local_rank: int, backend: Backend = "nccl") -> RankRecord:
    """Who this process is, in the names that NCCL uses for its log file."""
    raise NotImplementedError


def write_ranks(directory: Path, records: Sequence[RankRecord]) -> Path:
    """Write ``ranks.json``: a list of rank, host, pid, local_rank, backend."""
    raise NotImplementedError


def read_counters(sysfs_root: Path = SYSFS_ROOT) -> NodeCounters:
    """EFA counters of this node now. Never raises: what cannot be read is listed in ``problems``."""
    raise NotImplementedError


def write_counters(
    directory: Path,
    before: Sequence[NodeCounters],
    after: Sequence[NodeCounters],
    expected_bytes: Mapping[str, int],
) -> Path:
    """Write ``counters.json``: host -> device -> before/after -> counter -> value, and expected_bytes per host."""
    raise NotImplementedError


def collect_logs(local_dir: Path, destination: Path, record: RankRecord | None = None) -> list[Path]:
    """Copy the NCCL logs of this attempt (of one rank when ``record`` is given) to the run folder."""
    raise NotImplementedError
