"""Peak memory by configuration, on one GPU and as rank 0 of eight (a fake process group: real shards, no peers).

`python -m bench.gpu.memory one` or `eight`: the latter under a cap of 22 GiB, which stands for an L4. Prints what the
memory model of `finetune plan` says for the same job beside it.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu.ours import Clock, Ours, clean, emit, environment, make_job, summary
from training.parallel import World

CAP_GIB = 22.0

# tokens, length, activation_checkpointing, reshard_after_forward
ONE = [
    (32_768, 2_048, "none", False),
    (32_768, 8_192, "none", False),
    (32_768, 16_384, "none", False),
    (32_768, 32_768, "none", False),
    (8_192, 2_048, "none", False),
    (16_384, 2_048, 2, False),
    (16_384, 2_048, "full", False),
]
# What a row that runs out of memory leaves behind would count for the next one: it is the last of its process.
EIGHT = [
    (4_096, 2_048, "none", False),
    (16_384, 2_048, 2, True),
    (24_576, 2_048, "full", True),
    (65_536, 2_048, "full", True),
    (8_192, 2_048, "none", True),
    (10_240, 2_048, "none", True),
    (20_480, 2_048, 2, True),
]


def world_of_eight() -> World:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.cuda.set_device(0)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    everyone: Any = dist.group.WORLD
    return World(0, 8, 0, 8, torch.device("cuda", 0), everyone, everyone)


def main(which: str, count: int | None = None) -> None:
    emit("environment", **environment())
    world = world_of_eight() if which == "eight" else None
    if world is not None:
        torch.cuda.set_per_process_memory_fraction(
            CAP_GIB * 2**30 / torch.cuda.get_device_properties(0).total_memory
        )
    for tokens, length, checkpointing, reshard in (EIGHT if world else ONE)[:count]:
        name = {"world_size": 8 if world else 1, "tokens": tokens, "length": length,
                "activation_checkpointing": checkpointing, "reshard_after_forward": reshard}  # fmt: skip
        clean()
        clock = Clock()
        try:
            measure(name, world)
        except torch.OutOfMemoryError:
            emit("memory", **name, fits=False, seconds=clock.lap())
            return
        except Exception as error:
            traceback.print_exc()
            emit("memory", **name, error=f"{type(error).__name__}: {error}"[:300])


def measure(name: dict[str, Any], world: World | None) -> None:
    clock = Clock()
    tokens, length = name["tokens"], name["length"]
    job = make_job(
        tokens, length,
        parallel__activation_checkpointing=name["activation_checkpointing"],
        parallel__reshard_after_forward=name["reshard_after_forward"],
        resilience__non_finite="skip",
    )  # fmt: skip
    ours = Ours(job, world_=world)
    # Without peers the gathered weights are whatever lies there.
    ours.trainer._non_finite = lambda *_: "no peers"
    ours.steps(2)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    times = summary(ours.steps(6), tokens, length) if world is None else {}
    emit("memory", **name, fits=True, peak_gib=round(peak / 2**30, 3), reserved_gib=round(reserved / 2**30, 3),
         **times, seconds=clock.lap())  # fmt: skip
    ours.close()


if __name__ == "__main__":
    main(sys.argv[1])
