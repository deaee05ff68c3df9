"""`finetune` as a user calls it, against the stack on the rig; and the tiny job of these tests."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pexpect

from tests.rig.deployment import Deployment
from tests.rig.layout import REPOSITORY

# The demo's model and data, shrunk until two cores train it on two nodes within seconds.
TINY = {
    "model.architecture.hidden_size": "32",
    "model.architecture.intermediate_size": "64",
    "model.architecture.num_layers": "1",
    "model.architecture.num_heads": "2",
    "model.architecture.num_kv_heads": "1",
    "model.architecture.vocab_size": "384",
    "data.max_length": "256",
    "data.limit": "400",
    "batch.tokens_per_gpu": "8192",
    "schedule.warmup_steps": "2",
    "data.validation.fraction": "0.2",
    "evaluation.prompts": "[]",
    "evaluation.every": "100000",
    "evaluation.max_batches": "1",
}

# 20 to 50 s of training (2026-12): long enough for something to happen in the middle.
STEPS = 160


@dataclass(frozen=True)
class Result:
    """How one `finetune` ended."""

    status: int
    document: dict[str, Any]
    words: str
    seconds: float


@dataclass
class Running:
    """A `finetune` that runs: what it says grows in a file."""

    process: subprocess.Popen[str]
    words_file: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def words(self) -> str:
        return self.words_file.read_text(errors="replace")

    def wait_for(self, pattern: str, seconds: float = 240.0) -> str:
        """The first match of a pattern in what it says."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            match = re.search(pattern, self.words)
            if match is not None:
                return match[0]
            if self.process.poll() is not None:
                break
            time.sleep(0.5)
        raise AssertionError(
            f"{pattern!r} did not come (exit status {self.process.poll()}):\n{self.words[-4000:]}"
        )

    def result(self, seconds: float = 480.0) -> Result:
        out, _ = self.process.communicate(timeout=seconds)
        return _result(self.process.returncode, out, self.words, self.started)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@dataclass
class Finetune:
    """Calls the command line of the product with --json and the outputs of a stack."""

    stack: Deployment
    folder: Path
    outputs: Path
    code: Path
    """A copy of the product: the id of a submission must not change when the checkout is edited meanwhile."""
    calls: int = 0

    def submit(self, name: str, *options: str, steps: int = STEPS, **overrides: str) -> Running:
        """`finetune submit` of the tiny job under a name of its own."""
        return self.start(
            "submit",
            str(self.code / "training/jobs/demo.yaml"),
            "--yes",
            *options,
            *tiny(name, steps, overrides),
        )

    def start(self, *arguments: str) -> Running:
        self.calls += 1
        words = self.folder / f"call-{self.calls}.txt"
        with words.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "training.cli", *arguments, "--json", "--outputs", str(self.outputs)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                cwd=self.folder,
                env={**self.stack.environment(), "PYTHONPATH": str(self.code), "COLUMNS": "200"},
            )
        return Running(process, words)

    def run(self, *arguments: str, seconds: float = 240.0) -> Result:
        return self.start(*arguments).result(seconds)

    def in_terminal(self, *arguments: str) -> pexpect.spawn[str]:
        """A command in a terminal of its own, with somebody to answer: keys are sent, words are expected."""
        return pexpect.spawn(
            sys.executable,
            ["-m", "training.cli", *arguments, "--outputs", str(self.outputs)],
            cwd=str(self.folder),
            env={**self.stack.environment(), "PYTHONPATH": str(self.code), "TERM": "xterm"},
            dimensions=(50, 200),
            encoding="utf-8",
            codec_errors="replace",
            timeout=240,
        )


def copy_of_the_product(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    for package in ("training", "infra"):
        shutil.copytree(REPOSITORY / package, folder / package, ignore=ignored)
    return folder


def tiny(name: str, steps: int = STEPS, overrides: Mapping[str, str] | None = None) -> list[str]:
    """The options that make the demo the tiny job; `__` in a keyword stands for a dot."""
    fields = {**TINY, "name": name, "steps": str(steps), "checkpoint.every": "8"}
    fields |= {key.replace("__", "."): value for key, value in (overrides or {}).items()}
    return [part for key, value in fields.items() for part in ("--set", f"{key}={value}")]


def _result(status: int, out: str, words: str, started: float) -> Result:
    lines = [line for line in out.splitlines() if line.strip()]
    try:
        document = json.loads(out) if lines else {}
    except ValueError:
        raise AssertionError(f"standard output is not one JSON object: {out!r}\n{words[-4000:]}") from None
    return Result(status, document, words, time.monotonic() - started)


def metrics(stack: Deployment, run_uri: str) -> list[dict[str, Any]]:
    """The lines of a run folder's metrics.jsonl."""
    return [json.loads(line) for line in read_text(stack, run_uri, "metrics.jsonl").splitlines()]


def read_text(stack: Deployment, run_uri: str, name: str) -> str:
    return s3(stack, "get_object", run_uri, name)["Body"].read().decode()


def names(stack: Deployment, run_uri: str) -> list[str]:
    """Names of the files in a run folder."""
    prefix = run_uri.removeprefix("s3://").partition("/")[2] + "/"
    found = client(stack).list_objects_v2(Bucket=bucket(run_uri), Prefix=prefix).get("Contents", [])
    return [item["Key"].removeprefix(prefix) for item in found]


def s3(stack: Deployment, call: str, run_uri: str, name: str) -> dict[str, Any]:
    key = f"{run_uri.removeprefix('s3://').partition('/')[2]}/{name}"
    return getattr(client(stack), call)(Bucket=bucket(run_uri), Key=key)


def delete_runs(stack: Deployment) -> None:
    """Empties runs/ in the rig's store: a job would go on from the checkpoints of an earlier session."""
    store, name = client(stack), bucket(stack.rig.storage_uri)
    for page in store.get_paginator("list_objects_v2").paginate(Bucket=name, Prefix="runs/"):
        for item in page.get("Contents", []):
            store.delete_object(Bucket=name, Key=item["Key"])


def bucket(uri: str) -> str:
    return uri.removeprefix("s3://").partition("/")[0]


def client(stack: Deployment) -> Any:
    import boto3

    environment = stack.rig.storage_environment()
    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL_S3"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
    )


def wait_until(what: str, true: Any, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(1.0)
