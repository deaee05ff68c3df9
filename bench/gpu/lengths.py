"""Documents of real lengths (log-normal, mean 400 tokens, at most 2048): packed, padded, and TRL's packings."""

from __future__ import annotations

import statistics
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers.models.qwen2 import modeling_qwen2

from bench.gpu.attention import log_normal_lengths
from bench.gpu.ours import Ours, clean, emit, intervals, peak_gib
from bench.gpu.peers import LENGTH, ROWS, STEPS, TIMED, TOKENS, Bench
from training.data.batch import IGNORE, Batch
from training.data.packing import best_fit_decreasing


class Rows:
    """Batches made of given documents, in place of the loop's loader."""

    def __init__(self, rows: list[list[list[int]]], slots: bool) -> None:
        self.iterator = self._batches(rows, slots)

    def __next__(self) -> Batch:
        return next(self.iterator)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def _batches(self, rows: list[list[list[int]]], slots: bool) -> Iterator[Batch]:
        while True:
            for documents in rows:
                yield _batch(documents, slots)


def _batch(documents: list[list[int]], slots: bool) -> Batch:
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    labels = torch.full((TOKENS,), IGNORE)
    positions = torch.zeros(TOKENS, dtype=torch.int64)
    borders = [0]
    start = 0
    for document in documents:
        length = len(document)
        row = torch.tensor(document)
        ids[start : start + length] = row
        labels[start : start + length - 1] = row[1:]
        size = LENGTH if slots else length
        positions[start : start + size] = torch.arange(size)
        start += size
        borders.append(start)
    if start < TOKENS:
        borders.append(TOKENS)
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    tokens = sum(len(document) for document in documents)
    return Batch(ids, labels, positions, cu_seqlens, LENGTH, tokens - len(documents), tokens, len(documents))


def documents(count: int = 3000) -> list[list[int]]:
    rng = np.random.default_rng(1)
    lengths = log_normal_lengths(count * 400)[:count]
    return [rng.integers(3, 151_000, max(length, 2)).tolist() for length in lengths]


def main(only: list[str]) -> None:
    bench = Bench()
    texts = documents()
    emit("lengths", name="documents", count=len(texts), mean=round(statistics.mean(map(len, texts)), 1))
    packing = best_fit_decreasing(np.array([len(text) for text in texts]), TOKENS)
    order = np.random.default_rng(0).permutation(packing.num_packs)
    packed = [[texts[i] for i in packing.pack(p)] for p in order]
    padded = [texts[i : i + ROWS] for i in range(0, len(texts), ROWS)]
    for name, rows, slots in (("ours, packed", packed, False), ("ours, padded", padded, True)):
        bench.ours.trainer.data = _with_loader(bench.ours, Rows(rows, slots))
        bench.ours.steps(4)
        seconds = bench.ours.steps(2 * TIMED + 1)
        supervised = statistics.mean(_batch(row, slots).num_supervised for row in rows[:-1])
        report(name, seconds, supervised, peak_gib())
    bench.ours.close()
    settings: dict[str, dict[str, Any]] = {
        "TRL default (bfd packing, checkpointing)": {"gradient_checkpointing": True},
        "TRL bfd packing + Liger, no checkpointing": {"use_liger_kernel": True},
        "TRL wrapped packing + Liger, no checkpointing": {
            "use_liger_kernel": True,
            "packing_strategy": "wrapped",
        },
    }
    for name, changes in settings.items():
        if only and not any(wanted in name for wanted in only):
            continue
        clean()
        unpatched = dict(vars(modeling_qwen2))
        try:
            marks, _, tokens = bench.trl(texts, **changes)
            # Of each document all tokens but the first are learnt; wrapped rows begin with a token that is not.
            share = 1 - len(texts) / sum(map(len, texts))
            report(name, intervals(marks)[-TIMED:], tokens * share, peak_gib())
        except BaseException as error:
            traceback.print_exc()
            emit("lengths", name=name, error=str(error)[:300])
        vars(modeling_qwen2).update(unpatched)


def _with_loader(ours: Ours, loader: Rows) -> Any:
    from dataclasses import replace

    return replace(ours.trainer.data, train_loader=loader)  # pyright: ignore


def report(name: str, seconds: list[float], supervised: float, peak: float) -> None:
    median = statistics.median(seconds)
    emit("lengths", name=name, step_ms=round(median * 1e3, 1), low=round(min(seconds) * 1e3, 1),
         high=round(max(seconds) * 1e3, 1), supervised_per_step=round(supervised),
         supervised_tokens_per_second=round(supervised / median), peak_gib=peak, steps=STEPS)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
