"""Charts as inline SVG that needs no script: geometry here, markup in templates/chart.html.

A plot is as wide as the page allows: paths live in a 1000 x HEIGHT box that is stretched, ticks and marks
stand at percentages, so that text keeps its size on a phone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from training.report import text
from training.report.metrics_table import Buckets, Floats, MetricsTable, make_buckets
from training.report.scale import Scale, Tick, fit, fit_steps

MAX_COLUMNS = 500
"""Columns of a chart. The widest plot is about 1,000 CSS pixels: closer columns would hide one another."""

BOX_WIDTH = 1000


@dataclass(frozen=True)
class Curve:
    """A line over the steps, with the band of its extremes where several steps share a column."""

    name: str
    tone: str
    path: str
    band: str = ""
    dots: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Area:
    """One layer of a stack."""

    name: str
    tone: str
    path: str


@dataclass(frozen=True)
class Reference:
    """A horizontal line at a known value (a prediction, a limit)."""

    name: str
    y: str


@dataclass(frozen=True)
class Mark:
    """Something that happened between two steps."""

    kind: str
    x: str
    label: str


@dataclass(frozen=True)
class ReadoutRow:
    """What the pointer reads of one curve, one text a column ('' for nothing)."""

    name: str
    tone: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Chart:
    """All that the template needs to draw one chart."""

    key: str
    title: str
    unit: str
    height: int
    description: str
    headline: str = ""
    wide: bool = False
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    curves: tuple[Curve, ...] = ()
    areas: tuple[Area, ...] = ()
    references: tuple[Reference, ...] = ()
    marks: tuple[Mark, ...] = ()
    notes: tuple[str, ...] = ()
    readout_places: tuple[float, ...] = ()
    readout_labels: tuple[str, ...] = ()
    readout_rows: tuple[ReadoutRow, ...] = ()

    @property
    def readout(self) -> dict[str, object]:
        """For the script that follows the pointer."""
        return {
            "places": list(self.readout_places),
            "labels": list(self.readout_labels),
            "rows": [
                {"name": row.name, "tone": row.tone, "values": list(row.values)} for row in self.readout_rows
            ],
        }


@dataclass(frozen=True)
class Canvas:
    """What all charts of a run share: the axis of steps, the columns, and what happened on the way."""

    metrics: MetricsTable
    checkpoints: tuple[int, ...] = ()
    steps: Scale = field(init=False)
    buckets: Buckets = field(init=False)

    def __post_init__(self) -> None:
        everything = [*self.metrics.steps, *(step for step, _ in self.metrics.discarded)]
        object.__setattr__(self, "steps", fit_steps(np.array(everything, dtype=np.float64)))
        object.__setattr__(self, "buckets", make_buckets(self.metrics.steps, MAX_COLUMNS))

    def x_ticks(self) -> tuple[Tick, ...]:
        return tuple(self.steps.ticks(6, whole=True))

    def marks(self, *, loss: bool = False) -> tuple[Mark, ...]:
        """Restarts; for the chart of the loss also checkpoints and steps without a finite loss."""
        marks = [
            Mark(
                "restart",
                percent(self.steps.place(restart.step - 0.5)),
                f"restart before step {restart.step:,}",
            )
            for restart in self.metrics.restarts
        ]
        if loss:
            inside = [step for step in self.checkpoints if self.steps.low <= step <= self.steps.high]
            marks += [
                Mark("checkpoint", percent(self.steps.place(step)), f"checkpoint of step {step:,}")
                for step in inside
            ]
            marks += [
                Mark(
                    "not-finite", percent(self.steps.place(step)), f"step {step:,.0f}: the loss is not finite"
                )
                for step in self.metrics.steps_without_loss()[:100]
            ]
        return tuple(marks)

    def readout_places(self) -> tuple[float, ...]:
        return tuple(round(self.steps.place(step), 5) for step in self.buckets.centre)

    def readout_labels(self) -> tuple[str, ...]:
        pairs = zip(self.buckets.first, self.buckets.last, strict=True)
        return tuple(
            f"step {first:,.0f}" if first == last else f"steps {first:,.0f} to {last:,.0f}"
            for first, last in pairs
        )

    def columns_note(self) -> str:
        """What a column of the charts is, where it is more than a step."""
        size = self.buckets.size
        if size == 1:
            return ""
        return (
            f"Each column of the charts is {size:,} steps: a line is their mean, and the band around it runs "
            "from the lowest to the highest of them. metrics.jsonl has every step."
        )


@dataclass(frozen=True)
class Series:
    """A column of the metrics to draw. `sparse` ones have a value on few steps: drawn point by point."""

    column: str
    name: str
    tone: str
    sparse: bool = False


def line_chart(
    canvas: Canvas,
    series: Sequence[Series],
    *,
    key: str,
    title: str,
    unit: str,
    headline: str = "",
    height: int = 170,
    wide: bool = False,
    from_zero: bool = False,
    allow_log: bool = False,
    references: Sequence[tuple[str, float]] = (),
    is_loss: bool = False,
    notes: Iterable[str] = (),
    show: Callable[[float], str] = text.compact,
) -> Chart:
    """A chart of one or more columns over the steps. The caller makes sure that at least one has a value."""
    metrics = canvas.metrics
    drawn = [one for one in series if metrics.has(one.column)]
    pool = [metrics.column(one.column) for one in drawn] + [np.array([value for _, value in references])]
    scale = fit(np.concatenate(pool), from_zero=from_zero, allow_log=allow_log)
    curves: list[Curve] = []
    rows: list[ReadoutRow] = []
    for one in drawn:
        values = metrics.column(one.column)
        if one.sparse:
            curves.append(_sparse_curve(canvas, scale, one, height))
            rows.append(ReadoutRow(one.name, one.tone, tuple(_latest(canvas, one.column, show))))
        else:
            low, mean, high = canvas.buckets.envelope(values)
            curves.append(_dense_curve(canvas, scale, one, (low, mean, high), height))
            texts = (_range(*sides, show) for sides in zip(low, mean, high, strict=True))
            rows.append(ReadoutRow(one.name, one.tone, tuple(texts)))
    if is_loss and metrics.discarded:
        steps = np.array([step for step, _ in metrics.discarded], dtype=np.float64)
        lost = np.array([value for _, value in metrics.discarded])
        curves.append(Curve("undone by a restart", "lost", _path(canvas.steps, scale, steps, lost, height)))
    all_notes = list(notes)
    if scale.log:
        all_notes.append("The vertical axis is logarithmic.")
    return Chart(
        key=key,
        title=title,
        unit=unit,
        height=height,
        headline=headline,
        wide=wide,
        description=_describe(title, unit, metrics, drawn, show),
        x_ticks=canvas.x_ticks(),
        y_ticks=tuple(scale.ticks(round(height / 38))),
        curves=tuple(curves),
        references=tuple(Reference(name, _y(scale, value, height)) for name, value in references),
        marks=canvas.marks(loss=is_loss),
        notes=tuple(all_notes),
        readout_places=canvas.readout_places(),
        readout_labels=canvas.readout_labels(),
        readout_rows=tuple(rows),
    )


def stack_chart(
    canvas: Canvas,
    layers: Sequence[Series],
    *,
    key: str,
    title: str,
    unit: str,
    headline: str,
    height: int = 190,
) -> Chart:
    """Parts of a whole over the steps, one column a step (or the mean of a span of steps)."""
    metrics, buckets = canvas.metrics, canvas.buckets
    drawn = [layer for layer in layers if metrics.has(layer.column)]
    parts = [np.nan_to_num(buckets.mean(np.nan_to_num(metrics.column(layer.column)))) for layer in drawn]
    tops = np.cumsum(np.vstack(parts), axis=0)
    scale, notes = _stack_scale(tops[-1])
    edges = _column_edges(canvas)
    areas: list[Area] = []
    floor = np.zeros_like(tops[0])
    for layer, top in zip(drawn, tops, strict=True):
        areas.append(Area(layer.name, layer.tone, _steps_area(scale, edges, floor, top, height)))
        floor = top
    rows = [
        ReadoutRow(layer.name, layer.tone, tuple(text.duration(value) for value in part))
        for layer, part in reversed(list(zip(drawn, parts, strict=True)))
    ]
    rows.insert(0, ReadoutRow("whole step", "total", tuple(text.duration(value) for value in tops[-1])))
    shares = ", ".join(
        f"{layer.name} {text.duration(float(np.mean(part)))}"
        for layer, part in zip(drawn, parts, strict=True)
    )
    return Chart(
        key=key,
        title=title,
        unit=unit,
        height=height,
        headline=headline,
        wide=True,
        description=f"{title}, stacked, over the steps. Mean seconds a step: {shares}.",
        x_ticks=canvas.x_ticks(),
        y_ticks=tuple(scale.ticks(round(height / 38))),
        areas=tuple(areas),
        marks=canvas.marks(),
        notes=tuple(notes),
        readout_places=canvas.readout_places(),
        readout_labels=canvas.readout_labels(),
        readout_rows=tuple(rows),
    )


def _stack_scale(totals: Floats) -> tuple[Scale, list[str]]:
    """From zero to the tallest column; cut where a few (a step that compiles) would flatten the rest."""
    usual = float(np.percentile(totals, 95))
    tallest = float(totals.max())
    if usual <= 0 or tallest <= 3 * usual:
        return fit(totals, from_zero=True), []
    scale = fit(totals[totals <= 3 * usual], from_zero=True)
    cut = int((totals > scale.high).sum())
    are = "column is" if cut == 1 else "columns are"
    return scale, [
        f"{cut:,} {are} taller than the axis and cut off at its top; the tallest is {text.duration(tallest)}."
    ]


def percent(place: float) -> str:
    return f"{100 * place:.3f}".rstrip("0").rstrip(".") + "%"


def _y(scale: Scale, value: float, height: int) -> str:
    return _number((1 - scale.place(value)) * height)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _path(x_scale: Scale, y_scale: Scale, steps: Floats, values: Floats, height: int) -> str:
    """A polyline; a missing value breaks it."""
    pieces: list[str] = []
    pen_down = False
    for step, value in zip(steps, values, strict=True):
        if not np.isfinite(value):
            pen_down = False
            continue
        x = _number(x_scale.place(float(step)) * BOX_WIDTH)
        pieces.append(f"{'L' if pen_down else 'M'}{x} {_y(y_scale, float(value), height)}")
        pen_down = True
    return "".join(pieces)


def _band(x_scale: Scale, y_scale: Scale, steps: Floats, low: Floats, high: Floats, height: int) -> str:
    """The area between two lines, one closed piece for each run of columns that have values."""
    there = np.isfinite(low)
    cuts = np.flatnonzero(np.diff(there.astype(np.int8))) + 1
    pieces: list[str] = []
    for run in np.split(np.arange(len(steps)), cuts):
        if len(run) < 2 or not there[run[0]]:
            continue
        upper = _path(x_scale, y_scale, steps[run], high[run], height)
        lower = _path(x_scale, y_scale, steps[run][::-1], low[run][::-1], height)
        pieces.append(f"{upper}L{lower[1:]}Z")
    return "".join(pieces)


def _dense_curve(
    canvas: Canvas, scale: Scale, one: Series, sides: tuple[Floats, Floats, Floats], height: int
) -> Curve:
    low, mean, high = sides
    centre = canvas.buckets.centre
    band = _band(canvas.steps, scale, centre, low, high, height) if canvas.buckets.size > 1 else ""
    finite = np.isfinite(mean)
    dots = _dots(canvas, scale, centre[finite], mean[finite], height) if finite.sum() <= 16 else ()
    return Curve(one.name, one.tone, _path(canvas.steps, scale, centre, mean, height), band, dots)


def _sparse_curve(canvas: Canvas, scale: Scale, one: Series, height: int) -> Curve:
    """Every point, or, where there are more than columns, their means with the band of extremes."""
    steps, values = canvas.metrics.points(one.column)
    buckets = make_buckets(steps, MAX_COLUMNS)
    low, mean, high = buckets.envelope(values)
    band = _band(canvas.steps, scale, buckets.centre, low, high, height) if buckets.size > 1 else ""
    dots = _dots(canvas, scale, buckets.centre, mean, height) if len(mean) <= 60 else ()
    return Curve(one.name, one.tone, _path(canvas.steps, scale, buckets.centre, mean, height), band, dots)


def _dots(
    canvas: Canvas, scale: Scale, steps: Floats, values: Floats, height: int
) -> tuple[tuple[str, str], ...]:
    pairs = zip(steps, values, strict=True)
    return tuple(
        (percent(canvas.steps.place(float(step))), _y(scale, float(value), height)) for step, value in pairs
    )


def _column_edges(canvas: Canvas) -> Floats:
    """Left edge of each column, and the right edge of the last, as places in the box."""
    centre = canvas.buckets.centre
    between = (centre[1:] + centre[:-1]) / 2
    edges = np.concatenate([[canvas.steps.low], between, [canvas.steps.high]])
    return np.array([canvas.steps.place(float(edge)) * BOX_WIDTH for edge in edges])


def _steps_area(scale: Scale, edges: Floats, bottom: Floats, top: Floats, height: int) -> str:
    def corners(values: Floats, order: Iterable[int], left: int, right: int) -> str:
        return "".join(
            f"L{_number(edges[index + left])} {_y(scale, float(values[index]), height)}"
            f"L{_number(edges[index + right])} {_y(scale, float(values[index]), height)}"
            for index in order
        )

    forth = corners(top, range(len(top)), 0, 1)
    back = corners(bottom, range(len(top) - 1, -1, -1), 1, 0)
    return f"M{forth[1:]}{back}Z"


def _range(low: float, mean: float, high: float, show: Callable[[float], str]) -> str:
    if not np.isfinite(mean):
        return ""
    return show(mean) if low == high else f"{show(mean)} ({show(low)} to {show(high)})"


def _latest(canvas: Canvas, column: str, show: Callable[[float], str]) -> Iterable[str]:
    """For each column the newest value up to its end, with its step."""
    steps, values = canvas.metrics.points(column)
    for index in np.searchsorted(steps, canvas.buckets.last, side="right"):
        yield f"{show(float(values[index - 1]))} (step {steps[index - 1]:,.0f})" if index else ""


def _describe(
    title: str, unit: str, metrics: MetricsTable, drawn: Sequence[Series], show: Callable[[float], str]
) -> str:
    """The chart in words, for those who do not see it."""
    sentences: list[str] = []
    for one in drawn:
        steps, values = metrics.points(one.column)
        sentences.append(
            f"{one.name} goes from {show(float(values[0]))} at step {steps[0]:,.0f} "
            f"to {show(float(values[-1]))} at step {steps[-1]:,.0f}, "
            f"lowest {show(float(values.min()))}, highest {show(float(values.max()))}."
        )
    return f"{title}{f' in {unit}' if unit else ''} over the steps. " + " ".join(sentences)
