"""What a job learns from, as the loop sees it: sums over the micro-batches, and what they are a mean over."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from training.attention import PackedLayout
from training.data.batch import Batch
from training.model import CausalLM


class Objective(Protocol):
    """MEASURES: names of the numbers that stand beside the loss in metrics.jsonl.
    EXTRA_FORWARDS: passes over a batch besides the forward and the backward of the trained model.
    """

    MEASURES: tuple[str, ...]
    EXTRA_FORWARDS: int

    def count(self, batch: Batch) -> int:
        """How many of what the loss is a mean over a micro-batch holds."""
        ...

    def loss(self, batch: Batch, layout: PackedLayout) -> Tensor:
        """Sums over a micro-batch, float32 [1 + measures]: the loss, through which gradients go, then MEASURES."""
        ...


class Supervised:
    """Cross entropy of the supervised tokens."""

    MEASURES: tuple[str, ...] = ()
    EXTRA_FORWARDS: int = 0

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    def count(self, batch: Batch) -> int:
        return batch.num_supervised

    def loss(self, batch: Batch, layout: PackedLayout) -> Tensor:
        return self.model(batch, layout)[None]
