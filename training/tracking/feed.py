"""Carries the records of a run to one tracker, in a thread of its own.

A tracker is a guest: a slow one costs the loop nothing, a failing one is tried again and warned of once, and what it
misses stands in metrics.jsonl.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]

FLUSH_SECONDS = 2.0
# A server that restarts is back within minutes; asking it more often helps nobody.
RETRY_SECONDS = 30.0
# What the end of a job may wait for a tracker; MLflow's own retries and W&B's upload take less where they work.
CLOSE_SECONDS = 60.0
# About 40 MB of records: a day of a tracker's absence at a step every four seconds.
MAX_UNSENT = 20_000


@dataclass(frozen=True)
class OpenedRun:
    """The tracker's run. url: where a person looks at it, where there is such a place."""

    run_id: str
    url: str | None


class Tracker(ABC):
    """One experiment tracker. Every method may raise whatever its client raises."""

    name: str

    @abstractmethod
    def open(self, run_id: str | None, parameters: Mapping[str, Any]) -> OpenedRun:
        """Goes on with a run, or starts one with these parameters where run_id is None."""

    @abstractmethod
    def log(self, records: Sequence[Record]) -> None:
        """Sends records of flat numbers, each with its `step`. Called again with the same ones after a failure."""

    @abstractmethod
    def close(self, succeeded: bool) -> None:
        """Ends the run."""


class Feed:
    """The thread between the loop and a tracker.

    open: opens the tracker's run where `opened` is false; tried again until it works.
    """

    def __init__(
        self, tracker: Tracker, open_run: Callable[[], None], *, opened: bool, warn: Callable[[str], None]
    ) -> None:
        self.tracker = tracker
        self._open_run = open_run
        self._opened = opened
        self._warn = warn
        self._warned = False
        self._records: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._unsent: list[Record] = []
        self._num_lost = 0
        self._ending = threading.Event()
        self._succeeded = False
        self._thread = threading.Thread(target=self._run, name=f"tracking-{tracker.name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        self._records.put(record)

    def close(self, *, succeeded: bool) -> None:
        """Sends what is left, and gives up after CLOSE_SECONDS."""
        self._succeeded = succeeded
        self._ending.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._warn(
                f"tracking.{self.tracker.name} did not finish within {CLOSE_SECONDS:.0f} s; it is left"
            )

    def _run(self) -> None:
        retry_at = 0.0
        while not self._ending.wait(FLUSH_SECONDS):
            self._collect()
            if time.monotonic() >= retry_at and not self._send():
                retry_at = time.monotonic() + RETRY_SECONDS
        self._collect()
        sent = self._send()
        missing = len(self._unsent) + self._num_lost
        if missing:
            self._warn(
                f"tracking.{self.tracker.name} misses {missing:,} records of this attempt; metrics.jsonl has them all"
            )
        if sent:
            self._try(lambda: self.tracker.close(self._succeeded))

    def _collect(self) -> None:
        while not self._records.empty():
            self._unsent.append(self._records.get())
        too_many = len(self._unsent) - MAX_UNSENT
        if too_many > 0:
            self._num_lost += too_many
            del self._unsent[:too_many]

    def _send(self) -> bool:
        """Sends all that waits; False where it did not work and has to be tried again."""
        if not self._opened:
            self._opened = self._try(self._open_run)
        if not self._opened:
            return False
        if self._unsent and not self._try(lambda: self.tracker.log(self._unsent)):
            return False
        self._unsent = []
        return True

    def _try(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # a tracker's client raises its own, its transport's and plain OSErrors
            if not self._warned:
                self._warned = True
                self._warn(
                    f"tracking.{self.tracker.name} failed ({in_short(error)}). Training goes on; what it "
                    "misses is kept and sent again"
                )
            return False
        return True


def in_short(error: Exception) -> str:
    """The first line of an error, for a sentence."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
