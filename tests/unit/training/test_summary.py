"""What the end of a launch says about its attempts."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.unit.training.jobs import tiny_job
from training.storage import Storage, open_storage
from training.summary import attempt_names, conclude


def _attempt(storage: Storage, name: str, resumed_from: str | None) -> None:
    record = {"attempt": name, "resumed_from": resumed_from, "world_size": 2, "nodes": 2, "time": time.time()}
    storage.write_text(f"attempts/{name}.json", json.dumps(record))


def test_attempts_of_a_launch_seconds_ago_are_not_this_launchs(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    _attempt(storage, "000-lost", None)
    earlier = attempt_names(storage)
    started = time.time()
    _attempt(storage, "001-resumed", "step-00000008.000-lost")
    outcome = {"status": "succeeded", "exit_status": 0, "error": None}
    summary = conclude(tiny_job(), storage, outcome, earlier=earlier, started=started, target=None)
    assert summary["resumed_from"] == "step-00000008.000-lost"
    assert summary["restarts"] == 0
