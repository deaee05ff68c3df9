"""A resumed run goes on as if it had never stopped, at another number of ranks too; a damaged checkpoint is never used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.jobs import read_losses, tiny_job
from tests.unit.training.processes import run_ranks
from training.checkpoint import best_checkpoint, complete_checkpoints, prune
from training.job import JobSpec
from training.storage import LocalStorage, open_storage

pytestmark = pytest.mark.slow


def _train(job_yaml: str, run: str, work: str) -> dict[str, Any]:
    """One rank of one attempt; returns its result and the warnings it gave."""
    from training.job import job_from_yaml
    from training.loop import Hooks, train

    events: list[dict[str, Any]] = []
    result = train(job_from_yaml(job_yaml), open_storage(run), Path(work), Hooks(event=events.append))
    return {"result": result.__dict__, "events": events}


def _run(job: JobSpec, run: Path, world_size: int, work: Path | None = None) -> list[dict[str, Any]]:
    return run_ranks(_train, world_size, job.dump_yaml(), str(run), str(work or run.with_name("work")))


def _job(steps: int, *, micro_batches: int = 1, **changes: Any) -> JobSpec:
    # A constant rate, so that the first half does not depend on where the job would have ended.
    return tiny_job(
        steps=steps,
        schedule={"kind": "constant", "warmup_steps": 1},
        batch={"tokens_per_gpu": 256 * micro_batches, "accumulation": micro_batches},
        **changes,
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of six steps on two ranks, never stopped."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    _run(_job(6), folder / "run", 2)
    losses = read_losses(folder / "run")
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    return losses


def test_resume_is_bit_equal_at_the_same_world_size(tmp_path: Path, uninterrupted: dict[int, float]) -> None:
    run = tmp_path / "run"
    _run(_job(3), run, 2)
    second = _run(_job(6), run, 2)
    assert second[0]["result"]["resumed_from"].startswith("step-00000003.000-")
    assert read_losses(run) == uninterrupted


@pytest.mark.parametrize(("world_size", "micro_batches"), [(1, 2)])
def test_resume_at_another_world_size_follows_the_same_trajectory(
    tmp_path: Path, uninterrupted: dict[int, float], world_size: int, micro_batches: int
) -> None:
    run = tmp_path / "run"
    _run(_job(3), run, 2)
    _run(_job(6, micro_batches=micro_batches), run, world_size)
    assert read_losses(run) == pytest.approx(uninterrupted, rel=2e-5)


def test_four_ranks_go_on_with_two_and_with_one(tmp_path: Path) -> None:
    _run(_job(6), tmp_path / "whole" / "run", 4)
    whole = read_losses(tmp_path / "whole" / "run")
    run = tmp_path / "run"
    _run(_job(2, checkpoint={"every": 2}), run, 4)
    _run(_job(4, micro_batches=2, checkpoint={"every": 2}), run, 2)
    last = _run(_job(6, micro_batches=4, checkpoint={"every": 2}), run, 1)
    assert last[0]["result"]["resumed_from"].startswith("step-00000004.")
    assert read_losses(run) == pytest.approx(whole, rel=2e-5)


def test_a_truncated_checkpoint_is_skipped_with_a_warning_that_names_it(
    tmp_path: Path, uninterrupted: dict[int, float]
) -> None:
    run = tmp_path / "run"
    _run(_job(6), run, 2)
    (damaged,) = (run / "checkpoints").glob("step-00000006.*")
    shard = next(damaged.glob("__1_*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])
    answers = _run(_job(6), run, 2)
    assert answers[0]["result"]["resumed_from"].startswith("step-00000003.")
    warnings = [event["text"] for event in answers[0]["events"] if event["event"] == "warning"]
    assert len(warnings) == 1
    assert damaged.name in warnings[0]
    assert f"{shard.name} has" in warnings[0]
    assert "truncated" in warnings[0]
    assert read_losses(run) == uninterrupted


def test_a_half_written_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    _fake(storage, 3, "000-aaaaaa")
    _fake(storage, 6, "000-aaaaaa")
    storage.delete("checkpoints/step-00000006.000-aaaaaa/COMPLETE")
    warnings: list[str] = []
    assert complete_checkpoints(storage, warnings.append) == ["step-00000003.000-aaaaaa"]
    assert "step-00000006.000-aaaaaa is skipped: it has no COMPLETE marker" in warnings[0]


def test_a_checkpoint_with_a_missing_file_is_named(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    _fake(storage, 3, "000-aaaaaa")
    storage.delete("checkpoints/step-00000003.000-aaaaaa/.metadata")
    warnings: list[str] = []
    assert complete_checkpoints(storage, warnings.append) == []
    assert ".metadata is missing" in warnings[0]


def test_retention_keeps_the_newest_and_the_best_and_clears_what_was_abandoned(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for step, eval_loss in ((1, 2.5), (2, 3.0), (3, None), (4, 2.6)):
        _fake(storage, step, "001-bbbbbb", eval_loss)
    storage.write_text("checkpoints/step-00000002.000-aaaaaa/__0_0.distcp", "half of an earlier attempt")
    storage.write_text("checkpoints/step-00000005.001-bbbbbb/__0_0.distcp", "being written now")
    prune(storage, keep=2, attempt="001-bbbbbb")
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    assert left == [
        "step-00000001.001-bbbbbb",
        "step-00000003.001-bbbbbb",
        "step-00000004.001-bbbbbb",
        "step-00000005.001-bbbbbb",
    ]
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-00000001.001-bbbbbb"


def test_the_best_checkpoint_is_never_a_damaged_one(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for step, eval_loss in ((1, 2.5), (2, 2.5), (3, 2.0), (4, 9.0)):
        _fake(storage, step, "001-bbbbbb", eval_loss)
    (tmp_path / "checkpoints" / "step-00000003.001-bbbbbb" / "__0_0.distcp").write_bytes(b"cut")
    best = best_checkpoint(storage)
    assert best is not None
    assert (best.step, best.eval_loss) == (1, 2.5)  # of equal ones the first


def test_without_an_evaluation_no_checkpoint_is_the_best(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    _fake(storage, 1, "001-bbbbbb")
    assert best_checkpoint(storage) is None
    prune(storage, keep=1, attempt="001-bbbbbb")
    assert not storage.exists("checkpoints/best")


def _train_with_given_evaluations(
    job_yaml: str, run: str, work: str, values: dict[int, float]
) -> dict[str, Any]:
    """Trains with held-out losses by step that are given: which checkpoint is best is then known."""
    from training import loop
    from training.job import job_from_yaml

    original = loop._Trainer._evaluate  # pyright: ignore[reportPrivateUsage]

    def evaluate(self: Any, step: int) -> float | None:
        original(self, step)
        self.last_eval_loss = values[step]
        return values[step]

    loop._Trainer._evaluate = evaluate  # pyright: ignore[reportPrivateUsage]
    try:
        return loop.train(job_from_yaml(job_yaml), open_storage(run), Path(work)).__dict__
    finally:
        loop._Trainer._evaluate = original  # pyright: ignore[reportPrivateUsage]


def test_export_best_writes_the_weights_of_the_best_checkpoint(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "checkpoint": {"every": 2, "keep": 1, "export": "best"},
        "evaluation": {"every": 2, "max_batches": 1},
    }
    values = {0: 9.0, 2: 5.0, 4: 6.0, 6: 7.0}
    arguments = (_job(6, **changes).dump_yaml(), str(tmp_path / "run"), str(tmp_path / "work"), values)
    result = run_ranks(_train_with_given_evaluations, 2, *arguments)[0]
    assert result["exported"]["checkpoint"].startswith("step-00000002.")
    assert result["exported"]["eval_loss"] == 5.0
    assert result["eval_loss"] == 7.0
    left = sorted(path.name[:13] for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir())
    assert left == ["step-00000002", "step-00000006"]
    _run(_job(2, evaluation={"every": 2, "max_batches": 1}), tmp_path / "short" / "run", 2)
    exported = [
        (run / "export" / "model-00001-of-00001.safetensors").read_bytes()
        for run in (tmp_path / "run", tmp_path / "short" / "run")
    ]
    assert exported[0] == exported[1]


def test_the_same_job_gives_the_same_bits(tmp_path: Path) -> None:
    """Losses, gradient norms, held-out losses and weights of two runs on two ranks."""
    curves: list[list[dict[str, Any]]] = []
    weights: list[bytes] = []
    for name in ("first", "second"):
        run = tmp_path / name / "run"
        _run(_job(6, deterministic=True), run, 2)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        kept = ("step", "tokens", "loss", "grad_norm", "eval_loss", "learning_rate")
        curves.append([{key: line[key] for key in kept if key in line} for line in lines])
        weights.append((run / "export" / "model-00001-of-00001.safetensors").read_bytes())
    assert curves[0] == curves[1]
    assert [line["step"] for line in curves[0]] == list(range(7))
    assert sum("eval_loss" in line for line in curves[0]) == 3
    assert weights[0] == weights[1]


def _fake(storage: LocalStorage, step: int, attempt: str, eval_loss: float | None = None) -> None:
    folder = f"checkpoints/step-{step:08d}.{attempt}"
    files = {".metadata": 3, "__0_0.distcp": 5}
    for name, size in files.items():
        storage.write_bytes(f"{folder}/{name}", b"x" * size)
    marker = {"step": step, "attempt": attempt, "world_size": 1, "eval_loss": eval_loss, "files": files}
    storage.write_text(f"{folder}/COMPLETE", json.dumps(marker))
