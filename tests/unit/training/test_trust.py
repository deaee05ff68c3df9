"""A token reaches the hub and nothing else: it is looked for in everything that a run, a bundle and a stack leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from infra.ray_cluster import common_environment
from tests.graph import graphs
from tests.unit.data.test_hub import COMMIT, Hub
from tests.unit.training.jobs import tiny_job
from training import sources
from training.errors import UsageError
from training.job import load_job
from training.sources import fetch_model
from training.submit.bundle import build_bundle

HUB_TOKEN = "hf_" + "PlantedForThisTestAndNothingElse09"
WANDB_KEY = "c0ffee" + "9" * 34
SECRETS = {"HF_TOKEN": HUB_TOKEN, "WANDB_API_KEY": WANDB_KEY, "MLFLOW_TRACKING_TOKEN": "planted-ml-token"}


class PrivateHub(Hub):
    """Answers only to the token."""

    authorized = 0

    def do_GET(self) -> None:  # noqa: N802
        if self.headers.get("Authorization") != f"Bearer {HUB_TOKEN}":
            self.answer(401, headers={"X-Error-Code": "GatedRepo"})
            return
        PrivateHub.authorized += 1
        super().do_GET()


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), PrivateHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def _holding_a_secret(folder: Path) -> list[str]:
    """Files under a folder with one of the planted values in their content or their name."""
    values = [value.encode() for value in SECRETS.values()]
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*"))
        if any(
            value in str(path).encode() or (path.is_file() and value in path.read_bytes()) for value in values
        )
    ]


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "log").write_bytes(b"\x00token=" + HUB_TOKEN.encode() + b"\n")
    (tmp_path / "b").write_text("nothing")
    assert _holding_a_secret(tmp_path) == ["a/log"]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(900)
def test_a_local_run_reads_with_the_token_and_leaves_it_nowhere(tmp_path: Path, hub: str) -> None:
    run = tmp_path / "run"
    job = tiny_job(
        name="tiny-trust",
        data={"source": "hf://owner/rows", "max_length": 64},
        steps=2,
        schedule={"kind": "constant", "warmup_steps": 1},
        parallel={"num_workers": 2},
        tracking={"wandb": {"project": "trust", "mode": "offline"}},
        run={"path": str(run)},
    )
    (tmp_path / "job.yaml").write_text(job.dump_yaml())
    done = subprocess.run(
        [sys.executable, "-m", "training.cli", "local", str(tmp_path / "job.yaml"), "--json"],
        env={
            **os.environ,
            **SECRETS,
            "HF_ENDPOINT": hub,
            "HF_HOME": str(tmp_path / "hub-cache"),
            "FINETUNE_SCRATCH": str(tmp_path / "scratch"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert PrivateHub.authorized > 0
    summary = json.loads(done.stdout)
    assert summary["data"]["sources"][0]["revision"] == COMMIT, "a moving name is resolved and recorded"
    for name in ("summary.json", "report.html", "metrics.jsonl", "job.yaml", "tracking/wandb.json"):
        assert (run / name).is_file(), name
    assert not any(value in done.stdout + done.stderr for value in SECRETS.values())
    assert _holding_a_secret(tmp_path) == []


def test_a_bundle_holds_no_token_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    job = load_job("training/jobs/qwen2.5-1.5b-sft.yaml")
    bundle = build_bundle(job, {"stack": "dev"}, tmp_path)
    for name, content in bundle.files.items():
        assert not any(value.encode() in content for value in SECRETS.values()), name


def test_the_graph_of_a_stack_names_secrets_and_holds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the program registers is what Pulumi keeps in its state."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    values = {"hubSecret": "hub", "jobSecrets": ["WANDB_API_KEY=trackers", "MLFLOW_TRACKING_TOKEN=ml"]}
    graph = graphs.graph(**values)
    state = json.dumps([[r.type, r.name, r.inputs] for r in graph.resources], default=str)
    state += json.dumps(graph.outputs, default=str)
    assert not any(value in state for value in SECRETS.values())
    assert '"secretKeyRef"' in state
    named = {
        entry.name: entry.value_from.secret_key_ref.name
        for entry in common_environment(graphs.settings(**values))
        if entry.value_from is not None and entry.value_from.secret_key_ref is not None
    }
    assert named == {"HF_TOKEN": "hub", "WANDB_API_KEY": "trackers", "MLFLOW_TRACKING_TOKEN": "ml"}


def test_a_model_of_the_hub_without_a_commit_is_refused(tmp_path: Path) -> None:
    job = load_job("training/jobs/qwen2.5-1.5b-sft.yaml", ["model.revision=null"])
    with pytest.raises(UsageError, match=r"model\.source Qwen/Qwen2\.5-1\.5B: give model\.revision"):
        fetch_model(job, tmp_path)


def test_a_hub_out_of_reach_does_not_bring_the_token_into_the_message(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from training.job import load_job\n"
        "from training.sources import fetch_model\n"
        "job = load_job('training/jobs/qwen2.5-1.5b-sft.yaml')\n"
        "try:\n    fetch_model(job, Path(sys.argv[1]))\nexcept Exception as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, **SECRETS, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "model.source Qwen/Qwen2.5-1.5B at 8faed761" in done.stdout
    assert not any(value in done.stdout + done.stderr for value in SECRETS.values())
    assert _holding_a_secret(tmp_path) == []


@pytest.mark.parametrize("name", ["owner/name", "owner/name@main", "owner/name@" + "A" * 40])
def test_a_tokenizer_of_the_hub_without_a_commit_is_refused(name: str) -> None:
    with pytest.raises(
        UsageError, match=rf"model\.tokenizer {name}: give a folder, or .* owner/name@ and 40"
    ):
        sources.named_tokenizer(name)


def test_a_tokenizer_of_the_hub_is_read_at_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(sources, "load_tokenizer", lambda *arguments: asked.append(arguments))
    sources.named_tokenizer(f"owner/name@{COMMIT}")
    assert asked == [("owner/name", COMMIT)]


def test_a_tokenizer_folder_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(UsageError, match=r"model\.tokenizer \./nowhere: no such folder"):
        sources.named_tokenizer("./nowhere")


def test_a_trained_tokenizer_does_not_go_with_the_weights_of_a_source() -> None:
    with pytest.raises(UsageError, match=r"tokenizer 'train' goes with architecture"):
        load_job("training/jobs/qwen2.5-1.5b-sft.yaml", ["model.tokenizer=train"])
