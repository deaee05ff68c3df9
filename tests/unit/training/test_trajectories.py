"""A whole run, packed, evaluated and checkpointed, makes the same losses however many ranks share it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.unit.training.jobs import read_losses, tiny_architecture, tiny_job
from tests.unit.training.processes import run_ranks

pytestmark = pytest.mark.slow


def _train(job_yaml: str, run: str) -> dict[str, Any]:
    from training.job import job_from_yaml
    from training.loop import train
    from training.storage import open_storage

    return train(job_from_yaml(job_yaml), open_storage(run), Path(run).with_name("work")).__dict__


def _losses(run: Path, world_size: int, local_size: int, sharding: str) -> dict[int, float]:
    """Losses of four steps on ranks that share the same tokens."""
    micro_batches = 4 // world_size
    job = tiny_job(
        steps=4,
        parallel={"sharding": sharding},
        batch={"tokens_per_gpu": 256 * micro_batches, "accumulation": micro_batches},
    )
    result = run_ranks(_train, world_size, job.dump_yaml(), str(run), local_size=local_size)[0]
    assert (result["world_size"], result["nodes"]) == (world_size, world_size // local_size)
    assert result["sharding"]["scheme"] == sharding
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    return read_losses(run)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    losses = _losses(tmp_path_factory.mktemp("alone") / "run", 1, 1, "full")
    assert losses[4] < losses[1]
    return losses


@pytest.mark.parametrize(
    ("world_size", "local_size", "sharding"), [(2, 2, "full"), (4, 4, "full"), (4, 2, "hybrid")]
)
def test_several_ranks_train_as_one_does(
    tmp_path: Path, alone: dict[int, float], world_size: int, local_size: int, sharding: str
) -> None:
    assert _losses(tmp_path / "run", world_size, local_size, sharding) == pytest.approx(alone, rel=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("exported", ["last", "best"])
def test_weights_that_stay_gathered_change_nothing(tmp_path: Path, dtype: str, exported: str) -> None:
    """One rank keeps the weights it computes with from step to step; freed after each forward they are made from the
    masters again. Losses, and the weights that come out, are the same: through evaluations, checkpoints, a resume and the
    export of an earlier checkpoint.
    """
    losses: list[dict[int, float]] = []
    weights: list[dict[str, torch.Tensor]] = []
    for freed in (False, True):
        run = tmp_path / f"freed-{freed}" / "run"
        changes = {
            "model__dtype": dtype,
            "parallel": {"reshard_after_forward": freed},
            "checkpoint__export": exported,
        }
        # Too high a rate spoils the weights after the third step: those of the checkpoint are better.
        for steps, rate in ((3, 3e-3), (6, 3.0 if exported == "best" else 3e-3)):
            job = tiny_job(steps=steps, optimizer__learning_rate=rate, **changes)
            result = run_ranks(_train, 1, job.dump_yaml(), str(run))[0]
        assert result["resumed_from"] is not None
        assert (result["exported"]["checkpoint"] == result["checkpoint"]) == (exported == "last")
        losses.append(read_losses(run))
        weights.append(load_file(run / "export" / "model-00001-of-00001.safetensors"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert weights[0].keys() == weights[1].keys()
    for name, kept in weights[0].items():
        torch.testing.assert_close(kept, weights[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_after_an_evaluation_holds_the_masters(tmp_path: Path, world_size: int) -> None:
    """Weights that are kept after the forward of an evaluation lie in the model, rounded, in the place of the masters."""
    run = tmp_path / "run"
    job = tiny_job(
        steps=3, model__dtype="bfloat16", parallel={"reshard_after_forward": False}, checkpoint__every=3
    )
    run_ranks(_train, world_size, job.dump_yaml(), str(run))
    (folder,) = (run / "checkpoints").glob("step-00000003.*")
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    dtypes = {name: entry.properties.dtype for name, entry in saved.items() if name.startswith("model.")}  # pyright: ignore
    assert len(dtypes) > 10
    assert set(dtypes.values()) == {torch.float32}


def test_several_ranks_export_the_best_checkpoint_where_it_is_the_newest(tmp_path: Path) -> None:
    """Only rank 0 learns which checkpoint was published last; a rank that loaded the best one alone would wait for ever."""
    run = tmp_path / "run"
    result = run_ranks(_train, 2, tiny_job(steps=3, checkpoint__export="best").dump_yaml(), str(run))[0]
    assert result["exported"]["checkpoint"] == result["checkpoint"]
    assert (run / "export" / "model-00001-of-00001.safetensors").is_file()


def test_a_checkpoint_of_a_model_of_another_size_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(_train, 1, tiny_job(steps=3).dump_yaml(), str(run))
    other = tiny_job(
        steps=6, model={"architecture": tiny_architecture(hidden_size=64, num_layers=3), "tokenizer": "train"}
    )
    with pytest.raises(AssertionError) as refused:
        run_ranks(_train, 1, other.dump_yaml(), str(run))
    words = " ".join(str(refused.value).split())
    assert "UsageError: checkpoint step-00000003." in words
    assert (
        "is of a model with num_hidden_layers 2, hidden_size 32, intermediate_size 64, vocab_size 512"
        in words
    )
    assert "this job's has num_hidden_layers 3, hidden_size 64" in words
    assert "Give the job its earlier model, or another run.path, or set run.resume: false" in words
