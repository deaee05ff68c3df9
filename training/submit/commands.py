"""What `finetune submit`, `status`, `logs`, `stop` and `list` do. Each returns the exit status; with
`as_json` one JSON object goes to standard output and everything else to standard error."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from training.console import ProgressLine
from training.errors import ContactLost, ExitStatus, FinetuneError, UsageError
from training.submit.bill import bill, bill_words
from training.submit.checks import ask_inside
from training.submit.ending import STOP_GRACE_SECONDS, code_bundle, finish, read_log, stop_and_wait
from training.submit.follow import Ending, Follower, Limits, duration, head_was_replaced
from training.submit.job_client import JobClient, RayJob
from training.submit.log_lines import Line, LogParser, lines_of_rank
from training.submit.outcome import Require
from training.submit.session import Access, Output, guarded, job_document
from training.submit.submission import Submission

PROGRESS_TAIL_BYTES = 64 * 1024  # of the log in which `status` looks for the newest progress

_ID = re.compile(r"(?P<name>.+?)-[0-9a-f]{12}(-\d+)?")


def submit(
    job_path: Path,
    access: Access,
    *,
    overrides: Sequence[str] = (),
    require_transport: Require | None = None,
    detach: bool = False,
    yes: bool = False,
    as_json: bool = False,
    show_log: bool = False,
    limits: Limits | None = None,
    folder: Path | None = None,
) -> int:
    """Plans, checks, asks, submits and follows one job; the same submit again finds the same job.

    folder: relative paths of the job file start there, and results are saved under its runs/ (default: the
    current).
    """
    if require_transport is not None:
        overrides = [*overrides, f"transport.require={require_transport}"]
    output = Output(as_json)
    submission = Submission(
        job_path, tuple(overrides), access, output, limits or Limits(), folder or Path.cwd(), show_log
    )
    return guarded(output, lambda: submission.run(detach=detach, yes=yes))


def status(access: Access, name: str | None = None, *, as_json: bool = False) -> int:
    """One look at a job (the newest where no name is given). 130 while it goes on, else the status of its end."""
    output = Output(as_json)

    def run() -> int:
        with access.client(access.target(), _again("status", name, access)) as client:
            job = _find(client, name)
            output.say(bill_words(client.cluster.target))
            if job.ended:
                parser, _ = read_log(client, job.submission_id)
                return finish(client, Ending(job, parser), output)
            progress = _last_progress(client, job.submission_id)
            output.say(f"{job.submission_id}: {job.status.lower()}")
            if progress is not None:
                with ProgressLine(output.console, plain=True) as shown:
                    shown.event(progress)
            goes_on = int(ExitStatus.DETACHED)
            output.emit(
                {
                    **job_document(job),
                    "progress": progress,
                    "exit_status": goes_on,
                    "bill": bill(client.cluster.target),
                }
            )
            return goes_on

    return guarded(output, run)


def logs(
    access: Access,
    name: str | None = None,
    *,
    rank: int | None = None,
    follow: bool = False,
    first_failure: bool = False,
    as_json: bool = False,
) -> int:
    """The log of a job: all of it, what one rank said, or the first failure alone.

    With `follow` it goes on to the job's end and returns the job's exit status; Ctrl-C leaves the job running.
    """
    output = Output(as_json)

    def run() -> int:
        with access.client(access.target(), _again("logs", name, access)) as client:
            job = _find(client, name)
            if follow:
                view = _LogView(rank, output)
                return finish(client, Follower(client, job.submission_id, view, Limits()).follow(), output)
            parser, lines = read_log(client, job.submission_id)
            shown = _chosen(parser, lines, rank, first_failure)
            if as_json:
                output.emit({**job_document(job), "rank": rank, "lines": shown})
            else:
                sys.stdout.write("".join(f"{line}\n" for line in shown))
            return int(ExitStatus.SUCCEEDED)

    return guarded(output, run)


def stop(access: Access, name: str | None = None, *, now: bool = False, as_json: bool = False) -> int:
    """Stops a job after its step and a last checkpoint, or `now`. 0 when it has ended."""
    output = Output(as_json)

    def run() -> int:
        with access.client(access.target(), _again("stop", name, access)) as client:
            job = _find(client, name)
            if not job.ended:
                job = stop_and_wait(client, job, output, grace=0.0 if now else STOP_GRACE_SECONDS)
            output.say(f"{job.submission_id}: has ended ({job.status.lower()})")
            output.emit(job_document(job))
            return int(ExitStatus.SUCCEEDED)

    return guarded(output, run)


def list_jobs(access: Access, *, as_json: bool = False) -> int:
    """The jobs that this RayCluster knows: those submitted since its head started."""
    output = Output(as_json)

    def run() -> int:
        with access.client(access.target(), f"finetune list {access.flags()}") as client:
            jobs = client.jobs()
        table = Table("job", "status", "started", "took", "run folder")
        for job in jobs:
            run_uri = job.metadata.get("run", "")
            table.add_row(
                job.submission_id, job.status.lower(), _clock(job.start_time_ms), _took(job), run_uri
            )
        if not as_json:
            Console().print(table if jobs else Text("no jobs since the head started"))
        output.emit({"jobs": [job_document(job) for job in jobs]})
        return int(ExitStatus.SUCCEEDED)

    return guarded(output, run)


def _again(verb: str, name: str | None, access: Access) -> str:
    return " ".join(part for part in ("finetune", verb, name, access.flags()) if part)


def _find(client: JobClient, name: str | None) -> RayJob:
    """The job of that submission id, the newest of that name, or the newest of all."""
    jobs = client.jobs()
    if name is None:
        if not jobs:
            raise UsageError(
                f"RayCluster {client.cluster.target.ray_cluster} has no jobs since its head started."
            )
        return jobs[-1]
    for names in (
        [job for job in jobs if job.submission_id == name],
        [job for job in jobs if name in (job.metadata.get("submission"), job.metadata.get("name"))],
    ):
        if names:
            return names[-1]
    raise _unknown(client, name, jobs)


def _unknown(client: JobClient, name: str, jobs: Sequence[RayJob]) -> FinetuneError:
    """No such job in Ray: never submitted, or lost with a former head, which its run folder tells."""
    match = _ID.fullmatch(name)
    run_uri = f"{client.cluster.target.storage_uri.rstrip('/')}/runs/{match['name'] if match else name}"
    found = ask_inside(client, code_bundle(), ["steps", run_uri])
    if not found["checkpoints"] and found["last"] is None:
        known = ", ".join(sorted({job.metadata.get("name") or job.submission_id for job in jobs})) or "none"
        return UsageError(
            f"Ray knows no job {name}, and {run_uri} is empty. Jobs since the head started: {known}."
        )
    step = (found["last"] or {}).get("step", "none")
    newest = found["checkpoints"][-1] if found["checkpoints"] else "none"
    lost = head_was_replaced(name, f"finetune report {run_uri}")
    return ContactLost(
        f"{lost}\nRun folder {run_uri}: last step {step}, newest complete checkpoint {newest}."
    )


def _last_progress(client: JobClient, submission_id: str) -> Mapping[str, Any] | None:
    size = client.poll(submission_id, offset=2**62).log_size
    parser = LogParser()
    parser.feed(client.poll(submission_id, offset=max(0, size - PROGRESS_TAIL_BYTES)).log)
    return parser.progress


def _chosen(parser: LogParser, lines: Sequence[Line], rank: int | None, first_failure: bool) -> list[str]:
    if first_failure:
        failure = parser.first_failure()
        return [failure.headline(), *failure.text.splitlines()] if failure else ["no rank has failed"]
    if rank is None:
        return [line.text for line in lines]
    known = sorted(set(parser.ranks.values()))
    if rank not in known:
        raise UsageError(f"--rank {rank}: the log tells of ranks {', '.join(map(str, known)) or 'none yet'}.")
    return lines_of_rank(lines, parser, rank)


class _LogView:
    """Prints a followed log: whole, or of one rank."""

    def __init__(self, rank: int | None, output: Output) -> None:
        self._rank = rank
        self._console = output.console if output.as_json else Console()
        self._parser = LogParser()

    def line(self, line: Line) -> None:
        self._parser.learn(line)
        if self._rank is None or self._parser.rank_of(line) == self._rank:
            self._console.print(Text(line.text), soft_wrap=True)

    def status(self, status: str) -> None: ...

    def nodes(self, nodes: Sequence[Mapping[str, Any]]) -> None: ...


def _clock(milliseconds: int | None) -> str:
    return "" if not milliseconds else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(milliseconds / 1000))


def _took(job: RayJob) -> str:
    if not job.start_time_ms:
        return ""
    return duration((job.end_time_ms or time.time() * 1000) / 1000 - job.start_time_ms / 1000)
