"""The benchmark of several GPUs: the very command, on two processes of this machine, and the arithmetic behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu.scaling import Run, deadline_of, main, verdict_of
from bench.gpu.scaling_rank import Rates, joined, overlap, sort_events
from bench.gpu.scaling_report import conclusions, largest_difference, plot, table, write_report
from training.planning import Hardware, ModelShape, Sharding, step_parts

ROOT = Path(__file__).parents[3]

Row = dict[str, Any]

spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda s: (s[0], s[0] + s[1])), max_size=12
)


@given(communication=spans, compute=spans)
def test_overlap_counts_each_moment_once(
    communication: list[tuple[int, int]], compute: list[tuple[int, int]]
) -> None:
    communicating = {moment for start, end in communication for moment in range(start, end)}
    computing = {moment for start, end in compute for moment in range(start, end)}
    assert overlap(communication, compute) == (len(communicating), len(communicating - computing))
    assert joined(communication) == sorted(joined(communication))


class Event:
    def __init__(self, name: str, start: int, end: int) -> None:
        self._name, self._start, self._end = name, start, end

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return self._start

    def duration_ns(self) -> int:
        return self._end - self._start


def test_a_profile_without_communication_is_an_error_and_not_full_overlap() -> None:
    events = [Event("gloo:all_reduce", 0, 5), Event("aten::mm", 3, 9), Event("python", 0, 9)]
    assert sort_events(events, cuda=False) == ([(0, 5)], [(3, 9)])
    with pytest.raises(RuntimeError, match="0 events of communication and 1 others"):
        sort_events(events[1:2], cuda=False)


def test_the_plan_of_a_measured_link_is_the_bytes_over_its_rate() -> None:
    from bench.gpu.ours import make_job

    rates = Rates(everywhere=2.0, in_node=5.0, across=3.0)
    job = make_job()
    assert job.model.architecture is not None
    shape = ModelShape.of_architecture(job.model.architecture)
    one_host = rates.on(Hardware("NVIDIA H200", 1, 4, 139.0, 989.0, 450.0, 10.0))
    _, in_node, _ = step_parts(job, shape, one_host, Sharding("full", False, 0, ""))
    # A gather of two bytes and a reduction of four, three quarters of each over every link.
    assert in_node == pytest.approx(0.75 * 6 * shape.num_parameters / 2e9)
    halves = rates.on(Hardware("NVIDIA H200", 2, 2, 139.0, 989.0, 450.0, 10.0))
    _, in_node, across = step_parts(job, shape, halves, Sharding("hybrid", False, 0, ""))
    assert in_node == pytest.approx(0.5 * 6 * shape.num_parameters / 5e9)
    assert across == pytest.approx(4 * shape.num_parameters / 3e9)


def step(
    world_size: int, rate: float, *, scheme: str = "full", link: str = "direct", plan: float = 100.0
) -> Row:
    return {"kind": "scaling", "link": link, "world_size": world_size, "scheme": scheme, "step_ms": 100.0,
            "step_ms_low": 90.0, "step_ms_high": 125.0, "tokens_per_second_per_gpu": rate, "predicted_step_ms": plan,
            "predicted_parts_ms": {"compute": 50.0}}  # fmt: skip


ENVIRONMENT = {
    "kind": "environment",
    "link": "direct",
    "world_size": 2,
    "device": "NVIDIA H200",
    "versions": {"torch": "2"},
}


def judged(*rows: Row) -> dict[tuple[str, int, str], tuple[float | None, bool]]:
    return {
        (c["name"], c["world_size"], c["what"]): (c["value"], c["met"])
        for c in conclusions([ENVIRONMENT, *rows])
    }


def test_each_goal_can_be_met_and_missed() -> None:
    found = judged(
        step(1, 1000.0), step(2, 960.0, plan=114.0), step(4, 940.0, plan=80.0), step(2, 10.0, link="sockets")
    )
    assert found["weak scaling", 2, "full"] == (0.96, True)
    assert found["weak scaling", 4, "full"] == (0.94, False)
    assert found["step time of the plan", 4, "full"] == (pytest.approx(-0.2), False)
    assert not any(
        name == "weak scaling" and size == 2 and value == 0.01
        for (name, size, _), (value, _) in found.items()
    )


def test_a_resume_must_follow_and_one_without_moments_must_not() -> None:
    saved = {
        "kind": "save",
        "link": "direct",
        "world_size": 4,
        "losses": [4.0, 2.0],
        "share_of_50_steps": 0.04,
    }
    resumed = {"kind": "resume", "link": "direct", "losses": [4.001, 2.0]}
    close = judged(
        saved, {**resumed, "world_size": 2, "moments": True}, {**resumed, "world_size": 1, "moments": False}
    )
    assert close["resume", 2, "saved on 4"] == (pytest.approx(2.5e-4), True)
    assert close["resume", 1, "saved on 4, moments forgotten (must differ)"] == (pytest.approx(2.5e-4), False)
    assert close["checkpoint's share of 50 steps", 4, ""] == (0.04, False)
    far = judged(saved, {**resumed, "world_size": 2, "moments": True, "losses": [4.0, 2.1]})
    assert far["resume", 2, "saved on 4"] == (pytest.approx(0.05), False)


def test_hybrid_is_held_to_the_plain_variant_and_float8_to_float8() -> None:
    def losses(world_size: int, variant: str, *values: float) -> Row:
        return {
            "kind": "equality",
            "link": "direct",
            "world_size": world_size,
            "variant": variant,
            "losses": list(values),
        }

    found = judged(
        losses(1, "packing", 4.0), losses(1, "float8", 8.0), losses(2, "packing", 4.0),
        losses(2, "packing, hybrid", 4.2), losses(2, "float8", 8.06),
    )  # fmt: skip
    assert found["equality with one rank", 2, "packing"] == (0.0, True)
    assert found["equality with one rank", 2, "packing, hybrid"] == (pytest.approx(0.05), False)
    assert found["equality with one rank", 2, "float8"] == (pytest.approx(0.0075), True)


def test_losses_of_other_steps_are_not_compared() -> None:
    with pytest.raises(ValueError, match="4 losses were expected, 3 found"):
        largest_difference([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0])


def test_what_failed_is_in_the_table_and_the_plot_is_whole() -> None:
    failed = {
        "kind": "failed",
        "link": "sockets",
        "world_size": 4,
        "reason": "rank 2 ended:\n...\nValueError: no",
    }
    document = {"date": "2026-12-01", "device": "NVIDIA H200", "versions": {}, "conclusions": [],
                "rows": [step(1, 1000.0), step(2, 900.0), step(2, 800.0, scheme="hybrid"), failed]}  # fmt: skip
    assert "- failed: 4 sockets : rank 2 ended: ValueError: no" in table(document)
    drawing = plot(document)
    assert drawing.count("<polyline") == 2
    assert "NaN" not in drawing
    assert "2 GPUs" in drawing


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["scalling"])
    assert (
        "unknown stage scalling; allowed: scaling, checkpoint, equality, sockets" in capsys.readouterr().err
    )


def test_nothing_is_launched_after_the_time_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.ours.OUT", tmp_path)
    past = time.time() - 1
    assert Run([2], tiny=True, deadline=past).launch(2, "direct", ["scaling"], past)
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "the time box was over"


def test_the_verdict_of_a_launch_is_held_to_the_links_it_had() -> None:
    real = ROOT / "tests" / "unit" / "transport" / "real"
    alone = verdict_of(real / "one-gpu", "direct")
    assert (alone["verdict"], alone["socket_channels"], alone["right"]) == ("none", 0, True)
    assert not verdict_of(real / "one-gpu", "sockets")["right"]  # no channel shows that sockets were used
    hosts = verdict_of(real / "four-nodes-sockets-split", "sockets")
    assert hosts["verdict"] == "tcp"
    assert isinstance(hosts["socket_channels"], int)
    assert hosts["socket_channels"] > 0
    assert not hosts["right"]


def test_a_launch_that_hangs_leaves_time_for_the_others() -> None:
    assert deadline_of(600.0, 0.0, 4) == 300.0
    assert deadline_of(600.0, 300.0, 3) == 500.0
    assert deadline_of(600.0, 500.0, 2) == deadline_of(600.0, 500.0, 1) == 600.0


@pytest.mark.slow
def test_the_whole_command_on_two_processes(tmp_path: Path) -> None:
    """Every stage by the command of docs/performance.md, without CUDA; two processes and one must train alike."""
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.scaling", "--minutes", "15"],
        cwd=ROOT, env=os.environ | {"OUT": str(out), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=560, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    document = json.loads((out / "gpu-scaling.json").read_text())
    rows: list[Row] = document["rows"]
    kinds = [(row["kind"], row.get("link"), row.get("world_size"), row.get("scheme")) for row in rows]
    for link, size, scheme in (("direct", 2, "full"), ("direct", 2, "hybrid"), ("direct", 1, "full"),
                               ("sockets", 2, "full"), ("sockets", 2, "hybrid")):  # fmt: skip
        assert kinds.count(("scaling", link, size, scheme)) == 1
    for row in rows:
        if row["kind"] == "scaling" and row["world_size"] == 2:
            assert 0 < row["exposed_ms"] <= row["communication_ms"] + 1e-6
            assert row["predicted_step_ms"] > 0
    undone = [row for row in rows if row["kind"] in ("not run", "failed")]
    assert {(row["what"], row["reason"].partition(";")[0]) for row in undone} == {
        ("equality: float8", "model.float8 needs a GPU of compute capability 8.9 or later (L4, H100)")
    }
    found = {(c["name"], c["link"], c["world_size"], c["what"]): c for c in document["conclusions"]}
    for what in ("packing", "packing, hybrid", "adapter"):
        assert found["equality with one rank", "direct", 2, what]["met"]
    for size in (2, 1):
        assert found["resume", "direct", size, "saved on 2"]["met"]
        assert found["transport verdict", "direct", size, "none, 0 socket channels"]["met"]
    assert found["resume", "direct", 1, "saved on 2, moments forgotten (must differ)"]["met"]
    assert found["transport verdict", "sockets", 2, "none, 0 socket channels"]["met"]
    with tarfile.open(out / "nccl-logs.tar.gz") as archive:
        assert {f"nccl/{name}/ranks.json" for name in ("2-direct", "1-direct", "2-sockets")} <= set(
            archive.getnames()
        )
    again = tmp_path / "again"
    assert write_report([out], again) == (out / "gpu-scaling.md").read_text()
    assert (again / "gpu-scaling.svg").read_text().startswith("<svg")
