"""`finetune sleep`, `wake` and `extend` with this machine's credentials and the jobs of the cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from operations.power import Extension, Resized, extend, sleep, wake
from training.errors import ExitStatus, FinetuneError
from training.submit.session import Access

# After these nobody knows whether the job goes on, or nothing ran at all.
_NOT_ENDED = {ExitStatus.USAGE, ExitStatus.CONTACT_LOST, ExitStatus.DETACHED}


def put_to_sleep(access: Access, *, now: bool) -> Resized:
    """GPU nodes to zero, unless a job is under way; with `now` even then.

    Raises UsageError, FinetuneError, and ContactLost where the cluster does not say which jobs it has.
    """
    import boto3

    target = access.target()

    def unfinished() -> Sequence[str]:
        with access.client(target, f"finetune sleep {access.flags()}") as client:
            return [job.submission_id for job in client.jobs() if not job.ended]

    return sleep(boto3.Session(), target, None if now else unfinished)


def wake_up(access: Access) -> Resized:
    """GPU nodes back to their full number. Raises UsageError, FinetuneError."""
    import boto3

    return wake(boto3.Session(), access.target())


def extend_settings_file(path: Path, hours: float) -> Extension:
    """Moves the expiry of the stack of a settings file. Raises UsageError, FinetuneError."""
    import boto3

    return extend(boto3.Session(), path, hours)


def sleep_after(access: Access, status: int) -> None:
    """`--then sleep`: puts the nodes to sleep once a job has ended, however it did. The exit status stays the job's, so
    a failure is a message on standard error."""
    if status in _NOT_ENDED:
        sys.stderr.write(f"The GPU nodes stay: with exit status {status} no job has ended here.\n")
        return
    try:
        sys.stderr.write(put_to_sleep(access, now=False).render() + "\n")
    except FinetuneError as error:
        sys.stderr.write(f"error: the GPU nodes are still running and billing: {error}\n")
