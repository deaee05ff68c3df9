from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from training.control import Control
from training.errors import ExitStatus
from training.job import job_from_yaml, load_job
from training.storage import open_storage
from training.submit import inside

pytestmark = pytest.mark.usefixtures("tmp_path")


def problems(job_file: Path, run: Path, *overrides: str) -> list[str]:
    return inside.check(load_job(job_file, overrides), str(run))


def test_a_sound_pod_has_no_problems_and_leaves_nothing(job_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert problems(job_file, run) == []
    assert list(run.iterdir()) == []


def test_storage_that_cannot_be_written_is_a_problem(job_file: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file in the way")
    [problem] = problems(job_file, tmp_path / "run")
    assert "is not writable from this pod" in problem


@pytest.mark.parametrize("key", ["data.source", "model.tokenizer"])
def test_a_path_that_is_not_on_the_pod_is_a_problem(job_file: Path, tmp_path: Path, key: str) -> None:
    [problem] = problems(job_file, tmp_path / "run", f"{key}=/no/such/file.jsonl")
    assert problem.startswith(f"{key} /no/such/file.jsonl cannot be read from this pod: No such file")


def test_a_held_out_source_is_looked_at_too(job_file: Path, tmp_path: Path) -> None:
    [problem] = problems(job_file, tmp_path / "run", "data.validation.source.source=/no/held-out.jsonl")
    assert "/no/held-out.jsonl" in problem


def test_a_hub_model_that_is_not_cached_offline_is_a_problem(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    [problem] = problems(job_file, tmp_path / "run", "model.tokenizer=owner/name")
    assert "HF_HUB_OFFLINE is set" in problem
    (tmp_path / "models--owner--name").mkdir()
    assert problems(job_file, tmp_path / "run", "model.tokenizer=owner/name") == []


def test_a_hub_that_cannot_be_reached_says_whether_there_is_a_token(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no route to the hub\nmore")

    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", refuse)
    [problem] = problems(job_file, tmp_path / "run", "data.source=owner/name")
    assert "ConnectionError: no route to the hub. HF_TOKEN is not set" in problem


def run_main(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    return json.loads(json.dumps(inside.main(list(arguments))))


def test_files_of_the_run_folder_are_fetched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.json").write_bytes(b"\x00\xff")
    found = run_main(capsys, "fetch", str(tmp_path), "summary.json", "transport.json")["files"]
    assert found == {"summary.json": base64.b64encode(b"\x00\xff").decode(), "transport.json": None}


def test_checkpoints_without_marker_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (
        "step-00000004.000-a/COMPLETE",
        "step-00000008.001-b/state.json",
        "step-00000002.000-a/COMPLETE",
    ):
        path = tmp_path / "checkpoints" / name
        path.parent.mkdir(parents=True)
        path.touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n{"step": 8')
    found = run_main(capsys, "steps", str(tmp_path))
    assert found == {"checkpoints": ["step-00000002.000-a", "step-00000004.000-a"], "last": {"step": 7}}
    assert run_main(capsys, "steps", str(tmp_path / "none")) == {"checkpoints": [], "last": None}


def test_the_wish_to_stop_is_where_the_loop_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_main(capsys, "stop", str(tmp_path))
    assert Control(open_storage(str(tmp_path)), rank=0).stop_asked()


def test_the_job_file_of_a_bundle_is_checked(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = tmp_path / "job.yaml"
    resolved.write_text(load_job(job_file).dump_yaml())
    assert job_from_yaml(resolved.read_text()).name == "tiny"
    found = run_main(capsys, "check", str(resolved), str(tmp_path / "run"))
    assert found["problems"] == []
    assert set(found["versions"]) == {"python", "ray", "torch", "transformers"}  # pyright: ignore[reportArgumentType]


def test_other_words_are_refused() -> None:
    with pytest.raises(SystemExit):
        inside.main(["nonsense"])
    assert ExitStatus.USAGE == 2
