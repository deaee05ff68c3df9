"""The driver's log, line by line: who said it, the `@finetune {...}` events in it, and the first failure of a
rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from training.failures import is_consequence

EVENT_MARK = "@finetune "

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SOURCE = re.compile(r"\((?P<actor>[^()]*?) ?pid=(?P<pid>\d+)(?:, ip=(?P<ip>[^)\s]+))?\) ?")
_RANK = re.compile(r"\(ip=(?P<ip>[^,\s]+), pid=(?P<pid>\d+)\) world_rank=(?P<rank>\d+)")
_TRACEBACK = "Traceback (most recent call last):"
MAX_TRACEBACK_LINES = 80


@dataclass(frozen=True)
class Line:
    """One line of the log without colours and without Ray's prefix, which names the process."""

    text: str
    actor: str = ""
    pid: int | None = None
    ip: str | None = None
    event: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Failure:
    """The exception of one rank (None: of the driver), and where it ran."""

    text: str
    rank: int | None = None
    host: str | None = None

    def headline(self) -> str:
        who = "the driver" if self.rank is None else f"rank {self.rank}"
        return f"First failure: {who}" + (f" on {self.host}" if self.host else "")


@dataclass
class LogParser:
    """Cuts the log into lines as its bytes come, and remembers what is asked for at the end."""

    ranks: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    failures: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    tracebacks: list[tuple[Line, list[str]]] = field(default_factory=list[tuple[Line, list[str]]])
    progress: Mapping[str, Any] | None = None
    end: Mapping[str, Any] | None = None
    _rest: bytes = b""
    _open: dict[tuple[str, int | None, str | None], list[str]] = field(
        default_factory=dict[tuple[str, int | None, str | None], list[str]]
    )

    def feed(self, data: bytes) -> list[Line]:
        """The lines that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [self._line(line) for line in lines]

    def close(self) -> list[Line]:
        """What the log held after its last line end."""
        rest, self._rest = self._rest, b""
        return [self._line(rest)] if rest else []

    def _line(self, raw: bytes) -> Line:
        line = parse_line(raw.decode("utf-8", errors="replace"))
        self.learn(line)
        return line

    def learn(self, line: Line) -> None:
        """Remembers what a line says of ranks, progress and failures."""
        match = _RANK.search(line.text)
        if match is not None:
            self.ranks[match["ip"], int(match["pid"])] = int(match["rank"])
        if line.event is not None:
            self._note(line.event)
        else:
            self._trace(line)

    def _note(self, event: Mapping[str, Any]) -> None:
        match event.get("event"):
            case "progress":
                self.progress = event
            case "end":
                self.end = event
            case "failure":
                self.failures.append(event)
            case _:
                pass

    def _trace(self, line: Line) -> None:
        """Collects tracebacks; the lines of several processes come mixed."""
        source = (line.actor, line.pid, line.ip)
        if line.text.strip().endswith(_TRACEBACK):
            self._open[source] = [_TRACEBACK]
            self.tracebacks.append((line, self._open[source]))
        elif source in self._open:
            block = self._open[source]
            block.append(line.text)
            ends = bool(line.text) and not line.text[0].isspace()
            if ends or len(block) >= MAX_TRACEBACK_LINES:
                del self._open[source]

    def rank_of(self, line: Line) -> int | None:
        """The rank that said a line, where the log tells."""
        if line.pid is None:
            return None
        if line.ip is not None:
            return self.ranks.get((line.ip, line.pid))
        on_head = [rank for (_, pid), rank in self.ranks.items() if pid == line.pid]
        return on_head[0] if len(on_head) == 1 else None

    def first_failure(self) -> Failure | None:
        """The failure that came first; one that only reports another rank's end comes after the others."""
        if self.failures:
            return _failure_of_event(min(enumerate(self.failures), key=_order_of_event)[1])
        blocks = [(line, "\n".join(block)) for line, block in self.tracebacks]
        if not blocks:
            return None
        line, text = min(enumerate(blocks), key=lambda item: (_consequence(item[1][1]), item[0]))[1]
        return Failure(text, rank=self.rank_of(line), host=line.ip)


def _order_of_event(item: tuple[int, Mapping[str, Any]]) -> tuple[bool, float, int]:
    index, event = item
    time = event.get("time")
    return (
        _consequence(str(event.get("error", ""))),
        float(time) if isinstance(time, int | float) else 0.0,
        index,
    )


def _consequence(text: str) -> bool:
    last = text.strip().splitlines()[-1] if text.strip() else ""
    return is_consequence(last)


def _failure_of_event(event: Mapping[str, Any]) -> Failure:
    rank = event.get("rank")
    text = str(event.get("traceback") or event.get("error") or "no message")
    return Failure(text.strip(), rank=rank if isinstance(rank, int) else None, host=event.get("host"))


def parse_line(raw: str) -> Line:
    """One line: colours off, Ray's `(RayTrainWorker pid=.., ip=..) ` read, an event decoded. A line whose
    event is damaged is plain text."""
    text = _ANSI.sub("", raw).rstrip("\r")
    source = _SOURCE.match(text)
    actor, pid, ip = "", None, None
    if source is not None:
        actor, pid, ip = source["actor"], int(source["pid"]), source["ip"]
        text = text[source.end() :]
    return Line(text, actor, pid, ip, _event(text))


def _event(text: str) -> Mapping[str, Any] | None:
    _, mark, body = text.partition(EVENT_MARK)
    if not mark:
        return None
    try:
        event = json.loads(body)
    except ValueError:
        return None
    if not isinstance(event, dict) or "event" not in event:
        return None
    return cast("dict[str, Any]", event)


def lines_of_rank(lines: Iterable[Line], parser: LogParser, rank: int) -> list[str]:
    """The text that one rank printed, over all attempts. `parser` has read the same lines."""
    return [line.text for line in lines if line.event is None and parser.rank_of(line) == rank]
