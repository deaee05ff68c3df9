"""Float8 against bf16 on real text (the Python language reference): held-out loss, same steps, same weights.

`python -m bench.gpu.convergence [MODEL[:DTYPE] ...]`: small, 1.5B, small:float8, 1.5B:bf16, ... Only losses count here, so
that several of them may share a GPU.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from bench.gpu.ours import WORK, Clock, Ours, clean, emit, make_job
from training.data.texts import texts
from training.data.tokenizer import save_tokenizer, train_bpe

LENGTH, VOCAB = 1_024, 4_096
DATA: dict[str, Any] = {"source": "python-docs", "validation": {"fraction": 0.05}}

SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_layers": 8, "num_heads": 8, "vocab_size": VOCAB}
# name -> (architecture, steps, learning rate, tokens a step): at most 7 passes over the text, so that held-out loss falls
MODELS: dict[str, tuple[dict[str, Any], int, float, int]] = {
    "1.5B": ({}, 300, 2e-4, 8_192),
    "small": (SMALL, 1000, 5e-4, 2_048),
}


def run(name: str, float8: bool, pieces: int = 5) -> None:
    architecture, steps, learning_rate, tokens = MODELS[name]
    folder = WORK / "tokenizer-docs"
    if not folder.exists():
        data = make_job(tokens, LENGTH, data=DATA).data
        save_tokenizer(train_bpe(texts(data, WORK / "texts"), VOCAB), folder)
    clean()
    clock = Clock()
    job = make_job(
        tokens, LENGTH, architecture, DATA,
        model__tokenizer=str(folder), model__float8=float8, optimizer__learning_rate=learning_rate,
        schedule__warmup_steps=30, evaluation__max_batches=20,
    )  # fmt: skip
    ours = Ours(job)
    trainer = ours.trainer
    evaluations: list[list[float | None]] = []
    seconds: list[float] = []
    for piece in range(pieces):
        seconds += ours.steps(steps // pieces)
        if not piece:
            evaluations.append([0, trainer.progress.first_eval_loss])
        evaluations.append([trainer.progress.step, trainer._evaluate(trainer.progress.step)])
        emit("held_out", name=name, float8=float8, step=evaluations[-1][0], loss=evaluations[-1][1])
    losses = ours.losses()
    emit("convergence", name=name, float8=float8, steps=steps, tokens_per_step=tokens, learning_rate=learning_rate,
         held_out=evaluations, train_loss=statistics.mean(losses[-20:]), 
         median_step_ms=round(statistics.median(seconds) * 1e3, 1),
         seconds=clock.lap())  # fmt: skip
    ours.close()


def main(names: list[str]) -> None:
    for argument in names or list(MODELS):
        name, _, dtype = argument.partition(":")
        for each in (dtype,) if dtype else ("bf16", "float8"):
            run(name, each == "float8")


if __name__ == "__main__":
    main(sys.argv[1:])
