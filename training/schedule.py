"""Learning rate over the optimizer steps."""

from __future__ import annotations

import math

from training.job import ScheduleSpec


def warmup_steps(spec: ScheduleSpec, total_steps: int) -> int:
    """Steps of linear warm-up; 3 % of the steps where the job does not say."""
    return spec.warmup_steps if spec.warmup_steps is not None else round(0.03 * total_steps)


def learning_rate(spec: ScheduleSpec, peak: float, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (0 is the first) out of `total_steps`."""
    warmup = warmup_steps(spec, total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * _after_warmup(spec, step - warmup, max(total_steps - warmup, 1))


def _after_warmup(spec: ScheduleSpec, step: int, steps: int) -> float:
    floor = spec.min_ratio
    progress = min(step / steps, 1.0)
    match spec.kind:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - floor) * progress
        case "cosine":
            return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
        case "wsd":  # warm-up, stable, decay (arXiv:2404.06395)
            decay_start = 1.0 - spec.decay_fraction
            if progress <= decay_start:
                return 1.0
            return 1.0 - (1.0 - floor) * (progress - decay_start) / spec.decay_fraction
