"""Checkpoints that survive: written while training goes on, published by a marker that comes last, never overwritten.

A checkpoint is a folder `checkpoints/step-NNNNNNNN.<attempt>/` with DCP's files, `state.json` and `COMPLETE`. The
marker lists every file with its size: a checkpoint without marker, or with a file missing or cut, is never resumed from.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from training.optimizer import ShardedAdamW
from training.parallel import World
from training.storage import Storage

FOLDER = "checkpoints"
MARKER = "COMPLETE"
STATE = "state.json"
LATEST = f"{FOLDER}/latest"
BEST = f"{FOLDER}/best"
_NAME = re.compile(r"step-(\d{8})\.(.+)")

# How long rank 0 waits for the other ranks' files before it gives a checkpoint up (2026-12: 2.3 GB per rank to S3 takes
# well under a minute; a rank that needs half an hour is gone).
PUBLISH_TIMEOUT_SECONDS = 1800.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Published:
    """A complete checkpoint."""

    name: str
    step: int
    bytes: int
    seconds: float
    blocked_seconds: float


@dataclass
class _InFlight:
    name: str
    thread: threading.Thread
    errors: list[BaseException]


def checkpoint_name(step: int, attempt: str) -> str:
    return f"step-{step:08d}.{attempt}"


def training_state(optimizer: ShardedAdamW, world: World) -> dict[str, Any]:
    """The tensors of a checkpoint: trained weights (masters), moments, and this rank's random generators.

    DCP loads into the same tensors. Frozen weights are not in it: they are made or read again, and the loop compares
    their fingerprint.
    """
    generators = {f"cpu.{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        generators[f"cuda.{world.rank}"] = torch.cuda.get_rng_state()
    return {"model": optimizer.parameters, "optimizer": optimizer.state_dict(), "rng": generators}


class _KeptCopies(AsyncStager):
    """Copies of a state in host memory that is made once, and pinned where a GPU copies into it.

    Memory that is new for each checkpoint is made page by page while the steps wait: 24 s for 17 GiB (H200, 2026-12-01).
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[str, ...], Tensor] = {}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state with its tensors on the host, valid until the next call."""
        staged = self._copied(state_dict, ())
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return staged

    def _copied(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            return {name: self._copied(inner, (*path, name)) for name, inner in items}
        sharded = isinstance(value, DTensor)
        source = cast("Tensor", value._local_tensor if sharded else value).detach()  # pyright: ignore[reportPrivateUsage]
        if path not in self._copies:
            self._copies[path] = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
        copy = self._copies[path]
        copy.copy_(source, non_blocking=True)
        return DTensor(copy, value._spec, requires_grad=False) if sharded else copy  # pyright: ignore[reportPrivateUsage]


class Checkpointer:
    """Writes checkpoints of one attempt in the background and keeps the newest ones (and the best)."""

    def __init__(
        self,
        storage: Storage,
        world: World,
        *,
        attempt: str,
        keep: int,
        asynchronous: bool,
        work_dir: Path,
        on_published: Callable[[Published], None] = lambda _: None,
    ) -> None:
        self.storage = storage
        self.world = world
        self.attempt = attempt
        self.keep = keep
        self.asynchronous = asynchronous
        self.work_dir = work_dir
        self.on_published = on_published
        self._in_flight: _InFlight | None = None
        self._copies = _KeptCopies()

    def allocate(self, state: dict[str, Any]) -> None:
        """Makes the host memory that checkpoints of `state` are copied to, so that the first one need not wait for it."""
        self._copies.stage(state)

    def save(
        self, state: dict[str, Any], step: int, progress: dict[str, Any], eval_loss: float | None = None
    ) -> str:
        """Starts (or, where not asynchronous, makes) a checkpoint. Every rank calls it at the same step.

        progress: JSON-able state of the loop (step, data cursor, ...). eval_loss: the held-out loss of these weights,
        where it is known. Waits first for the previous one, whose failure is raised here. Returns the checkpoint's name.
        """
        started = time.monotonic()
        self.wait()
        name = checkpoint_name(step, self.attempt)
        local = self._local_folder(name)
        if self.world.local_rank == 0 or self.storage.local_path is not None:
            local.mkdir(parents=True, exist_ok=True)
        dist.barrier(group=self.world.control)
        writer = FileSystemWriter(local, single_file_per_rank=True, sync_files=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future = dcp.async_save(
                state,
                storage_writer=writer,
                process_group=self.world.checkpoint,
                async_checkpointer_type=AsyncCheckpointerType.THREAD,
                async_stager=self._copies,
            )
        errors: list[BaseException] = []

        def publish() -> None:
            try:
                cast("Any", future).result()
                self._publish(name, local, step, progress, eval_loss, started, blocked)
            except BaseException as error:  # CheckpointException is one
                errors.append(error)

        thread = threading.Thread(name=f"checkpoint {name}", daemon=True, target=publish)
        blocked = time.monotonic() - started
        self._in_flight = _InFlight(name, thread, errors)
        thread.start()
        if not self.asynchronous:
            self.wait()
        return name

    def wait(self) -> None:
        """Waits for the checkpoint in flight. Raises RuntimeError where it failed."""
        if self._in_flight is None:
            return
        self._in_flight.thread.join()
        finished, self._in_flight = self._in_flight, None
        for error in finished.errors:
            raise RuntimeError(f"checkpoint {finished.name} could not be written: {error}") from error

    def _local_folder(self, name: str) -> Path:
        if self.storage.local_path is not None:
            return self.storage.local_path / FOLDER / name
        return self.work_dir / FOLDER / name

    def _publish(
        self,
        name: str,
        local: Path,
        step: int,
        progress: dict[str, Any],
        eval_loss: float | None,
        started: float,
        blocked: float,
    ) -> None:
        folder = f"{FOLDER}/{name}"
        mine = sorted(path for path in local.iterdir() if path.name.startswith(f"__{self.world.rank}_"))
        if self.world.rank == 0:
            (local / STATE).write_text(json.dumps(progress))
            mine += [local / ".metadata", local / STATE]
        for path in mine:
            self.storage.upload(path, f"{folder}/{path.name}")
        sizes = {path.name: path.stat().st_size for path in mine}
        self.storage.write_text(f"{folder}/written.{self.world.rank}.json", json.dumps(sizes))
        if self.world.rank == 0:
            files = self._await_ranks(folder)
            seconds = time.monotonic() - started
            marker = {
                "step": step,
                "attempt": self.attempt,
                "world_size": self.world.size,
                "eval_loss": eval_loss if eval_loss is not None and math.isfinite(eval_loss) else None,
                "files": files,
            }
            self.storage.write_text(f"{folder}/{MARKER}", json.dumps(marker))
            self.storage.write_text(LATEST, name)
            prune(self.storage, self.keep, self.attempt)
            self.on_published(Published(name, step, sum(files.values()), seconds, blocked))
        if self.storage.local_path is None:
            for path in mine:
                path.unlink(missing_ok=True)

    def _await_ranks(self, folder: str) -> dict[str, int]:
        deadline = time.monotonic() + PUBLISH_TIMEOUT_SECONDS
        waiting = set(range(self.world.size))
        files: dict[str, int] = {}
        while True:
            for rank in sorted(waiting):
                name = f"{folder}/written.{rank}.json"
                if self.storage.exists(name):
                    files |= json.loads(self.storage.read_text(name))
                    waiting.discard(rank)
            if not waiting:
                return files
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"ranks {sorted(waiting)} did not write their files in {PUBLISH_TIMEOUT_SECONDS:.0f} s"
                )
            time.sleep(0.05 if self.storage.local_path is not None else 0.5)


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A complete checkpoint, in the order in which they were written."""

    step: int
    attempt: str
    name: str
    eval_loss: float | None = field(compare=False)
    """Held-out loss of its weights; None where it was written at a step without an evaluation."""


def complete_checkpoints(storage: Storage, warn: Callable[[str], None] = log.warning) -> list[str]:
    """Names of the checkpoints that can be resumed from, oldest first. What cannot is named in a warning."""
    return [checkpoint.name for checkpoint in _complete(storage, warn)]


def best_checkpoint(storage: Storage) -> Checkpoint | None:
    """The complete checkpoint with the lowest held-out loss (the first of equal ones); None where none was evaluated.

    Read off the markers, so that it is right after a resume, a rollback or a damaged checkpoint too.
    """
    return _best(_complete(storage, lambda _: None))


def _best(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    evaluated = [(one.eval_loss, one) for one in checkpoints if one.eval_loss is not None]
    return min(evaluated)[1] if evaluated else None


def _complete(storage: Storage, warn: Callable[[str], None]) -> list[Checkpoint]:
    by_name: dict[str, list[str]] = {}
    for file in storage.list(FOLDER):
        parts = file.split("/")
        if len(parts) == 3 and _NAME.fullmatch(parts[1]):
            by_name.setdefault(parts[1], []).append(parts[2])
    good: list[Checkpoint] = []
    for name, files in by_name.items():
        problem = _problem(storage, name, files)
        if problem is None:
            written = json.loads(storage.read_text(f"{FOLDER}/{name}/{MARKER}"))
            good.append(
                Checkpoint(int(written["step"]), str(written["attempt"]), name, written.get("eval_loss"))
            )
        else:
            warn(f"checkpoint {storage.uri}/{FOLDER}/{name} is skipped: {problem}")
    return sorted(good)


def _problem(storage: Storage, name: str, files: list[str]) -> str | None:
    if MARKER not in files:
        return f"it has no {MARKER} marker: the run ended while it was being written"
    try:
        marker = json.loads(storage.read_text(f"{FOLDER}/{name}/{MARKER}"))
        expected = cast("dict[str, int]", marker["files"])
    except (ValueError, KeyError) as error:
        return f"its {MARKER} marker cannot be read ({error})"
    for file, size in expected.items():
        if file not in files:
            return f"{file} is missing"
        found = storage.size(f"{FOLDER}/{name}/{file}")
        if found != size:
            return f"{file} has {found} bytes instead of {size}: it is truncated"
    return None


def restore(
    storage: Storage, name: str, state: dict[str, Any], world: World, work_dir: Path
) -> dict[str, Any]:
    """Loads a checkpoint into `state` (see training_state), whatever the number of ranks that wrote it.

    Random generators are restored only where the number of ranks is the same. Returns the saved progress.
    """
    marker = json.loads(storage.read_text(f"{FOLDER}/{name}/{MARKER}"))
    folder = _local_copy(storage, name, marker["files"], world, work_dir)
    same_world = marker["world_size"] == world.size
    template = state if same_world else {key: value for key, value in state.items() if key != "rng"}
    dcp.load(template, storage_reader=FileSystemReader(folder), process_group=world.checkpoint)
    if same_world:
        torch.set_rng_state(state["rng"][f"cpu.{world.rank}"])
        if world.device.type == "cuda":
            torch.cuda.set_rng_state(state["rng"][f"cuda.{world.rank}"].cpu())
    progress = json.loads((folder / STATE).read_text())
    _drop_copy(storage, folder, world)
    return cast("dict[str, Any]", progress)


def saved_progress(storage: Storage, name: str) -> dict[str, Any]:
    """What the loop saved beside the tensors of a checkpoint."""
    return cast("dict[str, Any]", json.loads(storage.read_text(f"{FOLDER}/{name}/{STATE}")))


def restore_weights(
    storage: Storage, name: str, weights: Mapping[str, Tensor], world: World, work_dir: Path
) -> None:
    """Loads the weights of a checkpoint, and nothing else, into `weights` (see training_state). Every rank calls it."""
    marker = json.loads(storage.read_text(f"{FOLDER}/{name}/{MARKER}"))
    folder = _local_copy(storage, name, marker["files"], world, work_dir)
    reader = FileSystemReader(folder)
    dcp.load({"model": dict(weights)}, storage_reader=reader, process_group=world.checkpoint)
    _drop_copy(storage, folder, world)


def _local_copy(storage: Storage, name: str, files: dict[str, int], world: World, work_dir: Path) -> Path:
    """The folder to read from. A remote checkpoint is fetched once per node, its files shared among the node's ranks."""
    if storage.local_path is not None:
        return storage.local_path / FOLDER / name
    folder = work_dir / FOLDER / f"restore-{name}"
    for index, file in enumerate(sorted(files)):
        if index % world.local_size == world.local_rank:
            storage.download(f"{FOLDER}/{name}/{file}", folder / file)
    dist.barrier(group=world.control)
    return folder


def _drop_copy(storage: Storage, folder: Path, world: World) -> None:
    dist.barrier(group=world.control)
    if storage.local_path is None and world.local_rank == 0:
        shutil.rmtree(folder)


def prune(storage: Storage, keep: int, attempt: str) -> None:
    """Removes complete checkpoints beyond the newest `keep` and the best, and what earlier attempts left half-written.

    The best is named in `checkpoints/best` before anything goes.
    """
    names = sorted({file.split("/")[1] for file in storage.list(FOLDER) if file.count("/") == 2})
    checkpoints = _complete(storage, lambda _: None)
    complete = [checkpoint.name for checkpoint in checkpoints]
    kept = set(complete[-keep:])
    best = _best(checkpoints)
    if best is not None:
        storage.write_text(BEST, best.name)
        kept.add(best.name)
    for name in names:
        stale = name in complete and name not in kept
        abandoned = name not in complete and not name.endswith(f".{attempt}")
        if stale or abandoned:
            # The marker goes first: a checkpoint that is half removed must not look complete.
            storage.delete(f"{FOLDER}/{name}/{MARKER}")
            storage.delete(f"{FOLDER}/{name}")
