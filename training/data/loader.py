"""The resumable loader: this rank's share of one global order of packs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from training.data.batch import Batch
from training.data.errors import DataError
from training.data.streams import PackStream

_STATE_VERSION = 1


@dataclass(frozen=True)
class OrderIdentity:
    """What the global order of packs is a function of; a saved position means nothing when one of these
    changed."""

    content: str
    tokenizer: str
    settings: dict[str, Any]
    seed: int


class PackedLoader:
    """Endless iterator of this rank's micro-batches.

    The packs of all epochs form one sequence, a function of the content, the seed and the settings alone.
    Micro-step m of a run with world size W takes packs [m * W, (m + 1) * W), rank r the r-th of them, so
    every rank gets the same number of batches and what an epoch leaves over opens the next one. The state is
    the position in that sequence, the same on every rank, and holds at any other world size.
    """

    def __init__(self, stream: PackStream, identity: OrderIdentity, *, rank: int, world_size: int):
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}")
        self._stream = stream
        self._identity = identity
        self._rank = rank
        self._world_size = world_size
        self._packs = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._stream.take(self._world_size, self._rank)
        self._packs += self._world_size
        return batch

    @property
    def epoch(self) -> int:
        """Complete passes over the data before the next batch."""
        return self._stream.epoch

    @property
    def packs(self) -> int:
        """Packs that all ranks together have taken, over restarts too."""
        return self._packs

    def state_dict(self) -> dict[str, Any]:
        """A small JSON-able cursor: where the next micro-step begins. It is the same on every rank."""
        return {
            "version": _STATE_VERSION,
            "epoch": self.epoch,
            "packs": self._packs,
            "cursor": self._stream.cursor(),
            "seed": self._identity.seed,
            "content": self._identity.content,
            "tokenizer": self._identity.tokenizer,
            "settings": self._identity.settings,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a cursor. Raises DataError that names what changed when the order is no longer the
        same."""
        if state.get("version") != _STATE_VERSION:
            raise DataError(
                f"the saved data position has version {state.get('version')!r}, this program reads "
                f"{_STATE_VERSION}; resume with the version that wrote the checkpoint"
            )
        changed = self._changes(state)
        if changed:
            raise DataError(
                "the saved data position does not fit this job, because the order of the documents depends "
                f"on what changed: {'; '.join(changed)}. Resume with the same data section, seed and files, "
                "or start a new run from the checkpoint's weights."
            )
        self._packs = int(state["packs"])
        self._stream.seek(state["cursor"])

    def _changes(self, state: dict[str, Any]) -> list[str]:
        now = self._identity
        changed: list[str] = []
        if state["content"] != now.content:
            changed.append("the content of the data files")
        if state["tokenizer"] != now.tokenizer:
            changed.append("the tokenizer, chat template or mask")
        if state["seed"] != now.seed:
            changed.append(f"seed (was {state['seed']}, now {now.seed})")
        saved: dict[str, Any] = state["settings"]
        changed += [
            f"{name} (was {saved.get(name)!r}, now {now.settings.get(name)!r})"
            for name in sorted(saved.keys() | now.settings.keys())
            if saved.get(name) != now.settings.get(name)
        ]
        return changed
