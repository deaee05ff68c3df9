"""Runs of the real clients, read back: MLflow on a file store, Weights & Biases offline."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.jobs import tiny_job
from training.errors import UsageError
from training.job import JobSpec
from training.storage import LocalStorage, open_storage
from training.tracking import feed as feed_module
from training.tracking import mlflow_run, wandb_run
from training.tracking.feed import Feed, OpenedRun, Record, Tracker
from training.tracking.trackers import Tracking, flat, tracked_runs


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(feed_module, "RETRY_SECONDS", 0.1)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def _line(step: int, loss: float) -> dict[str, Any]:
    return {
        "step": step,
        "tokens": 256 * step,
        "loss": loss,
        "learning_rate": 1e-3,
        "tokens_per_second": 1000.0,
        "seconds": {"forward": 0.5, "checkpoint": 0.0},
        "memory": {"peak_gib": 1.5},
        "attempt": "000-abcdef",
        "time": 1_800_000_000.0 + step,
    }


class _World:
    """A run folder with what the loop would hear."""

    def __init__(self, folder: Path, job: JobSpec) -> None:
        self.storage = LocalStorage(folder / "run")
        self.work_dir = folder / "work"
        self.job = job
        self.warnings: list[str] = []
        self.events: list[dict[str, Any]] = []

    def track(self) -> Tracking:
        return Tracking(self.job, self.storage, self.work_dir, self.warnings.append, self.events.append)


def _mlflow(folder: Path) -> _World:
    uri = (folder / "mlruns").as_uri()
    return _World(folder, tiny_job(tracking={"mlflow": {"uri": uri, "experiment": "tests"}}))


def _wandb(folder: Path) -> _World:
    return _World(folder, tiny_job(tracking={"wandb": {"project": "tests", "mode": "offline"}}))


def _mlflow_history(world: _World, metric: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    spec = world.job.tracking.mlflow
    assert spec is not None
    client = MlflowClient(tracking_uri=spec.uri, registry_uri=spec.uri)
    run_id = tracked_runs(world.storage)["mlflow"].run_id
    return [(m.step, m.value) for m in client.get_metric_history(run_id, metric)]


def _mlflow_run(world: _World) -> Any:
    from mlflow import MlflowClient

    spec = world.job.tracking.mlflow
    assert spec is not None
    client = MlflowClient(tracking_uri=spec.uri, registry_uri=spec.uri)
    return client.get_run(tracked_runs(world.storage)["mlflow"].run_id)


def _wandb_records(world: _World) -> Iterator[Any]:
    """What the offline files hold, in the order of the attempts."""
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

    for path in sorted((world.storage.root / "wandb").glob("offline-run-*/*.wandb")):
        for data in _log_entries(path.read_bytes()):
            record = WandbRecord()
            record.ParseFromString(data)
            yield record


def _log_entries(content: bytes) -> Iterator[bytes]:
    """The entries of a .wandb file: LevelDB's log format behind a header of 7 bytes. In blocks of 32 KiB, each piece has a
    checksum (4 bytes), a length (2) and a kind (1: whole, 2: first, 3: middle, 4: last)."""
    assert content[:4] == b":W&B"
    position, entry = 7, b""
    while position + 7 <= len(content):
        left = 32_768 - position % 32_768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        entry += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield entry
            entry = b""


def _wandb_history(world: _World) -> list[dict[str, Any]]:
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in _wandb_records(world)
        if record.WhichOneof("record_type") == "history"
    ]


def test_mlflow_gets_every_number_and_the_job(tmp_path: Path) -> None:
    world = _mlflow(tmp_path)
    tracking = world.track()
    tracking.record({"step": 0, "eval_loss": 4.5, "seconds": {}, "memory": {}, "time": 1_800_000_000.0})
    for step in range(1, 301):
        tracking.record(_line(step, 4.0 / step))
    tracking.close(succeeded=True)
    assert _mlflow_history(world, "loss") == [(step, 4.0 / step) for step in range(1, 301)]
    assert _mlflow_history(world, "eval_loss") == [(0, 4.5)]
    assert _mlflow_history(world, "seconds/forward")[0] == (1, 0.5)
    assert _mlflow_history(world, "memory/peak_gib")[-1] == (300, 1.5)
    run = _mlflow_run(world)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "tiny"
    assert run.data.params["optimizer/learning_rate"] == "0.003"
    assert run.data.params["model/architecture/num_layers"] == "2"
    assert world.warnings == []
    assert world.events[0]["tracker"] == "mlflow"


def test_mlflow_goes_on_with_the_same_run(tmp_path: Path) -> None:
    world = _mlflow(tmp_path)
    first = world.track()
    for step in (1, 2, 3):
        first.record(_line(step, 4.0 - step))
    first.close(succeeded=False)
    assert _mlflow_run(world).info.status == "FAILED"
    before = tracked_runs(world.storage)["mlflow"]
    second = world.track()
    for step in (3, 4):
        second.record(_line(step, 4.0 - step))
    second.close(succeeded=True)
    assert tracked_runs(world.storage)["mlflow"] == before
    assert sorted(_mlflow_history(world, "loss")) == [(1, 3.0), (2, 2.0), (3, 1.0), (3, 1.0), (4, 0.0)]
    assert _mlflow_run(world).info.status == "FINISHED"


def test_mlflow_that_is_away_for_a_while_is_warned_of_once_and_misses_nothing(tmp_path: Path) -> None:
    world = _mlflow(tmp_path)
    tracking = world.track()
    tracking.record(_line(1, 3.0))
    _wait_until(lambda: len(_mlflow_history(world, "loss")) == 1)
    away = (tmp_path / "mlruns").rename(tmp_path / "away")
    for step in (2, 3):
        tracking.record(_line(step, 3.0 - step / 10))
        time.sleep(0.3)
    assert len(world.warnings) == 1
    assert world.warnings[0].startswith("tracking.mlflow failed (")
    assert "Training goes on" in world.warnings[0]
    if (tmp_path / "mlruns").exists():  # the client may have made an empty store
        (tmp_path / "mlruns").rename(tmp_path / "empty")
    away.rename(tmp_path / "mlruns")
    tracking.close(succeeded=True)
    assert _mlflow_history(world, "loss") == [(1, 3.0), (2, 2.8), (3, 2.7)]
    assert len(world.warnings) == 1


def test_wandb_gets_every_number_and_the_job(tmp_path: Path) -> None:
    world = _wandb(tmp_path)
    tracking = world.track()
    for step in range(1, 21):
        tracking.record(_line(step, 4.0 / step))
    tracking.close(succeeded=True)
    history = _wandb_history(world)
    assert [(row["step"], row["loss"]) for row in history] == [(step, 4.0 / step) for step in range(1, 21)]
    assert history[0]["seconds/forward"] == 0.5
    assert history[0]["memory/peak_gib"] == 1.5
    configs = [r.run.config for r in _wandb_records(world) if r.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in configs[0].update}
    assert config["optimizer/learning_rate"] == 0.003
    assert world.warnings == []


def test_wandb_goes_on_with_the_same_run(tmp_path: Path) -> None:
    world = _wandb(tmp_path)
    for steps in ((1, 2, 3), (3, 4)):
        tracking = world.track()
        for step in steps:
            tracking.record(_line(step, 4.0 - step))
        tracking.close(succeeded=steps[-1] == 4)
        time.sleep(1.1)  # the folder's name has the second
    ids = {r.run.run_id for r in _wandb_records(world) if r.WhichOneof("record_type") == "run"}
    assert ids == {tracked_runs(world.storage)["wandb"].run_id}
    assert [row["step"] for row in _wandb_history(world)] == [1, 2, 3, 3, 4]


def test_wandb_that_ends_in_the_middle_is_warned_of_once(tmp_path: Path) -> None:
    import wandb

    world = _wandb(tmp_path)
    tracking = world.track()
    tracking.record(_line(1, 3.0))
    _wait_until(lambda: len(_wandb_history(world)) == 1 or wandb.run is not None)
    time.sleep(0.3)
    assert wandb.run is not None
    wandb.run.finish()
    for step in (2, 3):
        tracking.record(_line(step, 2.0))
        time.sleep(0.3)
    tracking.close(succeeded=True)
    assert world.warnings[0].startswith("tracking.wandb failed (")
    assert world.warnings[1:] == [
        "tracking.wandb misses 2 records of this attempt; metrics.jsonl has them all"
    ]


def test_offline_files_reach_a_run_folder_that_is_not_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = _wandb(tmp_path)
    monkeypatch.setattr(world.storage, "local_path", None)  # as an S3 prefix has none
    tracking = world.track()
    tracking.record(_line(1, 3.0))
    tracking.close(succeeded=True)
    assert [row["loss"] for row in _wandb_history(world)] == [3.0]


def test_a_server_that_does_not_answer_is_an_error_before_a_new_run(tmp_path: Path) -> None:
    world = _World(
        tmp_path, tiny_job(tracking={"mlflow": {"uri": "http://127.0.0.1:9", "experiment": "tests"}})
    )
    with pytest.raises(UsageError, match=r"tracking\.mlflow cannot start a run: .*jobSecrets"):
        world.track()


def test_wandb_without_a_key_is_an_error_before_a_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    world = _World(tmp_path, tiny_job(tracking={"wandb": {"project": "tests"}}))
    with pytest.raises(UsageError, match=r"tracking\.wandb cannot start a run: .*API key.*jobSecrets"):
        world.track()


def test_a_run_that_goes_on_is_not_held_up_by_its_tracker(tmp_path: Path) -> None:
    world = _World(
        tmp_path, tiny_job(tracking={"mlflow": {"uri": "http://127.0.0.1:9", "experiment": "tests"}})
    )
    world.storage.write_text("tracking/mlflow.json", json.dumps({"run_id": "abc", "url": None}))
    tracking = world.track()
    tracking.record(_line(1, 3.0))
    tracking.close(succeeded=True)
    assert "tracking.mlflow cannot go on with run abc" in world.warnings[0]
    assert "misses 1 records" in world.warnings[-1]


@pytest.mark.parametrize("package", [mlflow_run.PACKAGE, wandb_run.PACKAGE], ids=lambda p: p.module)
def test_a_package_that_is_not_there_is_named_with_the_lines_that_bring_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: Any
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    world = _mlflow(tmp_path) if package.module == "mlflow" else _wandb(tmp_path)
    with pytest.raises(UsageError) as error:
        world.track()
    assert str(error.value) == (
        f"tracking.{package.module} needs the package {package.module}, which is not installed: the image does not "
        f"have it. Add it to the job file, and the job brings it along:\n  runtime_env:\n    pip: "
        f"[{package.requirement}]"
    )
    assert package.problem(promised=[package.requirement]) is None
    assert package.problem(promised=[package.requirement.replace("-", "_").upper()]) is None
    assert package.problem(promised=["other==1.0"]) is not None


class _Recorder(Tracker):
    """A tracker of this test, whose log can be held and made to fail."""

    name = "recorder"

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.failures = 0
        self.gate = threading.Event()
        self.gate.set()
        self.closed: list[bool] = []

    def open(self, run_id: str | None, parameters: Mapping[str, Any]) -> OpenedRun:
        return OpenedRun("1", None)

    def log(self, records: Sequence[Record]) -> None:
        self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise OSError("connection reset")
        self.steps += [record["step"] for record in records]

    def close(self, succeeded: bool) -> None:
        self.closed.append(succeeded)


def _feed(tracker: Tracker, warnings: list[str]) -> Feed:
    return Feed(tracker, lambda: None, opened=True, warn=warnings.append)


def test_a_slow_tracker_costs_the_loop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "CLOSE_SECONDS", 0.2)
    tracker, warnings = _Recorder(), list[str]()
    tracker.gate.clear()
    feed = _feed(tracker, warnings)
    for step in range(1000):
        feed.put({"step": step})  # would wait for the gate if it were not for the thread
    feed.close(succeeded=True)
    assert warnings == ["tracking.recorder did not finish within 0 s; it is left"]
    tracker.gate.set()
    _wait_until(lambda: len(tracker.steps) == 1000)


def test_records_come_in_order_after_failures() -> None:
    tracker, warnings = _Recorder(), list[str]()
    tracker.failures = 3
    feed = _feed(tracker, warnings)
    for step in range(50):
        feed.put({"step": step})
        time.sleep(0.01)
    _wait_until(lambda: tracker.failures == 0)
    feed.close(succeeded=False)
    assert tracker.steps == list(range(50))
    assert tracker.closed == [False]
    assert warnings == [
        "tracking.recorder failed (OSError: connection reset). Training goes on; what it misses is kept and sent again"
    ]


def test_what_cannot_be_kept_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_UNSENT", 10)
    tracker, warnings = _Recorder(), list[str]()
    tracker.failures = 1_000_000
    feed = _feed(tracker, warnings)
    for step in range(35):
        feed.put({"step": step})
    feed.close(succeeded=True)
    assert warnings[-1] == "tracking.recorder misses 35 records of this attempt; metrics.jsonl has them all"


def test_nested_numbers_get_flat_names() -> None:
    assert flat({"a": 1, "b": {"c": 2, "d": {"e": 3}}}) == {"a": 1, "b/c": 2, "b/d/e": 3}


def test_a_run_without_trackers_writes_nothing(tmp_path: Path) -> None:
    world = _World(tmp_path, tiny_job())
    tracking = world.track()
    tracking.record(_line(1, 3.0))
    tracking.close(succeeded=True)
    assert tracked_runs(open_storage(str(tmp_path / "run"))) == {}


def _wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
