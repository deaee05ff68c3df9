"""The job under Ray on this machine: a killed worker costs a restart and nothing else; Ctrl-C leaves a checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.training.jobs import read_losses, tiny_job

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(900)]


def _start(run: Path, *overrides: str, steps: int = 12) -> subprocess.Popen[str]:
    job = tiny_job(
        name=f"tiny-{run.parent.name.replace('_', '-').lower()[:40].strip('-')}",
        steps=steps,
        schedule={"kind": "constant", "warmup_steps": 1},
        checkpoint={"every": 2},
        parallel={"num_workers": 2},
        evaluation={"every": 100, "max_batches": 1, "prompts": ["What is a class?"]},
        run={"path": str(run)},
    )
    run.parent.mkdir(parents=True, exist_ok=True)
    path = run.parent / "job.yaml"
    path.write_text(job.dump_yaml())
    settings = [argument for override in overrides for argument in ("--set", override)]
    # A session of its own: Ctrl-C is sent to the command alone, as a shell's job control would to its group.
    return subprocess.Popen(
        [sys.executable, "-m", "training.cli", "local", str(path), "--json", *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FINETUNE_SCRATCH": str(run.parent / "scratch")},
        start_new_session=True,
    )


def _finish(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    stdout, stderr = process.communicate(timeout=600)
    assert stdout.count("\n") == 1, f"one JSON object on standard output, found:\n{stdout}\n{stderr[-3000:]}"
    return process.returncode, json.loads(stdout), stderr


def _await_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        metrics = run / "metrics.jsonl"
        if metrics.exists() and any(f'"step": {step},' in line for line in metrics.read_text().splitlines()):
            return
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.05)
    raise AssertionError(f"step {step} did not come")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    status, summary, stderr = _finish(_start(run))
    assert status == 0, stderr[-3000:]
    assert summary["status"] == "succeeded"
    assert summary["restarts"] == 0
    assert summary["transport"]["verdict"] == "none"
    assert summary["world_size"] == 2
    for name in (
        "summary.json",
        "transport.json",
        "report.html",
        "job.yaml",
        "samples.json",
        "export/config.json",
    ):
        assert (run / name).is_file(), name
    assert summary == json.loads((run / "summary.json").read_text())
    return read_losses(run)


def test_a_killed_worker_is_restarted_and_ends_with_the_same_loss(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    run = tmp_path / "run"
    process = _start(run)
    _await_step(run, 5, process)
    ranks = json.loads(next((run / "nccl").glob("*/ranks.json")).read_text())
    os.kill(next(rank["pid"] for rank in ranks if rank["rank"] == 1), signal.SIGKILL)
    status, summary, stderr = _finish(process)
    assert status == 0, stderr[-3000:]
    assert summary["status"] == "succeeded"
    assert summary["restarts"] == 1
    resumed = [
        json.loads(path.read_text())["resumed_from"] for path in sorted((run / "attempts").glob("*.json"))
    ]
    assert any(name and re.match(r"step-0000000[24]\.000-", name) for name in resumed)
    assert read_losses(run) == undisturbed
    assert summary["last_loss"] == pytest.approx(undisturbed[12], abs=1e-6)


def test_ctrl_c_ends_cleanly_with_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = _start(run, steps=4000)
    _await_step(run, 3, process)
    process.send_signal(signal.SIGINT)
    status, summary, _ = _finish(process)
    assert status == 11
    assert summary["status"] == "stopped"
    assert "stopped on request after step" in summary["error"]["message"]
    latest = (run / "checkpoints" / "latest").read_text()
    assert (run / "checkpoints" / latest / "COMPLETE").is_file()
    assert summary["checkpoint"] == latest


def test_a_mistake_in_the_data_fails_once_and_is_named(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 20 + "not json\n")
    process = _start(tmp_path / "run", f"data.source={data}", "data.limit=null", "data.on_bad_row=stop")
    status, summary, stderr = _finish(process)
    assert status == 2, stderr[-3000:]
    assert summary["status"] == "failed"
    assert "rows.jsonl:21" in summary["error"]["message"]
    assert summary["restarts"] == 0


def test_packages_of_the_job_must_be_here_already(tmp_path: Path) -> None:
    process = _start(tmp_path / "run", "runtime_env.pip=[no-such-package==1.0, torch==0.1]")
    status, answer, _ = _finish(process)
    assert status == 2
    assert "no-such-package==1.0 (not installed), torch==0.1 (found 2.13.0" in answer["reason"]


def test_the_resolved_job_stands_in_the_run_folder(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    del undisturbed
    status, summary, _ = _finish(_start(tmp_path / "run", "optimizer.learning_rate=1e-4", steps=2))
    assert status == 0
    resolved = yaml.safe_load((tmp_path / "run" / "job.yaml").read_text())
    assert resolved["optimizer"]["learning_rate"] == 1e-4
    assert summary["steps"] == 2
