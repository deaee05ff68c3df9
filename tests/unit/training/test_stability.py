"""What a run does with a loss that is not finite or jumps, with a rank that hangs, and with a storage that is S3."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.jobs import read_losses, tiny_job
from tests.unit.training.processes import run_ranks
from training.job import JobSpec
from training.stability import SpikeDetector
from training.watchdog import HUNG_EXIT_CODE, Watchdog


def test_a_spike_is_told_from_a_slow_rise() -> None:
    detector = SpikeDetector(factor=2.0)
    assert not any(detector.is_spike(5.0 - 0.01 * step) for step in range(30))
    assert detector.is_spike(12.0)
    assert not detector.is_spike(6.0)
    assert detector.median == pytest.approx(4.85, abs=0.1)


def test_the_first_losses_are_never_spikes() -> None:
    detector = SpikeDetector(factor=2.0)
    assert not any(detector.is_spike(loss) for loss in (1.0, 50.0, 1.0))


def test_a_rank_without_progress_says_where_it_stands_and_ends() -> None:
    told: list[tuple[int, str, str]] = []
    ended = threading.Event()

    def end(code: int) -> None:
        assert code == HUNG_EXIT_CODE
        ended.set()

    watchdog = Watchdog(0.3, lambda *report: told.append(report), end)
    watchdog.start()
    watchdog.mark(7, "data")
    assert ended.wait(10)
    step, phase, stack = told[0]
    assert (step, phase) == (7, "data")
    assert "test_a_rank_without_progress" in stack


def test_progress_and_pauses_keep_the_watchdog_quiet() -> None:
    told: list[Any] = []
    watchdog = Watchdog(0.5, lambda *report: told.append(report), lambda _: None)
    watchdog.start()
    with watchdog.paused():
        time.sleep(0.8)
    for step in range(8):
        watchdog.mark(step, "forward and backward")
        time.sleep(0.1)
    watchdog.stop()
    assert not told


def _train_with_bad_step(job_yaml: str, run: str, factor: float, at_step: int) -> dict[str, Any]:
    """Trains while the loss of one step is multiplied, as a poisoned batch would."""
    from training import loop
    from training.job import job_from_yaml
    from training.storage import open_storage

    events: list[dict[str, Any]] = []
    original = loop._Trainer._forward_backward  # pyright: ignore[reportPrivateUsage]
    poisoned = {"left": 1}

    def forward_backward(self: Any, *arguments: Any) -> torch.Tensor:
        loss = original(self, *arguments)
        if self.progress.step == at_step and poisoned["left"]:
            poisoned["left"] -= 1
            for parameter in self.optimizer.parameters.values():
                parameter.grad = parameter.grad * factor
            return loss * factor
        return loss

    loop._Trainer._forward_backward = forward_backward  # pyright: ignore[reportPrivateUsage]
    try:
        result = loop.train(
            job_from_yaml(job_yaml),
            open_storage(run),
            Path(run).with_name("work"),
            loop.Hooks(event=events.append),
        )
        return {"result": result.__dict__, "events": events, "error": None}
    except Exception as error:
        return {"result": None, "events": events, "error": f"{type(error).__name__}: {error}"}


def _run(tmp_path: Path, job: JobSpec, factor: float, at_step: int) -> dict[str, Any]:
    return run_ranks(_train_with_bad_step, 2, job.dump_yaml(), str(tmp_path / "run"), factor, at_step)[0]


def _job(**resilience: Any) -> JobSpec:
    return tiny_job(steps=16, checkpoint={"every": 4}, evaluation={"every": 100}, resilience=resilience)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_job_and_names_the_batch(tmp_path: Path) -> None:
    answer = _run(tmp_path, _job(), float("nan"), at_step=2)
    assert answer["error"].startswith("NonFiniteLoss: step 3: loss nan")
    assert "rank 0" in answer["error"]
    assert "rank 1" in answer["error"]
    assert "<|im_start|>" in answer["error"]
    assert "resilience.non_finite: skip" in answer["error"]


@pytest.mark.slow
def test_a_step_that_is_not_finite_can_be_skipped(tmp_path: Path) -> None:
    answer = _run(tmp_path, _job(non_finite="skip"), float("inf"), at_step=2)
    assert answer["error"] is None
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("skipped") == "non_finite"] == [3]
    assert answer["result"]["last_loss"] < answer["result"]["first_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "rollback", "stop"])
def test_a_loss_spike_is_treated_as_the_job_says(tmp_path: Path, policy: str) -> None:
    answer = _run(tmp_path, _job(loss_spike=policy, spike_factor=3.0), 50.0, at_step=13)
    spike = next(event for event in answer["events"] if event["event"] == "loss_spike")
    assert spike["step"] == 14
    assert "The batch: rank 0" in spike["what"]
    if policy == "stop":
        assert answer["error"].startswith("LossSpike: step 14: loss")
        return
    assert answer["error"] is None
    losses = read_losses(tmp_path / "run")
    assert sorted(losses) == list(range(1, 17))
    assert answer["result"]["steps"] == 16
    assert answer["result"]["last_loss"] < answer["result"]["first_loss"]
    if policy == "rollback":
        assert max(losses.values()) < 10  # the lines of the steps that were taken back are gone
        names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()]
        assert any(name.endswith("-r1") for name in names)
