"""Numbers of a run: metrics.jsonl, TensorBoard, throughput, model FLOP/s utilization and memory."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from training.storage import Storage

# Dense bf16 peak in TFLOP/s by the name torch gives the device. NVIDIA's headline for L4 and L40S (242, 733) is with
# sparsity. Source: vendor data sheets; L4 checked as 58 SM x 1,024 FLOP/clock x 2.04 GHz.
PEAK_BF16_TFLOPS = {
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA A10G": 70.0,
    "NVIDIA A100": 312.0,
    "NVIDIA H100": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA B200": 2250.0,
}

REMOTE_FLUSH_SECONDS = 10.0


def peak_flops(device: torch.device) -> tuple[float | None, str | None]:
    """(peak FLOP/s, None), or (None, why there is none): a wrong peak would give a wrong utilization."""
    if device.type != "cuda":
        return None, "no peak is defined for a CPU"
    name = torch.cuda.get_device_name(device)
    for known in sorted(PEAK_BF16_TFLOPS, key=len, reverse=True):
        if name == known or name.startswith((known + " ", known + "-")):
            return PEAK_BF16_TFLOPS[known] * 1e12, None
    return None, f"the peak of {name!r} is not in the table (known: {', '.join(PEAK_BF16_TFLOPS)})"


def flops_per_step(
    num_matmul_parameters: int,
    num_layers: int,
    attention_width: int,
    lengths: list[int],
    num_frozen: int = 0,
) -> float:
    """Model FLOPs of forward and backward over documents of these lengths: 6 N per token, and causal attention.

    6 N T + 6 L w sum(length^2): PaLM's appendix B with half of the attention products, as a causal mask needs;
    packing shortens the attention, which the sum of squares accounts for. attention_width: heads x channels.
    num_frozen: those of the parameters that get no gradient, which is 2 FLOPs per token less each.
    """
    tokens = sum(lengths)
    squares = sum(length * length for length in lengths)
    return (
        6.0 * num_matmul_parameters - 2.0 * num_frozen
    ) * tokens + 6.0 * num_layers * attention_width * squares


def memory(device: torch.device) -> dict[str, float]:
    """Peak memory in GiB: allocated on CUDA, resident on the host."""
    if device.type == "cuda":
        return {
            "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        }
    return {"rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


@dataclass
class Throughput:
    """Tokens over time, without the steps that also compile, evaluate for the first time or warm caches."""

    WARMUP_STEPS = 3

    steps: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    recent: list[float] = field(default_factory=list)

    def add(self, tokens: int, flops: float, seconds: float) -> None:
        self.steps += 1
        self.recent = [*self.recent[-19:], seconds]
        if self.steps > self.WARMUP_STEPS:
            self.tokens += tokens
            self.flops += flops
            self.seconds += seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def utilization(self, peak: float) -> float | None:
        """The share of `peak` FLOP/s that the model's FLOPs came to; None before the first measured step."""
        return self.flops / self.seconds / peak if self.seconds else None

    def seconds_left(self, steps: int) -> float:
        ordered = sorted(self.recent)
        return steps * ordered[len(ordered) // 2] if ordered else 0.0


class PartTimer:
    """Seconds of each part of a step: wall clock on a CPU, events on CUDA, so that measuring does not stop the queue."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        self._marks = [("", self._now())]

    def end(self, part: str) -> None:
        """The time since the last mark belongs to `part`."""
        self._marks.append((part, self._now()))

    def take(self) -> Callable[[], dict[str, float]]:
        """The marks of this step, to be read when the device has passed them."""
        marks = self._marks

        def read() -> dict[str, float]:
            if self._cuda:
                marks[-1][1].synchronize()
            seconds: dict[str, float] = {}
            for (_, before), (part, after) in zip(marks, marks[1:], strict=False):
                elapsed = before.elapsed_time(after) / 1e3 if self._cuda else after - before
                seconds[part] = seconds.get(part, 0.0) + elapsed
            return seconds

        return read

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass
class StepRecord:
    """One line of metrics.jsonl."""

    step: int
    tokens: int
    supervised_tokens: int
    loss: float | None
    learning_rate: float
    grad_norm: float | None
    tokens_per_second: float
    seconds: dict[str, float]
    memory: dict[str, float]
    attempt: str
    eval_loss: float | None = None
    skipped: str | None = None
    measures: dict[str, float] = field(default_factory=dict[str, float])
    """Numbers of the objective beside its loss, each with a name of its own in the line."""
    time: float = field(default_factory=time.time)

    def line(self) -> dict[str, Any]:
        values = {
            key: value for key, value in self.__dict__.items() if value is not None and key != "measures"
        }
        values |= {key: value for key, value in self.measures.items() if math.isfinite(value)}
        # Seven digits would round a time since 1970 to a thousand seconds.
        return {key: _rounded(value) for key, value in values.items()} | {"time": round(self.time, 3)}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.7g}") if isinstance(value, float) else value


class MetricsLog:
    """metrics.jsonl and TensorBoard events of a run, written by rank 0.

    A resumed run first drops the lines after the step it resumes from, so that every step stands once. On S3, which
    cannot append, the file is written anew every ten seconds and at the end.
    """

    NAME = "metrics.jsonl"

    def __init__(self, storage: Storage, work_dir: Path, resumed_step: int | None) -> None:
        self.storage = storage
        self.path = (storage.local_path or work_dir) / self.NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._earlier_lines(resumed_step)
        self.path.write_text("".join(lines))
        self._file = self.path.open("a")
        self._flushed = time.monotonic()
        self._events = _tensorboard((storage.local_path or work_dir) / "tensorboard")

    def _earlier_lines(self, resumed_step: int | None) -> list[str]:
        if resumed_step is None or not self.storage.exists(self.NAME):
            return []
        kept: list[str] = []
        for line in self.storage.read_text(self.NAME).splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the line that was being written when the run died
            if record["step"] <= resumed_step:
                kept.append(line + "\n")
        return kept

    def write(self, record: StepRecord) -> None:
        line = record.line()
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for key in ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", *record.measures):
            if key in line:
                self._events.add_scalar(key, line[key], record.step)
        if self.storage.local_path is None and time.monotonic() - self._flushed > REMOTE_FLUSH_SECONDS:
            self.upload()

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def close(self) -> None:
        self._events.close()
        self._file.close()
        if self.storage.local_path is None:
            self.upload()
            for path in sorted(self.path.parent.glob("tensorboard/*")):
                self.storage.upload(path, f"tensorboard/{path.name}")

    def upload(self) -> None:
        """Brings metrics.jsonl to where the run folder is; on a local path it is there already."""
        if self.storage.local_path is not None:
            return
        self.storage.write_bytes(self.NAME, self.path.read_bytes())
        self._flushed = time.monotonic()


def _tensorboard(folder: Path) -> Any:
    from torch.utils.tensorboard.writer import SummaryWriter

    return SummaryWriter(str(folder))
