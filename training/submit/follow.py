"""Follows a job: status and log by byte offset in short calls, so that a lost connection costs nothing but
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from training.console import ProgressLine
from training.errors import ContactLost, DeadlinePassed, UsageError
from training.submit.cluster import Cluster, ClusterState
from training.submit.job_client import JobClient, RayJob
from training.submit.log_lines import Line, LogParser

PODS_EVERY_SECONDS = 15.0
NODES_EVERY_SECONDS = 30.0


class ResourcesNeverCame(DeadlinePassed):
    """Pods stayed away: nothing runs that could write a last checkpoint."""


class View(Protocol):
    """Where a followed job is shown."""

    def line(self, line: Line) -> None: ...
    def status(self, status: str) -> None: ...
    def nodes(self, nodes: Sequence[Mapping[str, Any]]) -> None: ...


@dataclass(frozen=True)
class Limits:
    """Seconds that a submitter waits: for the whole job (None: for ever), for pods that are not ready,
    between polls.
    """

    deadline: float | None = None
    resources: float = 900.0
    poll: float = 3.0


@dataclass(frozen=True)
class Ending:
    """A job that ended: Ray's record, and what its log said."""

    job: RayJob
    parser: LogParser


@dataclass
class Follower:
    """Follows one job to its end."""

    client: JobClient
    submission_id: str
    view: View
    limits: Limits
    has_gpus: bool = False
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def follow(self) -> Ending:
        """Returns when Ray's status is terminal and the log is read to its end.

        Raises DeadlinePassed (the whole, or pods that stay away while nothing moves) and ContactLost (also
        when the head was replaced: Ray's record of the job went with it).
        """
        parser = LogParser()
        watch = _PodWatch(self.client.cluster, self.limits.resources, self.clock)
        started, nodes_at, offset = self.clock(), self.clock(), 0
        while True:
            now = self.clock()
            with_nodes = self.has_gpus and now - nodes_at >= NODES_EVERY_SECONDS
            poll = self.client.poll(self.submission_id, offset, nodes=with_nodes)
            if poll.job is None:
                raise head_was_replaced(self.submission_id, self.client.cluster.come_back)
            for line in parser.feed(poll.log):
                self.view.line(line)
                if line.event is not None:
                    watch.moved()
            offset += len(poll.log)
            if with_nodes:
                self.view.nodes(poll.nodes)
                nodes_at = now
            if offset < poll.log_size:
                continue  # behind: read on without a pause
            if poll.job.ended:
                for line in parser.close():
                    self.view.line(line)
                return Ending(poll.job, parser)
            self.view.status(poll.job.status)
            if self.limits.deadline is not None and self.clock() - started > self.limits.deadline:
                raise DeadlinePassed(f"The job did not end within --deadline {self.limits.deadline:.0f} s.")
            watch.look()
            self.sleep(self.limits.poll)


class _PodWatch:
    """Raises DeadlinePassed with a diagnosis when pods stay away and the job does not move."""

    def __init__(self, cluster: Cluster, seconds: float, clock: Callable[[], float]) -> None:
        self._cluster, self._seconds, self._clock = cluster, seconds, clock
        self._looked = self._still_since = clock()
        self._away_since: float | None = None

    def moved(self) -> None:
        self._still_since = self._clock()

    def look(self) -> None:
        now = self._clock()
        if now - self._looked < min(PODS_EVERY_SECONDS, self._seconds / 2):
            return
        self._looked = now
        try:
            state = self._cluster.state()
        except UsageError as error:
            raise ContactLost(f"{error}\nThe job was running on it.") from None
        if state.ready:
            self._away_since = None
            return
        self._away_since = self._away_since or now
        if now - max(self._away_since, self._still_since) > self._seconds:
            raise resources_never_came(self._cluster, self._seconds)


def wait_until_ready(
    cluster: Cluster,
    seconds: float,
    tell: Callable[[ClusterState], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> ClusterState:
    """Waits for the head and every worker. Raises DeadlinePassed with the diagnosis."""
    started = clock()
    while True:
        state = cluster.state()
        if state.ready:
            return state
        if clock() - started > seconds:
            raise resources_never_came(cluster, seconds)
        tell(state)
        sleep(3.0)


def resources_never_came(cluster: Cluster, seconds: float) -> ResourcesNeverCame:
    return ResourcesNeverCame(f"The resources did not come within {seconds:.0f} s.\n{cluster.diagnosis()}")


def head_was_replaced(submission_id: str, come_back: str) -> ContactLost:
    return ContactLost(
        f"Ray no longer knows the job {submission_id}: the head was replaced or started anew, and the job ended with "
        "it. Its checkpoints are in the run folder: the same `finetune submit` again goes on from the newest complete "
        f"one. State: {come_back}"
    )


class TerminalView:
    """The loop's events and its progress; the other lines of the log on request."""

    def __init__(self, console: Console, show_log: bool = False) -> None:
        self._console, self._show_log = console, show_log
        self._progress = ProgressLine(console)
        self._status = ""

    def __enter__(self) -> TerminalView:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, traceback)

    def line(self, line: Line) -> None:
        if line.event is not None:
            self._progress.event(line.event)
        elif self._show_log and line.text.strip():
            who = f"({line.actor} {line.ip or ''} {line.pid}) " if line.pid is not None else ""
            self._console.print(Text(who + line.text, style="dim"))

    def status(self, status: str) -> None:
        if status != self._status:
            self._status = status
            self._progress.note(f"job {status.lower()}")

    def nodes(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        for node in nodes:
            if node.get("gpus"):
                self._progress.note(describe_node(node))


def describe_node(node: Mapping[str, Any]) -> str:
    """Utilization and memory of the GPUs of a node, as Ray reports them (memory in MiB)."""
    gpus = [
        f"{gpu.get('utilizationGpu')} % "
        f"{(gpu.get('memoryUsed') or 0) / 1024:.1f}/{(gpu.get('memoryTotal') or 0) / 1024:.0f} GiB"
        for gpu in node["gpus"]
    ]
    memory = node.get("memory") or []
    ram = f" · memory {memory[2]} %" if len(memory) > 2 else ""
    return f"{node.get('host')}: GPU " + ", ".join(gpus) + ram


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
