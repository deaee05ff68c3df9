"""What an asynchronous checkpoint of the full state costs the steps around it, and how long a resume takes."""

from __future__ import annotations

import statistics
import time

import torch

from bench.gpu.ours import Ours, clean, emit, make_job
from training import checkpoint as ckpt

EVERY = 30


def main() -> None:
    clean()
    ours = Ours(make_job(checkpoint__every=EVERY, checkpoint__keep=1))
    published: list[ckpt.Published] = []
    ours.trainer.checkpointer.on_published = published.append
    ours.trainer._save_if_due = lambda _, *rest: ours.save_due(False, *rest)
    ours.steps(3)
    usual = statistics.median(ours.steps(12))
    for _ in range(2):
        before = ours.trainer.checkpoint_seconds
        count = EVERY - ours.trainer.progress.step % EVERY + 12
        seconds = ours.steps(count)
        lost = sum(seconds) - usual * len(seconds)
        emit("checkpoint", usual_step_ms=round(usual * 1e3, 1), slowest_step_ms=round(max(seconds) * 1e3, 1),
             steps=len(seconds), lost_s=round(lost, 3), share_of_50_steps=round(lost / (50 * usual), 4),
             blocked_s=round(ours.trainer.checkpoint_seconds - before, 3),
             written_s=round(published[-1].seconds, 2), gib=round(published[-1].bytes / 2**30, 2))  # fmt: skip
    trainer = ours.trainer
    started = time.monotonic()
    state = ckpt.training_state(trainer.optimizer, trainer.world)
    ckpt.restore(trainer.storage, published[-1].name, state, trainer.world, trainer.work_dir)
    torch.cuda.synchronize()
    emit("resume", seconds=round(time.monotonic() - started, 2))
    ours.close()


if __name__ == "__main__":
    main()
