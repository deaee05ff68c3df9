"""Runs the training function under Ray Train: in the cluster as the entry point of a Ray job, and on a laptop.

The driver starts the worker group, and at the end, however it came, leaves summary.json, transport.json and
report.html in the run folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from training.errors import FinetuneError, JobStopped, UsageError
from training.failures import FOLDER as FAILURES
from training.failures import cause_among, last_failures, record_failure
from training.job import JobSpec, job_from_yaml
from training.storage import Storage, open_storage

EVENT_PREFIX = "@finetune "
# While a lost node is being replaced, the worker group cannot start: Ray's 60 s would end such a start (2026-12).
GROUP_START_TIMEOUT_SECONDS = "600"

# A node that does not answer by then is passed over.
COLLECT_SECONDS = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """What every worker gets besides the job."""

    run_uri: str
    launch_id: str
    """Names this start of the driver: a failure that cannot be cured by a restart is recorded under it."""
    target: dict[str, Any] | None = None


def emit(event: dict[str, Any]) -> None:
    """One line that the follower of the driver's log understands. Ray forwards a worker's output to the driver."""
    print(EVENT_PREFIX + json.dumps(event), flush=True)  # noqa: T201


# The worker


def worker(config: dict[str, Any]) -> None:
    """The function each rank runs. Trains, and leaves its evidence and its failure behind."""
    from training.evidence import Evidence
    from training.flight import Recorder
    from training.loop import Hooks, new_attempt, train
    from training.parallel import hardware_of, join_world
    from training.tracking.prometheus import PrometheusGauges

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    job = job_from_yaml(config["job"])
    launch = Launch(**config["launch"])
    storage = open_storage(launch.run_uri)
    if storage.exists(_final_failure(launch)):
        return  # an earlier attempt of this launch failed in a way that trying again cannot cure
    world = join_world()
    work_dir = scratch_folder(job.name)
    attempt = new_attempt(storage, world)
    evidence = Evidence(storage, work_dir, world, attempt)
    try:
        evidence.publish_ranks()
        gauges = PrometheusGauges(job.name, world.rank)
        hooks = Hooks(
            event=_events_to(events_path(job.name), gauges.event),
            preempted=_preempted,
            metrics=gauges.record,
        )
        train(job, storage, work_dir, hooks, attempt, world, hardware_of(world, launch.target))
    except JobStopped as stopped:
        if world.rank == 0:
            storage.write_text(
                _final_failure(launch), json.dumps({"status": int(stopped.status), "message": str(stopped)})
            )
    except Exception as error:
        _record_failure(storage, launch, attempt, world.rank, error)
        if not isinstance(error, FinetuneError):
            Recorder(storage, work_dir, attempt, world.rank).dump()
        if isinstance(error, UsageError):
            return  # every rank finds the same mistake; a restart would find it again
        raise
    finally:
        evidence.collect()


def _events_to(path: Path, gauges: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Events go to the log, which a follower far away reads, to a file, which `finetune local` reads, and to the gauges."""

    def event(event: dict[str, Any]) -> None:
        emit(event)
        gauges(event)
        with path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    return event


def _preempted() -> bool:
    import ray.train

    return ray.train.get_preemption_info() is not None


def _record_failure(storage: Storage, launch: Launch, attempt: str, rank: int, error: Exception) -> None:
    failure = record_failure(storage, launch.launch_id, attempt, rank, error)
    text = f"{failure['type']}: {failure['message']}"
    emit({"event": "failure", "rank": rank, "host": failure["host"], "error": text})
    if isinstance(error, UsageError) and rank == 0:
        storage.write_text(
            _final_failure(launch), json.dumps({"status": int(error.status), "message": str(error)})
        )


def _final_failure(launch: Launch) -> str:
    return f"control/final-{launch.launch_id}.json"


def scratch_folder(name: str) -> Path:
    """Scratch space of this node, kept between attempts, so that downloads and tokenized data are found again."""
    folder = Path(os.environ.get("FINETUNE_SCRATCH", tempfile.gettempdir())) / "finetune" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def events_path(name: str) -> Path:
    return scratch_folder(name) / "events.jsonl"


# The driver


def run(
    job: JobSpec,
    run_uri: str,
    *,
    num_workers: int,
    target: dict[str, Any] | None = None,
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Trains a job on the Ray cluster this process is connected to, and returns the summary (also in summary.json).

    target: the stack's outputs as a dictionary, where there is a stack. on_event: gets the driver's own events (a node
    that is left out). Never raises for a job that fails: the summary says so, with `exit_status`.
    """
    from training.outcome import end_of_launch
    from training.summary import attempt_names, conclude

    storage = open_storage(run_uri)
    launch = Launch(run_uri, uuid.uuid4().hex[:12], target)
    if not job.run.resume:
        clear(storage)
        # From here on, a restarted worker group goes on from this launch's own checkpoints.
        job = job.model_copy(update={"run": job.run.model_copy(update={"resume": True})})
    storage.delete("control/stop")
    storage.write_text("job.yaml", job.dump_yaml())
    earlier = attempt_names(storage)
    started = time.time()
    error = _fit(job, launch, num_workers, on_event)
    outcome = end_of_launch(storage, launch.launch_id, earlier, error, _final_failure(launch))
    return conclude(job, storage, outcome, earlier=earlier, started=started, target=target)


# What a run leaves in its folder; anything else there is the user's.
RUN_FOLDERS = (
    "attempts",
    "checkpoints",
    "control",
    "export",
    FAILURES,
    "flight",
    "hangs",
    "nccl",
    "tensorboard",
    "tokenizer",
    "tracking",
    "wandb",
)
RUN_FILES = (
    "evaluation.json",
    "metrics.jsonl",
    "report.html",
    "samples.json",
    "summary.json",
    "transport.json",
)


def clear(storage: Storage) -> None:
    """Removes what an earlier run left in the folder: the job file says `run.resume: false`."""
    for name in (*RUN_FOLDERS, *RUN_FILES):
        storage.delete(name)


def _fit(
    job: JobSpec, launch: Launch, num_workers: int, on_event: Callable[[dict[str, Any]], None]
) -> Exception | None:
    """Runs the job to its end, with a new trainer each time that a node has to be left out from then on."""
    import ray

    from training.nodes import TooFewNodes, read_record, usable_nodes, workers_left

    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", GROUP_START_TIMEOUT_SECONDS)
    # Relative paths of a job file are those of the folder it was started from, not of one that Ray makes for each run.
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    resource = "GPU" if ray.cluster_resources().get("GPU", 0) > 0 and not _cpu_asked(job) else "CPU"
    storage = open_storage(launch.run_uri)
    num_excluded = 0
    while True:
        error = _fit_once(job, launch, num_workers, resource)
        record = read_record(storage, launch.launch_id)
        if error is None or len(record.excluded) == num_excluded:
            break
        for node in record.told()[num_excluded:]:
            on_event({"event": "excluded", **node})
        num_excluded = len(record.excluded)
        cause = cause_among(last_failures(storage, launch.launch_id))
        last = f"{cause['type']}: {cause['message']}" if cause is not None else None
        try:
            num_workers = workers_left(
                record, usable_nodes(resource), num_workers, job.parallel.min_workers, last
            )
        except TooFewNodes as too_few:
            error = too_few
            break
    if error is not None:
        _collect_dumps(job, launch)
    return error


def _fit_once(job: JobSpec, launch: Launch, num_workers: int, resource: str) -> Exception | None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from training.nodes import NodeWatch, read_record, selector

    record = read_record(open_storage(launch.run_uri), launch.launch_id)
    use_gpu = resource == "GPU"
    elastic = job.parallel.min_workers
    limit = job.resilience.exclude_node_after
    watch = [] if limit is None else [NodeWatch(launch.run_uri, launch.launch_id, limit, resource)]
    trainer = TorchTrainer(
        worker,
        train_loop_config={"job": job.dump_yaml(), "launch": launch.__dict__},
        scaling_config=ScalingConfig(
            num_workers=num_workers if elastic is None else (elastic, num_workers),
            use_gpu=use_gpu,
            resources_per_worker=None if use_gpu else {"CPU": 1},
            placement_strategy="PACK" if use_gpu else "SPREAD",
            label_selector=selector(record.excluded),
        ),
        # Gloo beside NCCL: checkpoints and host-side agreements go over the CPU.
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo"),
        run_config=RunConfig(
            # A name of its own, or Ray would go on with an earlier run: resuming is the loop's, by its own checkpoints.
            name=f"{job.name}-{launch.launch_id}-{len(record.excluded)}",
            storage_path=str(scratch_folder(job.name) / "ray"),
            failure_config=FailureConfig(max_failures=job.resilience.max_failures - record.failures),
            callbacks=cast("Any", watch),
        ),
    )
    failed: list[Exception] = []

    def fit() -> None:
        try:
            trainer.fit()
        except Exception as error:  # whatever it is, the launch has not succeeded
            failed.append(error)

    # Not in the main thread, where Ray would take Ctrl-C for itself and end the workers without a checkpoint.
    fitting = threading.Thread(target=fit, name="fit", daemon=True)
    fitting.start()
    fitting.join()
    return failed[0] if failed else None


def _cpu_asked(job: JobSpec) -> bool:
    return job.runtime_env.env.get("CUDA_VISIBLE_DEVICES") == ""


def _collect_dumps(job: JobSpec, launch: Launch) -> None:
    """Fetches what processes that are gone have dumped on their nodes. A node that is gone too is passed over."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    collect = ray.remote(num_cpus=0, max_retries=0)(collect_dumps)
    tasks = [
        collect.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(launch.run_uri, job.name)
        for node in ray.nodes()
        if node["Alive"]
    ]
    ray.wait(tasks, num_returns=len(tasks), timeout=COLLECT_SECONDS)


def collect_dumps(run_uri: str, job_name: str) -> None:
    """Runs on each node."""
    from training.flight import upload_left_behind

    upload_left_behind(open_storage(run_uri), scratch_folder(job_name))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.ray_entry", description=__doc__)
    parser.add_argument("--job", required=True, type=Path, help="resolved job file")
    parser.add_argument(
        "--run", required=True, help="run folder: a path all nodes share, or s3://BUCKET/PREFIX"
    )
    parser.add_argument("--num-workers", required=True, type=int)
    parser.add_argument("--target", type=Path, help="stack outputs as JSON")
    options = parser.parse_args(arguments)
    import ray

    ray.init(address="auto", log_to_driver=True, logging_level=logging.WARNING)
    try:
        job = job_from_yaml(options.job.read_text(), str(options.job))
        target = json.loads(options.target.read_text()) if options.target else None
        summary = run(job, options.run, num_workers=options.num_workers, target=target, on_event=emit)
    except FinetuneError as error:
        emit({"event": "end", "status": "failed", "exit_status": int(error.status), "error": str(error)})
        return int(error.status)
    emit({"event": "end", "status": summary["status"], "exit_status": summary["exit_status"]})
    return int(summary["exit_status"])


if __name__ == "__main__":
    sys.exit(main())
