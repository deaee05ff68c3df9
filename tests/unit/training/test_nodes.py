"""Which node a failure is blamed on, and how the job goes on without a node that fails again and again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from tests.unit.training.jobs import read_losses, tiny_job
from training.failures import may_be_the_nodes
from training.nodes import (
    Fault,
    Node,
    Record,
    TooFewNodes,
    attribute,
    nodes_to_exclude,
    selector,
    workers_left,
)

NODES = {
    0: Node("aa", "worker-0"),
    1: Node("aa", "worker-0"),
    2: Node("bb", "worker-1"),
    3: Node("bb", "worker-1"),
}
DIED = WorkerHealthCheckFailedError("gone", failure=RuntimeError("the actor died"))


def _failure(rank: int, error: str, time: float, may_be_the_nodes: bool = True) -> dict[str, Any]:
    kind, _, message = error.partition(": ")
    return {
        "rank": rank,
        "type": kind,
        "message": message,
        "time": time,
        "may_be_the_nodes": may_be_the_nodes,
    }


def _blamed(fault: Fault | None) -> tuple[str, int] | None:
    return None if fault is None else (fault.node_id, fault.rank)


def test_a_hang_is_blamed_on_the_node_of_the_rank_that_all_waited_for() -> None:
    everybody_ended = dict.fromkeys(NODES, DIED)
    fault = attribute(everybody_ended, NODES, (3, "rank 3 made no progress"), [])
    assert _blamed(fault) == ("bb", 3)
    assert fault is not None
    assert fault.reason == "rank 3 made no progress"


def test_a_process_that_ended_without_a_word_is_blamed_and_not_the_peers_that_complain() -> None:
    peers = [_failure(rank, "RuntimeError: Connection closed by peer", 1.0) for rank in (0, 1, 3)]
    errors = {0: RuntimeError("x"), 1: RuntimeError("x"), 2: DIED, 3: RuntimeError("x")}
    assert _blamed(attribute(errors, NODES, None, peers)) == ("bb", 2)


def test_both_processes_of_one_node_may_be_gone_but_not_those_of_two() -> None:
    assert _blamed(attribute({2: DIED, 3: DIED}, NODES, None, [])) == ("bb", 2)
    assert attribute({0: DIED, 2: DIED}, NODES, None, []) is None


def test_the_first_exception_that_is_no_consequence_counts() -> None:
    failures = [
        _failure(0, "RuntimeError: [gloo] Connection closed by peer", 1.0),
        _failure(2, "AcceleratorError: CUDA error: uncorrectable ECC error", 2.0),
        _failure(3, "AcceleratorError: CUDA error: later", 3.0),
    ]
    fault = attribute({0: RuntimeError("x")}, NODES, None, failures)
    assert _blamed(fault) == ("bb", 2)
    assert fault is not None
    assert fault.reason == "AcceleratorError: CUDA error: uncorrectable ECC error"


def test_mistakes_of_the_job_and_lone_consequences_are_blamed_on_no_node() -> None:
    mistake = _failure(1, "ValueError: no such column", 1.0, may_be_the_nodes=False)
    assert attribute({1: ValueError("x")}, NODES, None, [mistake]) is None
    lost = _failure(1, "DistBackendError: NCCL error", 1.0)
    assert attribute({1: RuntimeError("x")}, NODES, None, [lost]) is None


def test_what_a_machine_can_be_to_blame_for() -> None:
    from training.loop import NonFiniteLoss

    assert may_be_the_nodes(RuntimeError("CUDA error"))
    assert may_be_the_nodes(OSError("no space left on device"))
    assert not may_be_the_nodes(NonFiniteLoss("loss nan"))
    assert not may_be_the_nodes(KeyError("labels"))


def _record(*faults: str, excluded: tuple[str, ...] = ()) -> Record:
    return Record(len(faults), [Fault(one, f"host-{one}", 0, "CUDA error") for one in faults], list(excluded))


def test_a_node_is_left_out_once_its_faults_reach_the_limit() -> None:
    usable = {"aa": 4, "bb": 4}
    assert nodes_to_exclude(_record("bb"), 2, usable) == []
    assert nodes_to_exclude(_record("bb", "aa", "bb"), 2, usable) == ["bb"]
    assert nodes_to_exclude(_record("bb", "bb", excluded=("bb",)), 2, usable) == []


@given(
    st.lists(st.sampled_from("abc")),
    st.integers(1, 4),
    st.lists(st.sampled_from("abc"), unique=True).map(tuple),
)
def test_one_node_is_always_left(faults: list[str], limit: int, excluded: tuple[str, ...]) -> None:
    usable = {"a": 1, "b": 1, "c": 1}
    due = nodes_to_exclude(_record(*faults, excluded=excluded), limit, usable)
    assert not due or set(usable) - set(due) - set(excluded)
    assert all(faults.count(one) >= limit for one in due)


def test_the_selector_keeps_workers_off_the_nodes() -> None:
    assert selector([]) is None
    assert selector(["aa", "bb"]) == {"ray.io/node-id": "!in(aa,bb)"}


def test_the_job_goes_on_where_there_is_room() -> None:
    record = _record("bb", "bb", excluded=("bb",))
    usable = {"aa": 4, "bb": 4, "cc": 4}
    assert workers_left(record, usable, 8, None, None) == 8
    assert workers_left(record, {"aa": 4, "bb": 4}, 8, 2, None) == 4


def test_too_few_nodes_are_told_with_what_to_do() -> None:
    record = _record("bb", "bb", excluded=("bb",))
    with pytest.raises(TooFewNodes) as raised:
        workers_left(record, {"aa": 4, "bb": 4}, 8, None, "AcceleratorError: CUDA error")
    message = str(raised.value)
    for part in (
        "excluded: host-bb (Ray node bb) after 2 failures: CUDA error.",
        "room for 4 workers, and the job needs 8",
        "set parallel.min_workers",
        "kubectl cordon MACHINE; kubectl delete pod host-bb",
        "goes on from its newest checkpoint",
        "resilience.exclude_node_after: null",
        "The last failure: AcceleratorError: CUDA error",
    ):
        assert part in message
    with pytest.raises(TooFewNodes, match=r"needs at least 5 \(parallel.min_workers\)"):
        workers_left(record, {"aa": 4, "bb": 4}, 8, 5, None)


# With real Ray: a cluster of several nodes, one of which fails every time


def _run(tmp_path: Path, scenario: str, **changes: Any) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """Runs a job in a process of its own (tests/unit/training/bad_cluster.py); returns summary, events and log."""
    job = tiny_job(
        name=f"bad-{scenario}",
        schedule={"kind": "constant", "warmup_steps": 1},
        checkpoint={"every": 2},
        evaluation={"every": 100, "max_batches": 1},
        run={"path": str(tmp_path / "run")},
        **changes,
    )
    (tmp_path / "job.yaml").write_text(job.dump_yaml())
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.training.bad_cluster", scenario, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "FINETUNE_SCRATCH": str(tmp_path / "scratch")},
    )
    log = done.stderr[-4000:] + done.stdout[-2000:]
    assert (tmp_path / "answer.json").is_file(), log
    answer = json.loads((tmp_path / "answer.json").read_text())
    return answer["summary"], answer["events"], log


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(900)
def test_a_node_that_always_fails_is_left_out_and_the_job_ends_well(tmp_path: Path) -> None:
    summary, events, log = _run(tmp_path, "three-nodes", parallel={"num_workers": 2})
    assert summary["status"] == "succeeded", (summary["error"], log)
    bad_node = (tmp_path / "bad-node").read_text()
    (excluded,) = summary["excluded_nodes"]
    assert excluded["node_id"] == bad_node
    assert excluded["reasons"] == ["RuntimeError: CUDA error: uncorrectable ECC error encountered"] * 2
    assert [event["node_id"] for event in events if event["event"] == "excluded"] == [bad_node]
    assert summary["restarts"] == 2
    assert summary["world_size"] == 2
    assert sorted(read_losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    assert bad_node not in (tmp_path / "last-nodes").read_text()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(900)
def test_with_too_few_nodes_an_elastic_job_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    summary, _, log = _run(tmp_path, "two-nodes", parallel={"num_workers": 2, "min_workers": 1})
    assert summary["status"] == "succeeded", (summary["error"], log)
    assert summary["world_size"] == 1
    assert [node["node_id"] for node in summary["excluded_nodes"]] == [(tmp_path / "bad-node").read_text()]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(900)
def test_with_too_few_nodes_a_fixed_job_says_what_to_replace(tmp_path: Path) -> None:
    summary, _, log = _run(tmp_path, "two-nodes", parallel={"num_workers": 2})
    assert (summary["status"], summary["exit_status"]) == ("failed", 10), log
    message = summary["error"]["message"]
    assert (tmp_path / "bad-node").read_text() in message
    assert "room for 1 workers, and the job needs 2" in message
    assert "kubectl cordon" in message
    assert "uncorrectable ECC error" in message
    assert summary["restarts"] == 1


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(900)
def test_under_ray_the_error_of_the_job_names_the_sleeping_rank(tmp_path: Path) -> None:
    resilience = {"step_timeout_seconds": 10, "max_failures": 0}
    summary, events, log = _run(tmp_path, "sleeper", parallel={"num_workers": 2}, resilience=resilience)
    assert summary["status"] == "failed", log
    error = summary["error"]
    assert (error["kind"], error["rank"], error["step"]) == ("hang", 1, 3)
    assert "in _oversleep" in error["frames"]
    assert "Rank 0 waits in" in error["message"]
    assert error["flight"].startswith("flight/000-")
    assert any("rank 1 never started" in missed for missed in error["missed_collectives"])
    (hang,) = [event for event in events if event["event"] == "hang"]
    assert hang["rank"] == 1
    report = (tmp_path / "run" / "report.html").read_text()
    assert "made no progress for 10 s" in report
    assert "_oversleep" in report
