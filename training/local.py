"""`finetune local`: the same job on this machine, with a local Ray."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Generator
from importlib import metadata
from pathlib import Path
from typing import Any

from training.errors import FinetuneError, JobStopped, UsageError
from training.job import JobSpec
from training.storage import open_storage

CPU_WORKERS = 2


class LocalRayFailed(FinetuneError):
    """Ray does not start on this machine."""


def run_local(job: JobSpec, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Starts Ray here, trains with one worker per GPU (two on a machine without), and returns the summary.

    on_event: gets the loop's events (attempt, progress, evaluation, checkpoint, failure) as they come.
    The first Ctrl-C asks for a checkpoint and a clean end; the second one ends at once.
    """
    run_uri = job.run.path or f"runs/{job.name}"
    storage = open_storage(run_uri)
    if storage.local_path is not None:
        run_uri = str(storage.local_path.resolve())
        _check_writable(storage.local_path)
    _check_packages(job)
    with _ray(job) as ray_module, _stop_on_interrupt(run_uri, on_event), _events(job, on_event):
        from training.ray_entry import run

        return run(job, run_uri, num_workers=_num_workers(job, ray_module), on_event=on_event)


def report_path(summary: dict[str, Any]) -> str:
    return f"{summary['run']}/report.html"


def _check_packages(job: JobSpec) -> None:
    """A local run uses this environment as it is: what the job adds to the image must be installed here already."""
    from packaging.requirements import Requirement

    from training import harness
    from training.optional import missing_packages
    from training.tracking.trackers import packages_of

    if problems := missing_packages(
        [*packages_of(job), *harness.packages_of(job)], promised=job.runtime_env.pip
    ):
        raise UsageError("\n".join(problems))
    missing: list[str] = []
    for text in job.runtime_env.pip:
        requirement = Requirement(text)
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(f"{text} (not installed)")
            continue
        if not requirement.specifier.contains(found):
            missing.append(f"{text} (found {found})")
    if missing:
        raise UsageError(
            f"runtime_env.pip: {', '.join(missing)}. On a stack it is installed for the job; here, install it into this "
            f"environment: uv pip install {' '.join(job.runtime_env.pip)}"
        )


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"run.path {folder}: cannot be written to ({error.strerror}); set run.path to a folder that can"
        ) from None


@contextlib.contextmanager
def _ray(job: JobSpec) -> Generator[Any]:
    # A token file of another cluster must not decide whether this one wants tokens.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Started by `uv run`, Ray would pack this folder and start every worker by `uv run` as well, in a copy of it.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Ray gives its workers the lowest priority but a few: on a laptop in use the job would starve.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Workers load torch and the model's code while they start: on two busy cores Ray's 60 s are not enough (2026-12).
    os.environ.setdefault("RAY_worker_register_timeout_seconds", "300")
    import ray

    try:
        _start_ray(ray, job)
    except KeyboardInterrupt:
        ray.shutdown()
        raise JobStopped("stopped while Ray was starting: nothing has run") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _start_ray(ray_module: Any, job: JobSpec) -> None:
    """Starts Ray; a busy machine may need a second try, since Ray gives its own processes 30 s, not to be changed."""
    runtime_env = {"env_vars": dict(job.runtime_env.env)}
    for attempt in (1, 2):
        try:
            ray_module.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, _asked_workers(job) + 1),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env=runtime_env,
            )
            return
        except Exception as error:  # Ray raises plain Exception and RuntimeError for a start that fails
            ray_module.shutdown()
            if attempt == 2:
                raise LocalRayFailed(
                    f"a local Ray could not be started ({str(error).splitlines()[0]}). It needs a few seconds of both "
                    "cores and 2 GiB of memory: end what else is running and try again"
                ) from error


def _asked_workers(job: JobSpec) -> int:
    return job.parallel.num_workers or CPU_WORKERS


def _num_workers(job: JobSpec, ray_module: Any) -> int:
    gpus = int(ray_module.cluster_resources().get("GPU", 0))
    if not gpus:
        return _asked_workers(job)
    wanted = job.parallel.num_workers or gpus
    if wanted > gpus:
        raise UsageError(
            f"parallel.num_workers {wanted}: this machine has {gpus} GPUs; lower it, or submit to a stack"
        )
    return wanted


@contextlib.contextmanager
def _stop_on_interrupt(run_uri: str, on_event: Callable[[dict[str, Any]], None]) -> Generator[None]:
    from training.control import STOP_FILE

    def ask(_signal: int, _frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        open_storage(run_uri).write_text(STOP_FILE, "")
        on_event({"event": "stopping"})

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _events(job: JobSpec, on_event: Callable[[dict[str, Any]], None]) -> Generator[None]:
    """Follows the file that rank 0 writes its events to."""
    from training.ray_entry import events_path

    path = events_path(job.name)
    path.unlink(missing_ok=True)
    follower = _Follower(path, on_event)
    follower.start()
    try:
        yield
    finally:
        follower.finish()


class _Follower(threading.Thread):
    def __init__(self, path: Path, on_event: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(name="events", daemon=True)
        self.path = path
        self.on_event = on_event
        self._done = threading.Event()
        self._offset = 0

    def run(self) -> None:
        while not self._done.wait(0.2):
            self._read()
        self._read()

    def finish(self) -> None:
        self._done.set()
        self.join()

    def _read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open() as file:
            file.seek(self._offset)
            while (line := file.readline()).endswith("\n"):
                self._offset = file.tell()
                self.on_event(json.loads(line))
