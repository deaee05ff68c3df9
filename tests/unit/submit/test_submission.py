"""What `finetune submit` does where its checks meet a cluster that changes."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from training.submit import submission
from training.submit.checks import PodWentAway
from training.submit.session import Output
from training.submit.submission import Submission


def _submission(seconds: float) -> tuple[Submission, io.StringIO]:
    output = Output(False)
    words = io.StringIO()
    output.console = Console(file=words, width=200)
    limits: Any = SimpleNamespace(resources=seconds)
    access: Any = None
    return Submission(Path("job.yaml"), (), access, output, limits, Path(), False), words


def test_a_pod_that_goes_away_during_the_checks_is_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter(["old pods", "new pods"])

    def check_pods(client: Any, plan: Any, bundle: Any, state: str) -> dict[str, str]:
        if state == "old pods":
            raise PodWentAway("Pod w-1 went away during the checks: container not found. Submit again.")
        return {"ray": "2.58.0"}

    monkeypatch.setattr(submission, "wait_until_ready", lambda *_: next(states))
    monkeypatch.setattr(submission, "check_pods", check_pods)
    monkeypatch.setattr(submission, "CHECK_AGAIN_SECONDS", 0.01)
    one, words = _submission(60)
    client: Any = SimpleNamespace(cluster=None)
    nothing: Any = None
    assert one._check(client, nothing, nothing) == {"ray": "2.58.0"}
    assert "A pod went away during the checks: they are made again." in words.getvalue()


def test_pods_that_keep_going_away_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_pods(*_: Any) -> dict[str, str]:
        raise PodWentAway("Pod w-1 went away during the checks: container not found. Submit again.")

    monkeypatch.setattr(submission, "wait_until_ready", lambda *_: None)
    monkeypatch.setattr(submission, "check_pods", check_pods)
    monkeypatch.setattr(submission, "CHECK_AGAIN_SECONDS", 0.01)
    one, _ = _submission(0.05)
    client: Any = SimpleNamespace(cluster=None)
    nothing: Any = None
    with pytest.raises(PodWentAway, match=r"Pod w-1 went away .* Submit again"):
        one._check(client, nothing, nothing)
