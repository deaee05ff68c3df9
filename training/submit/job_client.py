"""Ray's jobs, through short calls into the head pod. Ray's own token is in the environment that exec
inherits.

Of the answers of `ray job submit` only one thing is believed: that the job API afterwards knows the
submission id. `ray job status` and a log that ends say nothing about success (its exit status is 0 for
STOPPED and after a lost log).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from training.errors import UsageError
from training.submit.bundle import Bundle
from training.submit.cluster import Cluster, Pod
from training.submit.kubectl import ExecResult, UnreachableError

DASHBOARD_PORT = 8265
BUNDLE_FOLDER = "/tmp/finetune"  # noqa: S108 - inside the pod, replaced with it
TERMINAL = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})

# `ray job submit` packs and uploads the working directory; 79 s were seen for its first start on a busy
# two-core machine (2026-12).
SUBMIT_TIMEOUT_SECONDS = 240.0

_UNPACK = """
import hashlib, io, os, shutil, sys, tarfile
folder, digest = sys.argv[1:]
data = sys.stdin.buffer.read()
if hashlib.sha256(data).hexdigest() != digest:
    sys.exit(f"{len(data)} bytes came, with another digest")
if not os.path.isdir(folder):
    part = f"{folder}.{os.getpid()}"
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(part, filter="data")
    try:
        os.rename(part, folder)
    except OSError:
        shutil.rmtree(part)
        if not os.path.isdir(folder):
            raise
"""

JobStatus = Literal["PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED"]


@dataclass(frozen=True)
class RayJob:
    """Ray's record of a job."""

    submission_id: str
    status: JobStatus
    message: str = ""
    error_type: str = ""
    driver_exit_code: int | None = None
    start_time_ms: int | None = None
    end_time_ms: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL


@dataclass(frozen=True)
class Poll:
    """One look at a job: its record (None where Ray knows no such job), new bytes of its log, its nodes."""

    job: RayJob | None
    log: bytes
    log_size: int
    nodes: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class JobClient:
    """Submits, polls, stops and lists the jobs of a RayCluster. Every method may raise ContactLost."""

    cluster: Cluster

    def submit(
        self,
        submission_id: str,
        folder: str,
        entrypoint: Sequence[str],
        runtime_env: Mapping[str, Any],
        metadata: Mapping[str, str],
    ) -> None:
        """Queues the job once, however often the call has to be repeated. Raises UsageError when Ray refuses it."""
        command = [
            "ray", "job", "submit", "--address", f"http://127.0.0.1:{DASHBOARD_PORT}", "--no-wait",
            "--submission-id", submission_id, "--working-dir", folder,
            "--runtime-env-json", json.dumps(runtime_env), "--metadata-json", json.dumps(metadata),
            "--", *entrypoint,
        ]  # fmt: skip
        self.cluster.retry(lambda: self._submit_once(submission_id, command))

    def _submit_once(self, submission_id: str, command: Sequence[str]) -> None:
        if self.find(submission_id) is not None:  # an earlier try got through
            return
        result = self.cluster.on_head(command, timeout=SUBMIT_TIMEOUT_SECONDS)
        if self.find(submission_id) is not None:
            return
        words = f"{result.text().strip()}\n{result.stderr.strip()}".strip()
        if result.status == 0:
            raise UnreachableError(
                f"ray job submit ended without an error, but Ray knows no job {submission_id}: {words}"
            )
        if re.search(
            r"Failed to connect|Connection refused|ConnectionError|No available agent|HTTP 50\d|status code "
            r"50\d",
            words,
        ):
            raise UnreachableError(f"ray job submit: {words[-2000:]}")
        raise UsageError(
            f"Ray refuses the job {submission_id} (ray job submit exited {result.status}):\n{words[-4000:]}"
        )

    def push(self, bundle: Bundle, pod: Pod | None = None) -> str:
        """Puts the bundle on the head, or on another pod, once, and returns its folder there."""
        folder = f"{BUNDLE_FOLDER}/{bundle.digest[:24]}"
        if self._run(pod, ["test", "-d", folder], None, 30.0).status == 0:
            return folder
        archive = bundle.archive()
        command = ["python", "-c", _UNPACK, folder, hashlib.sha256(archive).hexdigest()]
        seconds = 60.0 + 5.0 * len(archive) / 2**20  # 200 KiB/s at least

        def send() -> str:
            result = self._run(pod, command, archive, seconds)
            if "with another digest" in result.stderr:
                raise UnreachableError(f"sending the bundle: {result.stderr.strip()}")
            if result.status != 0:
                raise UsageError(
                    f"The bundle cannot be unpacked into {folder} of the pod: {result.stderr.strip()[-2000:]}"
                )
            return folder

        return self.cluster.retry(send)

    def _run(
        self, pod: Pod | None, command: Sequence[str], stdin: bytes | None, timeout: float
    ) -> ExecResult:
        if pod is None:
            return self.cluster.on_head(command, stdin=stdin, timeout=timeout)
        return self.cluster.on_pod(pod, command, stdin=stdin, timeout=timeout)

    def find(self, submission_id: str) -> RayJob | None:
        """Ray's record, None where Ray knows no such job."""
        return self.poll(submission_id, offset=2**62).job

    def poll(self, submission_id: str, offset: int, nodes: bool = False) -> Poll:
        """Status and the log from byte `offset` on, in one call."""
        answer = self._ask({"verb": "poll", "id": submission_id, "offset": offset, "nodes": nodes})
        log = answer["log"]
        return Poll(
            job=_ray_job(answer["job"]) if answer["job"] else None,
            log=base64.b64decode(log["data"]),
            log_size=int(log["size"]),
            nodes=tuple(answer.get("nodes") or ()),
        )

    def jobs(self) -> list[RayJob]:
        """Every job submitted to this RayCluster since its head started, oldest first."""
        jobs = [_ray_job(job) for job in self._ask({"verb": "list"})["jobs"] if job.get("submission_id")]
        return sorted(jobs, key=lambda job: job.start_time_ms or 0)

    def stop(self, submission_id: str) -> None:
        """Asks Ray to stop the job: SIGTERM to the driver, SIGKILL after the grace time. Poll for the end."""
        self._ask({"verb": "stop", "id": submission_id})

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self.cluster.retry(lambda: self._ask_once({"port": DASHBOARD_PORT, **request}))

    def _ask_once(self, request: Mapping[str, Any]) -> dict[str, Any]:
        script = Path(__file__).with_name("pod_script.py").read_bytes()
        result = self.cluster.on_head(["python", "-", json.dumps(request)], stdin=script, timeout=60.0)
        if result.status != 0:
            raise UnreachableError(
                f"asking Ray in the head pod: exit status {result.status}: {result.stderr.strip()[-500:]}"
            )
        try:
            answer = cast("dict[str, Any]", json.loads(result.stdout))
        except ValueError:
            raise UnreachableError(
                f"asking Ray in the head pod: the answer of {len(result.stdout)} bytes is not JSON"
            ) from None
        if answer.get("code") in (401, 403):
            raise UsageError(
                f"{answer['error']}: the head's container has no valid Ray token (RAY_AUTH_TOKEN); see authOptions"
            )
        if "error" in answer:
            raise UnreachableError(answer["error"])
        return answer


def _ray_job(record: Mapping[str, Any]) -> RayJob:
    return RayJob(
        submission_id=record["submission_id"],
        status=record["status"],
        message=record.get("message") or "",
        error_type=record.get("error_type") or "",
        driver_exit_code=record.get("driver_exit_code"),
        start_time_ms=record.get("start_time"),
        end_time_ms=record.get("end_time"),
        metadata=record.get("metadata") or {},
    )
