"""`deterministic: true` on a GPU: two runs of a job give the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.jobs import read_losses, tiny_job
from tests.unit.training.processes import run_ranks

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.slow,
]


def _train(job_yaml: str, run: str, work: str) -> None:
    from training.job import job_from_yaml
    from training.loop import train
    from training.storage import open_storage

    train(job_from_yaml(job_yaml), open_storage(run), Path(work))


def test_two_runs_give_the_same_losses_and_weights(tmp_path: Path) -> None:
    losses: list[dict[int, float]] = []
    weights: list[bytes] = []
    changes: dict[str, Any] = {"steps": 20, "deterministic": True, "batch": {"tokens_per_gpu": 2048}}
    for name in ("first", "second"):
        run = tmp_path / name / "run"
        run_ranks(_train, 1, tiny_job(**changes).dump_yaml(), str(run), str(tmp_path / name / "work"))
        losses.append(read_losses(run))
        weights.append((run / "export" / "model-00001-of-00001.safetensors").read_bytes())
    assert losses[0] == losses[1]
    assert weights[0] == weights[1]
