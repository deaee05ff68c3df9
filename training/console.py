"""What the command line shows: a progress line, tables, errors, or one JSON object on standard output."""

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
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from training.errors import ExitStatus, FinetuneError
from training.job import JobSpec
from training.planning import Hardware, Prediction
from training.report import text

_BAR_WIDTH = 24
_NARROW = 100
"""Columns of a terminal below which the bar gives way to the figures."""


class Output:
    """The streams of a command: its result goes to standard output, everything else to standard error.

    With `json_mode`, standard output carries one JSON object, the one given to `result` (or `error`): what
    libraries and child processes write there inside the `with` block lands on standard error.
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
        """The result of the command: the object with --json, else `view` (without one, the object)."""
        assert not self._has_result, "a command has one result"
        self._has_result = True
        if self.json_mode:
            self._write_object(value)
        elif view is not None:
            # Text has commands to copy: no line is broken.
            Console(highlight=False).print(view, soft_wrap=isinstance(view, (str, Text)), markup=False)
        else:
            Console(highlight=False, soft_wrap=True).print(to_json(value, indent=2), markup=False)

    def note(self, message: str) -> None:
        """A line for people, on standard error."""
        self.log.print(message, markup=False)

    def error(self, error: FinetuneError) -> ExitStatus:
        """Shows an error and returns its exit status. With --json it is the result where there is none yet."""
        self.log.print(Text.assemble(("error: ", "bold red"), str(error)))
        status = error.status
        if self.json_mode and not self._has_result:
            self.result({"status": status.name.lower(), "exit_status": int(status), "reason": str(error)})
        return status

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
    """Valid JSON: NaN and infinity, which JSON cannot say, become null; models and paths plain values."""
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

    On a terminal the line is drawn in place, without the figures that do not fit its width. Elsewhere, and
    with NO_COLOR, plain lines are printed: the first, the last, each new held-out loss, and otherwise one
    every `seconds_between` seconds.
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
        if plain is None:
            plain = not console.is_terminal or bool(os.environ.get("NO_COLOR"))
        self.plain = plain
        self._seconds_between = seconds_between
        self._clock = clock
        self._printed_at: float | None = None
        self._eval_loss: float | None = None
        self._last_line = ""
        self._printed_line = ""
        self._progress = Progress(
            TextColumn("{task.fields[step]}"),
            *([BarColumn(bar_width=_BAR_WIDTH)] if console.width >= _NARROW else []),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        self._task = self._progress.add_task("", total=None, step="starting", figures="")

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
        reward_accuracy: float | None = None,
        tokens_per_second: float | None = None,
        seconds_left: float | None = None,
        memory_gib: float | None = None,
    ) -> None:
        """Shows a step. A held-out loss stays on the line until the next one."""
        evaluated = eval_loss is not None and eval_loss != self._eval_loss
        self._eval_loss = eval_loss if evaluated else self._eval_loss
        figures = {
            "loss": f"loss {text.loss(loss)}" if loss is not None else "",
            "held-out": f"held-out {text.loss(self._eval_loss)}" if self._eval_loss is not None else "",
            "pairs": f"{text.percent(reward_accuracy, 0)} in order" if reward_accuracy is not None else "",
            "speed": f"{text.compact(tokens_per_second)} tokens/s" if tokens_per_second is not None else "",
            "memory": f"{text.compact(memory_gib)} GiB" if memory_gib is not None else "",
            "left": f"{text.clock(seconds_left)} left" if seconds_left is not None else "",
        }
        place = f"step {step:>{len(str(steps))}}/{steps}"
        if self.plain:
            self._print_plain(f"{place}  {_joined(figures)}", now=evaluated or step >= steps)
            return
        room = self.console.width - len(place) - (_BAR_WIDTH + 2 if self.console.width >= _NARROW else 1)
        for name in ("memory", "speed", "pairs", "held-out", "loss"):
            if len(_joined(figures)) > room:
                figures[name] = ""
        self._progress.update(self._task, total=steps, completed=step, step=place, figures=_joined(figures))

    def _print_plain(self, line: str, *, now: bool) -> None:
        self._last_line = line
        clock = self._clock()
        due = self._printed_at is None or clock - self._printed_at >= self._seconds_between
        if (now or due) and line != self._printed_line:
            self._printed_at, self._printed_line = clock, line
            self.console.print(line, markup=False)

    def event(self, event: Mapping[str, Any]) -> None:
        """Shows an event of the training loop: progress on the line, all others as a line above it."""
        if event.get("event") == "progress":
            self.update(
                step=event["step"],
                steps=event["steps"],
                loss=event.get("loss"),
                eval_loss=event.get("eval_loss"),
                reward_accuracy=event.get("reward_accuracy"),
                tokens_per_second=event.get("tokens_per_second"),
                seconds_left=event.get("seconds_left"),
                memory_gib=event.get("memory_gib"),
            )
        elif (words := describe(event)) is not None:
            self.note(words)

    def note(self, message: str) -> None:
        """A line above the progress: an attempt, a checkpoint, a failure."""
        self.console.print(message, markup=False)


def _joined(figures: Mapping[str, str]) -> str:
    return "  ".join(figure for figure in figures.values() if figure)


def describe(event: Mapping[str, Any]) -> str | None:
    """An event of the training loop in words; None for one that the summary tells."""
    match event.get("event"):
        case "attempt":
            came_from = event.get("resumed_from")
            where = f"resumes from checkpoint {came_from}" if came_from else "starts"
            nodes = event.get("nodes")
            on = f" on {nodes} nodes" if isinstance(nodes, int) and nodes > 1 else ""
            return f"training {where}: {event.get('world_size')} ranks{on}, {event.get('steps')} steps"
        case "evaluation":
            loss = event.get("eval_loss")
            line = f"step {event.get('step')}: held-out loss {text.loss(loss)}"
            in_order = event.get("eval_reward_accuracy")
            if in_order is not None:
                return f"{line}, {text.percent(in_order)} of its pairs in order"
            return f"{line}, perplexity {text.compact(text.perplexity(loss))}"
        case "checkpoint":
            size, seconds = text.size(event.get("bytes")), text.duration(event.get("seconds"))
            return f"checkpoint {event.get('name')}: {size} in {seconds}"
        case "tracking":
            return f"{event.get('tracker')}: run {event.get('url') or event.get('run_id')}"
        case "warning":
            return f"warning: {event.get('text')}"
        case "stopping":
            return "stopping after this step and a checkpoint; Ctrl-C again ends at once"
        case "loss_spike":
            return f"loss spike ({event.get('policy')}): {event.get('what')}"
        case "non_finite":
            return f"not finite: {event.get('what')}"
        case "hang":
            return f"hang: {event.get('message')}"
        case "failure":
            return f"rank {event.get('rank')} on {event.get('host')} failed: {event.get('error')}"
        case "excluded":
            why = "; ".join(dict.fromkeys(event.get("reasons") or ()))
            return f"{event.get('host')} is left out from now on (Ray node {event.get('node_id')}): {why}"
        case "samples" | "end":
            return None
        case kind:
            return f"{kind}: " + ", ".join(f"{key} {value}" for key, value in event.items() if key != "event")


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
        ("pairs in order", _pairs_in_order(summary.get("measures") or {})),
        ("perplexity", text.compact(number("eval_perplexity"))),
        ("speed", _speed(summary)),
        ("steps", _pair(text.count(number("steps")), f"{text.compact(number('tokens'))} tokens")),
        ("wall time", text.duration(number("wall_seconds"))),
        ("peak memory", f"{text.compact(number('peak_memory_gib'))} GiB on rank 0"),
        ("restarts", _restarts(summary)),
        ("ranks", _ranks(summary)),
        ("transport", _transport(summary)),
        ("price", text.usd(number("cost_usd")) if number("cost_usd") is not None else None),
        ("checkpoint", str(summary["checkpoint"]) if summary.get("checkpoint") else None),
        ("exported", _exported(summary)),
        ("left out", _excluded(summary)),
        ("error", _error(summary)),
    ]
    return [(name, value) for name, value in rows if value is not None and not value.startswith(text.NONE)]


def _pairs_in_order(measures: Mapping[str, float]) -> str | None:
    shares = [
        ("training", measures.get("reward_accuracy")),
        ("held out", measures.get("eval_reward_accuracy")),
    ]
    return ", ".join(f"{text.percent(share)} {where}" for where, share in shares if share is not None) or None


def _from_to(first: float | None, last: float | None) -> str | None:
    if last is None:
        return None
    if first is None:
        return text.loss(last)
    difference = text.change(first, last)
    return f"{text.loss(first)} → {text.loss(last)}" + (f"  ({difference})" if difference else "")


def _exported(summary: Mapping[str, Any]) -> str | None:
    """Which weights left the job, where they are not simply the last ones."""
    exported = summary.get("exported")
    if not isinstance(exported, Mapping):
        return None
    known = cast("Mapping[str, Any]", exported)
    if known.get("checkpoint") in (None, summary.get("checkpoint")):
        return None
    return f"{known['checkpoint']}, the best one: held-out loss {text.loss(known.get('eval_loss'))}"


def _excluded(summary: Mapping[str, Any]) -> str | None:
    nodes = cast("list[dict[str, Any]]", summary.get("excluded_nodes") or [])
    return "; ".join(f"{one['host']}: {' / '.join(dict.fromkeys(one['reasons']))}" for one in nodes) or None


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
    if known.get("kind") == "hang":  # its message says where
        return str(known.get("message"))
    where = f"rank {known['rank']}" if known.get("rank") is not None else ""
    if known.get("host"):
        where = f"{where} ({known['host']})".strip()
    return f"{where}: {known.get('message')}" if where else str(known.get("message"))


def cost_table(cost: Mapping[str, Any]) -> Table:
    """The result of `finetune cost`: the lines, dearest first, their sums, and what bills by use."""
    table = Table(
        title=f"Prices of {cost['region']}, {cost['table_date']}",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 3, 0, 0),
        caption=Text("Besides, by use: " + "; ".join(cost["by_use"])) if cost.get("by_use") else None,
        caption_justify="left",
    )
    table.add_column("resource", overflow="fold")
    for name in ("quantity", "USD each", "USD per hour"):
        table.add_column(name, justify="right", no_wrap=True)
    lines = cast("list[dict[str, Any]]", cost["lines"])
    for line in sorted(lines, key=lambda line: -float(line["hourly_usd"])):
        table.add_row(
            Text(str(line["name"])),
            f"{line['quantity']:,}",
            f"{line['unit_usd']:.6f}".rstrip("0"),
            f"{line['hourly_usd']:.4f}",
        )
    hourly = float(cost["hourly_usd"])
    table.add_section()
    table.add_row("per hour", "", "", Text(f"{hourly:.2f}", style="bold"))
    table.add_row("per day", "", "", f"{24 * hourly:,.2f}")
    table.add_row("per month of 730 hours", "", "", f"{730 * hourly:,.2f}")
    return table


def _trained_text(prediction: Prediction) -> str:
    trained, parameters = prediction.trainable_parameters, prediction.parameters
    if trained == parameters:
        return f"all {parameters:,} parameters"
    return f"{trained:,} of {parameters:,} parameters ({100 * trained / parameters:.2g} %)"


def plan_tables(job: JobSpec, hardware: Hardware, prediction: Prediction) -> RenderableType:
    """What a job will need and take, part by part."""
    memory = Table(title=f"memory of each {hardware.gpu_name}", title_justify="left")
    memory.add_column("part")
    memory.add_column("GiB", justify="right")
    for name, value in prediction.memory_parts.items():
        memory.add_row(name, f"{value:.2f}")
    memory.add_section()
    memory.add_row("total", f"{prediction.memory_gib:.2f}")
    memory.add_row("the GPU has", f"{prediction.gpu_memory_gib:.2f}")
    time_table = Table(title="an optimizer step", title_justify="left")
    time_table.add_column("part")
    time_table.add_column("seconds", justify="right")
    for name, value in prediction.step_parts.items():
        time_table.add_row(name.replace("_", " "), f"{value:.3f}")
    time_table.add_section()
    time_table.add_row("the step, with what overlaps", f"{prediction.step_seconds:.3f}")
    total = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    nodes = f"{hardware.num_nodes} x {hardware.gpus_per_node} {hardware.gpu_name}"
    tokens = hardware.world_size * job.batch.tokens_per_gpu
    for key, value in (
        ("runs on", f"{nodes}, {tokens:,} tokens a step"),
        ("trains", _trained_text(prediction)),
        ("layout", prediction.sharding.reason),
        ("limited by", prediction.limited_by),
        ("speed", f"{prediction.tokens_per_second:,.0f} tokens/s"),
        (
            "time",
            "not known: the job counts epochs; give --steps"
            if prediction.hours is None
            else f"{prediction.hours:.2f} h for {prediction.steps:,} steps",
        ),
        ("price", "not known" if prediction.cost_usd is None else f"{prediction.cost_usd:.2f} USD"),
        (
            "fits",
            "yes"
            if prediction.fits
            else "NO: lower batch.tokens_per_gpu, raise batch.accumulation, or take larger GPUs",
        ),
    ):
        total.add_row(key, value)
    return Group(memory, time_table, total)
