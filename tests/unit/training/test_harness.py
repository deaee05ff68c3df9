"""lm-evaluation-harness at its border: a stand-in with the signature of lm_eval 0.4.13 takes the place of the package."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.jobs import tiny_job
from training.errors import UsageError
from training.harness import check_harness, run_harness
from training.job import HarnessSpec
from training.storage import LocalStorage


class _TaskManager:
    def match_tasks(self, task_list: list[str]) -> list[str]:
        return [task for task in task_list if task in ("hellaswag", "arc_easy")]


def _simple_evaluate(
    model: str,
    model_args: dict[str, Any] | None = None,
    tasks: list[str] | None = None,
    num_fewshot: int | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    limit: float | None = None,
    log_samples: bool = True,
    apply_chat_template: bool = False,
) -> dict[str, Any]:
    assert model == "hf"
    assert model_args is not None
    if not (Path(model_args["pretrained"]) / "config.json").is_file():
        raise OSError("no config.json")
    assert model_args["trust_remote_code"] is False
    assert (num_fewshot, batch_size, device, limit) == (2, 8, "cpu", 50)
    assert log_samples is apply_chat_template is False
    assert tasks is not None
    return {"results": {task: {"alias": task, "acc,none": 0.25, "acc_stderr,none": "N/A"} for task in tasks}}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    package, tasks = types.ModuleType("lm_eval"), types.ModuleType("lm_eval.tasks")
    package.__spec__ = types.SimpleNamespace(name="lm_eval")  # pyright: ignore[reportAttributeAccessIssue]
    package.simple_evaluate = _simple_evaluate  # pyright: ignore[reportAttributeAccessIssue]
    tasks.TaskManager = _TaskManager  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)


SPEC = HarnessSpec(tasks=("hellaswag",), limit=50, num_fewshot=2)


@pytest.mark.usefixtures("stand_in")
def test_numbers_by_task_reach_the_run_folder(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write_text("export/config.json", "{}")
    found = run_harness(SPEC, storage, tmp_path / "work", torch.device("cpu"))
    assert found["tasks"] == {"hellaswag": {"acc,none": 0.25}}
    assert json.loads(storage.read_text("evaluation.json")) == found


@pytest.mark.usefixtures("stand_in")
def test_a_harness_that_fails_leaves_its_error(tmp_path: Path) -> None:
    found = run_harness(SPEC, LocalStorage(tmp_path), tmp_path / "work", torch.device("cpu"))
    assert found["error"] == "OSError: no config.json"
    assert json.loads((tmp_path / "evaluation.json").read_text()) == found


@pytest.mark.usefixtures("stand_in")
def test_a_task_that_is_not_there_is_named_before_training() -> None:
    check_harness(tiny_job(evaluation={"harness": {"tasks": ["arc_easy"]}}))
    with pytest.raises(
        UsageError, match=r"evaluation\.harness\.tasks: helloswag: lm-evaluation-harness has no"
    ):
        check_harness(tiny_job(evaluation={"harness": {"tasks": ["arc_easy", "helloswag"]}}))


def test_a_harness_that_is_not_installed_is_named_with_the_line_that_brings_it() -> None:
    with pytest.raises(UsageError, match=r"(?s)evaluation\.harness needs .*pip: \[lm-eval==0\.4\.13\]"):
        check_harness(tiny_job(evaluation={"harness": {"tasks": ["arc_easy"]}}))
    check_harness(tiny_job())


def test_it_needs_a_whole_model() -> None:
    with pytest.raises(UsageError, match=r"evaluation\.harness needs a whole model"):
        tiny_job(evaluation={"harness": {"tasks": ["arc_easy"]}}, adapter={"merge": False})
