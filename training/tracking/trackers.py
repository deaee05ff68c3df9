"""The trackers that a job asks for, behind one object that the loop feeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from training.errors import UsageError
from training.job import JobSpec
from training.optional import OptionalPackage, missing_packages
from training.storage import Storage
from training.tracking import mlflow_run, wandb_run
from training.tracking.feed import Feed, OpenedRun, Record, Tracker, in_short

FOLDER = "tracking"


def packages_of(job: JobSpec) -> list[OptionalPackage]:
    """The packages that the job's trackers need."""
    wanted = (
        (job.tracking.mlflow, mlflow_run.PACKAGE),
        (job.tracking.wandb, wandb_run.PACKAGE),
    )
    return [package for asked, package in wanted if asked is not None]


class Tracking:
    """Feeds the trackers of a job. Made on rank 0, since a run is one run.

    The id of each tracker's run is kept in tracking/NAME.json of the run folder, so that the next attempt goes on with it.
    """

    def __init__(
        self,
        job: JobSpec,
        storage: Storage,
        work_dir: Path,
        warn: Callable[[str], None],
        event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._storage = storage
        self._parameters = flat(job.model_dump(mode="json", by_alias=True, exclude_none=True))
        self._event = event
        trackers: list[Tracker] = []
        if job.tracking.mlflow is not None:
            trackers.append(mlflow_run.MlflowTracker(job.tracking.mlflow, job.name))
        if job.tracking.wandb is not None:
            trackers.append(wandb_run.WandbTracker(job.tracking.wandb, job.name, storage, work_dir))
        self._feeds: list[Feed] = []
        if problems := missing_packages(packages_of(job)):
            raise UsageError("\n".join(problems))
        try:
            for tracker in trackers:
                self._start(tracker, warn)
        except UsageError:
            self.close(succeeded=False)
            raise

    def _start(self, tracker: Tracker, warn: Callable[[str], None]) -> None:
        """Opens the tracker's run. For a new run a failure is the user's to mend, so it is an error before training; a
        run that goes on is not held up by it."""
        known = self._run_id(tracker)
        opened = False
        try:
            self._open(tracker)
            opened = True
        except Exception as error:  # a tracker's client raises its own, its transport's and plain OSErrors
            if known is None:
                raise UsageError(
                    f"tracking.{tracker.name} cannot start a run: {in_short(error)}. Check the address and that this "
                    "machine reaches it; credentials come from the environment, on a stack from a Kubernetes Secret "
                    "(setting jobSecrets; docs/training.md, Tracking)"
                ) from error
            warn(
                f"tracking.{tracker.name} cannot go on with run {known} ({in_short(error)}); it is tried again"
            )
        self._feeds.append(Feed(tracker, lambda: self._open(tracker), opened=opened, warn=warn))

    def _open(self, tracker: Tracker) -> None:
        run = tracker.open(self._run_id(tracker), self._parameters)
        self._storage.write_text(_file(tracker), json.dumps(run.__dict__))
        self._event({"event": "tracking", "tracker": tracker.name, **run.__dict__})

    def _run_id(self, tracker: Tracker) -> str | None:
        if not self._storage.exists(_file(tracker)):
            return None
        return str(json.loads(self._storage.read_text(_file(tracker)))["run_id"])

    def record(self, line: Record) -> None:
        """A line of metrics.jsonl; its numbers go to every tracker."""
        numbers = {
            name: value
            for name, value in flat(line).items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for feed in self._feeds:
            feed.put(numbers)

    def close(self, *, succeeded: bool) -> None:
        for feed in self._feeds:
            feed.close(succeeded=succeeded)


def tracked_runs(storage: Storage) -> dict[str, OpenedRun]:
    """The trackers' runs of a run folder, by tracker."""
    runs: dict[str, OpenedRun] = {}
    for name in storage.list(FOLDER):
        runs[Path(name).stem] = OpenedRun(**json.loads(storage.read_text(name)))
    return runs


def _file(tracker: Tracker) -> str:
    return f"{FOLDER}/{tracker.name}.json"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by '/': {"seconds": {"data": 1}} -> {"seconds/data": 1}."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(cast("Mapping[str, Any]", value), f"{prefix}{key}/")
        else:
            result[f"{prefix}{key}"] = value
    return result
