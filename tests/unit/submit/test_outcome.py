from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from training.submit.job_client import RayJob
from training.submit.log_lines import Failure
from training.submit.outcome import outcome_of
from training.transport.verdict import TransportReport, judge


@functools.cache
def nothing_known() -> TransportReport:
    with tempfile.TemporaryDirectory() as folder:
        return judge(Path(folder), require="any")


def transport(verdict: str) -> bytes:
    changed = nothing_known().model_copy(update={"verdict": verdict, "reason": "because"})
    return changed.model_dump_json().encode()


SUMMARY = json.dumps({"status": "succeeded", "steps": 4}).encode()


def job(status: str, **fields: Any) -> RayJob:
    return RayJob("tiny-1", status, **fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("verdict", "require", "expected"),
    [
        *(("efa", require, 0) for require in ("efa", "any")),
        *((verdict, "any", 0) for verdict in ("tcp", "mixed", "none", "unknown")),
        *((verdict, "efa", 13) for verdict in ("tcp", "mixed")),
        ("unknown", "efa", 14),
    ],
)
def test_success_needs_the_required_transport(verdict: Any, require: Any, expected: int) -> None:
    files = {"summary.json": SUMMARY, "transport.json": transport(verdict)}
    outcome = outcome_of(job("SUCCEEDED"), files, require, None)
    assert outcome.status == expected
    assert f"transport {verdict}" in outcome.reason


@pytest.mark.parametrize("content", [None, b"", b"{", b"{}"])
def test_no_readable_verdict_is_unknown(content: bytes | None) -> None:
    files = {"summary.json": SUMMARY, "transport.json": content}
    assert outcome_of(job("SUCCEEDED"), files, "efa", None).status == 14
    assert outcome_of(job("SUCCEEDED"), files, "any", None).status == 0


def test_success_without_a_summary_is_not_believed() -> None:
    outcome = outcome_of(job("SUCCEEDED"), {"transport.json": transport("efa")}, "efa", None)
    assert outcome.status == 10
    assert "left no readable summary.json" in outcome.reason


@pytest.mark.parametrize("status", ["STOPPED", "FAILED"])
@pytest.mark.parametrize("code", [None, 0, 1, 2, 10, 11, 12, 13, 14, 15, 130, -9, 137, 255])
def test_no_other_status_of_ray_is_success(status: str, code: int | None) -> None:
    files = {"summary.json": SUMMARY, "transport.json": transport("efa")}
    assert outcome_of(job(status, driver_exit_code=code), files, "any", None).status != 0


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        ("STOPPED", None, 11),
        *(("FAILED", code, code) for code in (2, 10, 11, 12, 13, 14)),
        *(("FAILED", code, 10) for code in (1, -9, 137)),
    ],
)
def test_the_drivers_exit_status_is_passed_on(status: str, code: int | None, expected: int) -> None:
    assert outcome_of(job(status, driver_exit_code=code), {}, "any", None).status == expected


def test_the_jobs_own_record_of_the_failure_is_shown() -> None:
    error = {
        "rank": 1,
        "host": "w1",
        "type": "ValueError",
        "message": "row 7",
        "traceback": "Traceback\nValueError: row 7\n",
    }
    files = {"summary.json": json.dumps({"status": "failed", "error": error}).encode()}
    outcome = outcome_of(job("FAILED", driver_exit_code=10, message="wall\nof\nlogs"), files, "any", None)
    assert outcome.failure == Failure("Traceback\nValueError: row 7", 1, "w1")
    assert outcome.reason == "row 7"


def test_without_one_the_logs_first_failure_and_rays_first_line_are_shown() -> None:
    seen = Failure("ValueError: x", 0)
    outcome = outcome_of(job("FAILED", driver_exit_code=1, message="exit code 1\nwall"), {}, "any", seen)
    assert (outcome.failure, outcome.reason) == (seen, "exit code 1")


def test_a_runtime_environment_that_cannot_be_set_up_is_told_in_its_own_words() -> None:
    message = (
        "runtime_env setup failed: Failed to set up runtime environment.\nCould not create the actor "
        "because its "
        "associated runtime env failed to be created.\nTraceback (most recent call last):\n  File "
        "'agent.py'\n"
        "pip install ... failed\\nERROR: Could not find a version that satisfies the requirement x==1\\n"
        "ERROR: No matching distribution found for x==1\n"
    )
    outcome = outcome_of(job("FAILED", message=message), {}, "any", None)
    assert outcome.status == 10
    assert "ERROR: No matching distribution found for x==1\nSee runtime_env" in outcome.reason
    assert "agent.py" not in outcome.reason
