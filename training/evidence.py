"""What each attempt leaves for the transport gate: NCCL logs, ranks.json, counters.json in `nccl/<attempt>/`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed as dist

from training.parallel import World
from training.storage import Storage
from training.transport.collect import collect_logs, prepare_rank_env, rank_record, read_counters, write_ranks
from training.transport.records import Backend, NodeCounters

FOLDER = "nccl"


class Evidence:
    """The evidence of one attempt, from before NCCL starts until after the last collective, whether it succeeds or not."""

    def __init__(self, storage: Storage, work_dir: Path, world: World, attempt: str) -> None:
        self.storage = storage
        self.world = world
        self.remote = f"{FOLDER}/{attempt}"
        self.local = work_dir / FOLDER / attempt
        self.local.mkdir(parents=True, exist_ok=True)
        backend: Backend = "nccl" if world.device.type == "cuda" else "gloo"
        self.record = rank_record(world.rank, world.local_rank, backend)
        # NCCL reads its environment at its first communicator, which no collective has made yet.
        os.environ.update(prepare_rank_env(work_dir / FOLDER, attempt))
        self.before: NodeCounters | None = read_counters() if world.local_rank == 0 else None

    def publish_ranks(self) -> None:
        """Writes ranks.json: the job's own word on which rank runs where."""
        everyone: list[object] = [None] * self.world.size
        dist.all_gather_object(everyone, self.record, group=self.world.control)
        if self.world.rank == 0:
            path = write_ranks(self.local, everyone)  # pyright: ignore[reportArgumentType]
            self.storage.upload(path, f"{self.remote}/{path.name}")

    def collect(self) -> None:
        """Uploads this rank's logs and, once per node, the counters. No collective: it also runs after a failure."""
        gathered = self.local / "upload"
        gathered.mkdir(exist_ok=True)
        for path in collect_logs(self.local, gathered, self.record):
            self.storage.upload(path, f"{self.remote}/{path.name}")
        if self.before is not None:
            after = read_counters()
            pair = {"before": self.before.model_dump(mode="json"), "after": after.model_dump(mode="json")}
            self.storage.write_text(f"{self.remote}/counters.{self.record.host}.json", json.dumps(pair))


def merge_counters(storage: Storage, attempt: str, expected_bytes: dict[str, int], work_dir: Path) -> None:
    """Makes counters.json out of the nodes' own files. Called by the driver when an attempt has ended."""
    from training.transport.collect import write_counters

    before: list[NodeCounters] = []
    after: list[NodeCounters] = []
    for name in storage.list(f"{FOLDER}/{attempt}"):
        if Path(name).name.startswith("counters.") and Path(name).name != "counters.json":
            pair = json.loads(storage.read_text(name))
            before.append(NodeCounters.model_validate(pair["before"]))
            after.append(NodeCounters.model_validate(pair["after"]))
    work_dir.mkdir(parents=True, exist_ok=True)
    path = write_counters(work_dir, before, after, expected_bytes)
    storage.upload(path, f"{FOLDER}/{attempt}/{path.name}")
