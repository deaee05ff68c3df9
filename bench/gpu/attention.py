"""Attention kernels side by side: documents of one length and of uneven lengths, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.ours import emit
from training.attention import _uniform, _varlen  # pyright: ignore[reportPrivateUsage]

TOKENS, HEADS, KV_HEADS, CHANNELS = 16_384, 12, 2, 128


def log_normal_lengths(tokens: int, mean: float = 400.0, longest: int = 2048, seed: int = 0) -> list[int]:
    """Document lengths of real text (log-normal, sigma 1) that fill `tokens` exactly."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        length = int(rng.lognormal(np.log(mean) - 0.5, 1.0))
        lengths.append(max(1, min(length, longest, tokens - sum(lengths))))
    return lengths


def time_ms(run: Callable[[], Any], repeat: int = 20) -> float:
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeat):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeat


def inputs() -> list[Tensor]:
    return [
        torch.randn(1, TOKENS, heads, CHANNELS, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def both_ways(name: str, call: Callable[[], Tensor], leaves: list[Tensor]) -> None:
    grad = torch.ones_like(call())
    with torch.no_grad():
        forward = time_ms(call)
    both = time_ms(lambda: torch.autograd.grad(call(), leaves, grad))
    emit("attention", name=name, forward_ms=round(forward, 3), both_ms=round(both, 3))


def main() -> None:
    leaves = inputs()
    query, key, value = leaves
    both_ways("8 x 2048", lambda: _uniform(query, key, value, 2048, 0.0884), leaves)
    lengths = log_normal_lengths(TOKENS)
    borders = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")

    def varlen() -> Tensor:
        return _varlen()(query, key, value, borders, 2048, 0.0884, (-1, 0))

    both_ways(f"{len(lengths)} documents of uneven length", varlen, leaves)


if __name__ == "__main__":
    main()
