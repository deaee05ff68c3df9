"""Axes: from values to places, with round ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from training.report import text
from training.report.metrics_table import Floats


@dataclass(frozen=True)
class Tick:
    """A tick at `place` (0 to 1 along the axis) with its label."""

    place: float
    label: str


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic axis from `low` to `high`."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high one; clamped to a little outside."""
        if self.log:
            if value <= 0:
                return -0.01
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.01, max(-0.01, share))

    def ticks(self, wanted: int = 5, *, whole: bool = False) -> list[Tick]:
        """Ticks at round values; `whole`: at whole numbers only."""
        if self.log:
            return [Tick(self.place(value), text.tick(value)) for value in _log_ticks(self.low, self.high)]
        values, decimals = _linear_ticks(self.low, self.high, wanted, whole)
        return [Tick(self.place(value), _label(value, decimals)) for value in values]


def fit(values: Floats, *, from_zero: bool, allow_log: bool = False) -> Scale:
    """An axis that holds all finite values; `allow_log`: logarithmic where the largest dwarfs the typical."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return Scale(0.0, 1.0)
    low, high = float(finite.min()), float(finite.max())
    if allow_log and low > 0 and high > 12 * float(np.median(finite)):
        return Scale(low / 1.15, high * 1.15, log=True)
    if from_zero:
        return Scale(min(0.0, low), high * 1.06 if high > 0 else 1.0)
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    return Scale(low - margin if low - margin > 0 or low <= 0 else 0.0, high + margin)


def fit_steps(steps: Floats) -> Scale:
    """The axis of steps."""
    if not len(steps):
        return Scale(0.0, 1.0)
    low, high = float(steps.min()), float(steps.max())
    return Scale(low, high) if high > low else Scale(low - 1, high + 1)


def _linear_ticks(low: float, high: float, wanted: int, whole: bool) -> tuple[list[float], int]:
    """Round values from low to high, and the decimals that tell them apart."""
    rough = max((high - low) / max(1, wanted), 1.0 if whole else 0.0)
    exponent = math.floor(math.log10(rough))
    factors = (1.0, 2.0, 5.0, 10.0) if whole else (1.0, 2.0, 2.5, 5.0, 10.0)
    factor = next(factor for factor in factors if factor * 10.0**exponent >= rough * 0.999)
    step = factor * 10.0**exponent
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    decimals = max(0, -exponent + (1 if factor == 2.5 else -1 if factor == 10 else 0))
    return [index * step for index in range(first, last + 1)], decimals


def _label(value: float, decimals: int) -> str:
    if decimals > 3 or abs(value) >= 1000 or value == 0:
        return text.tick(value)
    return f"{value:.{decimals}f}"


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, math.ceil(len(decades) / 5))
    factors = (1, 2, 5) if len(decades) <= 2 else (1, 3) if len(decades) <= 3 else (1,)
    ticks = [factor * 10.0**decade for decade in decades if decade % every == 0 for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]
