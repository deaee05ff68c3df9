"""Runs a job on a Ray cluster of two nodes of one CPU each, with a fault that the scenario names; `three-nodes` gets its
third once one has been left out.

python -m tests.unit.training.bad_cluster SCENARIO FOLDER: reads FOLDER/job.yaml, writes FOLDER/answer.json.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

NUM_NODES = 2


def worker(config: dict[str, Any]) -> None:
    """The product's worker, with a fault in the fourth step: by a node that fails, or a rank that sleeps."""
    import ray
    import ray.train

    from training import loop
    from training.ray_entry import worker as real_worker

    folder = Path(config["folder"])
    node = ray.get_runtime_context().get_node_id()
    rank = ray.train.get_context().get_world_rank()
    with (folder / "last-nodes").open("a" if rank else "w") as file:
        file.write(node + "\n")
    marker = folder / "bad-node"
    if rank == 1 and not marker.exists():
        marker.write_text(node)
    original = loop._Trainer._forward_backward  # pyright: ignore[reportPrivateUsage]

    def forward_backward(self: Any, *arguments: Any) -> Any:
        if self.progress.step == 3 and config["scenario"] == "sleeper" and rank == 1:
            _oversleep()
        if self.progress.step == 3 and config["scenario"] != "sleeper" and node == marker.read_text():
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return original(self, *arguments)

    loop._Trainer._forward_backward = forward_backward  # pyright: ignore[reportPrivateUsage]
    real_worker(config)


def _oversleep() -> None:
    time.sleep(3600)


def _add_node(cluster: Any, **settings: Any) -> None:
    """A busy machine may need a second try: Ray gives the processes of a node 30 s to start."""
    try:
        cluster.add_node(**settings)
    except Exception:
        cluster.add_node(**settings)


def main(scenario: str, folder: Path) -> None:
    for name, value in (
        ("RAY_AUTH_MODE", "disabled"),
        ("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0"),
        ("RAY_TRAIN_ENABLE_PRINT_PATCH", "0"),
        ("RAY_worker_niceness", "0"),
        ("RAY_worker_register_timeout_seconds", "300"),
    ):
        os.environ.setdefault(name, value)
    import ray
    from ray.cluster_utils import Cluster
    from ray.train.torch import TorchTrainer

    from training import ray_entry
    from training.job import load_job

    def trainer(_: Any, *, train_loop_config: dict[str, Any], **arguments: Any) -> Any:
        config = {**train_loop_config, "scenario": scenario, "folder": str(folder)}
        return TorchTrainer(worker, train_loop_config=config, **arguments)

    cluster = Cluster()
    _add_node(cluster, num_cpus=0, include_dashboard=False)
    for _ in range(NUM_NODES):
        _add_node(cluster, num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=True, logging_level=logging.WARNING)
    job = load_job(folder / "job.yaml")
    ray.train.torch.TorchTrainer = trainer  # pyright: ignore[reportAttributeAccessIssue]
    assert job.run.path is not None
    events: list[dict[str, Any]] = []
    path = ray_entry.events_path(job.name)

    def on_event(event: dict[str, Any]) -> None:
        events.append(event)
        # Were it there before, a second attempt might be spared the node that fails.
        if scenario == "three-nodes" and event["event"] == "excluded":
            _add_node(cluster, num_cpus=1)

    try:
        summary = ray_entry.run(
            job, job.run.path, num_workers=job.parallel.num_workers or 2, on_event=on_event
        )
    finally:
        ray.shutdown()
        cluster.shutdown()
    told = [json.loads(line) for line in path.read_text().splitlines()]
    (folder / "answer.json").write_text(json.dumps({"summary": summary, "events": [*events, *told]}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
