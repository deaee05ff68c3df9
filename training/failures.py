"""What a rank that fails leaves in `failures/<attempt>/rank-N.json`, and which failure of an attempt is the cause."""

from __future__ import annotations

import json
import re
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, cast

from training.errors import FinetuneError
from training.storage import Storage

FOLDER = "failures"

# What ranks say when another rank went away: the consequence of a failure, not its cause.
_CONSEQUENCE = re.compile(
    r"Connection reset|Connection closed|Connection refused|Broken pipe|NCCL error|ncclRemoteError|ncclSystemError"
    r"|DistBackendError|DistNetworkError|gloo|ProcessGroup|ActorDiedError|ActorUnavailableError|WorkerGroupError"
    r"|ControllerError|TrainingFailedError|watchdog",
    re.IGNORECASE,
)


def is_consequence(text: str) -> bool:
    """Whether a failure's text only says that another rank, or the connection to it, went away."""
    return _CONSEQUENCE.search(text) is not None


def may_be_the_nodes(error: Exception) -> bool:
    """Whether a machine can be to blame for an exception: CUDA, memory, disk and network errors, not a mistake in the
    job or in its code."""
    return isinstance(error, RuntimeError | OSError | MemoryError) and not isinstance(error, FinetuneError)


def record_failure(
    storage: Storage, launch_id: str, attempt: str, rank: int, error: Exception
) -> dict[str, Any]:
    """Writes the exception that is being handled; returns what was written."""
    failure = {
        "rank": rank,
        "host": socket.gethostname(),
        "time": time.time(),
        "type": type(error).__name__,
        "message": str(error),
        "traceback": traceback.format_exc(),
        "may_be_the_nodes": may_be_the_nodes(error),
        "attempt": attempt,
        "launch": launch_id,
    }
    storage.write_text(f"{FOLDER}/{attempt}/rank-{rank}.json", json.dumps(failure))
    return failure


def failures_of(storage: Storage, launch_id: str) -> list[dict[str, Any]]:
    """Every failure of a launch, in the order of attempts and names."""
    failures = [json.loads(storage.read_text(name)) for name in storage.list(FOLDER)]
    return [failure for failure in failures if failure["launch"] == launch_id]


def last_failures(storage: Storage, launch_id: str) -> list[dict[str, Any]]:
    """The failures of the last attempt of a launch that has any."""
    failures = failures_of(storage, launch_id)
    last = max((failure["attempt"] for failure in failures), default=None)
    return [failure for failure in failures if failure["attempt"] == last]


def cause_among(failures: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The failure of one attempt that came first; peers that only lost touch come after all others."""

    def order(failure: Mapping[str, Any]) -> tuple[bool, float]:
        return is_consequence(f"{failure['type']}: {failure['message']}"), cast("float", failure["time"])

    return min(failures, key=order, default=None)
