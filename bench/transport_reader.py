"""How fast the transport gate reads NCCL logs, and in how much memory.

    python bench/transport_reader.py [--gigabytes 1.0] [--output bench/results/transport_reader.json]

Writes a job's logs (16 ranks on 2 hosts, NCCL_DEBUG=INFO with subsystems INIT,NET,ENV, communicators set up
again and again) to a temporary folder, judges them in a process of its own, and reports MB/s and that
process's peak memory for the full size and for a tenth of it: memory that does not grow with the logs is
equal in both.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.unit.transport.builder import Job, job
from training.transport.verdict import judge


def write_logs(built: Job, folder: Path, num_bytes: int) -> int:
    """The job's logs, each repeated as often until all files together hold about ``num_bytes``."""
    built.write(folder)
    blocks = {path: path.read_bytes() for path in sorted(folder.glob("*.log"))}
    size = sum(len(block) for block in blocks.values())
    repeats = max(1, round(num_bytes / size))
    for path, block in blocks.items():
        with path.open("wb") as file:
            for _ in range(repeats):
                file.write(block)
    return repeats * size


def measure(folder: str, num_bytes: int) -> dict[str, float | str]:
    start, cpu_start = time.perf_counter(), time.process_time()
    report = judge(Path(folder), require="efa")
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {
        "gigabytes": round(num_bytes / 1e9, 3),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "megabytes_per_second": round(num_bytes / 1e6 / seconds, 1),
        "megabytes_per_cpu_second": round(num_bytes / 1e6 / cpu_seconds, 1),
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "verdict": report.verdict,
    }


def run(gigabytes: float) -> dict[str, float | str]:
    built = job(gpus=8, num_channels=16, hybrid=True, split=True)
    with tempfile.TemporaryDirectory() as temporary:
        num_bytes = write_logs(built, Path(temporary), int(gigabytes * 1e9))
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(measure, (temporary, num_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result = {
        "what": "judge() over the logs of a 16-rank job, one process",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average_at_start": round(os.getloadavg()[0], 1),
        "tenth": run(arguments.gigabytes / 10),
        "full": run(arguments.gigabytes),
        "goal": "1 GB in less than 20 s, memory that does not grow with the logs",
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
