"""Hang detection: a rank that makes no progress says where it stands, and ends, so that the group is restarted."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator

# What the process exits with; the worker group sees a dead worker and restarts.
HUNG_EXIT_CODE = 70


def poll_seconds(timeout_seconds: float) -> float:
    """How often a watchdog of this timeout looks."""
    return min(timeout_seconds / 10, 5.0)


class Watchdog:
    """Watches one rank. `phase` marks what the loop is doing; no mark for `timeout_seconds` is a hang.

    The ranks that wait for a stuck one hang too, but in a later phase of the same step: the report of each (step, phase,
    stack of the main thread) lets the one that everybody waits for be named.
    """

    def __init__(
        self,
        timeout_seconds: float,
        on_hang: Callable[[int, str, str], None],
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._on_hang = on_hang
        self._exit = exit_process
        self._main = (
            threading.main_thread().ident
            if threading.current_thread() is threading.main_thread()
            else threading.get_ident()
        )
        self._step = 0
        self._phase = "setup"
        self._since = time.monotonic()
        self._paused = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(name="watchdog", target=self._watch, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def mark(self, step: int, phase: str) -> None:
        self._step, self._phase, self._since = step, phase, time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """For work of unknown length, such as the compilation in a first step, or a download."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            self._since = time.monotonic()

    def _watch(self) -> None:
        while not self._stop.wait(poll_seconds(self.timeout_seconds)):
            if not self._paused and time.monotonic() - self._since > self.timeout_seconds:
                self._on_hang(self._step, self._phase, self._stack())
                self._exit(HUNG_EXIT_CODE)
                return

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main or 0)  # pyright: ignore[reportPrivateUsage]
        return (
            "".join(traceback.format_stack(frame))
            if frame is not None
            else "no stack: the main thread has ended"
        )
