"""Several GPUs of one host: weak scaling, slow links, checkpoints that change the number of ranks, equality.

    OUT=FOLDER python -m bench.gpu.scaling [STAGE ...] [--sizes 8 4 2 1] [--minutes 9] [--tiny]
    python -m bench.gpu.scaling --collect FOLDER ...

The first form measures, started once on the machine: it starts the process groups itself, one after another, and
without CUDA runs as --tiny over gloo, in which case the times mean nothing. FOLDER gets results.jsonl (a line for all
that was measured, as it comes), the NCCL logs (nccl-logs.tar.gz), and gpu-scaling.json, .md and .svg. The second form
joins the results of several calls in bench/results.

Stages (default: all):
    scaling     steps of Qwen2.5-1.5B at 8 x 2048 tokens per GPU, full and hybrid sharding, communication beside compute
    checkpoint  saved on the most GPUs, resumed on each number of them; what saving costs, how long loading takes
    equality    packing, hybrid sharding, an adapter and float8 on two GPUs against one
    sockets     `scaling` once more without the direct links between GPUs, against the communication model
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import torch

from bench.gpu.collect import RESULTS
from bench.gpu.ours import OUT, emit, tiny_tokenizer
from bench.gpu.scaling_rank import STAGES, Link, Plan, logs_of
from bench.gpu.scaling_report import write_report
from training.evidence import FOLDER as LOGS
from training.transport.attempt import AttemptEvidence
from training.transport.log_reader import read_logs
from training.transport.nccl_lines import SOCKET_NETWORKS
from training.transport.records import RANKS_FILE, load_ranks
from training.transport.verdict import judge

ALL_STAGES = (*STAGES, "sockets")
SIZES = (8, 4, 2, 1)
# NVLink multicast stays off: a machine that has but a part of its host's GPUs must not use it.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
# What a launch may run over its time box before it is ended: the step or checkpoint under way.
GRACE_SECONDS = 25.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.scaling", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=f"of {', '.join(ALL_STAGES)}; default: all"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", help="world sizes; default: 8 4 2 1, as many as exist"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time box of the whole call")
    parser.add_argument("--tiny", action="store_true", help="a shape that a CPU trains in moments")
    parser.add_argument("--collect", type=Path, nargs="+", metavar="FOLDER", help="results of earlier calls")
    options = parser.parse_args(arguments)
    if options.collect:
        print(write_report(options.collect, RESULTS))
        return 0
    unknown = [stage for stage in options.stages if stage not in ALL_STAGES]
    if unknown:
        parser.error(f"unknown stage {', '.join(unknown)}; allowed: {', '.join(ALL_STAGES)}")
    gpus = torch.cuda.device_count()
    most = gpus or 2
    sizes = sorted(set(options.sizes or [size for size in SIZES if size <= most]), reverse=True)
    if gpus and sizes[0] > gpus:
        parser.error(f"--sizes {sizes[0]}: this machine has {gpus} GPUs")
    OUT.mkdir(parents=True, exist_ok=True)
    began = time.time()
    run = Run(sizes, options.tiny or not gpus, began + options.minutes * 60)
    failed = run.all(options.stages or list(ALL_STAGES))
    emit("call", arguments=sys.argv[1:] if arguments is None else arguments, seconds=time.time() - began,
         date=datetime.datetime.now(datetime.UTC).date().isoformat())  # fmt: skip
    print(write_report([OUT], OUT))
    return 1 if failed else 0


class Run:
    def __init__(self, sizes: list[int], tiny: bool, deadline: float) -> None:
        self.sizes = sizes
        self.tiny = tiny
        self.deadline = deadline
        self.folder = Path(tempfile.mkdtemp(prefix="bench-scaling-"))
        self.logs = logs_of(self.folder) / LOGS

    def all(self, stages: list[str]) -> list[str]:
        """Launches every process group, the largest first; the names of those that failed."""
        tiny_tokenizer()
        failed: list[str] = []
        together = [stage for stage in STAGES if stage in stages]
        wanted: list[tuple[int, Link, list[str]]] = [
            (size, "direct", together) for size in self.sizes if together
        ]
        if "sockets" in stages:
            wanted += [(size, "sockets", ["scaling"]) for size in self.sizes if size > 1]
        for index, (size, link, of_launch) in enumerate(wanted):
            if not self.launch(
                size, link, of_launch, deadline_of(self.deadline, time.time(), len(wanted) - index)
            ):
                failed.append(f"{size}-{link}")
            self.archive_logs()
        shutil.rmtree(self.folder)
        return failed

    def launch(self, world_size: int, link: Link, stages: list[str], deadline: float) -> bool:
        """Runs one process group to its end. A failure or a missing time is reported, and the others go on."""
        attempt = f"{world_size}-{link}"
        if time.time() > deadline:
            emit(
                "not run",
                link=link,
                world_size=world_size,
                what=", ".join(stages),
                reason="the time box was over",
            )
            return True
        plan = Plan(attempt, link, stages, self.sizes, self.tiny, deadline, str(self.folder))
        path = self.folder / f"{attempt}.json"
        path.write_text(json.dumps(dataclasses.asdict(plan)))
        began = time.time()
        problem = Group(path, world_size, link).run(deadline + GRACE_SECONDS)
        if problem:
            emit("failed", link=link, world_size=world_size, reason=problem, seconds=time.time() - began)
        else:
            emit("launch", link=link, world_size=world_size, seconds=time.time() - began)
        if (self.logs / attempt / RANKS_FILE).is_file():
            emit("verdict", link=link, world_size=world_size, **verdict_of(self.logs / attempt, link))
        return problem is None

    def archive_logs(self) -> None:
        if self.logs.is_dir():
            with tarfile.open(OUT / "nccl-logs.tar.gz", "w:gz") as archive:
                archive.add(self.logs, LOGS)


def deadline_of(whole: float, now: float, num_launches: int) -> float:
    """When the next of the launches that are left must end: one that hangs may take the time of two, not of all."""
    return min(whole, now + 2 * (whole - now) / num_launches)


class Group:
    """The processes of one process group on this machine."""

    def __init__(self, plan: Path, world_size: int, link: Link) -> None:
        self.outputs = [plan.with_suffix(f".{rank}.txt") for rank in range(world_size)]
        environment = {
            **os.environ, **ENVIRONMENT, **(SOCKETS if link == "sockets" else {}),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size), "OUT": str(OUT.resolve()), "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        environment.setdefault("OMP_NUM_THREADS", "8" if torch.cuda.device_count() else "1")
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, output in enumerate(self.outputs):
            with output.open("wb") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "bench.gpu.scaling_rank", str(plan)],
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=None if rank == 0 else file, stderr=file,
                    )
                )  # fmt: skip

    def run(self, deadline: float) -> str | None:
        """Waits for all of them. What went wrong, with the end of the first failed rank's output."""
        try:
            while any(process.poll() is None for process in self.processes):
                broken = self._broken()
                if broken is not None:
                    return broken
                if time.time() > deadline:
                    return "it did not end within the time box"
                time.sleep(0.2)
            return self._broken()
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
                process.wait()

    def _broken(self) -> str | None:
        for rank, process in enumerate(self.processes):
            if process.poll():
                code = process.returncode
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
                return (
                    f"rank {rank} ended with {how}:\n{self.outputs[rank].read_text(errors='replace')[-3000:]}"
                )
        return None


def verdict_of(logs: Path, link: Link) -> dict[str, object]:
    """What the transport gate says of a launch, and whether that is right: nothing left the host, and NCCL opened
    network channels inside it exactly where the direct links were switched off."""
    report = judge(logs, require="any")
    ranks = AttemptEvidence(read_logs(logs), load_ranks(logs)).ranks
    num_sockets = sum(
        group.numbers.total()
        for rank in ranks
        for channel, group in rank.channels.items()
        if channel.network.lower() in SOCKET_NETWORKS
    )
    expected = report.backend == "nccl" and link == "sockets"
    return {
        "verdict": report.verdict, "reason": report.reason, "backend": report.backend, "socket_channels": num_sockets,
        "right": report.verdict == "none" and (num_sockets > 0) == expected,
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
