"""What the commands share: access to a stack, the two outputs, and errors turned into words and an exit
status.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from infra.outputs import StackOutputs
from training.console import to_json
from training.errors import ExitStatus, FinetuneError
from training.submit.cluster import Cluster
from training.submit.job_client import JobClient, RayJob
from training.submit.target import connect, load_target


@dataclass(frozen=True)
class Access:
    """Which stack, and for how many seconds it may be out of reach."""

    stack: str | None = None
    outputs: Path | None = None
    contact_seconds: float = 180.0

    def target(self) -> StackOutputs:
        """Raises UsageError."""
        return load_target(self.stack, self.outputs)

    def flags(self) -> str:
        """The options that name the same stack again."""
        if self.stack is not None:
            return f"--stack {shlex.quote(self.stack)}"
        return f"--outputs {shlex.quote(str(self.outputs))}"

    @contextmanager
    def client(self, target: StackOutputs, come_back: str) -> Generator[JobClient]:
        with connect(target) as kubectl:
            yield JobClient(Cluster(kubectl, target, self.contact_seconds, come_back))


@dataclass
class Output:
    """Words go to standard error; with `as_json` one JSON object goes to standard output."""

    as_json: bool = False
    console: Console = field(default_factory=lambda: Console(stderr=True))

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)

    def emit(self, document: Mapping[str, Any]) -> None:
        if self.as_json:
            sys.stdout.write(to_json(document) + "\n")
            sys.stdout.flush()


def guarded(output: Output, run: Callable[[], int]) -> int:
    """Runs a command; an error for people becomes words, a JSON object where asked for, and its exit status."""
    try:
        return run()
    except FinetuneError as error:
        output.say(f"finetune: {error}", "red")
        status = error.status.name.lower()
        output.emit({"status": status, "exit_status": int(error.status), "reason": str(error)})
        return int(error.status)
    except KeyboardInterrupt:
        output.say("Interrupted.")
        return int(ExitStatus.DETACHED)


def job_document(job: RayJob) -> dict[str, Any]:
    """What Ray says of a job, as JSON."""
    return {
        "name": job.metadata.get("name", job.submission_id),
        "submission_id": job.submission_id,
        "status": job.status.lower(),
        "run": job.metadata.get("run"),
        "started_ms": job.start_time_ms,
        "ended_ms": job.end_time_ms,
    }
