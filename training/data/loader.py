"""The resumable loader: this rank's share of one global order of packs."""

from collections.abc import Iterator
from typing import Any

from training.data.batch import Batch


class PackedLoader:
    """Endless iterator of this rank's micro-batches.

    The packs of all epochs form one sequence, a function of the content, the seed and the settings alone.
    Micro-step m of a run with world size W takes packs [m * W, (m + 1) * W), rank r the r-th of them, so every
    rank gets the same number of batches and what an epoch leaves over opens the next one. The state is the
    position in that sequence, the same on every rank, and holds at any other world size.
    """

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """Complete passes over the data before the next batch."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """A small JSON-able cursor: where the next micro-step begins."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a cursor; DataError names what changed when the order is no longer the same."""
        raise NotImplementedError
