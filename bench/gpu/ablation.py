"""What each optimization gains: the same loop with one more of them per row, and where the time of a step goes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

import training.loop as loop
import training.loss as loss
import training.parallel as parallel
from bench.gpu.ours import OUT, Clock, Ours, clean, emit, environment, make_job, peak_gib, summary
from training.kernels import qkv, swiglu
from training.optimizer import ShardedAdamW


def replaced(owner: Any, name: str, value: Any) -> Callable[[], Callable[[], None]]:
    def switch_off() -> Callable[[], None]:
        before = getattr(owner, name)
        setattr(owner, name, value)
        return lambda: setattr(owner, name, before)

    return switch_off


def plain_add(total: Any, left: Any, right: Any) -> None:
    total += left @ right


# In this order they are switched on; each entry switches one off.
SWITCHES: dict[str, Callable[[], Callable[[], None]]] = {
    "loss kernel": replaced(loss, "_chunk", loss._plain_chunk),  # pyright: ignore[reportPrivateUsage]
    "weight gradient summed in the product": replaced(loss, "_add_product", plain_add),
    "swiglu kernel": replaced(swiglu, "use", lambda *_: False),
    "fused qkv": replaced(qkv, "use", lambda *_: False),
    "adamw kernel": replaced(ShardedAdamW, "_step_large", lambda _, names, *__: names),
    "pinned batches": replaced(loop, "to_device", lambda batch, device: batch.to(device)),
    "weights stay gathered": replaced(parallel, "keeps_gathered", lambda *_: False),
}


def measure(name: str, steps: int = 9, profile: bool = False, **changes: Any) -> None:
    clock = Clock()
    torch._dynamo.reset()
    clean()
    ours = Ours(make_job(**changes))
    built = clock.lap()
    first = ours.steps(1)
    torch.cuda.synchronize()
    compiled = clock.lap()
    ours.steps(2)
    first = ours.steps(steps + 1)
    emit("ablation", name=name, **summary(first, ours.trainer.job.batch.tokens_per_gpu), peak_gib=peak_gib(),
         loss=ours.loss, build_s=built, first_step_s=compiled)  # fmt: skip
    if profile:
        kernels(name, ours)
    ours.close()


def kernels(name: str, ours: Ours, steps: int = 2) -> None:
    """Device time by kernel of a step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        ours.steps(steps)
        torch.cuda.synchronize()
    rows = [
        {
            "kernel": row.key[:200],
            "ms": round(row.self_device_time_total / 1e3 / steps, 3),
            "calls": row.count // steps,
        }
        for row in found.key_averages()
        if row.self_device_time_total
    ]
    rows.sort(key=lambda row: -row["ms"])
    (OUT / f"kernels-{name.replace(' ', '-')}.json").write_text(json.dumps(rows, indent=0))
    emit("kernels", name=name, total_ms=round(sum(row["ms"] for row in rows), 2), top=rows[:12])


def main(names: list[str]) -> None:
    emit("environment", **environment())
    undo = {name: switch() for name, switch in SWITCHES.items()}
    measure("base", profile=True)
    for name, on in undo.items():
        on()
        if not names or name in names:
            measure(name)
    measure("all", steps=20, profile=True)


if __name__ == "__main__":
    main(sys.argv[1:])
