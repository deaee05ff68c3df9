"""How a launch ended, and why: what the ranks, their watchdogs and the flight recorder left in the run folder."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from training.errors import ExitStatus, FinetuneError
from training.failures import cause_among, last_failures
from training.flight import FOLDER as FLIGHT
from training.flight import missed_collectives, read_dumps
from training.hangs import FOLDER as HANGS
from training.hangs import diagnose, hosts_of, read_reports
from training.nodes import read_record
from training.storage import Storage

_STATUSES = {ExitStatus.SUCCEEDED: "succeeded", ExitStatus.JOB_STOPPED: "stopped"}


def end_of_launch(
    storage: Storage,
    launch_id: str,
    earlier: frozenset[str],
    error: Exception | None,
    final_failure: str,
) -> dict[str, Any]:
    """Status, exit status and error of a launch, and the nodes that were left out.

    earlier: attempt records of earlier launches. error: what Ray Train's run ended with. final_failure: the file that says
    that a restart cannot help.
    """
    reason = None
    if storage.exists(final_failure):
        final = json.loads(storage.read_text(final_failure))
        status, reason = ExitStatus(final["status"]), {"message": final["message"]}
    elif error is not None:
        status, reason = ExitStatus.JOB_FAILED, _error(storage, launch_id, earlier, error)
    else:
        status = ExitStatus.SUCCEEDED
    return {
        "status": _STATUSES.get(status, "failed"),
        "exit_status": int(status),
        "error": reason,
        "excluded_nodes": read_record(storage, launch_id).told(),
    }


def _error(storage: Storage, launch_id: str, earlier: frozenset[str], error: Exception) -> dict[str, Any]:
    """The error of the last attempt that went wrong: a hang, else the failure that came first."""
    if isinstance(error, FinetuneError):
        return {"message": str(error)}
    failures = last_failures(storage, launch_id)
    failed = str(failures[0]["attempt"]) if failures else ""
    attempts = {name.removeprefix("attempts/").removesuffix(".json") for name in storage.list("attempts")}
    before = {name.removeprefix("attempts/").removesuffix(".json") for name in earlier}
    hung = max(
        (name.split("/")[1] for name in storage.list(HANGS) if name.split("/")[1] in attempts - before),
        default="",
    )
    if hung and hung >= failed:
        return hang_error(storage, hung)
    cause = cause_among(failures)
    if cause is None:
        return {"message": str(error)}
    return {**cause, **_recorded(storage, failed)}


def hang_error(storage: Storage, attempt: str) -> dict[str, Any]:
    """The error of an attempt that made no progress: who, where, in what, and what the flight recorder says."""
    diagnosis = diagnose(read_reports(storage, attempt), hosts_of(storage, attempt))
    assert diagnosis is not None, attempt
    recorded = _recorded(storage, attempt)
    lines = [diagnosis.message, f"Stacks of the ranks: {HANGS}/{attempt}/"]
    if recorded:
        lines.append(f"Flight recorder ({recorded['flight']}): " + _told(recorded["missed_collectives"]))
    return {
        "kind": "hang",
        **asdict(diagnosis),
        "attempt": attempt,
        **recorded,
        "message": "\n".join(lines),
    }


def _recorded(storage: Storage, attempt: str) -> dict[str, Any]:
    """Where the flight recorder's dumps of an attempt are, and what they say; nothing where there are none."""
    dumps = read_dumps(storage, attempt)
    if not dumps:
        return {}
    missed = [str(one) for backend, by_rank in dumps.items() for one in missed_collectives(backend, by_rank)]
    return {"flight": f"{FLIGHT}/{attempt}/", "missed_collectives": missed}


def _told(missed: list[str]) -> str:
    return "; ".join(missed) if missed else "every rank has started the same collectives"
