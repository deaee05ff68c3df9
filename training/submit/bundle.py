"""The bundle: the code and the job as one content-addressed archive.

Its digest is taken over names and contents alone, so the same code with the same job is the same bundle on
every machine. It never holds a secret: private files are left out, and a file or setting that looks like a
token is an error.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import training
from training.data.config import source_kind
from training.errors import UsageError
from training.job import JobSpec

JOB_FILE = "job.yaml"
TARGET_FILE = "target.json"

# Ray keeps the working directory of a job in the memory of the head (at most 500 MiB, RAY_RUNTIME_ENV_PACKAGE
# limits); 64 MiB (2026-12) is a small data set, and more belongs into the storage anyway.
MAX_BYTES = 64 * 2**20

_PRIVATE_NAMES = re.compile(
    r"\..*|.*\.(pem|key|p12|pfx|kubeconfig)|id_(rsa|dsa|ecdsa|ed25519).*|credentials(\..*)?|kubeconfig(\..*)?"
    r"|.*\.pyc|__pycache__",
    re.IGNORECASE,
)
_SECRET = re.compile(
    rb"hf_[A-Za-z0-9]{30,}|(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{36}"
    rb"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)


@dataclass(frozen=True)
class Bundle:
    """Files by their name in the archive."""

    files: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """SHA-256 over sorted names and contents, in hexadecimal."""
        total = hashlib.sha256()
        for name in sorted(self.files):
            content = self.files[name]
            total.update(f"{len(name.encode())}:{name}:{len(content)}:".encode())
            total.update(content)
        return total.hexdigest()

    def archive(self) -> bytes:
        """A .tar.gz that is byte for byte the same for the same files."""
        tar_bytes = io.BytesIO()
        with tarfile.open(fileobj=tar_bytes, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name in sorted(self.files):
                entry = tarfile.TarInfo(name)
                entry.size = len(self.files[name])
                entry.mode = 0o644
                tar.addfile(entry, io.BytesIO(self.files[name]))
        return gzip.compress(tar_bytes.getvalue(), mtime=0)


def build_bundle(job: JobSpec, target_facts: Mapping[str, Any], folder: Path) -> Bundle:
    """The bundle of a job: the `training` package, job.yaml, target.json, and the job's local files under `folder`.

    Relative paths of the job file (data, chat template, model, tokenizer) that exist under `folder` go along
    under the same name; absolute ones are taken as paths of the cluster. Raises UsageError for a secret or
    for too many bytes.
    """
    files = dict(code_files())
    for reference, key in _local_references(job):
        files.update(_local_files(reference, key, folder))
    files[JOB_FILE] = job.dump_yaml().encode()
    files[TARGET_FILE] = json.dumps(target_facts, sort_keys=True, indent=1).encode()
    _refuse_secrets(files)
    size = sum(map(len, files.values()))
    if size > MAX_BYTES:
        largest = max(files, key=lambda name: len(files[name]))
        raise UsageError(
            f"The bundle would have {size / 2**20:.0f} MiB, {MAX_BYTES / 2**20:.0f} are allowed; the largest file is "
            f"{largest} ({len(files[largest]) / 2**20:.0f} MiB). Copy data and models to the storage of the stack "
            "(`aws s3 cp`) and name them by s3://... in the job file."
        )
    return Bundle(files)


def code_files() -> Iterator[tuple[str, bytes]]:
    """What runs in the cluster: the package `training`."""
    assert training.__file__ is not None
    package = Path(training.__file__).parent
    for path in _visible(package):
        yield f"training/{path.relative_to(package).as_posix()}", path.read_bytes()


def _visible(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if _PRIVATE_NAMES.fullmatch(path.name):
            continue
        if path.is_dir():
            yield from _visible(path)
        elif path.is_file():
            yield path


def _local_references(job: JobSpec) -> Iterator[tuple[str, str]]:
    """Relative local paths that the job file names, each with its key."""
    named: list[tuple[str | None, str]] = [
        (source.source if source.kind == "local" else None, "data.source") for source in job.data.sources()
    ]
    held_out = job.data.validation.source if job.data.validation is not None else None
    if held_out is not None and held_out.kind == "local":
        named.append((held_out.source, "data.validation.source"))
    if job.data.chat_template not in (None, "chatml"):
        named.append((job.data.chat_template, "data.chat_template"))
    for value, key in ((job.model.source, "model.source"), (job.model.tokenizer, "model.tokenizer")):
        if value is not None and value != "train" and source_kind(value) == "local":
            named.append((value, key))
    for reference, key in named:
        if reference is not None and not reference.startswith(("/", "~")):
            yield reference, key


def _local_files(reference: str, key: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    name = PurePosixPath(reference)
    if ".." in name.parts:
        raise UsageError(
            f"{key} {reference}: lies outside of {folder}, from where paths of a job file go to the cluster"
        )
    path = folder / name
    if path.is_file():
        yield name.as_posix(), _bounded(path, key)
    elif path.is_dir():
        for inner in _visible(path):
            yield inner.relative_to(folder).as_posix(), _bounded(inner, key)
    else:
        raise UsageError(
            f"{key} {reference}: no such file or folder in {folder}. A relative path is one of this machine and goes "
            "along with the job; a path of the cluster is absolute; a data set or model of the hub is owner/name; "
            "S3 is s3://bucket/prefix."
        )


def _bounded(path: Path, key: str) -> bytes:
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise UsageError(
            f"{key}: {path} has {size / 2**20:.0f} MiB; files up to {MAX_BYTES / 2**20:.0f} MiB go along with a job. "
            "Copy it to the storage of the stack (`aws s3 cp`) and name it by s3://... in the job file."
        )
    return path.read_bytes()


def _refuse_secrets(files: Mapping[str, bytes]) -> None:
    for name in sorted(files):
        match = _SECRET.search(files[name])
        if match is not None:
            line = files[name].count(b"\n", 0, match.start()) + 1
            raise UsageError(
                f"{name}:{line}: holds what looks like a secret ({match[0][:4].decode()}...). Nothing was sent. Take "
                "it out: the hub token reaches a job only from a Kubernetes Secret (docs/submission.md)."
            )
