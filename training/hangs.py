"""Which rank everybody waits for: the ranks of an attempt that made no progress left their stacks in `hangs/<attempt>/`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.storage import Storage
from training.watchdog import poll_seconds

FOLDER = "hangs"
# In the order in which a step goes through them: a rank in an earlier one is waited for by those in a later one.
PHASES = ("setup", "data", "forward and backward", "optimizer", "evaluation", "checkpoint")
FRAMES_SHOWN = 4
# How much longer than its own watchdog a hung rank waits for the reports of the others.
PEERS_SECONDS = 5.0

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')


@dataclass(frozen=True)
class Report:
    """One rank's own word, written by its watchdog when its timeout had passed.

    stack: of the thread that trains, as traceback.format_stack gives it, innermost frame last.
    """

    rank: int
    host: str
    step: int
    phase: str
    stack: str
    timeout_seconds: float

    @property
    def waits_in(self) -> str | None:
        """The collective this rank waits in for others; None where the innermost frame is something else."""
        frames = list(_FRAME.finditer(self.stack))
        if not frames or "/torch/distributed/" not in frames[-1]["file"]:
            return None
        return frames[-1]["function"]

    @property
    def innermost(self) -> str:
        """The last frames of the stack."""
        starts = [match.start() for match in _FRAME.finditer(self.stack)]
        return self.stack[starts[-FRAMES_SHOWN:][0] :].rstrip() if starts else self.stack.rstrip()

    @property
    def place(self) -> tuple[int, int]:
        return self.step, PHASES.index(self.phase) if self.phase in PHASES else len(PHASES)


@dataclass(frozen=True)
class Diagnosis:
    """Who is to blame for a hang. rank and host are None where every rank waits and none is behind the others."""

    rank: int | None
    host: str | None
    step: int
    phase: str | None
    frames: str | None
    message: str


def leave_report(
    storage: Storage,
    attempt: str,
    report: Report,
    world_size: int,
    dump: Callable[[], object],
    event: Callable[[dict[str, Any]], None],
) -> None:
    """Leaves this rank's report and the flight recorder's `dump`, and waits for the reports of its peers: the end of the
    first process ends them all. One of them tells the diagnosis as an event."""
    folder = f"{FOLDER}/{attempt}"
    storage.write_text(f"{folder}/rank-{report.rank}.json", json.dumps(report.__dict__))
    dump()
    deadline = time.monotonic() + PEERS_SECONDS + 2 * poll_seconds(report.timeout_seconds)
    while len(storage.list(folder)) < world_size and time.monotonic() < deadline:
        time.sleep(0.2)
    reports = read_reports(storage, attempt)
    diagnosis = diagnose(reports, hosts_of(storage, attempt))
    if diagnosis is not None and report.rank == reports[0].rank:
        event({"event": "hang", **diagnosis.__dict__})


def read_reports(storage: Storage, attempt: str) -> list[Report]:
    names = storage.list(f"{FOLDER}/{attempt}")
    fields = Report.__dataclass_fields__
    found = [json.loads(storage.read_text(name)) for name in names]
    reports = [Report(**{key: value for key, value in one.items() if key in fields}) for one in found]
    return sorted(reports, key=lambda report: report.rank)


def hosts_of(storage: Storage, attempt: str) -> dict[int, str]:
    """Host by rank of all ranks of an attempt, as its ranks.json says."""
    name = f"nccl/{attempt}/ranks.json"
    if not storage.exists(name):
        return {}
    return {int(one["rank"]): str(one["host"]) for one in json.loads(storage.read_text(name))}


def diagnose(reports: Sequence[Report], hosts: Mapping[int, str]) -> Diagnosis | None:
    """Names the rank that the others wait for; None where no rank reported a hang.

    hosts: by rank, of every rank of the attempt. In this order: a rank that could not even report (its process is frozen,
    or holds Python's lock in foreign code); a rank that is in no collective; the rank that is furthest behind.
    """
    if not reports:
        return None
    timeout = max(report.timeout_seconds for report in reports)
    waiting = [report for report in reports if report.waits_in is not None]
    silent = sorted(set(hosts) - {report.rank for report in reports})
    if silent:
        return _frozen(silent, hosts, reports, timeout)
    busy = [report for report in reports if report.waits_in is None]
    behind = min(busy or reports, key=lambda report: report.place)
    if not busy and all(report.place == behind.place for report in reports):
        return _all_wait(reports, timeout)
    others = [report for report in waiting if report is not behind]
    what = f"in {behind.waits_in}, behind the others" if behind.waits_in else "and in no collective"
    message = (
        f"rank {behind.rank} on {behind.host} made no progress for {timeout:g} s: it is in step {behind.step + 1} "
        f"({behind.phase}) {what}. Its innermost frames:\n{behind.innermost}\n{_who_waits(others)}{_ADVICE}"
    )
    return Diagnosis(behind.rank, behind.host, behind.step, behind.phase, behind.innermost, message)


_ADVICE = "A step that is only slow needs a larger resilience.step_timeout_seconds."


def _frozen(
    silent: Sequence[int], hosts: Mapping[int, str], reports: Sequence[Report], timeout: float
) -> Diagnosis:
    first = silent[0]
    who = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in silent)
    message = (
        f"{who} made no progress for {timeout:g} s and did not answer its own watchdog: the process is stopped, or stuck in "
        f"code that holds Python's lock. {_who_waits(reports)}{_ADVICE}"
    )
    step = min(report.step for report in reports)
    return Diagnosis(first, hosts[first], step, None, None, message)


def _all_wait(reports: Sequence[Report], timeout: float) -> Diagnosis:
    first = reports[0]
    message = (
        f"no rank made progress for {timeout:g} s: all wait in step {first.step + 1} ({first.phase}). "
        f"{_who_waits(reports)}A rank whose GPU stands still looks like this too: the flight recorder tells which "
        f"collective it did not finish. {_ADVICE}"
    )
    return Diagnosis(None, None, first.step, first.phase, None, message)


def _who_waits(reports: Sequence[Report]) -> str:
    by_place: dict[str, list[int]] = {}
    for report in reports:
        where = f"in {report.waits_in}" if report.waits_in else f"in step {report.step + 1} ({report.phase})"
        by_place.setdefault(where, []).append(report.rank)
    return "".join(f"{_ranks(ranks)} {where}. " for where, ranks in by_place.items())


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"Rank {shown} waits" if len(ranks) == 1 else f"Ranks {shown} wait"
