"""The example of docs/preference.md, as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "preference.md"


def test_the_documented_example_learns_the_preference(tmp_path: Path) -> None:
    text = PAGE.read_text()
    for name, body in re.findall(r"<!-- example: (\S+) -->\n```\w+\n(.*?)```", text, re.S):
        (tmp_path / name).write_text(body)
    commands = re.search(r"```console\n(\$ python pairs.py\n.*?)```", text, re.S)
    assert commands is not None
    script = commands[1].replace("$ ", "").replace("finetune", f"{sys.executable} -m training.cli")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "FINETUNE_SCRATCH": str(tmp_path / "scratch"),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs/dpo/summary.json").read_text())
    assert summary["status"] == "succeeded"
    assert summary["first_eval_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert summary["eval_loss"] < 0.5
    assert summary["measures"]["eval_reward_accuracy"] > 0.9
    shown = done.stdout + done.stderr
    assert "of its pairs in order" in shown
    assert re.search(r"pairs in order\s+\S+ % training, \S+ % held out", shown)
    report = (tmp_path / "runs/dpo/report.html").read_text()
    assert "Pairs in the preferred order" in report
    assert "Rewards" in report
    assert "per pair" in report
    events = (tmp_path / "runs/dpo/tensorboard").iterdir()
    assert any(b"reward_margin" in path.read_bytes() for path in events)
