"""Who may end an attempt before its last step: a signal, a file in the run folder, nodes that are being taken away."""

from __future__ import annotations

import signal
import time
from typing import Any

from training.storage import Storage

STOP_FILE = "control/stop"
STOP_POLL_SECONDS = 1.0
PREEMPTION_POLL_SECONDS = 5.0


class Control:
    """What one rank has been asked. Rank 0 looks into the run folder and says when to look for a preemption; the ranks
    agree on the answers before each step."""

    def __init__(self, storage: Storage, rank: int) -> None:
        self._storage = storage
        self._rank = rank
        self._stop_requested = False
        self._last_stop_poll = 0.0
        self._last_preemption_poll = time.monotonic()

    def trap_signals(self) -> None:
        """SIGTERM and SIGINT ask for a clean end: a checkpoint, then JobStopped."""

        def ask(_signal: int, _frame: Any) -> None:
            self._stop_requested = True

        try:
            signal.signal(signal.SIGTERM, ask)
            signal.signal(signal.SIGINT, ask)
        except ValueError:
            pass  # not the main thread (Ray Train's): the stop file is the way there

    def stop_asked(self) -> bool:
        now = time.monotonic()
        if self._rank == 0 and not self._stop_requested and now - self._last_stop_poll > STOP_POLL_SECONDS:
            self._last_stop_poll = now
            self._stop_requested = self._storage.exists(STOP_FILE)
        return self._stop_requested

    def preemption_poll_due(self) -> bool:
        now = time.monotonic()
        if self._rank != 0 or now - self._last_preemption_poll < PREEMPTION_POLL_SECONDS:
            return False
        self._last_preemption_poll = now
        return True
