"""From Ray's record and the run folder to an exit status. Only SUCCEEDED is success, and only with its
transport proven.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import ValidationError

from training.errors import ExitStatus
from training.submit.job_client import RayJob
from training.submit.log_lines import Failure
from training.transport.verdict import TransportReport, exit_status

SUMMARY_FILE = "summary.json"
TRANSPORT_FILE = "transport.json"
REPORT_FILE = "report.html"

Require = Literal["efa", "any"]


@dataclass(frozen=True)
class Outcome:
    """How a job ended, and why."""

    status: ExitStatus
    reason: str
    summary: Mapping[str, Any] | None = None
    failure: Failure | None = None


def outcome_of(
    job: RayJob, files: Mapping[str, bytes | None], require: Require, failure: Failure | None
) -> Outcome:
    """The outcome of a job whose status is terminal.

    files: summary.json and transport.json of this very job, absent or None where it left none. failure: the
    first one that its log tells of.
    """
    summary = _summary(files.get(SUMMARY_FILE))
    if job.status == "STOPPED":
        return Outcome(ExitStatus.JOB_STOPPED, "the job was stopped", summary)
    if job.status == "SUCCEEDED":
        return _succeeded(files.get(TRANSPORT_FILE), summary, require)
    status = _status_of_driver(job.driver_exit_code)
    if status in (ExitStatus.TRANSPORT_OTHER, ExitStatus.TRANSPORT_UNKNOWN):
        return Outcome(status, transport_status(files.get(TRANSPORT_FILE), "efa")[1], summary)
    if status == ExitStatus.JOB_STOPPED:
        return Outcome(status, "the job was stopped", summary)
    if job.driver_exit_code is None and "runtime_env" in job.message:
        return Outcome(status, _setup_words(job.message))
    return Outcome(status, _reason(job, summary), summary, _failure(summary) or failure)


def transport_status(content: bytes | None, require: Require) -> tuple[ExitStatus, str]:
    """0, 13 or 14 from transport.json, with the reason; a file that is absent or unreadable is `unknown`."""
    try:
        if content is None:
            raise ValueError(f"the run folder has no {TRANSPORT_FILE}")
        report = TransportReport.model_validate_json(content)
    except (ValidationError, ValueError) as error:
        words = f"transport unknown: {str(error).splitlines()[0]}"
        return (ExitStatus.SUCCEEDED, words) if require == "any" else (ExitStatus.TRANSPORT_UNKNOWN, words)
    status = ExitStatus(exit_status(report, require))
    needed = "" if status == ExitStatus.SUCCEEDED else " (efa is required)"
    return status, f"transport {report.verdict}{needed}: {report.reason}"


def _succeeded(transport: bytes | None, summary: Mapping[str, Any] | None, require: Require) -> Outcome:
    if summary is None:
        reason = f"Ray reports success, but the job left no readable {SUMMARY_FILE}"
        return Outcome(ExitStatus.JOB_FAILED, reason)
    status, reason = transport_status(transport, require)
    return Outcome(status, reason, summary)


def _status_of_driver(code: int | None) -> ExitStatus:
    """The driver exits with the statuses of `finetune`; anything else is a job that failed."""
    if code is None or code == 0 or code not in {int(known) for known in ExitStatus}:
        return ExitStatus.JOB_FAILED
    return ExitStatus(code)


def _reason(job: RayJob, summary: Mapping[str, Any] | None) -> str:
    message = str(((summary or {}).get("error") or {}).get("message") or "").strip()
    if message:
        return message
    # Ray repeats the end of the log in its message; its first line says what there is to say.
    return job.message.splitlines()[0] if job.message else "the job failed without a message of Ray"


def _failure(summary: Mapping[str, Any] | None) -> Failure | None:
    """The first failing rank's exception as the job recorded it."""
    error = cast("Mapping[str, Any]", (summary or {}).get("error") or {})
    if "traceback" not in error:
        return None
    return Failure(str(error["traceback"]).strip(), rank=error.get("rank"), host=error.get("host"))


def _setup_words(message: str) -> str:
    """pip's own error lines out of Ray's long message."""
    text = message.replace("\\n", "\n")
    own = [line.strip() for line in text.splitlines() if re.match(r"\s*(ERROR|error):", line)]
    detail = "\n  ".join(dict.fromkeys(own)) or text.strip()[-1500:]
    return (
        f"the runtime environment cannot be set up on the cluster, so no training code ran:\n  {detail}\nSee "
        "runtime_env in the job file: pin versions that exist for the image's Python, and see that the pods reach "
        "the package index."
    )


def _summary(content: bytes | None) -> dict[str, Any] | None:
    try:
        summary = json.loads(content or b"")
    except ValueError:
        return None
    return cast("dict[str, Any]", summary) if isinstance(summary, dict) else None
