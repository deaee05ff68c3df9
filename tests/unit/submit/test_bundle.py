from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from training.errors import UsageError
from training.job import JobSpec, load_job
from training.submit import bundle as bundle_module
from training.submit.bundle import Bundle, build_bundle, code_files
from training.submit.submission import submission_id


def job(path: Path, *overrides: str) -> JobSpec:
    return load_job(path, overrides)


def test_same_content_is_the_same_bundle_and_a_changed_job_is_another(job_file: Path, tmp_path: Path) -> None:
    first = build_bundle(job(job_file), {"stack": "dev"}, tmp_path)
    again = build_bundle(job(job_file), {"stack": "dev"}, tmp_path)
    other = build_bundle(job(job_file, "seed=7"), {"stack": "dev"}, tmp_path)
    assert (first.digest, first.archive()) == (again.digest, again.archive())
    assert submission_id("tiny", first) == submission_id("tiny", again) != submission_id("tiny", other)


def test_names_and_contents_cannot_be_confused() -> None:
    assert Bundle({"a": b"bc"}).digest != Bundle({"ab": b"c"}).digest


def test_it_holds_the_code_and_nothing_private(job_file: Path, tmp_path: Path) -> None:
    names = set(build_bundle(job(job_file), {}, tmp_path).files)
    assert {"training/job.py", "training/submit/inside.py", "job.yaml", "target.json"} <= names
    assert not [name for name in names if "__pycache__" in name or name.split("/")[-1].startswith(".")]
    assert not [
        name for name in names if name.startswith("infra")
    ]  # how a cluster is reached is not the job's


def test_the_archive_unpacks_to_the_files(job_file: Path, tmp_path: Path) -> None:
    bundle = build_bundle(job(job_file), {}, tmp_path)
    with tarfile.open(fileobj=io.BytesIO(bundle.archive())) as tar:
        tar.extractall(tmp_path / "out", filter="data")
    assert (tmp_path / "out/job.yaml").read_bytes() == bundle.files["job.yaml"]


def test_relative_data_goes_along_absolute_does_not(job_file: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "data/.env").write_text("X=1")
    files = build_bundle(job(job_file, "data.source=./data"), {}, tmp_path).files
    assert files["data/train.jsonl"] == b'{"text": "a"}\n'
    assert "data/.env" not in files
    assert not [
        n
        for n in build_bundle(job(job_file, "data.source=/mnt/a.jsonl"), {}, tmp_path).files
        if "a.jsonl" in n
    ]


@pytest.mark.parametrize(
    ("source", "words"),
    [("missing.jsonl", "no such file or folder"), ("../a.jsonl", "outside of")],
)
def test_data_that_cannot_go_along_is_an_error(
    job_file: Path, tmp_path: Path, source: str, words: str
) -> None:
    with pytest.raises(UsageError, match=rf"data\.source {source}: .*{words}"):
        build_bundle(job(job_file, f"data.source={source}"), {}, tmp_path)


def test_too_much_data_names_the_file_and_the_way_out(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "big.jsonl").write_bytes(b"x" * 2**21)
    monkeypatch.setattr(bundle_module, "MAX_BYTES", 2**20)
    with pytest.raises(UsageError, match=r"(?s)big\.jsonl has 2 MiB; files up to 1 MiB.*s3://"):
        build_bundle(job(job_file, "data.source=big.jsonl"), {}, tmp_path)


@pytest.mark.parametrize("secret", ["hf_" + "a" * 34, "AKIA" + "A" * 16, "-----BEGIN RSA PRIVATE KEY-----"])
def test_a_secret_in_a_file_is_an_error_that_names_the_line_and_not_the_secret(
    job_file: Path, tmp_path: Path, secret: str
) -> None:
    (tmp_path / "train.jsonl").write_text(f'{{"text": "a"}}\n{{"text": "{secret}"}}\n')
    with pytest.raises(UsageError, match=r"train\.jsonl:2: holds what looks like a secret") as error:
        build_bundle(job(job_file, "data.source=train.jsonl"), {}, tmp_path)
    assert secret not in str(error.value)


def test_the_shipped_code_holds_no_secret() -> None:
    assert dict(code_files())
