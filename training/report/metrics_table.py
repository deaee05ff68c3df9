"""metrics.jsonl as columns over steps, across restarts."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

STEP_PARTS = ("data", "forward", "backward", "optimizer", "evaluation", "checkpoint")


@dataclass(frozen=True)
class Restart:
    """A later attempt takes over at `step`, and does `repeated` steps of the earlier one again."""

    attempt: str
    step: int
    repeated: int


@dataclass(frozen=True)
class MetricsTable:
    """One row a step, ascending, of the trajectory that stands; NaN where a step has no value.

    `columns` holds loss, learning_rate, `seconds.data`, `memory.peak_gib` and so on. `discarded` are the
    steps and losses that a restart threw away. `problems` says, in sentences, which lines could not be read.
    """

    steps: Floats
    columns: Mapping[str, Floats]
    restarts: tuple[Restart, ...] = ()
    discarded: tuple[tuple[int, float], ...] = ()
    problems: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def column(self, name: str) -> Floats:
        """The values of one column, all NaN where no line had it."""
        return self.columns.get(name, np.full(len(self.steps), np.nan))

    def has(self, name: str) -> bool:
        return name in self.columns and bool(np.isfinite(self.columns[name]).any())

    def points(self, name: str) -> tuple[Floats, Floats]:
        """Steps and values where the column has a finite value."""
        values = self.column(name)
        there = np.isfinite(values)
        return self.steps[there], values[there]

    def first(self, name: str) -> float | None:
        values = self.points(name)[1]
        return float(values[0]) if len(values) else None

    def last(self, name: str) -> float | None:
        values = self.points(name)[1]
        return float(values[-1]) if len(values) else None

    def steps_without_loss(self) -> Floats:
        """Training steps (they have a learning rate) without a finite loss."""
        trained = np.isfinite(self.column("learning_rate"))
        return self.steps[trained & ~np.isfinite(self.column("loss"))]

    def seconds(self) -> Floats:
        """Seconds of each step, all parts together; NaN where no part was measured."""
        parts = [column for name, column in self.columns.items() if name.startswith("seconds.")]
        if not parts:
            return np.full(len(self.steps), np.nan)
        stacked = np.vstack(parts)
        return np.where(np.isnan(stacked).all(axis=0), np.nan, np.nansum(stacked, axis=0))

    def training_seconds(self) -> Floats:
        """Seconds of each training step, without evaluation and checkpoint."""
        around = (np.nan_to_num(self.column(f"seconds.{part}")) for part in ("evaluation", "checkpoint"))
        return self.seconds() - sum(around, np.zeros(len(self.steps)))


def read_metrics(lines: Iterable[str]) -> MetricsTable:
    """Reads the lines of metrics.jsonl in the order they were written.

    The first loss of a later attempt replaces what earlier ones said of its step and all later steps. Lines
    that are not JSON objects with a step (a run killed while writing leaves half a line) are left out.
    """
    rows = _Rows()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            rows.unreadable.append(number)
            continue
        step = cast("dict[str, Any]", record).get("step") if isinstance(record, dict) else None
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**53:
            rows.unreadable.append(number)
            continue
        rows.add(step, cast("dict[str, Any]", record))
    return rows.table()


@dataclass
class _Rows:
    row_of_step: dict[int, int] = field(default_factory=dict[int, int])  # in order of writing
    columns: dict[str, array[float]] = field(default_factory=dict[str, "array[float]"])
    num_rows: int = 0
    attempt: str | None = None
    resumes: bool = False
    restarts: list[Restart] = field(default_factory=list[Restart])
    discarded: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    unreadable: list[int] = field(default_factory=list[int])

    def add(self, step: int, record: Mapping[str, Any]) -> None:
        attempt = str(record.get("attempt", ""))
        self.resumes = self.resumes or (self.attempt is not None and attempt != self.attempt)
        self.attempt = attempt
        if self.resumes and record.get("loss") is not None:
            repeated = self._discard_from(step)
            self.restarts.append(Restart(attempt, step, repeated))
            self.resumes = False
        row = self.row_of_step.get(step)
        if row is None:
            row = self.row_of_step[step] = self.num_rows
            self.num_rows += 1
        # Step 0 is the evaluation before any update: it has no speed and no learning rate yet.
        before_training = ("memory", "time")
        wanted = (
            record
            if step
            else {key: record[key] for key in record if key.startswith("eval_") or key in before_training}
        )
        for name, value in _numbers(wanted):
            column = self.columns.setdefault(name, array("d"))
            if len(column) <= row:
                column.extend([math.nan] * (row + 1 - len(column)))
            column[row] = value

    def _discard_from(self, step: int) -> int:
        losses = self.columns.get("loss", array("d"))
        gone = [other for other in self.row_of_step if other >= step]
        repeated = 0
        for other in sorted(gone):
            row = self.row_of_step.pop(other)
            if row < len(losses) and not math.isnan(losses[row]):
                self.discarded.append((other, losses[row]))
                repeated += 1
        return repeated

    def table(self) -> MetricsTable:
        steps = sorted(self.row_of_step)
        order = np.array([self.row_of_step[step] for step in steps], dtype=np.int64)
        columns: dict[str, Floats] = {}
        for name, values in self.columns.items():
            padded = np.full(self.num_rows, np.nan)
            padded[: len(values)] = np.frombuffer(values, dtype=np.float64)
            columns[name] = padded[order] if len(order) else np.empty(0)
        return MetricsTable(
            steps=np.array(steps, dtype=np.float64),
            columns=columns,
            restarts=tuple(self.restarts),
            discarded=tuple(self.discarded),
            problems=tuple(self._problems()),
        )

    def _problems(self) -> Iterator[str]:
        if self.unreadable:
            shown = ", ".join(str(number) for number in self.unreadable[:5])
            more = " and more" if len(self.unreadable) > 5 else ""
            count = len(self.unreadable)
            yield (
                f"metrics.jsonl: {count:,} line{'s' if count > 1 else ''} could not be read as a JSON object "
                f"with a step and {'are' if count > 1 else 'is'} left out (line {shown}{more})"
            )


_LARGEST = 1e30
_SMALLEST = 1e-30
"""Beyond these, no figure of a run means anything, and the arithmetic of an axis could overflow."""


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, dict) and not prefix:
            yield from _numbers(cast("dict[str, Any]", value), f"{key}.")
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        elif key not in ("step", "attempt"):
            yield prefix + key, _in_range(value)


def _in_range(value: float) -> float:
    if abs(value) > _LARGEST:
        return math.inf
    return 0.0 if abs(value) < _SMALLEST else float(value)


@dataclass(frozen=True)
class Buckets:
    """Equal spans of steps for a chart that has fewer columns than steps: `size` rows each."""

    steps: Floats
    size: int

    @property
    def first(self) -> Floats:
        return self.steps[:: self.size]

    @property
    def last(self) -> Floats:
        ends = np.minimum(np.arange(self.size, len(self.steps) + self.size, self.size), len(self.steps)) - 1
        return self.steps[ends]

    @property
    def centre(self) -> Floats:
        return (self.first + self.last) / 2

    def envelope(self, values: Floats) -> tuple[Floats, Floats, Floats]:
        """Lowest, mean and highest finite value of each span; NaN where it has none."""
        if self.size == 1:
            finite = np.where(np.isfinite(values), values, np.nan)
            return finite, finite, finite
        padded = np.full(len(self.first) * self.size, np.nan)
        padded[: len(values)] = np.where(np.isfinite(values), values, np.nan)
        spans = padded.reshape(-1, self.size)
        there = np.isfinite(spans)
        empty = ~there.any(axis=1)
        low = np.where(there, spans, np.inf).min(axis=1)
        high = np.where(there, spans, -np.inf).max(axis=1)
        mean = np.where(there, spans, 0.0).sum(axis=1) / np.maximum(there.sum(axis=1), 1)
        return tuple(np.where(empty, np.nan, side) for side in (low, mean, high))  # pyright: ignore[reportReturnType]

    def mean(self, values: Floats) -> Floats:
        return self.envelope(values)[1]


def make_buckets(steps: Floats, max_columns: int) -> Buckets:
    """At most `max_columns` spans over the rows; one row each where they fit."""
    return Buckets(steps, max(1, math.ceil(len(steps) / max_columns)))
