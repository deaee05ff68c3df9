"""The flight recorder: the last collectives of every rank, which torch keeps in memory, written down when something breaks.

`flight/<attempt>/` of the run folder holds `nccl-<rank>` and `gloo-<rank>` in torch's own format, which
`torchfrtrace --prefix nccl- FOLDER` reads too. torch records 2,000 collectives by default
(TORCH_NCCL_TRACE_BUFFER_SIZE) and dumps them itself when NCCL's watchdog gives up (TORCH_NCCL_DUMP_ON_TIMEOUT, on by
default); where to is all that it has to be told (torch 2.13, ProcessGroupNCCL.hpp and FlightRecorder.hpp, 2026-12).
"""

from __future__ import annotations

import ast
import io
import logging
import os
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch._C import _distributed_c10d as c10d

from training.storage import Storage

FOLDER = "flight"
BACKENDS = ("nccl", "gloo")
# A dump asks the device about its events; a device that stands still may not answer.
DUMP_SECONDS = 15.0

log = logging.getLogger(__name__)

Dump = Mapping[str, Any]


class Recorder:
    """The flight recorder of one rank in one attempt."""

    def __init__(self, storage: Storage, work_dir: Path, attempt: str, rank: int) -> None:
        self.storage = storage
        self.attempt = attempt
        self.rank = rank
        local = work_dir / FOLDER / attempt
        local.mkdir(parents=True, exist_ok=True)
        # torch reads it when it dumps, and appends the rank. Both names: the old one goes first in older versions.
        for variable in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
            os.environ[variable] = f"{local}/nccl-"

    def dump(self) -> None:
        """Writes what this rank recorded to the run folder. Gives up after a while; never raises: it runs while another
        failure is being handled."""
        thread = threading.Thread(target=self._dump, name="flight recorder", daemon=True)
        thread.start()
        thread.join(DUMP_SECONDS)

    def _dump(self) -> None:
        for backend in BACKENDS:
            try:
                data = _dumps()[backend]()
                if read_dump(data)["entries"]:
                    self.storage.write_bytes(f"{FOLDER}/{self.attempt}/{backend}-{self.rank}", data)
            except Exception as error:  # whatever it is, the failure that led here is the one to report
                log.warning("the flight recorder of %s could not be written: %s", backend, error)


def _dumps() -> dict[str, Callable[[], bytes]]:
    module = cast("Any", c10d)
    found = {"gloo": module._dump_fr_trace}
    found["nccl"] = (
        module._dump_nccl_trace if torch.cuda.is_available() else lambda: pickle.dumps({"entries": []})
    )
    return found


def upload_left_behind(storage: Storage, work_dir: Path) -> list[str]:
    """Brings what torch's own watchdog dumped on this node, before it ended the process, to the run folder.

    Returns the names of the files. A dump that a rank has written itself is kept.
    """
    uploaded: list[str] = []
    for path in sorted((work_dir / FOLDER).glob("*/nccl-*")):
        name = f"{FOLDER}/{path.parent.name}/{path.name}"
        if path.is_file() and not storage.exists(name):
            storage.upload(path, name)
            uploaded.append(name)
    return uploaded


# Reading


class _PlainUnpickler(pickle.Unpickler):
    """A dump holds dictionaries, lists, texts and numbers; anything else in it would be code, and is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"a flight recorder dump holds no {module_name}.{global_name}")


def read_dump(data: bytes) -> Dump:
    """The content of a dump. Raises pickle.UnpicklingError for what is none."""
    content = _PlainUnpickler(io.BytesIO(data)).load()
    if not isinstance(content, dict) or "entries" not in content:
        raise pickle.UnpicklingError("a flight recorder dump is a dictionary with entries")
    return cast("Dump", content)


def read_dumps(storage: Storage, attempt: str) -> dict[str, dict[int, Dump]]:
    """Dumps of an attempt by backend and rank; one that cannot be read is left out with a warning."""
    found: dict[str, dict[int, Dump]] = {}
    for name in storage.list(f"{FOLDER}/{attempt}"):
        backend, _, rank = Path(name).name.rpartition("-")
        if backend not in BACKENDS or not rank.isdigit():
            continue
        try:
            found.setdefault(backend, {})[int(rank)] = read_dump(storage.read_bytes(name))
        except Exception as error:  # a dump that was cut raises nearly anything
            log.warning("%s/%s cannot be read: %s", storage.uri, name, error)
    return found


@dataclass(frozen=True)
class Missed:
    """A collective that some ranks of a group have started and wait in, and others have not started."""

    backend: str
    group: str
    operation: str
    number: int
    """The how-manieth collective of the group it is, from 1 on."""
    waiting: tuple[int, ...]
    missing: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{_ranks(self.missing)} never started {self.operation} (number {self.number} of {self.backend} group "
            f"{self.group}), in which {_ranks(self.waiting)} wait{'s' if len(self.waiting) == 1 else ''}"
        )


def missed_collectives(backend: str, dumps: Mapping[int, Dump]) -> list[Missed]:
    """What the recorders of an attempt's ranks say of a hang, most ranks waiting first.

    Per process group: the furthest collective that any rank started and nobody finished, and the ranks whose last one is
    an earlier one.
    """
    missed: list[Missed] = []
    last = _last_collectives(dumps)
    for group, entries in last.items():
        furthest = max(_number(entry) for entry in entries.values())
        waiting = {r: e for r, e in entries.items() if _number(e) == furthest and not _finished(e)}
        members = _members(group, dumps) or set(entries)
        missing = sorted(
            r for r in members & set(dumps) if r not in entries or _number(entries[r]) < furthest
        )
        if waiting and missing:
            entry = next(iter(waiting.values()))
            operation = str(entry["profiling_name"]).removeprefix(f"{backend}:")
            missed.append(
                Missed(backend, _name(entry), operation, furthest, tuple(sorted(waiting)), tuple(missing))
            )
    return sorted(missed, key=lambda one: -len(one.waiting))


def _last_collectives(dumps: Mapping[int, Dump]) -> dict[str, dict[int, Mapping[str, Any]]]:
    """By group and rank, the last collective that was started."""
    last: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, dump in dumps.items():
        for entry in dump["entries"]:
            if entry.get("is_p2p"):
                continue
            of_group = last.setdefault(str(entry["process_group"][0]), {})
            if rank not in of_group or _number(of_group[rank]) <= _number(entry):
                of_group[rank] = entry
    return last


def _members(group: str, dumps: Mapping[int, Dump]) -> set[int]:
    """The ranks of a group, as NCCL's dumps say; gloo's do not."""
    for dump in dumps.values():
        ranks = dump.get("pg_config", {}).get(group, {}).get("ranks")
        if ranks:
            return set(ast.literal_eval(ranks)) if isinstance(ranks, str) else set(ranks)
    return set()


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry["collective_seq_id"])


def _finished(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _name(entry: Mapping[str, Any]) -> str:
    name, description = (str(part) for part in entry["process_group"])
    return name if description in ("", "undefined") else f"{name} ({description})"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
