from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.transport import corpus
from training.transport.compare import CompareError, compare, exit_status
from training.transport.verdict import judge

TOKENS = 2048 * 8


def write_run(
    folder: Path,
    verdict: str,
    step_seconds: float,
    *,
    steps: int = 20,
    tokens: int = TOKENS,
    expected: int | None = 7_700_000_000,
    **summary: Any,
) -> Path:
    """A run of ``steps`` steps with a slow start and, each fifth step, a checkpoint."""
    folder.mkdir()
    lines = [{"step": 0, "tokens": 0, "eval_loss": 2.0, "attempt": "0"}]
    for step in range(1, steps + 1):
        jitter = 1 + 0.02 * ((step * 7) % 5 - 2)
        seconds = {
            "forward": step_seconds * jitter * (10 if step == 1 else 1),
            "checkpoint": 3.0 * (step % 5 == 0),
            "evaluation": 1.0 * (step % 10 == 0),
        }
        lines.append({"step": step, "tokens": step * tokens, "seconds": seconds, "attempt": "0"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    nodes = [{"host": h, "expected_bytes": expected and expected * steps} for h in "ab"]
    transport = {"verdict": verdict, "reason": "because", "nodes": nodes}
    (folder / "transport.json").write_text(json.dumps(transport))
    (folder / "summary.json").write_text(json.dumps({"world_size": 8, "nodes": 2} | summary))
    return folder


def test_ratio_and_its_interval(tmp_path: Path) -> None:
    report = compare(write_run(tmp_path / "a", "efa", 1.93), write_run(tmp_path / "b", "tcp", 3.98))
    assert report.ratio == pytest.approx(2.06, abs=0.01)
    assert report.ratio_low < report.ratio < report.ratio_high
    assert report.ratio_high - report.ratio_low < 0.2
    assert report.tokens_per_gpu_per_step == 2048
    assert report.efa.steps_per_second_low <= report.efa.steps_per_second <= report.efa.steps_per_second_high
    assert report.efa.num_steps == 17
    assert report.problems == ()
    assert exit_status(report) == 0
    assert compare(tmp_path / "a", tmp_path / "b") == report


def test_tiny_batches_are_expected_to_show_the_ratio_of_the_networks(tmp_path: Path) -> None:
    """7.70 GB at 4.0 and 2.0 GB/s take 1.92 and 3.85 s: with a step of 1.9 s there is nothing else in it."""
    runs = write_run(tmp_path / "a", "efa", 1.90), write_run(tmp_path / "b", "tcp", 3.8)
    model = compare(*runs, network_gbps=40).expectation
    assert model is not None
    assert (model.efa_seconds, model.tcp_seconds) == (pytest.approx(1.925), pytest.approx(3.85))
    assert (model.ratio_low, model.ratio_high) == (pytest.approx(2), pytest.approx(2))
    assert (model.bandwidth, model.hiding_tokens) == ("assumed", None)


def test_large_batches_are_expected_to_tend_to_one(tmp_path: Path) -> None:
    runs = (
        write_run(tmp_path / "a", "efa", 5.0, tokens=8 * 16384),
        write_run(tmp_path / "b", "tcp", 5.4, tokens=8 * 16384),
    )
    report = compare(*runs, network_gbps=40)
    assert report.expectation is not None
    assert report.expectation.ratio_low == 1
    assert report.expectation.ratio_high == pytest.approx((5.0 - 1.925 + 3.85) / 5.0)
    assert report.expectation.hiding_tokens == pytest.approx(16384 * 3.85 / (5.0 - 1.925))
    assert any("tends to one" in sentence for sentence in report.sentences())


def test_measured_bandwidths_are_taken_over_the_line_rate(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "a", "efa", 5.0), write_run(tmp_path / "b", "tcp", 5.4)
    model = compare(*runs, network_gbps=40, efa_gb_per_second=4.4, tcp_gb_per_second=1.1).expectation
    assert model is not None
    assert (model.bandwidth, model.efa_seconds) == ("measured", pytest.approx(1.75))


def test_no_expectation_says_why(tmp_path: Path) -> None:
    one = compare(write_run(tmp_path / "a", "efa", 1), write_run(tmp_path / "b", "tcp", 2))
    assert (one.expected_ratio, one.expectation) == (None, None)
    assert "line rate" in str(one.expectation_missing)


@pytest.mark.parametrize(
    ("evidence", "why"),
    [
        (corpus.gloo_two_hosts, "the EFA leg ran on CPUs over gloo"),
        (corpus.gloo_one_host, "the EFA leg ran on CPUs over gloo"),
        (corpus.one_host, "all ranks of the EFA leg ran on one node"),
        (corpus.expected_bytes_not_recorded, "(the job recorded no expected bytes to compare with)"),
        (corpus.no_step_completed, "(the job completed no step that had to cross the network)"),
        (corpus.nothing_at_all, "(which ranks ran is not known: ranks.json is missing"),
    ],
)
def test_no_expected_bytes_has_the_reason_that_holds(
    tmp_path: Path, evidence: Callable[[Path], Path], why: str
) -> None:
    runs = write_run(tmp_path / "a", "efa", 1), write_run(tmp_path / "b", "tcp", 2)
    judged = judge(evidence(tmp_path / "evidence"), require="any")
    (runs[0] / "transport.json").write_text(judged.model_dump_json())

    report = compare(*runs, network_gbps=40)

    assert report.expectation is None
    [sentence] = [one for one in report.sentences() if one.startswith("No expectation: ")]
    assert why in sentence


@pytest.mark.parametrize(
    ("verdict_a", "verdict_b", "status", "problem"),
    [
        ("tcp", "tcp", 13, "the EFA leg"),
        ("efa", "efa", 13, "the TCP leg"),
        ("efa", "unknown", 14, "the TCP leg"),
        ("unknown", "tcp", 14, "because"),
    ],
)
def test_both_verdicts_are_checked(
    verdict_a: str, verdict_b: str, status: int, problem: str, tmp_path: Path
) -> None:
    report = compare(write_run(tmp_path / "a", verdict_a, 1), write_run(tmp_path / "b", verdict_b, 2))
    assert exit_status(report) == status
    assert problem in report.problems[0]
    assert problem in report.sentences()[-1]


def test_legs_of_different_jobs_are_named(tmp_path: Path) -> None:
    report = compare(
        write_run(tmp_path / "a", "efa", 1, parameters=10),
        write_run(tmp_path / "b", "tcp", 2, parameters=20, tokens=2 * TOKENS),
    )
    assert report.problems == (
        "the legs differ in parameters: 10 and 20",
        "the legs differ in tokens per GPU and step: 2,048 and 4,096",
    )


def test_too_few_steps_and_missing_files_are_errors_that_say_what_to_do(tmp_path: Path) -> None:
    good, short = write_run(tmp_path / "a", "efa", 1), write_run(tmp_path / "b", "tcp", 2, steps=7)
    with pytest.raises(CompareError, match=r"has 7 steps .* run the job with more steps"):
        compare(good, short)
    (short / "transport.json").unlink()
    with pytest.raises(CompareError, match=r"b has no transport\.json"):
        compare(good, short)


def test_rows_stand_side_by_side(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "a", "efa", 5.0), write_run(tmp_path / "b", "tcp", 5.4)
    rows = compare(*runs, network_gbps=40).rows()
    assert ("transport", "efa", "tcp") in rows
    assert rows[-1] == ("communication, s (assumed bandwidth)", "1.925", "3.850")
