"""Exit statuses of `finetune` and the errors that carry them."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """What the exit status of `finetune` says. Kept stable: continuous integration gates on it."""

    SUCCEEDED = 0
    USAGE = 2
    JOB_FAILED = 10
    JOB_STOPPED = 11
    DEADLINE = 12
    TRANSPORT_OTHER = 13
    TRANSPORT_UNKNOWN = 14
    CONTACT_LOST = 15
    DETACHED = 130


class FinetuneError(Exception):
    """An error for people. Its message says what was found, where, what is allowed, and what to do next."""

    status: ExitStatus = ExitStatus.JOB_FAILED


class UsageError(FinetuneError):
    """Wrong usage, job file, settings or data."""

    status = ExitStatus.USAGE


class JobStopped(FinetuneError):
    """The job was stopped on request, after a last checkpoint."""

    status = ExitStatus.JOB_STOPPED


class DeadlinePassed(FinetuneError):
    """A deadline passed, or the resources never came."""

    status = ExitStatus.DEADLINE


class ContactLost(FinetuneError):
    """The cluster cannot be reached: the state of the job is unknown."""

    status = ExitStatus.CONTACT_LOST
