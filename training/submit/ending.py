"""The end of a job as the submitter sees it: stopping it, fetching its results, saying how it ended."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from training.console import summary_table
from training.errors import DeadlinePassed, ExitStatus
from training.submit.bundle import Bundle, code_files
from training.submit.checks import ask_inside
from training.submit.follow import Ending, head_was_replaced
from training.submit.job_client import JobClient, RayJob
from training.submit.log_lines import Line, LogParser
from training.submit.outcome import (
    REPORT_FILE,
    SUMMARY_FILE,
    TRANSPORT_FILE,
    Outcome,
    Require,
    outcome_of,
)
from training.submit.session import Output, job_document

# From the wish to stop until Ray kills the driver: the step under way, and a last checkpoint of 20 GiB at
# 100 MiB/s (2026-12).
STOP_GRACE_SECONDS = 300.0
# Ray's own grace is 3 s; the rest is for a busy head (2026-12).
KILL_SECONDS = 60.0


def code_bundle() -> Bundle:
    """The code alone, to read a run folder with."""
    return Bundle(dict(code_files()))


def fetch(client: JobClient, run_uri: str, names: Sequence[str]) -> dict[str, bytes | None]:
    """Files of a run folder, read by the head, since the storage may be out of this machine's reach."""
    found = ask_inside(client, code_bundle(), ["fetch", run_uri, *names])["files"]
    return {name: None if content is None else base64.b64decode(content) for name, content in found.items()}


def read_log(client: JobClient, submission_id: str) -> tuple[LogParser, list[Line]]:
    """The whole log as it is now."""
    parser, offset = LogParser(), 0
    lines: list[Line] = []
    while True:
        poll = client.poll(submission_id, offset)
        lines += parser.feed(poll.log)
        offset += len(poll.log)
        if offset >= poll.log_size or not poll.log:
            return parser, lines + parser.close()


def stop_and_wait(client: JobClient, job: RayJob, output: Output, *, grace: float) -> RayJob:
    """Asks the training loop for a last checkpoint and its end; after `grace` seconds has Ray kill the driver.

    Raises DeadlinePassed when even that does not end it, ContactLost.
    """
    run_uri = job.metadata.get("run")
    if run_uri is not None and grace > 0:
        output.say(f"stopping {job.submission_id}: up to {grace:.0f} s for its step and a last checkpoint")
        ask_inside(client, code_bundle(), ["stop", run_uri])
        ended = _await_end(client, job.submission_id, grace)
        if ended is not None:
            return ended
    client.stop(job.submission_id)
    ended = _await_end(client, job.submission_id, KILL_SECONDS)
    if ended is None:
        raise DeadlinePassed(f"{job.submission_id} did not end though Ray was told to kill it; see its log.")
    return ended


def _await_end(client: JobClient, submission_id: str, seconds: float) -> RayJob | None:
    started = time.monotonic()
    while True:
        job = client.find(submission_id)
        if job is None:
            raise head_was_replaced(submission_id, client.cluster.come_back)
        if job.ended:
            return job
        if time.monotonic() - started > seconds:
            return None
        time.sleep(2.0)


def finish(client: JobClient, ending: Ending, output: Output, save_to: Path | None = None) -> int:
    """Fetches the results, says how the job ended, and returns the exit status."""
    job = ending.job
    files: dict[str, bytes | None] = {}
    if ending.parser.end is not None:  # else what lies in the run folder is of an earlier job
        files = fetch(client, job.metadata["run"], [SUMMARY_FILE, TRANSPORT_FILE, REPORT_FILE])
    require = cast("Require", job.metadata.get("require", client.cluster.target.required_transport))
    outcome = outcome_of(job, files, require, ending.parser.first_failure())
    there = {name: content for name, content in files.items() if content is not None}
    report = f"{job.metadata.get('run')}/{REPORT_FILE}"
    if save_to is not None and there:
        report = str(_save(there, save_to))
    _say(job, outcome, output, report if REPORT_FILE in there else None)
    output.emit(_document(job, outcome))
    return int(outcome.status)


def _save(files: Mapping[str, bytes], folder: Path) -> Path:
    """The results on this machine; returns where the report is."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder / REPORT_FILE


def _document(job: RayJob, outcome: Outcome) -> dict[str, object]:
    document: dict[str, object] = {**job_document(job), **(outcome.summary or {})}
    document |= {"ray_status": job.status, "exit_status": int(outcome.status), "reason": outcome.reason}
    if outcome.failure is not None:
        failure = outcome.failure
        document["failure"] = {"rank": failure.rank, "host": failure.host, "error": failure.text}
    return document


def _say(job: RayJob, outcome: Outcome, output: Output, report: str | None) -> None:
    if outcome.failure is not None:
        output.say(outcome.failure.headline(), "bold red")
        output.say(outcome.failure.text)
    if outcome.summary is not None:
        output.console.print(summary_table(outcome.summary, report))
    good = outcome.status == ExitStatus.SUCCEEDED
    how = "succeeded" if good else outcome.status.name.lower().replace("_", " ")
    output.say(f"{job.submission_id}: {how}: {outcome.reason}", "green" if good else "red")
