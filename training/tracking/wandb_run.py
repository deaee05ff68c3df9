"""Weights & Biases: one run for all attempts of a job."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.optional import OptionalPackage
from training.storage import Storage
from training.tracking.config import WandbSpec
from training.tracking.feed import OpenedRun, Record, Tracker

PACKAGE = OptionalPackage(
    key="tracking.wandb",
    module="wandb",
    requirement="wandb==0.31.0",  # tested 2026-12
    distributions=("wandb",),
)
FOLDER = "wandb"
INIT_SECONDS = 60


class WandbTracker(Tracker):
    """The key comes from the environment (WANDB_API_KEY).

    storage: the run folder, where offline files go. work_dir: scratch space of this node.
    """

    name = "wandb"

    def __init__(self, spec: WandbSpec, run_name: str, storage: Storage, work_dir: Path) -> None:
        self.spec = spec
        self.run_name = run_name
        self.storage = storage
        self.work_dir = work_dir

    def open(self, run_id: str | None, parameters: Mapping[str, Any]) -> OpenedRun:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        folder = self.storage.local_path or self.work_dir
        folder.mkdir(parents=True, exist_ok=True)
        with _unhooked():
            self._run = wandb.init(
                project=self.spec.project,
                entity=self.spec.entity,
                name=self.run_name,
                id=run_id or uuid.uuid4().hex[:12],
                resume="allow",
                config=None if run_id else dict(parameters),
                dir=str(folder),
                settings=wandb.Settings(
                    mode=self.spec.mode,
                    init_timeout=INIT_SECONDS,
                    # The log and the code of a job are its own: numbers leave, nothing else.
                    console="off",
                    disable_code=True,
                    disable_git=True,
                    silent=True,
                ),
            )
        # A resumed run repeats the steps after its checkpoint, and W&B's own counter never goes back.
        self._run.define_metric("*", step_metric="step")
        return OpenedRun(self._run.id, self._run.url if self.spec.mode == "online" else None)

    def log(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log({name: value for name, value in record.items() if name != "time"})

    def close(self, succeeded: bool) -> None:
        import wandb

        self._run.finish(exit_code=0 if succeeded else 1)
        wandb.teardown()  # finish() may return before W&B's own process has written the end of an offline file
        if self.spec.mode == "offline" and self.storage.local_path is None:
            self._upload(Path(self._run.settings.sync_dir))

    def _upload(self, folder: Path) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                self.storage.upload(path, f"{FOLDER}/{folder.name}/{path.relative_to(folder).as_posix()}")


@contextlib.contextmanager
def _unhooked() -> Generator[None]:
    """W&B replaces sys.exit and sys.excepthook to learn how a process ends. Here close() says so, and rank 0 has to stay
    like the other ranks: the built-in documentation data reads what it finds in sys."""
    before = sys.exit, sys.excepthook
    try:
        yield
    finally:
        sys.exit, sys.excepthook = before
