"""What the command line shows: a progress line, tables, errors; with --json one JSON object and nothing else on stdout."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TextIO, cast

from pydantic import BaseModel
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from training.errors import ExitStatus, FinetuneError
from training.report import text

_NARROW = 100
"""Columns of a terminal below which the bar gives way to the figures."""


class Output:
    """The streams of a command: its result goes to standard output, everything else to standard error.

    With `json_mode`, standard output carries exactly one JSON object, the one given to `result` (or to `error`).
    Inside the `with` block, whatever libraries and child processes write to standard output lands on standard error.
    """

    def __init__(self, *, json_mode: bool = False) -> None:
        self.json_mode = json_mode
        self.log = Console(stderr=True, highlight=False, soft_wrap=True)
        self._has_result = False
        self._stdout: TextIO | None = None
        self._saved_descriptor: int | None = None

    def __enter__(self) -> Self:
        if self.json_mode:
            self._stdout = sys.stdout
            if _is_descriptor_1(sys.stdout):
                sys.stdout.flush()
                self._saved_descriptor = os.dup(1)
                os.dup2(2, 1)
            sys.stdout = sys.stderr
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stdout is not None:
            sys.stdout = self._stdout
            self._stdout = None
        if self._saved_descriptor is not None:
            os.dup2(self._saved_descriptor, 1)
            os.close(self._saved_descriptor)
            self._saved_descriptor = None

    def result(self, value: Mapping[str, Any] | BaseModel, view: RenderableType | None = None) -> None:
        """The result of the command: the object with --json, `view` for people (the object, indented, without one)."""
        assert not self._has_result, "a command has one result"
        self._has_result = True
        if self.json_mode:
            self._write_object(value)
        elif view is not None:
            Console(highlight=False).print(view)
        else:
            Console(highlight=False, soft_wrap=True).print(to_json(value, indent=2), markup=False)

    def note(self, message: str) -> None:
        """A line for people, on standard error."""
        self.log.print(message, markup=False)

    def error(self, error: FinetuneError) -> ExitStatus:
        """Shows an error and returns the exit status it stands for. With --json it is the object, unless there was a result."""
        self.log.print(Text.assemble(("error: ", "bold red"), str(error)))
        if self.json_mode and not self._has_result:
            self._has_result = True
            self._write_object(
                {"error": str(error), "kind": type(error).__name__, "exit_status": int(error.status)}
            )
        return error.status

    def warning(self, message: str) -> None:
        self.log.print(Text.assemble(("warning: ", "bold yellow"), message))

    def progress(self) -> ProgressLine:
        """A progress line on standard error."""
        return ProgressLine(self.log)

    def _write_object(self, value: Mapping[str, Any] | BaseModel) -> None:
        line = to_json(value) + "\n"
        if self._saved_descriptor is not None:
            with os.fdopen(os.dup(self._saved_descriptor), "w", encoding="utf-8") as stream:
                stream.write(line)
        else:
            stream = self._stdout or sys.stdout
            stream.write(line)
            stream.flush()


def _is_descriptor_1(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (OSError, ValueError):  # a stream in memory has no descriptor
        return False


def to_json(value: Mapping[str, Any] | BaseModel, indent: int | None = None) -> str:
    """Valid JSON: what JSON cannot say (NaN, infinity) becomes null; models, paths and enums become plain values."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


class ProgressLine:
    """The state of a run in one line: step, loss, held-out loss, speed, time left.

    On a terminal the line is drawn in place. Elsewhere, and with NO_COLOR, plain lines are printed: the first, the
    last, each new held-out loss, and otherwise one every `seconds_between` seconds.
    """

    def __init__(
        self,
        console: Console,
        *,
        plain: bool | None = None,
        seconds_between: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self.plain = (
            plain if plain is not None else not console.is_terminal or bool(os.environ.get("NO_COLOR"))
        )
        self._seconds_between = seconds_between
        self._clock = clock
        self._printed_at: float | None = None
        self._eval_loss: float | None = None
        self._last_line = ""
        self._printed_line = ""
        self._progress = Progress(
            TextColumn("{task.fields[step]}"),
            *([BarColumn(bar_width=24)] if console.width >= _NARROW else []),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        self._task = self._progress.add_task("", step="starting", figures="")

    def __enter__(self) -> Self:
        if not self.plain:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.plain:
            self._progress.stop()
        elif self._last_line != self._printed_line:
            self.console.print(self._last_line, markup=False)

    def update(
        self,
        *,
        step: int,
        steps: int,
        loss: float | None = None,
        eval_loss: float | None = None,
        tokens_per_second: float | None = None,
        seconds_left: float | None = None,
        memory_gib: float | None = None,
    ) -> None:
        """Shows a step. A held-out loss stays on the line until the next one."""
        evaluated = eval_loss is not None
        self._eval_loss = eval_loss if evaluated else self._eval_loss
        figures = "  ".join(
            filter(
                None,
                (
                    f"loss {text.loss(loss)}" if loss is not None else "",
                    f"held-out {text.loss(self._eval_loss)}" if self._eval_loss is not None else "",
                    f"{text.compact(tokens_per_second)} tokens/s" if tokens_per_second is not None else "",
                    f"{text.compact(memory_gib)} GiB" if memory_gib is not None else "",
                    f"{text.clock(seconds_left)} left" if seconds_left is not None else "",
                ),
            )
        )
        place = f"step {step:>{len(str(steps))}}/{steps}"
        if not self.plain:
            self._progress.update(self._task, total=steps, completed=step, step=place, figures=figures)
            return
        self._last_line = f"{place}  {figures}"
        now = self._clock()
        if (
            evaluated
            or step >= steps
            or self._printed_at is None
            or now - self._printed_at >= self._seconds_between
        ) and self._last_line != self._printed_line:
            self._printed_at, self._printed_line = now, self._last_line
            self.console.print(self._last_line, markup=False)

    def note(self, message: str) -> None:
        """A line above the progress: an attempt, a checkpoint, a failure."""
        self.console.print(message, markup=False)


_STATUS_STYLES = {"succeeded": "bold green", "stopped": "bold yellow"}


def summary_table(summary: Mapping[str, Any], report: str | None = None) -> Table:
    """A run's summary.json as a table, with the place of its report."""
    status = str(summary.get("status") or "unknown").lower()
    table = Table(
        title=Text.assemble(
            str(summary.get("name") or "run"), " ", (status, _STATUS_STYLES.get(status, "bold red"))
        ),
        title_justify="left",
        title_style="bold",
        show_header=False,
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _summary_rows(summary):
        table.add_row(name, Text(value))
    if report is not None:
        table.add_row("report", Text(report, style="bold"))
    return table


def _summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    number = summary.get
    rows: list[tuple[str, str | None]] = [
        ("loss", _from_to(number("first_loss"), number("last_loss"))),
        ("held-out loss", _from_to(number("first_eval_loss"), number("eval_loss"))),
        ("speed", _speed(summary)),
        ("steps", _pair(text.count(number("steps")), f"{text.compact(number('tokens'))} tokens")),
        ("wall time", text.duration(number("wall_seconds"))),
        ("peak memory", f"{text.compact(number('peak_memory_gib'))} GiB per rank"),
        ("restarts", _restarts(summary)),
        ("ranks", _ranks(summary)),
        ("transport", _transport(summary)),
        ("price", text.usd(number("cost_usd")) if number("cost_usd") is not None else None),
        ("checkpoint", str(summary["checkpoint"]) if summary.get("checkpoint") else None),
        ("error", _error(summary)),
    ]
    return [(name, value) for name, value in rows if value is not None and not value.startswith(text.NONE)]


def _from_to(first: float | None, last: float | None) -> str | None:
    if last is None:
        return None
    if first is None:
        return text.loss(last)
    difference = text.change(first, last)
    return f"{text.loss(first)} → {text.loss(last)}" + (f"  ({difference})" if difference else "")


def _speed(summary: Mapping[str, Any]) -> str | None:
    total, per_rank, mfu = (
        summary.get(key) for key in ("tokens_per_second", "tokens_per_second_per_gpu", "mfu")
    )
    if total is None:
        return None
    pieces = [f"{text.compact(total)} tokens/s"]
    if per_rank is not None and per_rank != total:
        pieces.append(f"{text.compact(per_rank)} per rank")
    if isinstance(mfu, (int, float)):
        pieces.append(f"{text.percent(mfu)} of the peak FLOP/s")
    return ", ".join(pieces)


def _pair(first: str, second: str) -> str:
    return first if second.startswith(text.NONE) else f"{first}, {second}"


def _restarts(summary: Mapping[str, Any]) -> str | None:
    restarts = summary.get("restarts")
    if restarts is None:
        return None
    resumed = summary.get("resumed_from")
    return f"{restarts}" + (f", resumed from {resumed}" if resumed else "")


def _ranks(summary: Mapping[str, Any]) -> str | None:
    if summary.get("world_size") is None:
        return None
    nodes = summary.get("nodes")
    place = f"{summary['world_size']}" + (
        f" on {nodes} node{'' if nodes == 1 else 's'}" if nodes is not None else ""
    )
    return f"{place}, {summary['device']}" if summary.get("device") else place


def _transport(summary: Mapping[str, Any]) -> str | None:
    transport = summary.get("transport")
    if not isinstance(transport, Mapping) or not transport.get("verdict"):
        return None
    known = cast("Mapping[str, Any]", transport)
    return f"{known['verdict']}: {known['reason']}" if known.get("reason") else str(known["verdict"])


def _error(summary: Mapping[str, Any]) -> str | None:
    error = summary.get("error")
    if not isinstance(error, Mapping):
        return str(error) if error else None
    known = cast("Mapping[str, Any]", error)
    where = f"rank {known['rank']}" if known.get("rank") is not None else ""
    if known.get("host"):
        where = f"{where} ({known['host']})".strip()
    return f"{where}: {known.get('message')}" if where else str(known.get("message"))
