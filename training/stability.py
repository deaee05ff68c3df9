"""Loss spikes: found before the update that they would cause."""

from __future__ import annotations

import statistics
from collections import deque

# Steps whose median a loss is compared with, and how many are needed before anything counts as a spike.
WINDOW = 50
WARMUP = 10


class SpikeDetector:
    """Tells a loss that is more than `factor` times the median of the last accepted ones."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def is_spike(self, loss: float) -> bool:
        """Judges a finite loss; one that is no spike joins the window."""
        spike = len(self._losses) >= WARMUP and loss > self.factor * statistics.median(self._losses)
        if not spike:
            self._losses.append(loss)
        return spike

    @property
    def median(self) -> float | None:
        return statistics.median(self._losses) if self._losses else None
