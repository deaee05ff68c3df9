"""What the page says: the run's files turned into headline, figures, charts and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from training.report import text
from training.report.charts import Canvas, Chart, Series, line_chart, percent, stack_chart
from training.report.folder import RunFiles
from training.report.metrics_table import STEP_PARTS, Floats, MetricsTable
from training.report.values import as_number, mapping, mappings, number, shown, string, strings
from training.transport.compare import ComparisonReport

Tone = Literal["good", "warn", "bad", "plain"]

PART_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "data": "waiting for data",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
}
"""Parts of a step in the order they are stacked, the steady ones below."""

assert set(PART_NAMES) == set(STEP_PARTS)


@dataclass(frozen=True)
class Status:
    label: str
    tone: Tone


@dataclass(frozen=True)
class Figure:
    """One headline figure."""

    name: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Banner:
    """A sentence that decides something: the transport's verdict, the error that ended the job."""

    tone: Tone
    title: str
    body: str
    advice: Sequence[str] = ()


@dataclass(frozen=True)
class Cell:
    """A cell of a table; `tone` colours it, `code` sets it in a monospaced face."""

    value: str
    tone: Tone = "plain"
    code: bool = False


@dataclass(frozen=True)
class Table:
    """A table; columns whose name is in `numeric` are set to the right."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric: frozenset[str] = frozenset()
    note: str = ""


@dataclass(frozen=True)
class Share:
    """A part of the time of all steps."""

    name: str
    tone: str
    x: str
    width: str
    seconds: str
    percent: str


@dataclass(frozen=True)
class Bar:
    """A horizontal bar with its spread."""

    name: str
    tone: str
    width: str
    low: str
    high: str
    value: str


@dataclass(frozen=True)
class Comparison:
    sentences: Sequence[str]
    bars: Sequence[Bar]
    table: Table | None


@dataclass(frozen=True)
class Sample:
    prompt: str
    answer: str


@dataclass(frozen=True)
class Page:
    name: str
    status: Status
    lead: str
    subtitle: Sequence[str]
    figures: Sequence[Figure]
    banners: Sequence[Banner]
    charts: Sequence[Chart]
    columns_note: str
    shares: Sequence[Share]
    samples: Sequence[Sample]
    samples_absent: str
    prediction: Table | None
    comparison: Comparison | None
    data: Sequence[Table]
    data_absent: str
    data_warnings: Sequence[str]
    run: Sequence[Table]
    transport: Sequence[Table]
    evidence: Sequence[str]
    numbers: Table | None
    job_text: str
    problems: Sequence[str]
    uri: str
    written: str


def build_page(run: RunFiles, now: datetime) -> Page:
    """Everything that the template shows."""
    canvas = Canvas(run.metrics, tuple(one.step for one in run.checkpoints if one.marker))
    status = _status(run)
    return Page(
        name=string(run.summary, "name") or string(run.job, "name") or "Run without a name",
        status=status,
        lead=_lead(run),
        subtitle=tuple(_subtitle(run)),
        figures=tuple(_figures(run)),
        banners=tuple(_banners(run, status)),
        charts=tuple(_charts(run, canvas)) if len(run.metrics) else (),
        columns_note=canvas.columns_note(),
        shares=tuple(_shares(run.metrics)),
        samples=tuple(_samples(run)),
        samples_absent=_samples_absent(run),
        prediction=_prediction(run),
        comparison=_comparison(run),
        data=tuple(_data_tables(run)),
        data_absent="" if mapping(run.summary, "data") else "The summary holds no data report.",
        data_warnings=strings(run.summary, "data", "warnings"),
        run=tuple(_run_tables(run)),
        transport=tuple(_transport_tables(run)),
        evidence=tuple(_evidence(run)),
        numbers=_numbers(run.metrics),
        job_text=run.job_text,
        problems=run.problems,
        uri=run.uri,
        written=now.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


# Headline


def _status(run: RunFiles) -> Status:
    status = string(run.summary, "status")
    if status is None:
        return Status("no summary yet", "warn")
    word = status.lower()
    tone: Tone = "good" if word.startswith("succe") else "warn" if word.startswith(("stop", "run")) else "bad"
    return Status(word.replace("_", " "), tone)


def _losses(run: RunFiles) -> tuple[float | None, float | None, float | None, float | None]:
    """Loss first and last, held-out loss before and after."""
    metrics, summary = run.metrics, run.summary
    first = number(summary, "first_loss")
    last = number(summary, "last_loss")
    held_out = number(summary, "eval_loss")
    return (
        metrics.first("loss") if first is None else first,
        metrics.last("loss") if last is None else last,
        metrics.first("eval_loss"),
        metrics.last("eval_loss") if held_out is None else held_out,
    )


def _lead(run: RunFiles) -> str:
    first, last, before, after = _losses(run)
    steps = _num_steps(run)
    if first is None or last is None or steps is None:
        return "No loss was recorded."
    pieces = [f"In {text.count(steps)} steps the loss went from {text.loss(first)} to {text.loss(last)}"]
    if before is not None and after is not None and len(run.metrics.points("eval_loss")[1]) > 1:
        difference = text.change(before, after)
        held_out = f"the loss on held-out data from {text.loss(before)} to {text.loss(after)}"
        pieces.append(held_out + (f" ({difference})" if difference else ""))
    return " and ".join(pieces) + "."


def _num_steps(run: RunFiles) -> float | None:
    steps = number(run.summary, "steps")
    if steps is not None:
        return steps
    return float(run.metrics.steps[-1]) if len(run.metrics) else None


def _subtitle(run: RunFiles) -> Iterator[str]:
    model = string(run.job, "model", "source")
    architecture = mapping(run.job, "model", "architecture")
    if model:
        yield model
    elif architecture:
        layers, width = shown(architecture, "num_layers"), shown(architecture, "hidden_size")
        family = shown(architecture, "family") or "model"
        yield f"{family}, {layers} layers of width {width}, from random weights"
    parameters = number(run.summary, "parameters")
    trained = number(run.summary, "trainable_parameters")
    if parameters is not None:
        part = f", {text.compact(trained)} trained" if trained is not None and trained < parameters else ""
        yield f"{text.compact(parameters)} parameters{part}"
    world_size, nodes = number(run.summary, "world_size"), number(run.summary, "nodes")
    device = string(run.summary, "device")
    if world_size is not None:
        place = f"{_plural(world_size, 'rank')}"
        if nodes is not None:
            place += f" on {_plural(nodes, 'node')}"
        yield f"{place}, {device}" if device else place
    times = run.metrics.points("time")[1]
    if len(times) and 0 < times[0] < 2**35:
        yield datetime.fromtimestamp(float(times[0]), UTC).strftime("started %Y-%m-%d %H:%M UTC")


def _plural(value: float, noun: str) -> str:
    return f"{text.count(value)} {noun}{'' if value == 1 else 's'}"


def _figures(run: RunFiles) -> Iterator[Figure]:
    summary, metrics = run.summary, run.metrics
    first, last, before, after = _losses(run)
    if first is not None and last is not None:
        yield Figure("Loss", f"{text.loss(first)} → {text.loss(last)}", text.change(first, last) or "")
    if after is not None:
        evaluated_twice = before is not None and len(metrics.points("eval_loss")[1]) > 1
        value = f"{text.loss(before)} → {text.loss(after)}" if evaluated_twice else text.loss(after)
        told = [(text.change(before, after) or "") if evaluated_twice else ""]
        perplexity = number(summary, "eval_perplexity")
        told += [] if perplexity is None else [f"perplexity {text.compact(perplexity)}"]
        yield Figure("Held-out loss", value, ", ".join(filter(None, told)))
    in_order = _pairs_in_order(metrics)
    if in_order is not None:
        where = "held-out pairs" if metrics.has("eval_reward_accuracy") else "training pairs of the last step"
        yield Figure("Pairs in the preferred order", text.percent(in_order), where)
    speed = number(summary, "tokens_per_second") or _median(metrics.points("tokens_per_second")[1])
    if speed is not None:
        per_gpu = number(summary, "tokens_per_second_per_gpu")
        yield Figure(
            "Tokens per second", text.compact(speed), f"{text.compact(per_gpu)} per rank" if per_gpu else ""
        )
    tokens = number(summary, "tokens") or metrics.last("tokens")
    if tokens is not None:
        steps = _num_steps(run)
        yield Figure(
            "Tokens", text.compact(tokens), f"{text.count(steps)} steps" if steps is not None else ""
        )
    if not summary:
        return
    yield _utilization(summary)
    yield Figure("Wall time", text.duration(number(summary, "wall_seconds")), _restarts(run))
    peak = number(summary, "peak_memory_gib")
    if peak is not None:
        yield Figure("Peak memory", f"{text.compact(peak)} GiB", "rank 0")
    cost = number(summary, "cost_usd")
    yield Figure("Price", text.usd(cost), "" if cost is not None else "no hourly price known")


def _utilization(summary: Mapping[str, Any]) -> Figure:
    share = number(summary, "mfu")
    if share is not None:
        return Figure("Model FLOP utilization", text.percent(share), "of the device's peak")
    reason = string(summary, "mfu_reason") or string(summary, "mfu", "reason") or string(summary, "mfu")
    return Figure("Model FLOP utilization", text.NONE, reason or "peak of the device unknown")


def _restarts(run: RunFiles) -> str:
    restarts = number(run.summary, "restarts")
    if restarts is None:
        restarts = float(len(run.metrics.restarts))
    told = _plural(restarts, "restart") if restarts else "no restart"
    return f"{told}, resumed an earlier run" if string(run.summary, "resumed_from") else told


def _median(values: Floats) -> float | None:
    return float(np.median(values)) if len(values) else None


# Banners

_VERDICTS: Mapping[str, tuple[Tone, str]] = {
    "efa": ("good", "EFA carried the collectives"),
    "tcp": ("bad", "TCP carried the collectives, not EFA"),
    "mixed": ("bad", "Some ranks used EFA and others did not"),
    "none": ("plain", "Nothing crossed between nodes"),
    "unknown": ("warn", "Which network carried the collectives is not known"),
}


def _banners(run: RunFiles, status: Status) -> Iterator[Banner]:
    error = mapping(run.summary, "error")
    message = string(error, "message") or string(error, "error") or string(run.summary, "error")
    if message:
        rank, host = shown(error, "rank"), shown(error, "host")
        where = " ".join(filter(None, (f"on rank {rank}" if rank else "", f"({host})" if host else "")))
        yield Banner("bad", f"The job failed {where}".strip(), message)
    elif status.tone == "bad":
        yield Banner("bad", "The job failed", "The summary does not say why; the log of the job does.")
    for node in mappings(run.summary, "excluded_nodes"):
        reasons = list(dict.fromkeys(strings(node, "reasons")))
        yield Banner(
            "warn", f"{shown(node, 'host')} was left out after repeated failures", "; ".join(reasons)
        )
    bad = run.metrics.steps_without_loss()
    if len(bad):
        word = "step has" if len(bad) == 1 else "steps have"
        yield Banner(
            "warn",
            "The loss was not always finite",
            f"{len(bad):,} {word} no finite loss; the first is step {bad[0]:,.0f}.",
        )
    verdict = string(run.transport, "verdict") or string(run.summary, "transport", "verdict")
    if verdict:
        tone, title = _VERDICTS.get(verdict, ("warn", f"Transport: {verdict}"))
        if string(run.transport, "required") == "any" and tone == "bad":
            tone = "warn"
        reason = (
            string(run.transport, "reason")
            or string(run.summary, "transport", "reason")
            or "No reason is given."
        )
        yield Banner(tone, title, reason[0].upper() + reason[1:], tuple(_diagnosis(run)))


def _diagnosis(run: RunFiles) -> Iterator[str]:
    for one in mappings(run.transport, "diagnosis"):
        seen, where, change = (string(one, key) for key in ("seen", "where", "change"))
        yield " ".join(filter(None, (f"{seen}" if seen else "", f"({where})." if where else "", change)))


# Charts


def _charts(run: RunFiles, canvas: Canvas) -> Iterator[Chart]:
    metrics = run.metrics
    if metrics.has("loss") or metrics.has("eval_loss"):
        yield line_chart(
            canvas,
            [
                Series("loss", "training loss", "blue"),
                Series("eval_loss", "held-out loss", "orange", sparse=True),
            ],
            key="loss",
            title="Loss",
            unit="per pair" if metrics.has("reward_accuracy") else "per supervised token",
            headline=_arrow(metrics, "loss"),
            height=260,
            wide=True,
            allow_log=True,
            is_loss=True,
            show=text.loss,
            notes=_loss_notes(metrics),
        )
    parts = [Series(f"seconds.{part}", PART_NAMES[part], part) for part in _part_totals(metrics)]
    if parts:
        yield stack_chart(
            canvas,
            parts,
            key="seconds",
            title="Time of a step by part",
            unit="seconds, rank 0",
            headline=f"median {text.duration(_median_step(metrics))}",
        )
    yield from _preference_charts(run, canvas)
    yield from _small_charts(run, canvas)


def _preference_charts(run: RunFiles, canvas: Canvas) -> Iterator[Chart]:
    """Of a run on preference pairs."""
    metrics = run.metrics
    if metrics.has("reward_accuracy") or metrics.has("eval_reward_accuracy"):
        yield line_chart(
            canvas,
            [
                Series("reward_accuracy", "training pairs", "blue"),
                Series("eval_reward_accuracy", "held-out pairs", "orange", sparse=True),
            ],
            key="reward-accuracy",
            title="Pairs in the preferred order",
            unit="share with the higher reward on the chosen answer",
            headline=text.percent(_pairs_in_order(metrics)),
            from_zero=True,
            show=text.percent,
        )
    if metrics.has("reward_margin"):
        yield line_chart(
            canvas,
            [
                Series("chosen_reward", "chosen answers", "teal"),
                Series("rejected_reward", "rejected answers", "red"),
                Series("reward_margin", "margin", "purple"),
            ],
            key="rewards",
            title="Rewards",
            unit="beta times the log-ratio to the model at the start",
            headline=f"margin {text.compact(metrics.last('reward_margin'))}",
        )


def _pairs_in_order(metrics: MetricsTable) -> float | None:
    """The last share of held-out pairs in the preferred order, or of training pairs where none is held out."""
    held_out = metrics.last("eval_reward_accuracy")
    return metrics.last("reward_accuracy") if held_out is None else held_out


def _loss_notes(metrics: MetricsTable) -> Iterator[str]:
    for restart in metrics.restarts:
        if restart.repeated:
            repeated = _plural(restart.repeated, "step")
            yield f"The restart before step {restart.step:,} repeated {repeated} (dotted)."


def _small_charts(run: RunFiles, canvas: Canvas) -> Iterator[Chart]:
    metrics = run.metrics
    if metrics.has("tokens_per_second"):
        predicted = number(run.prediction, "tokens_per_second")
        yield line_chart(
            canvas,
            [Series("tokens_per_second", "tokens per second", "teal")],
            key="speed",
            title="Tokens per second",
            unit="all ranks together",
            headline=f"median {text.compact(_median(metrics.points('tokens_per_second')[1]))}",
            from_zero=True,
            references=[("predicted", predicted)] if predicted is not None else [],
        )
    memory = [
        Series("memory.peak_gib", "peak allocated on the GPU", "purple"),
        Series("memory.reserved_gib", "reserved on the GPU", "grey"),
        Series("memory.rss_gib", "resident in host memory", "purple"),
    ]
    if any(metrics.has(one.column) for one in memory):
        highest = max(float(metrics.points(one.column)[1].max()) for one in memory if metrics.has(one.column))
        yield line_chart(
            canvas,
            memory,
            key="memory",
            title="Memory",
            unit="GiB, rank 0",
            headline=f"at most {text.compact(highest)}",
            from_zero=True,
        )
    if metrics.has("learning_rate"):
        highest = float(metrics.points("learning_rate")[1].max())
        yield line_chart(
            canvas,
            [Series("learning_rate", "learning rate", "blue")],
            key="learning-rate",
            title="Learning rate",
            unit="",
            headline=f"at most {text.compact(highest)}",
            from_zero=True,
        )
    if metrics.has("grad_norm"):
        limit = number(run.job, "optimizer", "max_grad_norm")
        yield line_chart(
            canvas,
            [Series("grad_norm", "gradient norm", "red")],
            key="grad-norm",
            title="Gradient norm",
            unit="before clipping",
            headline=f"last {text.compact(metrics.last('grad_norm'))}",
            from_zero=True,
            allow_log=True,
            references=[("clipped above", limit)] if limit is not None else [],
        )


def _arrow(metrics: MetricsTable, column: str) -> str:
    return (
        f"{text.loss(metrics.first(column))} → {text.loss(metrics.last(column))}"
        if metrics.has(column)
        else ""
    )


def _median_step(metrics: MetricsTable) -> float | None:
    """Median seconds of a training step, without evaluation and checkpoint."""
    seconds = metrics.training_seconds()
    return _median(seconds[np.isfinite(seconds)])


_NEGLIGIBLE = 0.0005
"""Share of the time below which a part is not shown: it would read 0.0 %."""


def _part_totals(metrics: MetricsTable) -> dict[str, float]:
    """Seconds of each part over all steps, in the order they are stacked."""
    totals = {part: float(np.nansum(metrics.column(f"seconds.{part}"))) for part in PART_NAMES}
    whole = sum(totals.values())
    return {part: total for part, total in totals.items() if total > _NEGLIGIBLE * whole}


def _shares(metrics: MetricsTable) -> Iterator[Share]:
    """Where the time of all steps went."""
    totals = _part_totals(metrics)
    whole = sum(totals.values())
    left = 0.0
    for part, total in totals.items():
        share = total / whole
        yield Share(
            name=PART_NAMES[part],
            tone=part,
            x=percent(left),
            width=percent(share),
            seconds=text.duration(total),
            percent=text.percent(share),
        )
        left += share


# Samples, prediction, comparison


def _samples(run: RunFiles) -> Iterator[Sample]:
    for sample in run.samples:
        yield Sample(shown(sample, "prompt") or "", shown(sample, "answer") or "")


def _samples_absent(run: RunFiles) -> str:
    if run.samples:
        return ""
    if mapping(run.job, "evaluation").get("prompts"):
        return "The run ended before its exported model could answer the prompts of the job."
    return "The job asks for none (evaluation.prompts)."


def _prediction(run: RunFiles) -> Table | None:
    if not run.prediction:
        return None
    summary, metrics = run.summary, run.metrics
    hours = number(run.prediction, "hours")
    compared = [
        ("Memory of rank 0", _total(run.prediction, "memory_gib"), number(summary, "peak_memory_gib"), _gib),
        ("A step", _total(run.prediction, "step_seconds"), _median_step(metrics), text.duration),
        (
            "Tokens per second",
            number(run.prediction, "tokens_per_second"),
            number(summary, "tokens_per_second"),
            text.compact,
        ),
        (
            "Wall time",
            None if hours is None else hours * 3600,
            number(summary, "wall_seconds"),
            text.duration,
        ),
        ("Price", number(run.prediction, "cost_usd"), number(summary, "cost_usd"), text.usd),
    ]
    rows: list[Sequence[Cell]] = []
    for name, predicted, measured, show in compared:
        if predicted is None:
            continue
        off = abs(measured / predicted - 1) if measured is not None and predicted else None
        tone: Tone = "plain" if off is None else "good" if off <= 0.15 else "warn" if off <= 0.5 else "bad"
        difference = text.change(predicted, measured) or "not measured"
        rows.append((Cell(name), Cell(show(predicted)), Cell(show(measured)), Cell(difference, tone)))
    limited_by = shown(run.prediction, "limited_by")
    note = f"Predicted to be limited by: {limited_by}." if limited_by else ""
    head = ("Quantity", "Predicted", "Measured", "Difference")
    return Table("Prediction beside measurement", head, rows, frozenset(head[1:]), note)


def _total(source: Mapping[str, Any], key: str) -> float | None:
    """A figure, or the sum of its parts."""
    parts = mapping(source, key)
    if not parts:
        return number(source, key)
    total = number(parts, "total")
    return (
        total
        if total is not None
        else sum(value for name in parts if (value := number(parts, name)) is not None)
    )


def _gib(value: float | None) -> str:
    return text.NONE if value is None else f"{text.compact(value)} GiB"


def _comparison(run: RunFiles) -> Comparison | None:
    """comparison.json of `finetune compare`: the same job over EFA and over TCP."""
    if not run.comparison:
        return None
    try:
        report = ComparisonReport.model_validate(run.comparison)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        return Comparison([f"comparison.json cannot be read: {where}: {error.errors()[0]['msg']}."], [], None)
    legs = (("EFA", "blue", report.efa), ("TCP", "orange", report.tcp))
    widest = max(leg.steps_per_second_high for _, _, leg in legs) or 1.0
    bars = [
        Bar(
            name=name,
            tone=tone,
            width=percent(leg.steps_per_second / widest),
            low=percent(leg.steps_per_second_low / widest),
            high=percent(leg.steps_per_second_high / widest),
            value=f"{text.compact(leg.steps_per_second)} steps/s",
        )
        for name, tone, leg in legs
    ]
    head = ("", "Over EFA", "Over TCP")
    rows = [tuple(Cell(cell) for cell in row) for row in report.rows()]
    return Comparison(report.sentences(), bars, Table("The two runs", head, rows, frozenset(head[1:])))


# Data


def _data_tables(run: RunFiles) -> Iterator[Table]:
    report = mapping(run.summary, "data")
    sources = mappings(report, "sources")
    if sources:
        head = (
            "Source",
            "Format",
            "Read",
            "Used",
            "Rejected",
            "Cut to length",
            "Documents",
            "Tokens",
            "Supervised",
        )
        yield Table(
            "Rows of the sources", head, [_source_row(source) for source in sources], frozenset(head[2:])
        )
    reasons = [
        (string(source, "source") or "", reason, as_number(count))
        for source in sources
        for reason, count in mapping(source, "rejected").items()
    ]
    if reasons:
        rows = [
            (Cell(reason), Cell(text.count(count)), Cell(source, code=True))
            for source, reason, count in reasons
        ]
        yield Table("Rejected rows by reason", ("Reason", "Rows", "Source"), rows, frozenset(("Rows",)))
    examples = [example for source in sources for example in mappings(source, "examples")]
    if examples:
        rows = [
            (
                Cell(f"{string(one, 'file') or ''}:{shown(one, 'line') or ''}", code=True),
                Cell(string(one, "reason") or ""),
                Cell(string(one, "detail") or ""),
            )
            for one in examples
        ]
        yield Table("Rejected rows, the first of each reason", ("Place", "Reason", "Detail"), rows)
    splits = [name for name in ("train", "validation") if number(report, f"{name}_documents") is not None]
    if splits:
        keys = ("documents", "tokens", "supervised_tokens")
        rows = [
            (
                Cell({"train": "training", "validation": "held out"}[name]),
                *(Cell(text.count(number(report, f"{name}_{key}"))) for key in keys),
            )
            for name in splits
        ]
        head = ("Split", "Documents", "Tokens", "Supervised tokens")
        yield Table("Training and held-out data", head, rows, frozenset(head[1:]), _packing_note(report))


def _source_row(source: Mapping[str, Any]) -> Sequence[Cell]:
    rejected = sum(as_number(count) or 0.0 for count in mapping(source, "rejected").values())
    revision = string(source, "revision")
    name = string(source, "source") or ""
    return (
        Cell(f"{name}@{revision[:12]}" if revision else name, code=True),
        Cell(string(source, "format") or ""),
        Cell(text.count(number(source, "rows_read"))),
        Cell(text.count(number(source, "rows_used"))),
        Cell(text.count(rejected), "warn" if rejected else "plain"),
        *(
            Cell(text.count(number(source, key)))
            for key in ("rows_truncated", "documents", "tokens", "supervised_tokens")
        ),
    )


def _packing_note(report: Mapping[str, Any]) -> str:
    efficiency, packs = number(report, "packing_efficiency"), number(report, "packs_per_epoch")
    pieces: list[str] = []
    if packs is not None:
        pieces.append(f"One pass is {text.count(packs)} packed micro-batches")
    if efficiency is not None:
        pieces.append(f"{text.percent(efficiency)} of their tokens are not padding")
    fingerprint = string(report, "fingerprint")
    if fingerprint:
        pieces.append(f"fingerprint of the data {fingerprint[:12]}")
    return "; ".join(pieces) + "." if pieces else ""


# The run: attempts, checkpoints, ranks, versions


def _run_tables(run: RunFiles) -> Iterator[Table]:
    if run.attempts:
        yield _attempts(run)
    if run.checkpoints:
        yield _checkpoints(run)
    if run.ranks:
        head = ("Rank", "Host", "Local rank", "Process", "Backend")
        keys = ("rank", "host", "local_rank", "pid", "backend")
        rows = [
            tuple(Cell(shown(rank, key) or text.NONE, code=key == "host") for key in keys)
            for rank in run.ranks
        ]
        yield Table("Ranks of the last attempt", head, rows, frozenset(("Rank", "Local rank", "Process")))
    if mapping(run.summary, "sharding"):
        yield _layout(run)
    tasks = mapping(run.summary, "evaluation", "tasks")
    if tasks:
        rows = [
            (Cell(task), Cell(name, code=True), Cell(text.compact(as_number(value))))
            for task in tasks
            for name, value in mapping(tasks, task).items()
        ]
        yield Table(
            "lm-evaluation-harness on the export", ("Task", "Metric", "Value"), rows, frozenset(("Value",))
        )
    versions = mapping(run.summary, "versions")
    if versions:
        rows = [
            (Cell(name), Cell(str(version), code=True))
            for name, version in versions.items()
            if version is not None
        ]
        yield Table("Versions", ("Component", "Version"), rows)


def _attempts(run: RunFiles) -> Table:
    rows: list[Sequence[Cell]] = []
    for index, attempt in enumerate(run.attempts, start=1):
        name = shown(attempt, "attempt") or text.NONE
        last = index == len(run.attempts)
        ended = (
            run.hangs.get(name)
            or _first_failure(run, name)
            or ((string(run.summary, "status") if last else None) or text.NONE)
        )
        resumed_from = string(attempt, "resumed_from")
        rows.append(
            (
                Cell(str(index)),
                Cell(name, code=True),
                Cell(resumed_from, code=True) if resumed_from else Cell("the beginning"),
                Cell(shown(attempt, "world_size") or text.NONE),
                Cell(shown(attempt, "nodes") or text.NONE),
                Cell(ended),
            )
        )
    head = ("#", "Attempt", "From", "Ranks", "Nodes", "Ended")
    return Table("Attempts", head, rows, frozenset(("#", "Ranks", "Nodes")))


def _first_failure(run: RunFiles, attempt: str) -> str | None:
    """The failure that came first: the others are mostly peers that lost their connection."""
    failures = [failure for failure in run.failures if shown(failure, "attempt") == attempt]
    if not failures:
        return None
    first = min(failures, key=lambda failure: number(failure, "time") or 0.0)
    where = f"rank {shown(first, 'rank')} on {string(first, 'host')}"
    return f"{where}: {string(first, 'type') or 'error'}: {_cut(string(first, 'message') or '', 300)}"


def _cut(message: str, length: int) -> str:
    return message if len(message) <= length else message[: length - 1] + "…"


def _checkpoints(run: RunFiles) -> Table:
    rows: list[Sequence[Cell]] = []
    exported = string(run.summary, "exported", "checkpoint")
    for one in run.checkpoints:
        sizes = [as_number(size) or 0.0 for size in mapping(one.marker, "files").values()]
        rows.append(
            (
                Cell(text.count(one.step)),
                Cell(one.name, code=True),
                Cell(
                    ", ".join(("complete", *one.roles, *(("exported",) if one.name == exported else ()))),
                    "good",
                )
                if one.marker
                else Cell("incomplete", "warn"),
                Cell(text.loss(number(one.marker, "eval_loss"))),
                Cell(shown(one.marker, "world_size") or text.NONE),
                Cell(text.size(sum(sizes)) if sizes else text.NONE),
            )
        )
    blocked = number(run.summary, "checkpoint_blocked_seconds")
    note = "" if blocked is None else f"Training waited {text.duration(blocked)} for checkpoints in all."
    head = ("Step", "Folder", "State", "Held-out loss", "Ranks", "Size")
    right = frozenset(("Step", "Held-out loss", "Ranks", "Size"))
    return Table("Checkpoints that were kept", head, rows, right, note)


def _layout(run: RunFiles) -> Table:
    sharding = mapping(run.summary, "sharding")
    scheme = string(sharding, "scheme") or text.NONE
    every = number(sharding, "checkpoint_every")
    settings = (
        (
            "Sharding",
            {"full": "over all ranks", "hybrid": "in a node, replicated across nodes"}.get(scheme, scheme),
        ),
        (
            "Weights after the forward",
            "freed" if sharding.get("reshard_after_forward") else "kept for the backward",
        ),
        ("Recomputed in the backward", f"every {_ordinal(every)} block" if every else "nothing"),
        ("Why", string(sharding, "reason") or text.NONE),
    )
    rows = [(Cell(name), Cell(value)) for name, value in settings]
    return Table("Layout of the model over the ranks", ("Setting", "Value"), rows)


def _ordinal(value: float) -> str:
    return {1: "single", 2: "second", 3: "third"}.get(int(value), f"{value:.0f}th")


# Transport


def _transport_tables(run: RunFiles) -> Iterator[Table]:
    nodes = mappings(run.transport, "nodes")
    if nodes:
        head = ("Host", "Sent", "Received", "The collectives need", "Agrees", "Note")
        rows = [_node_row(node) for node in nodes]
        note = (
            "EFA hardware counters of the node, after the job less before, "
            "beside the bytes that the collectives must have sent."
        )
        yield Table("EFA counters", head, rows, frozenset(head[1:4]), note)
    ranks = mappings(run.transport, "ranks")
    if any(string(rank, "network") or string(rank, "provider") for rank in ranks):
        head = ("Rank", "Host", "Network", "Provider", "Channels between nodes", "GPUDirect RDMA")
        rows = [_transport_row(rank) for rank in ranks]
        yield Table("Transport of the ranks", head, rows, frozenset(("Rank", "Channels between nodes")))


def _node_row(node: Mapping[str, Any]) -> Sequence[Cell]:
    agrees = node.get("agrees")
    verdict = (
        Cell("yes", "good")
        if agrees is True
        else Cell("no", "bad")
        if agrees is False
        else Cell("cannot tell", "warn")
    )
    return (
        Cell(string(node, "host") or text.NONE, code=True),
        *(Cell(text.size(number(node, key))) for key in ("tx_bytes", "rx_bytes", "expected_bytes")),
        verdict,
        Cell(string(node, "note") or ""),
    )


def _transport_row(rank: Mapping[str, Any]) -> Sequence[Cell]:
    gpudirect = rank.get("gpudirect")
    return (
        Cell(shown(rank, "rank") or text.NONE),
        Cell(string(rank, "host") or text.NONE, code=True),
        Cell(string(rank, "network") or text.NONE),
        Cell(string(rank, "provider") or text.NONE),
        Cell(text.count(number(rank, "internode_channels"))),
        Cell("yes" if gpudirect is True else "no" if gpudirect is False else text.NONE),
    )


_MAX_EVIDENCE = 200


def _evidence(run: RunFiles) -> Iterator[str]:
    """Lines of the logs that prove the verdict, with their place."""
    lines = [line for rank in mappings(run.transport, "ranks") for line in mappings(rank, "evidence")]
    for line in lines[:_MAX_EVIDENCE]:
        yield f"{string(line, 'file') or '?'}:{shown(line, 'line') or '?'}: {string(line, 'text') or ''}"
    if len(lines) > _MAX_EVIDENCE:
        yield f"... and {len(lines) - _MAX_EVIDENCE:,} more: transport.json has all."


# The numbers behind the charts


def _evenly(indices: npt.NDArray[np.int64], wanted: int) -> npt.NDArray[np.int64]:
    """At most `wanted` of the indices, the first and the last among them."""
    if len(indices) <= wanted:
        return indices
    return indices[np.linspace(0, len(indices) - 1, wanted).round().astype(np.int64)]


def _numbers(metrics: MetricsTable) -> Table | None:
    """Some steps as a table, for those who read numbers rather than charts."""
    if not len(metrics):
        return None
    evaluated = np.flatnonzero(np.isfinite(metrics.column("eval_loss")))
    chosen = np.union1d(_evenly(np.arange(len(metrics)), 16), _evenly(evaluated, 12))
    columns = [
        ("Tokens", "tokens", text.compact),
        ("Loss", "loss", text.loss),
        ("Held-out loss", "eval_loss", text.loss),
        ("Pairs in order", "reward_accuracy", text.percent),
        ("Held-out pairs in order", "eval_reward_accuracy", text.percent),
        ("Reward margin", "reward_margin", text.compact),
        ("Learning rate", "learning_rate", text.compact),
        ("Gradient norm", "grad_norm", text.compact),
        ("Tokens/s", "tokens_per_second", text.compact),
    ]
    there = [column for column in columns if metrics.has(column[1])]
    seconds = metrics.seconds()
    rows: list[Sequence[Cell]] = []
    for index in chosen:
        cells = [Cell(text.count(float(metrics.steps[index])))]
        for _, column, show in there:
            value = float(metrics.column(column)[index])
            cells.append(Cell(show(value) if np.isfinite(value) else text.NONE))
        cells.append(Cell(text.duration(float(seconds[index]))))
        rows.append(cells)
    head = ("Step", *(name for name, _, _ in there), "Step time")
    every = (
        ""
        if len(chosen) == len(metrics)
        else f"{len(chosen)} of {len(metrics):,} steps; metrics.jsonl has all."
    )
    return Table("The numbers behind the charts", head, rows, frozenset(head), every)
