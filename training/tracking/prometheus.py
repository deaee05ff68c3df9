"""Gauges that each worker shows to Prometheus, through the metrics endpoint that Ray has on every node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.tracking.feed import Record

# Ray puts `ray_` before each name. Units are Prometheus' base units.
GAUGES: Mapping[str, str] = {
    "finetune_step": "last optimizer step that this rank has finished",
    "finetune_tokens": "tokens seen so far, over all ranks",
    "finetune_loss": "training loss per supervised token, over all ranks",
    "finetune_eval_loss": "held-out loss per supervised token",
    "finetune_learning_rate": "learning rate of the step",
    "finetune_grad_norm": "norm of the gradient before clipping",
    "finetune_tokens_per_second": "tokens per second of the step, over all ranks",
    "finetune_step_seconds": "seconds of the step by part",
    "finetune_memory_bytes": "peak memory of this rank by kind",
    "finetune_checkpoint_seconds": "seconds from the start of the last checkpoint until it was complete",
    "finetune_checkpoint_blocked_seconds": "seconds that training stood still for the last checkpoint",
    "finetune_checkpoint_bytes": "size of the last checkpoint",
}
_TAGS = ("run", "rank")
_PART_OF = {"finetune_step_seconds": "part", "finetune_memory_bytes": "kind"}
_GIB = 2**30


class PrometheusGauges:
    """The gauges of one rank, labelled `run` (the job's name) and `rank`. Needs a Ray worker around it."""

    def __init__(self, run: str, rank: int) -> None:
        from ray.util.metrics import Gauge

        self._gauges: dict[str, Any] = {}
        for name, description in GAUGES.items():
            part = _PART_OF.get(name)
            gauge = Gauge(name, description=description, tag_keys=(*_TAGS, *((part,) if part else ())))
            gauge.set_default_tags({"run": run, "rank": str(rank)})
            self._gauges[name] = gauge

    def record(self, line: Record) -> None:
        """A line of metrics.jsonl."""
        for name in (
            "step",
            "tokens",
            "loss",
            "eval_loss",
            "learning_rate",
            "grad_norm",
            "tokens_per_second",
        ):
            if name in line:
                self._gauges[f"finetune_{name}"].set(line[name])
        for part, seconds in line["seconds"].items():
            self._gauges["finetune_step_seconds"].set(seconds, tags={"part": part})
        for kind, gib in line["memory"].items():
            self._gauges["finetune_memory_bytes"].set(gib * _GIB, tags={"kind": kind.removesuffix("_gib")})

    def event(self, event: Mapping[str, Any]) -> None:
        """An event of the loop; checkpoints are of interest here."""
        if event.get("event") == "checkpoint":
            for name in ("seconds", "blocked_seconds", "bytes"):
                self._gauges[f"finetune_checkpoint_{name}"].set(event[name])
