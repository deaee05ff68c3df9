"""Measures the network of a cluster with every rank of it; runs inside the cluster, started by `finetune probe`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from training.ray_entry import GROUP_START_TIMEOUT_SECONDS, emit


def worker(config: dict[str, Any]) -> None:
    from training.parallel import join_world
    from training.transport.probe import probe

    world = join_world()
    result = probe(
        config["sizes"],
        network_gbps=config["network_gbps"],
        instance_type=config["instance_type"],
        node=f"node-{world.node_rank}",
    )
    if world.rank == 0:
        emit({"event": "probe", "result": result.model_dump(mode="json")})


def main(arguments: list[str] | None = None) -> int:
    from training.transport.probe import DEFAULT_SIZES

    parser = argparse.ArgumentParser(prog="python -m training.probe_entry", description=__doc__)
    parser.add_argument("--num-workers", required=True, type=int)
    parser.add_argument("--network-gbps", type=float, help="line rate of a node, Gbit/s")
    parser.add_argument("--instance-type")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(DEFAULT_SIZES), help="payloads in bytes")
    options = parser.parse_args(arguments)
    import os

    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", GROUP_START_TIMEOUT_SECONDS)
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address="auto")
    use_gpu = ray.cluster_resources().get("GPU", 0) > 0
    TorchTrainer(
        worker,
        train_loop_config={
            "sizes": options.sizes,
            "network_gbps": options.network_gbps,
            "instance_type": options.instance_type,
        },
        scaling_config=ScalingConfig(
            num_workers=options.num_workers,
            use_gpu=use_gpu,
            placement_strategy="PACK" if use_gpu else "SPREAD",
        ),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo"),
        run_config=RunConfig(storage_path="/tmp/finetune/probe"),  # noqa: S108 - nothing is stored there
    ).fit()
    emit({"event": "end", "status": "succeeded", "exit_status": 0})
    return 0


if __name__ == "__main__":
    sys.exit(main())
