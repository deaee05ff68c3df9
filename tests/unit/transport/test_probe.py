from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from training.transport.probe import Collective, Measurement, ProbeResult, Scope, judge_bandwidth

WORKER = """
import json, os, sys
import torch.distributed as dist
from training.transport.probe import probe
dist.init_process_group("gloo")
result = probe([1 << 16, 1 << 18], network_gbps=40.0, instance_type="g6.12xlarge", num_rounds=2,
               node=f"node-{dist.get_rank() // 2}")
open(f"{sys.argv[1]}/{dist.get_rank()}.json", "w").write(result.model_dump_json())
dist.destroy_process_group()
"""


def measurement(rate: float, scope: Scope = "world", collective: Collective = "all_gather") -> Measurement:
    return Measurement(
        collective=collective,
        scope=scope,
        num_ranks=8,
        payload_bytes=1 << 30,
        seconds=1,
        bus_gb_per_second=rate,
        bus_gb_per_second_low=rate,
        bus_gb_per_second_high=rate,
    )


def test_slower_collective_decides_against_the_floor() -> None:
    fast, slow = measurement(4.2), measurement(2.9, collective="reduce_scatter")
    verdict, reason = judge_bandwidth([fast, slow], 5.0, "g6.12xlarge")
    assert verdict == "failed"
    assert "reduce_scatter of 1,024 MiB across nodes reached 2.90 GB/s, below the floor 3.00 GB/s" in reason
    assert judge_bandwidth([fast], 5.0, "g6.12xlarge")[0] == "passed"


def test_small_sizes_and_one_node_are_not_judged() -> None:
    small = measurement(0.1).model_copy(update={"payload_bytes": 1 << 20})
    assert judge_bandwidth([small, measurement(4.2)], 5.0, None)[0] == "passed"
    assert judge_bandwidth([measurement(9, scope="node")], 5.0, None)[0] == "not judged"
    assert "not known" in judge_bandwidth([measurement(9)], None, None)[1]


def test_rows_say_what_was_measured_where() -> None:
    result = ProbeResult(
        verdict="passed",
        reason="",
        backend="nccl",
        instance_type=None,
        world_size=8,
        num_nodes=2,
        line_gb_per_second=None,
        floor_gb_per_second=None,
        measurements=(measurement(4.2), measurement(9, scope="node")),
    )
    assert result.rows() == [
        ("all-gather", "8 ranks on 2 nodes", "1,024.0", "1,000.00", "4.20", "4.20 to 4.20"),
        ("all-gather", "8 ranks in a node", "1,024.0", "1,000.00", "9.00", "9.00 to 9.00"),
    ]


@pytest.mark.slow
def test_four_processes_on_two_named_nodes(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    root = Path(__file__).parents[3]
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env=os.environ
            | {"PYTHONPATH": str(root), "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank)}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29631", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(4)
    ]
    assert [worker.wait(timeout=300) for worker in workers] == [0] * 4
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    result = results[0]
    assert all(other["measurements"] == result["measurements"] for other in results)
    assert (result["num_nodes"], result["world_size"], result["floor_gb_per_second"]) == (2, 4, 3.0)
    found = [
        (m["scope"], m["num_ranks"], m["payload_bytes"], m["collective"]) for m in result["measurements"]
    ]
    assert found == [
        (scope, ranks, size, collective)
        for scope, ranks in (("node", 2), ("world", 4))
        for size in (1 << 16, 1 << 18)
        for collective in ("all_gather", "reduce_scatter")
    ]
    for one in result["measurements"]:
        assert 0 < one["bus_gb_per_second_low"] <= one["bus_gb_per_second"] <= one["bus_gb_per_second_high"]
