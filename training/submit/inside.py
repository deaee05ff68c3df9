"""Runs inside a pod, from the bundle: what only a pod of the cluster can say. Prints one JSON object.

`python -m training.submit.inside VERB ARGUMENTS`, where VERB is
- `versions`: of Python, Ray, torch and transformers;
- `check JOB_FILE RUN_URI`: versions, and the problems that this pod has with storage, model and data;
- `fetch RUN_URI NAME...`: files of the run folder, base64; null for one that is not there;
- `steps RUN_URI`: the complete checkpoints and the last metrics line of the run folder;
- `install FOLDER REQUIREMENT...`: copies the code to FOLDER and installs packages beside it; `error` in pip's words;
- `stop RUN_URI`: asks the training loop for a last checkpoint and a clean end.
Imports only what the image ships.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import shutil
import sys
import uuid
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from training import harness
from training.control import STOP_FILE
from training.data.config import SourceSpec, hub_id, source_kind
from training.job import JobSpec, job_from_yaml
from training.optional import missing_packages
from training.storage import open_storage, s3_client
from training.submit import packages
from training.tracking.trackers import packages_of

PACKAGES = ("ray", "torch", "transformers")


def versions() -> dict[str, str]:
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def check(job: JobSpec, run_uri: str) -> list[str]:
    """What a rank of this job would stumble over on this pod, in sentences."""
    problems = [*_storage_problems(run_uri)]
    problems += missing_packages([*packages_of(job), *harness.packages_of(job)], promised=job.runtime_env.pip)
    if job.model.source is not None:
        problems += _model_problems("model.source", job.model.source, job.model.revision)
    if job.model.tokenizer not in (None, "train"):
        problems += _model_problems("model.tokenizer", job.model.tokenizer, None)
    sources: list[SourceSpec] = list(job.data.sources())
    if job.data.validation is not None and job.data.validation.source is not None:
        sources.append(job.data.validation.source)
    for source in sources:
        problems += _data_problems(source)
    return problems


def _storage_problems(run_uri: str) -> Iterator[str]:
    name = f".write-check-{uuid.uuid4().hex}"
    try:
        storage = open_storage(run_uri)
        storage.write_text(name, name)
        try:
            if storage.read_text(name) != name:
                yield f"storage {run_uri}: what was written comes back changed"
        finally:
            storage.delete(name)
    except Exception as error:
        yield (
            f"storage {run_uri} is not writable from this pod: {_words(error)}. See the service account's role, the "
            "bucket and the network policies of the stack."
        )


def _model_problems(key: str, source: str, revision: str | None) -> Iterator[str]:
    match source_kind(source):
        case "hub":
            yield from _hub_problems(key, hub_id(source), "model", revision)
        case "s3":
            yield from _s3_problems(key, source)
        case _:
            yield from _path_problems(key, source)


def _data_problems(source: SourceSpec) -> Iterator[str]:
    match source.kind:
        case "hub":
            yield from _hub_problems("data.source", hub_id(source.source), "dataset", source.revision)
        case "s3":
            yield from _s3_problems("data.source", source.source)
        case "local":
            yield from _path_problems("data.source", source.source)
        case "python-docs" | "random":
            pass


def _hub_problems(key: str, repository: str, kind: str, revision: str | None) -> Iterator[str]:
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{repository.replace('/', '--')}"
        if not folder.is_dir():
            yield f"{key} {repository}: HF_HUB_OFFLINE is set in this pod, and {folder} does not exist"
        return
    try:
        HfApi().repo_info(repository, repo_type=kind, revision=revision, timeout=20)
        HfApi().auth_check(repository, repo_type=kind)
    except Exception as error:
        token = "is set" if os.environ.get("HF_TOKEN") else "is not set (docs/submission.md says how)"
        yield (
            f"{key} {repository} cannot be read from the hub: {_words(error)}. HF_TOKEN {token} in this pod."
        )


def _s3_problems(key: str, uri: str) -> Iterator[str]:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    try:
        client: Any = s3_client()
        found = client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=10).get("Contents", [])
        if not found:
            yield f"{key} {uri}: there is no object under this prefix"
            return
        filled = next((item["Key"] for item in found if item["Size"]), None)
        if filled is not None:
            client.get_object(Bucket=bucket, Key=filled, Range="bytes=0-0")["Body"].read()
    except Exception as error:
        yield f"{key} {uri} cannot be read from this pod: {_words(error)}"


def _path_problems(key: str, source: str) -> Iterator[str]:
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            if not any(path.iterdir()):
                yield f"{key} {source}: this folder is empty on this pod"
        else:
            with path.open("rb") as file:
                file.read(1)
    except OSError as error:
        yield (
            f"{key} {source} cannot be read from this pod: {error.strerror}. An absolute path has to be on a volume "
            "that every pod mounts; a relative one goes along with the job; or use s3://bucket/prefix."
        )


def _words(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:500] if text else 'no message'}"


def fetch(run_uri: str, names: list[str]) -> dict[str, str | None]:
    storage = open_storage(run_uri)
    files: dict[str, str | None] = {}
    for name in names:
        try:
            files[name] = base64.b64encode(storage.read_bytes(name)).decode()
        except FileNotFoundError:
            files[name] = None
    return files


def steps(run_uri: str) -> dict[str, Any]:
    """`checkpoints`: names of the complete ones, oldest first; `last`: the last line of metrics.jsonl, or null."""
    storage = open_storage(run_uri)
    names = storage.list("checkpoints")
    complete = sorted(
        name.split("/")[1] for name in names if name.endswith("/COMPLETE") and name.count("/") == 2
    )
    last: dict[str, Any] | None = None
    if storage.exists("metrics.jsonl"):
        for line in storage.read_text("metrics.jsonl").splitlines():
            try:
                last = json.loads(line)
            except ValueError:  # the writer died in the middle of its last line
                continue
    return {"checkpoints": complete, "last": last}


def install_packages(folder: Path, requirements: list[str]) -> dict[str, Any]:
    """`packages`: name -> version of what was installed; `error`: why nothing was, else null."""
    if folder.is_dir():
        return {"packages": {}, "error": None}  # an earlier call has done it
    part = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    shutil.copytree(Path.cwd(), part)
    try:
        installed = packages.install(requirements, part)
    except packages.PackageError as error:
        shutil.rmtree(part)
        return {"packages": {}, "error": str(error)}
    part.rename(folder)
    return {"packages": installed, "error": None}


def main(arguments: list[str]) -> dict[str, Any]:
    match arguments:
        case ["versions"]:
            return {"versions": versions()}
        case ["check", job_file, run_uri]:
            job = job_from_yaml(Path(job_file).read_text(encoding="utf-8"))
            return {"versions": versions(), "problems": check(job, run_uri)}
        case ["fetch", run_uri, *names]:
            return {"files": fetch(run_uri, names)}
        case ["steps", run_uri]:
            return steps(run_uri)
        case ["install", folder, *requirements]:
            return install_packages(Path(folder), requirements)
        case ["stop", run_uri]:
            open_storage(run_uri).write_text(STOP_FILE, "")
            return {}
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1:])))
