"""Our training loop, driven step by step: the object that the benchmarks time and take apart."""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

import training.loop as loop
from training.data.texts import texts
from training.data.tokenizer import save_tokenizer, train_bpe
from training.job import JobSpec, job_from_yaml
from training.metrics import MetricsLog
from training.model import (
    CausalLM,
    _fill,  # pyright: ignore[reportPrivateUsage]
    _seed_of,  # pyright: ignore[reportPrivateUsage]
    base_parameters,
    recompute_buffers,
)
from training.parallel import World, join_world
from training.storage import open_storage

QWEN = {
    "family": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_layers": 28,
    "num_heads": 12,
    "num_kv_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
}
"""The shape of Qwen2.5-1.5B."""

PEAK = 989e12

OUT = Path(os.environ.get("OUT", "bench/results"))
WORK = Path(tempfile.gettempdir()) / "bench-gpu"


def emit(kind: str, **values: Any) -> None:
    """One JSON line: on standard output and in the results of this run."""
    line = json.dumps({"kind": kind, **values})
    print(line, flush=True)
    with (OUT / "results.jsonl").open("a") as file:
        file.write(line + "\n")


def environment() -> dict[str, Any]:
    return {"device": torch.cuda.get_device_name(), **loop.versions()} if torch.cuda.is_available() else {}


def make_job(
    tokens: int = 16_384,
    length: int = 2_048,
    architecture: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **changes: Any,
) -> JobSpec:
    """changes: SECTION__KEY=VALUE."""
    document: dict[str, Any] = {
        "name": "bench",
        "model": {"architecture": {**QWEN, **(architecture or {})}, "tokenizer": str(WORK / "tokenizer")},
        "data": {"source": "random", "max_length": length, **(data or {})},
        "optimizer": {"learning_rate": 1e-5},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "batch": {"tokens_per_gpu": tokens},
        "steps": 100_000,
        "checkpoint": {"every": 1_000_000, "keep": 1},
        "evaluation": {"every": 1_000_000},
        "parallel": {"activation_checkpointing": "none", "reshard_after_forward": False},
        "run": {"resume": False},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        document.setdefault(section, {})[name] = value
    return job_from_yaml(yaml.safe_dump(document))


def tiny_tokenizer() -> None:
    """A tokenizer for data that has no text: the loop needs one to name documents in messages."""
    folder = WORK / "tokenizer"
    if not folder.exists():
        data = make_job(data={"source": "python-docs", "limit": 20}).data
        save_tokenizer(train_bpe(texts(data, WORK / "texts"), 512), folder)


def fast_init(model: CausalLM, seed: int) -> None:
    """Random weights made on the device: the loop's own, made on the host, take too long for a benchmark. As with these,
    the number of ranks does not matter."""
    for name, parameter in base_parameters(model).items():
        device = parameter.data.to_local().device  # pyright: ignore[reportAttributeAccessIssue]
        if parameter.ndim >= 2:
            generator = torch.Generator(device).manual_seed(_seed_of(seed, name))
            whole = torch.empty(tuple(parameter.shape), device=device)
            whole.normal_(0.0, float(model.config.initializer_range), generator=generator)
        else:
            whole = torch.full(tuple(parameter.shape), 0.0 if name.endswith("bias") else 1.0, device=device)
        _fill(parameter, lambda rows, whole=whole: whole[rows])
    recompute_buffers(model)


_world: list[World] = []


def world() -> World:
    if not _world:
        _world.append(join_world())
    return _world[0]


class Ours:
    """A trainer whose loop is run a few steps at a time, timed on the device from optimizer step to optimizer step.

    folder: holds the run and its scratch space; with several ranks, one that they share.
    """

    def __init__(
        self, job: JobSpec, with_log: bool = True, world_: World | None = None, folder: Path | None = None
    ) -> None:
        tiny_tokenizer()
        loop.init_weights = fast_init
        folder = folder or Path(tempfile.mkdtemp(prefix="bench-run-"))
        self.folder = folder
        self.trainer = trainer = loop._Trainer(  # pyright: ignore[reportPrivateUsage]
            job, open_storage(str(folder / "run")), folder / "work", loop.Hooks(), world_ or world(), "000-bench",
            loop.hardware_of(world_ or world()),
        )  # fmt: skip
        (folder / "work").mkdir(parents=True, exist_ok=True)
        trainer.prepare()
        trainer.total_steps = 0
        if with_log:
            trainer.log = MetricsLog(trainer.storage, trainer.work_dir, None)
        self.save_due = trainer._save_if_due
        trainer._save_if_due = lambda *_: None
        self.marks: list[Any] = []
        step = trainer.optimizer.step

        def timed(*args: Any) -> None:
            step(*args)
            self.marks.append(mark())

        trainer.optimizer.step = timed

    def steps(self, count: int) -> list[float]:
        """Runs `count` steps; seconds between their ends (count - 1 numbers)."""
        self.marks.clear()
        self.trainer.total_steps += count
        self.trainer._loop()
        return intervals(self.marks)

    @staticmethod
    def batches(job: JobSpec) -> Any:
        """The loader of a job, from its beginning."""
        return loop.build_data(
            job.data, None, seed=job.seed, tokens_per_batch=job.batch.micro_batch_tokens, rank=0, world_size=1,
            work_dir=WORK / "data", vocab_size=QWEN["vocab_size"],
        ).train_loader  # fmt: skip

    def losses(self) -> list[float]:
        """Of every step so far."""
        return (
            [line["loss"] for line in self.trainer.log.records() if "loss" in line]
            if self.trainer.log
            else []
        )

    @property
    def loss(self) -> float | None:
        return self.trainer.last_loss

    def close(self) -> None:
        self.trainer.close()
        self.trainer = None  # pyright: ignore[reportAttributeAccessIssue]
        clean()


def mark() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def intervals(marks: list[Any]) -> list[float]:
    pairs = list(zip(marks, marks[1:], strict=False))
    if not torch.cuda.is_available():
        return [after - before for before, after in pairs]
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def summary(seconds: list[float], tokens: int, length: int = 2_048) -> dict[str, Any]:
    """Median and spread of step times, and what follows from them. MFU counts 6 N + causal attention."""
    median = statistics.median(seconds)
    flops = 6 * 1_543_569_408 + 6 * 28 * 1536 * length
    return {
        "step_ms": round(median * 1e3, 2),
        "step_ms_low": round(min(seconds) * 1e3, 2),
        "step_ms_high": round(max(seconds) * 1e3, 2),
        "tokens_per_second": round(tokens / median),
        "mfu_percent": round(tokens / median * flops / PEAK * 100, 2),
        "steps": len(seconds),
    }


def peak_gib(before: int = 0) -> float:
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)


class Clock:
    """Wall-clock seconds of parts of a benchmark: device time is scarce."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def lap(self) -> float:
        now = time.monotonic()
        seconds, self.last = now - self.last, now
        return round(seconds, 1)
