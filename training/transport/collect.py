"""What a rank does for the transport gate: log NCCL to its own file, say who it is, read the EFA counters."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.transport.counters import SYSFS_ROOT, read_node
from training.transport.log_reader import LOG_GLOB
from training.transport.records import COUNTERS_FILE, RANKS_FILE, Backend, NodeCounters, RankRecord

#: INIT and NET hold the verdict's lines; ENV shows which settings NCCL read, for the diagnosis.
_SUBSYSTEMS = ("INIT", "NET", "ENV")


def prepare_rank_env(
    run_nccl_dir: Path, attempt: str, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Environment that makes NCCL log to one file per process; set it before torch initializes NCCL.

    The folder ``run_nccl_dir/attempt`` is made, since NCCL does not make it and then logs to standard output.
    A level or subsystems that the job's own environment sets stay, INIT, NET and ENV being added. (A job that
    sets NCCL_DEBUG to less than INFO gets the verdict ``unknown``.) The attempt is in the path so that no
    other attempt's lines can be read as this one's.
    """
    directory = run_nccl_dir / attempt
    directory.mkdir(parents=True, exist_ok=True)
    return {
        "NCCL_DEBUG": environ.get("NCCL_DEBUG") or "INFO",
        "NCCL_DEBUG_SUBSYS": _subsystems(environ.get("NCCL_DEBUG_SUBSYS", "")),
        "NCCL_DEBUG_FILE": str(directory / "%h.%p.log"),
    }


def _subsystems(wanted: str) -> str:
    if wanted.startswith("^"):  # all but these
        left = [name for name in wanted[1:].split(",") if name.strip().upper() not in _SUBSYSTEMS]
        return "^" + ",".join(left) if left else "ALL"
    names = [name.strip().upper() for name in wanted.split(",") if name.strip()]
    return ",".join(dict.fromkeys([*_SUBSYSTEMS, *names]))


def nccl_host() -> str:
    """This machine's name as NCCL writes it into ``%h`` and in front of each line (src/debug.cc)."""
    return socket.gethostname().split(".")[0].replace("%", "-").replace("/", "-")


def rank_record(rank: int, local_rank: int, backend: Backend = "nccl") -> RankRecord:
    """Who this process is, in the names that NCCL uses for its log file."""
    return RankRecord(rank=rank, host=nccl_host(), pid=os.getpid(), local_rank=local_rank, backend=backend)


def write_ranks(directory: Path, records: Sequence[RankRecord]) -> Path:
    """Write ``ranks.json``: a list of rank, host, pid, local_rank, backend, in rank order."""
    ordered = sorted(records, key=lambda record: record.rank)
    return _write_json(directory / RANKS_FILE, [record.model_dump() for record in ordered])


def read_counters(sysfs_root: Path = SYSFS_ROOT) -> NodeCounters:
    """EFA counters of this node now. Never raises: what cannot be read is listed in ``problems``."""
    return read_node(nccl_host(), sysfs_root)


def write_counters(
    directory: Path,
    before: Sequence[NodeCounters],
    after: Sequence[NodeCounters],
    expected_bytes: Mapping[str, int],
) -> Path:
    """Write ``counters.json`` from one reading per host before the job's collectives and one after.

    host -> device -> before/after -> counter -> value; beside the devices of a host its ``expected_bytes``
    (bytes each way) and, where something could not be read, ``problems``. A host or device read only once is
    a problem too.
    """
    first = {node.host: node for node in before}
    last = {node.host: node for node in after}
    content: dict[str, dict[str, Any]] = {}
    for host in sorted(first.keys() | last.keys()):
        devices_before = first[host].devices if host in first else {}
        devices_after = last[host].devices if host in last else {}
        problems = [
            f"{moment} the job: {problem}"
            for moment, nodes in (("before", first), ("after", last))
            for problem in (nodes[host].problems if host in nodes else ("the host was not read",))
        ]
        problems += [
            f"{device} was read only {'before' if device in devices_before else 'after'} the job"
            for device in sorted(devices_before.keys() ^ devices_after.keys())
        ]
        entry: dict[str, Any] = {
            device: {"before": devices_before[device], "after": devices_after[device]}
            for device in sorted(devices_before.keys() & devices_after.keys())
        }
        if host in expected_bytes:
            entry["expected_bytes"] = expected_bytes[host]
        if problems:
            entry["problems"] = problems
        content[host] = entry
    return _write_json(directory / COUNTERS_FILE, content)


def collect_logs(local_dir: Path, destination: Path, record: RankRecord | None = None) -> list[Path]:
    """Copy this attempt's NCCL logs from the node's own disk to the run folder; the paths written.

    With ``record`` only that rank's file, so that every rank can bring its own, also when its peers are gone.
    A rank that logged nothing copies nothing, which the verdict then names. ``local_dir`` may be
    ``destination``.
    """
    pattern = LOG_GLOB if record is None else f"{record.host}.{record.pid}.log"
    destination.mkdir(parents=True, exist_ok=True)
    copied: list[Path] = []
    for source in sorted(local_dir.glob(pattern)):
        target = destination / source.name
        if source.resolve() != target.resolve():
            partial = target.with_suffix(".partial")
            shutil.copyfile(source, partial)
            partial.replace(target)
        copied.append(target)
    return copied


def _write_json(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path
