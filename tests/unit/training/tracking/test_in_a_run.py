"""Trackers and gauges beside the training loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.jobs import tiny_job
from tests.unit.training.processes import run_ranks
from training.tracking.prometheus import GAUGES

pytestmark = pytest.mark.slow


def _train(job_yaml: str, run: str) -> str | None:
    import os

    from training.job import job_from_yaml
    from training.loop import train
    from training.storage import open_storage

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    try:
        train(job_from_yaml(job_yaml), open_storage(run), Path(run).with_name("work"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_two_launches_of_a_job_are_one_run_with_the_numbers_of_metrics_jsonl(tmp_path: Path) -> None:
    uri = (tmp_path / "mlruns").as_uri()
    tracking = {
        "mlflow": {"uri": uri, "experiment": "loop"},
        "wandb": {"project": "loop", "mode": "offline"},
    }
    run = tmp_path / "run"
    for steps in (3, 6):
        job = tiny_job(tracking=tracking, steps=steps, schedule={"kind": "constant", "warmup_steps": 1})
        assert run_ranks(_train, 2, job.dump_yaml(), str(run)) == [None, None], steps
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]

    code = (
        "import json, sys\n"
        "from mlflow import MlflowClient\n"
        "client = MlflowClient(tracking_uri=sys.argv[1], registry_uri=sys.argv[1])\n"
        "experiment = client.get_experiment_by_name('loop').experiment_id\n"
        "(run,) = client.search_runs([experiment])\n"
        "print(json.dumps([run.info.status, [(m.step, m.value) for m in "
        "client.get_metric_history(run.info.run_id, 'loss')]]))\n"
    )
    import os

    done = subprocess.run(
        [sys.executable, "-c", code, uri],
        env={**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"},
        capture_output=True,
        text=True,
        check=True,
    )
    status, tracked = json.loads(done.stdout.splitlines()[-1])
    assert status == "FINISHED"
    assert [(step, value) for step, value in tracked] == losses
    folders = sorted(path.name for path in (run / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert len({name.rpartition("-")[2] for name in folders}) == 1, "both attempts have one run id"


def test_every_rank_ends_with_what_is_wrong_with_a_tracker(tmp_path: Path) -> None:
    job = tiny_job(tracking={"mlflow": {"uri": "http://127.0.0.1:9", "experiment": "e"}})
    for error in run_ranks(_train, 2, job.dump_yaml(), str(tmp_path / "run")):
        assert error.startswith("UsageError: tracking.mlflow cannot start a run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


SCRAPE = """
import json, time, urllib.request
import ray

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)

@ray.remote
class Worker:
    def record(self, line):
        from training.tracking.prometheus import PrometheusGauges
        self.gauges = PrometheusGauges("demo", 3)
        self.gauges.record(line)
        self.gauges.event({"event": "checkpoint", "seconds": 1.5, "blocked_seconds": 0.25, "bytes": 1000})
        self.gauges.event({"event": "progress"})

worker = Worker.remote()
ray.get(worker.record.remote(%s))
address = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
found = []
deadline = time.monotonic() + 90
while time.monotonic() < deadline and not any("checkpoint_bytes{" in line for line in found):
    time.sleep(1)
    try:
        page = urllib.request.urlopen(address, timeout=10).read().decode()
    except OSError:
        continue
    found = [line for line in page.splitlines() if line.startswith("ray_finetune")]
print(json.dumps(found))
ray.shutdown()
"""


@pytest.mark.xdist_group("ray")
def test_the_endpoint_of_a_ray_node_shows_every_gauge() -> None:
    import os

    line: dict[str, Any] = {
        **{"step": 7, "tokens": 1792, "loss": 2.5, "eval_loss": 2.75, "learning_rate": 1e-3},
        **{"grad_norm": 0.5, "tokens_per_second": 512.0},
        "seconds": {"forward": 0.5, "checkpoint": 0.25},
        "memory": {"peak_gib": 1.5},
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRAPE % repr(line)],
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, float] = {}
    for sample in json.loads(done.stdout.splitlines()[-1]):
        name, _, rest = sample.partition("{")
        labels, _, value = rest.partition("} ")
        assert 'run="demo"' in labels
        assert 'rank="3"' in labels
        part = next((p for p in ("forward", "checkpoint", "peak") if f'="{p}"' in labels), "")
        found[f"{name.removeprefix('ray_')}{part and f'/{part}'}"] = float(value)
    assert found == {
        **{"finetune_step": 7, "finetune_tokens": 1792, "finetune_loss": 2.5, "finetune_eval_loss": 2.75},
        **{"finetune_learning_rate": 1e-3, "finetune_grad_norm": 0.5, "finetune_tokens_per_second": 512},
        **{"finetune_step_seconds/forward": 0.5, "finetune_step_seconds/checkpoint": 0.25},
        "finetune_memory_bytes/peak": 1.5 * 2**30,
        **{"finetune_checkpoint_seconds": 1.5, "finetune_checkpoint_blocked_seconds": 0.25},
        "finetune_checkpoint_bytes": 1000,
    }
    assert {name.partition("/")[0] for name in found} == set(GAUGES)


def _train_on_own_file(job_yaml: str, folder: str) -> str | None:
    """Each rank finds its own file under the same name, as on nodes without a shared volume."""
    import os

    rank = int(os.environ["RANK"])
    home = Path(folder) / f"node-{rank}"
    home.mkdir(parents=True)
    rows = "".join(f'{{"prompt": "question {i + rank}", "completion": "answer {i}"}}\n' for i in range(60))
    (home / "rows.jsonl").write_text(rows)
    os.chdir(home)
    return _train(job_yaml, f"{folder}/run")


def test_ranks_that_read_other_data_are_named(tmp_path: Path) -> None:
    job = tiny_job(data={"source": "./rows.jsonl", "max_length": 128})
    for error in run_ranks(_train_on_own_file, 2, job.dump_yaml(), str(tmp_path)):
        assert error.startswith("UsageError: ranks 1 read other data than rank 0")
