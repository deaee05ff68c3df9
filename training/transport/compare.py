"""Two runs of the same job, one over EFA and one over TCP: how much faster, how surely, and what was to be
expected.

The expectation is the communication model's: a step takes between its compute and its communication,
whichever is longer (full overlap), and the sum of both (none). With few tokens per step the ratio is that of
the two networks' bandwidths; with enough it tends to one. So a ratio means nothing without the tokens per GPU
and step.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from pydantic import BaseModel, ConfigDict

#: Environment of the TCP leg, set over the stack's own through runtime_env.
TCP_ENV: Mapping[str, str] = {
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "FI_PROVIDER": "tcp",
    "NCCL_SOCKET_IFNAME": "eth0",
}
#: Steps left out at the start of each leg: compilation, lazy connections, cold caches.
NUM_WARM_UP = 3
MIN_STEPS = 5
#: Parts of the line rate that are assumed where no probe measured them: 4.0 and 2.0 of the 5.0 GB/s of a
#: g6.12xlarge. No published measurement was found. 2026-12-01
ASSUMED_EFA_SHARE = 0.8
ASSUMED_TCP_SHARE = 0.4
_NUM_RESAMPLES = 2000
_SAME_TOKENS = 0.01


class CompareError(ValueError):
    """A run that cannot be compared: the text says which, what is missing, and what to do."""


class RunReader(Protocol):
    """The part of a run folder's storage that a comparison reads."""

    uri: str

    def read_text(self, name: str) -> str:
        """Raises FileNotFoundError."""
        ...


class Leg(BaseModel):
    """One of the two runs. Low and high are the quartiles over its measured steps."""

    model_config = ConfigDict(frozen=True)

    run: str
    verdict: str
    reason: str
    num_steps: int
    step_seconds: float
    steps_per_second: float
    steps_per_second_low: float
    steps_per_second_high: float
    tokens_per_gpu_per_step: float
    tokens_per_second: float


class Expectation(BaseModel):
    """What the communication model says of the TCP leg, given the EFA leg's step.

    Bytes are per node, direction and step. ``hiding_tokens`` is the tokens per GPU and step from which
    compute could hide even TCP's communication, so that the ratio would be one; None when a step is all
    communication.
    """

    model_config = ConfigDict(frozen=True)

    bytes_per_node_per_step: int
    efa_gb_per_second: float
    tcp_gb_per_second: float
    bandwidth: Literal["measured", "assumed"]
    efa_seconds: float
    tcp_seconds: float
    ratio_low: float
    ratio_high: float
    hiding_tokens: float | None


class ComparisonReport(BaseModel):
    """``comparison.json``. ``ratio`` is steps per second over EFA by those over TCP, low and high its 95 %
    interval (bootstrap over steps). ``problems`` are the reasons why it is no comparison of EFA with TCP;
    empty when it is."""

    model_config = ConfigDict(frozen=True)

    efa: Leg
    tcp: Leg
    ratio: float
    ratio_low: float
    ratio_high: float
    tokens_per_gpu_per_step: float
    expected_ratio: float | None
    expectation: Expectation | None
    expectation_missing: str | None
    problems: tuple[str, ...]

    def rows(self) -> list[tuple[str, str, str]]:
        """A table: what, over EFA, over TCP."""
        legs = (self.efa, self.tcp)
        rows = [
            ("transport", *(leg.verdict for leg in legs)),
            ("steps measured", *(str(leg.num_steps) for leg in legs)),
            ("steps/s", *(f"{leg.steps_per_second:.4f}" for leg in legs)),
            (
                "steps/s, middle half of the steps",
                *(f"{leg.steps_per_second_low:.4f} to {leg.steps_per_second_high:.4f}" for leg in legs),
            ),
            ("seconds per step", *(f"{leg.step_seconds:.3f}" for leg in legs)),
            ("tokens per GPU and step", *(f"{leg.tokens_per_gpu_per_step:,.0f}" for leg in legs)),
            ("tokens/s", *(f"{leg.tokens_per_second:,.0f}" for leg in legs)),
        ]
        if self.expectation is not None:
            model = self.expectation
            rows.append(
                (
                    f"communication, s ({model.bandwidth} bandwidth)",
                    f"{model.efa_seconds:.3f}",
                    f"{model.tcp_seconds:.3f}",
                )
            )
        return cast("list[tuple[str, str, str]]", rows)

    def sentences(self) -> list[str]:
        """What the numbers mean, for people."""
        interval = f"95 % interval {self.ratio_low:.2f} to {self.ratio_high:.2f}"
        tokens = f"{self.tokens_per_gpu_per_step:,.0f} tokens per GPU and step"
        lines = [f"EFA made {self.ratio:.2f} times the steps of TCP ({interval}) at {tokens}."]
        if self.expectation is None:
            lines.append(f"No expectation: {self.expectation_missing}.")
        else:
            model = self.expectation
            lines.append(
                f"The communication model expects {model.ratio_low:.2f} (communication hidden behind "
                f"compute) to {model.ratio_high:.2f} (not hidden) for "
                f"{model.bytes_per_node_per_step / 1e9:.2f} GB per node and step at "
                f"{model.efa_gb_per_second:.2f} and {model.tcp_gb_per_second:.2f} GB/s ({model.bandwidth})."
            )
            lines.append(
                "A step is all communication: the ratio is that of the networks and not of the training."
                if model.hiding_tokens is None
                else f"From about {model.hiding_tokens:,.0f} tokens per GPU and step on, compute can hide "
                "TCP's communication too, and the ratio tends to one."
            )
        return [*lines, *(f"Not a comparison of EFA with TCP: {problem}." for problem in self.problems)]


def compare(
    run_a: RunReader | Path,
    run_b: RunReader | Path,
    *,
    network_gbps: float | None = None,
    efa_gb_per_second: float | None = None,
    tcp_gb_per_second: float | None = None,
) -> ComparisonReport:
    """Compare the last attempts of two runs: ``run_a`` over EFA, ``run_b`` over TCP.

    Reads summary.json, metrics.jsonl and transport.json of each. The expectation takes the bandwidths that a
    probe measured across nodes, or else parts of the line rate ``network_gbps`` (Gbit/s per node). Raises
    CompareError for a run without these files or with too few steps.
    """
    first, second = _Run(run_a), _Run(run_b)
    efa, tcp = first.leg(), second.leg()
    ratios = _resampled_ratios(first.step_seconds, second.step_seconds)
    expectation, missing = _expectation(first, efa, network_gbps, efa_gb_per_second, tcp_gb_per_second)
    return ComparisonReport(
        efa=efa,
        tcp=tcp,
        ratio=tcp.step_seconds / efa.step_seconds,
        ratio_low=_quantile(ratios, 0.025),
        ratio_high=_quantile(ratios, 0.975),
        tokens_per_gpu_per_step=efa.tokens_per_gpu_per_step,
        expected_ratio=None if expectation is None else (expectation.ratio_low + expectation.ratio_high) / 2,
        expectation=expectation,
        expectation_missing=missing,
        problems=tuple(_problems(first, second, efa, tcp)),
    )


def exit_status(report: ComparisonReport) -> Literal[0, 13, 14]:
    """0 when the legs ran over EFA and TCP as asked, 14 when a leg's transport is unknown, 13 otherwise."""
    if report.efa.verdict == "efa" and report.tcp.verdict == "tcp":
        return 0
    return 14 if "unknown" in (report.efa.verdict, report.tcp.verdict) else 13


class _Run:
    def __init__(self, run: RunReader | Path) -> None:
        self.run = run
        self.name = str(run) if isinstance(run, Path) else run.uri
        self.summary = self._object("summary.json")
        self.transport = self._object("transport.json")
        self.world_size = self._whole(self.summary, "summary.json", "world_size")
        lines = [json.loads(line) for line in self._text("metrics.jsonl").splitlines() if line.strip()]
        steps = [line for line in cast("list[dict[str, Any]]", lines) if line.get("seconds")]
        last = [line for line in steps if line.get("attempt") == steps[-1].get("attempt")] if steps else []
        self.num_steps = len(last)
        if self.num_steps < NUM_WARM_UP + MIN_STEPS:
            raise CompareError(
                f"{self.name}: metrics.jsonl has {self.num_steps} steps of its last attempt; a comparison "
                f"leaves out {NUM_WARM_UP} to warm up and needs {MIN_STEPS} more: run the job with more "
                "steps"
            )
        measured = last[NUM_WARM_UP:]
        self.step_seconds = [_training_seconds(line) for line in measured]
        self.tokens = [
            line["tokens"] - before["tokens"]
            for before, line in zip(last[NUM_WARM_UP - 1 :], measured, strict=False)
        ]

    def leg(self) -> Leg:
        speeds = [1 / seconds for seconds in self.step_seconds]
        seconds = statistics.median(self.step_seconds)
        tokens = statistics.median(self.tokens)
        return Leg(
            run=self.name,
            verdict=str(self.transport.get("verdict")),
            reason=str(self.transport.get("reason")),
            num_steps=len(speeds),
            step_seconds=seconds,
            steps_per_second=1 / seconds,
            steps_per_second_low=_quantile(speeds, 0.25),
            steps_per_second_high=_quantile(speeds, 0.75),
            tokens_per_gpu_per_step=tokens / self.world_size,
            tokens_per_second=tokens / seconds,
        )

    @property
    def bytes_per_node_per_step(self) -> int | None:
        """None when there are no expected bytes in transport.json, or they are 0."""
        nodes = cast("list[dict[str, Any]]", self.transport.get("nodes") or [])
        expected = [node.get("expected_bytes") for node in nodes]
        known = [cast("int", value) for value in expected if value]
        return max(known) // self.num_steps if known else None

    @property
    def bytes_missing(self) -> str:
        """Why there is no `bytes_per_node_per_step`."""
        if self.transport.get("backend") == "gloo":
            return "the EFA leg ran on CPUs over gloo, and transport.json holds bytes of NCCL alone"
        ranks = cast("list[dict[str, Any]]", self.transport.get("ranks") or [])
        if len({rank.get("host") for rank in ranks}) == 1:
            return "all ranks of the EFA leg ran on one node: its collectives crossed no network"
        nodes = cast("list[dict[str, Any]]", self.transport.get("nodes") or [])
        notes = sorted({str(node.get("note")) for node in nodes}) or [str(self.transport.get("reason"))]
        return f"transport.json of the EFA leg has no expected bytes ({'; '.join(notes)})"

    def _text(self, name: str) -> str:
        try:
            if isinstance(self.run, Path):
                return (self.run / name).read_text(encoding="utf-8")
            return self.run.read_text(name)
        except FileNotFoundError:
            raise CompareError(
                f"{self.name} has no {name}: the run did not come to its end; run it again before comparing"
            ) from None

    def _object(self, name: str) -> dict[str, Any]:
        content = json.loads(self._text(name))
        if not isinstance(content, dict):
            raise CompareError(f"{self.name}: {name} is no JSON object")
        return cast("dict[str, Any]", content)

    def _whole(self, content: Mapping[str, Any], name: str, key: str) -> int:
        value = content.get(key)
        if not isinstance(value, int) or value < 1:
            raise CompareError(
                f"{self.name}: {name} has {key} {value!r}, which must be a whole number of 1 or more"
            )
        return value


def _training_seconds(line: Mapping[str, Any]) -> float:
    """Seconds of a step without what is no training: saving a checkpoint, evaluating."""
    parts = cast("Mapping[str, float]", line["seconds"])
    return sum(seconds for part, seconds in parts.items() if part not in ("checkpoint", "evaluation"))


def _problems(first: _Run, second: _Run, efa: Leg, tcp: Leg) -> list[str]:
    problems: list[str] = []
    for leg, wanted in ((efa, "efa"), (tcp, "tcp")):
        if leg.verdict != wanted:
            problems.append(
                f"the {wanted.upper()} leg {leg.run} has the verdict {leg.verdict} ({leg.reason})"
            )
    for key in ("world_size", "nodes", "parameters", "sharding", "device"):
        a, b = first.summary.get(key), second.summary.get(key)
        if a != b:
            problems.append(f"the legs differ in {key}: {a} and {b}")
    if (
        abs(efa.tokens_per_gpu_per_step - tcp.tokens_per_gpu_per_step)
        > _SAME_TOKENS * efa.tokens_per_gpu_per_step
    ):
        problems.append(
            f"the legs differ in tokens per GPU and step: {efa.tokens_per_gpu_per_step:,.0f} and "
            f"{tcp.tokens_per_gpu_per_step:,.0f}"
        )
    return problems


def _expectation(
    run: _Run,
    efa: Leg,
    network_gbps: float | None,
    efa_gb_per_second: float | None,
    tcp_gb_per_second: float | None,
) -> tuple[Expectation | None, str | None]:
    """The model's expectation, or why there is none."""
    bytes_per_step = run.bytes_per_node_per_step
    if bytes_per_step is None:
        return None, run.bytes_missing
    measured = efa_gb_per_second is not None and tcp_gb_per_second is not None
    if measured:
        efa_rate, tcp_rate = cast("tuple[float, float]", (efa_gb_per_second, tcp_gb_per_second))
    elif network_gbps is not None:
        efa_rate, tcp_rate = (share * network_gbps / 8 for share in (ASSUMED_EFA_SHARE, ASSUMED_TCP_SHARE))
    else:
        return None, "neither measured bandwidths nor the line rate of the nodes are known"
    efa_seconds, tcp_seconds = (bytes_per_step / 1e9 / rate for rate in (efa_rate, tcp_rate))
    step = efa.step_seconds
    compute = step - efa_seconds  # without overlap; with it, up to the whole step
    if compute <= 0:
        low = high = tcp_seconds / efa_seconds
    else:
        low = max(step, tcp_seconds) / step
        high = (compute + tcp_seconds) / step
    return (
        Expectation(
            bytes_per_node_per_step=bytes_per_step,
            efa_gb_per_second=efa_rate,
            tcp_gb_per_second=tcp_rate,
            bandwidth="measured" if measured else "assumed",
            efa_seconds=efa_seconds,
            tcp_seconds=tcp_seconds,
            ratio_low=low,
            ratio_high=high,
            hiding_tokens=efa.tokens_per_gpu_per_step * tcp_seconds / compute if compute > 0 else None,
        ),
        None,
    )


def _resampled_ratios(efa_seconds: Sequence[float], tcp_seconds: Sequence[float]) -> list[float]:
    """Ratios of medians over resampled steps; the same steps give the same ratios."""
    generator = random.Random(0)  # noqa: S311
    return [
        statistics.median(generator.choices(tcp_seconds, k=len(tcp_seconds)))
        / statistics.median(generator.choices(efa_seconds, k=len(efa_seconds)))
        for _ in range(_NUM_RESAMPLES)
    ]


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
