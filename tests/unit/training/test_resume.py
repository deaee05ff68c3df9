"""A resumed run goes on as if it had never stopped, at another number of ranks too; a damaged checkpoint is never used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.jobs import read_losses, tiny_job
from tests.unit.training.processes import run_ranks
from training.checkpoint import complete_checkpoints, prune
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
    for step in (1, 2, 3, 4):
        _fake(storage, step, "001-bbbbbb")
    storage.write_text("checkpoints/best", "step-00000001.001-bbbbbb")
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


def _fake(storage: LocalStorage, step: int, attempt: str) -> None:
    folder = f"checkpoints/step-{step:08d}.{attempt}"
    files = {".metadata": 3, "__0_0.distcp": 5}
    for name, size in files.items():
        storage.write_bytes(f"{folder}/{name}", b"x" * size)
    storage.write_text(
        f"{folder}/COMPLETE", json.dumps({"step": step, "attempt": attempt, "world_size": 1, "files": files})
    )
