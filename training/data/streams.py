"""The global order of packs: one sequence for all ranks, and a cursor in it.

PreparedPacks knows every document beforehand: an epoch is packed as a whole. StreamedPacks tokenizes shard by
shard while training goes on, and packs block by block. In both, the order is a function of the content, the
seed and the settings alone, and no document is ever left out: an epoch's last, partly filled rows are rows
like others.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from training.data.batch import Batch
from training.data.documents import Documents, RowLayout
from training.data.errors import DataError
from training.data.packing import Packing
from training.data.shuffle import permutation

IntArray = npt.NDArray[np.int64]

# Salts that keep the draws of one seed apart.
_DOCUMENTS, _PACKS, _SHARDS, _BLOCKS = 1, 2, 3, 4


class PackStream(Protocol):
    """An endless sequence of packs."""

    @property
    def epoch(self) -> int: ...

    def cursor(self) -> dict[str, Any]:
        """Where the next pack stands, as JSON."""
        ...

    def seek(self, cursor: dict[str, Any]) -> None: ...

    def take(self, number: int, chosen: int) -> Batch:
        """Go `number` packs on and return the one at offset `chosen` of them as a row."""
        ...


class PreparedPacks:
    """Epochs over documents that are all known.

    sources: the documents of each source with its weight. In an epoch the source with the most tokens per
    weight is seen once, and every other one as often as its weight asks for; what that leaves of a pass is
    not dropped but opens the source's part of the next epoch.
    """

    def __init__(
        self, sources: Sequence[tuple[Documents, float]], layout: RowLayout, *, seed: int, shuffle: bool
    ):
        self.documents = Documents.concatenate([documents for documents, _ in sources])
        self._layout = layout
        self._seed = seed
        self._shuffle = shuffle
        self._sizes = [len(documents) for documents, _ in sources]
        self.per_epoch = _documents_per_epoch(sources)
        self.epoch = 0
        self._next = 0
        self._plans: dict[int, Packing] = {}

    def plan(self, epoch: int) -> Packing:
        """The packs of an epoch, in order."""
        if epoch not in self._plans:
            self._plans = {known: plan for known, plan in self._plans.items() if known == self.epoch}
            self._plans[epoch] = self._packed(epoch)
        return self._plans[epoch]

    def num_packs(self, epochs: int) -> int:
        """Packs of the first `epochs` epochs."""
        if len(self._sizes) == 1:
            # Best-fit decreasing needs as many rows for the same lengths in any order.
            return epochs * self.plan(0).num_packs
        return sum(self.plan(epoch).num_packs for epoch in range(epochs))

    def cursor(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "pack": self._next}

    def seek(self, cursor: dict[str, Any]) -> None:
        self.epoch, self._next = int(cursor["epoch"]), int(cursor["pack"])

    def take(self, number: int, chosen: int) -> Batch:
        batch: Batch | None = None
        for offset in range(number):
            plan = self.plan(self.epoch)
            if offset == chosen:
                batch = self._layout.batch(self.documents, plan.pack(self._next))
            self._next += 1
            if self._next == plan.num_packs:
                self.epoch, self._next = self.epoch + 1, 0
        assert batch is not None
        return batch

    def _packed(self, epoch: int) -> Packing:
        if not self._shuffle:
            return _in_order(self._layout.group(self.documents.length, np.arange(len(self.documents))))
        order = np.concatenate([self._drawn(source, epoch) for source in range(len(self._sizes))])
        order = order[permutation(len(order), self._seed, _DOCUMENTS, epoch)]
        packing = self._layout.group(self.documents.length, order)
        return packing.reordered(permutation(packing.num_packs, self._seed, _PACKS, epoch))

    def _drawn(self, source: int, epoch: int) -> IntArray:
        """The documents that an epoch takes from a source: a stretch of its passes laid end to end."""
        size, number = self._sizes[source], self.per_epoch[source]
        places = np.arange(epoch * number, (epoch + 1) * number)
        passes, within = np.divmod(places, size)
        drawn = np.empty(number, np.int64)
        for one in np.unique(passes).tolist():
            here = passes == one
            drawn[here] = permutation(size, self._seed, _DOCUMENTS, source, one)[within[here]]
        return drawn + sum(self._sizes[:source])


def _in_order(packing: Packing) -> Packing:
    """The packs in the order of the files, as far as packing keeps it: by the first document of each."""
    first = np.minimum.reduceat(packing.documents, packing.offsets[:-1])
    return packing.reordered(np.argsort(first, kind="stable"))


def _documents_per_epoch(sources: Sequence[tuple[Documents, float]]) -> list[int]:
    tokens = [int(documents.length.sum()) for documents, _ in sources]
    total = max(count / weight for count, (_, weight) in zip(tokens, sources, strict=True))
    return [
        max(len(documents), round(len(documents) * total * weight / count))
        for count, (documents, weight) in zip(tokens, sources, strict=True)
    ]


_ROWS_PER_BLOCK = 256  # packed together; at 16k tokens 4M tokens, where best-fit fills over 99 % of a row


@dataclass(frozen=True)
class StreamSource:
    """A source whose shards are opened when their turn comes: `open_shard(i)` gives the documents of shard
    i."""

    name: str
    num_shards: int
    weight: float
    open_shard: Callable[[int], Documents]


@dataclass(frozen=True)
class _Place:
    """A place in a source's endless passes, and the tokens drawn so far."""

    one_pass: int = 0
    shard: int = 0
    document: int = 0
    drawn: int = 0

    def as_list(self) -> list[int]:
        return [self.one_pass, self.shard, self.document, self.drawn]


@dataclass(frozen=True)
class _Block:
    number: int
    begin: tuple[_Place, ...]
    end: tuple[_Place, ...]
    documents: Documents
    packing: Packing


class StreamedPacks:
    """Blocks of packs, each drawn from the sources by their weights; the next block is prepared meanwhile.

    In every pass over a source its shards come in another order, and so do the documents within a shard.
    """

    def __init__(self, sources: Sequence[StreamSource], layout: RowLayout, *, seed: int, shuffle: bool):
        self._sources = sources
        self._layout = layout
        self._seed = seed
        self._shuffle = shuffle
        self._shares = [source.weight / sum(other.weight for other in sources) for source in sources]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._current: _Block | None = None
        self._following: Future[_Block] | None = None
        self._start: tuple[int, tuple[_Place, ...]] = (0, tuple(_Place() for _ in sources))
        self._next = 0

    @property
    def epoch(self) -> int:
        """Complete passes over the source that has had the fewest."""
        places = self._current.begin if self._current else self._start[1]
        return min(place.one_pass for place in places)

    def cursor(self) -> dict[str, Any]:
        number, places = (self._current.number, self._current.begin) if self._current else self._start
        return {"block": number, "pack": self._next, "places": [place.as_list() for place in places]}

    def seek(self, cursor: dict[str, Any]) -> None:
        places = tuple(_Place(*place) for place in cursor["places"])
        if len(places) != len(self._sources):
            raise DataError(
                f"the saved position is one in {len(places)} sources; this job has {len(self._sources)}"
            )
        self._start, self._next = (int(cursor["block"]), places), int(cursor["pack"])
        self._current = self._following = None

    def take(self, number: int, chosen: int) -> Batch:
        batch: Batch | None = None
        for offset in range(number):
            block = self._block()
            if offset == chosen:
                batch = self._layout.batch(block.documents, block.packing.pack(self._next))
            self._next += 1
            if self._next == block.packing.num_packs:
                assert self._following is not None
                self._current, self._next = self._following.result(), 0
                self._following = self._prepare(self._current.number + 1, self._current.end)
        assert batch is not None
        return batch

    def _block(self) -> _Block:
        if self._current is None:
            self._current = self._prepare(*self._start).result()
            self._following = self._prepare(self._current.number + 1, self._current.end)
        return self._current

    def _prepare(self, number: int, begin: tuple[_Place, ...]) -> "Future[_Block]":
        return self._thread.submit(self._build, number, begin)

    def _build(self, number: int, begin: tuple[_Place, ...]) -> _Block:
        target = (number + 1) * _ROWS_PER_BLOCK * self._layout.tokens
        parts: list[Documents] = []
        end: list[_Place] = []
        for index, place in enumerate(begin):
            drawn, place = self._draw(index, place, int(target * self._shares[index]))
            parts += drawn
            end.append(place)
        documents = Documents.concatenate(parts)
        if not self._shuffle:
            packing = _in_order(self._layout.group(documents.length, np.arange(len(documents))))
        else:
            packing = self._layout.group(
                documents.length, permutation(len(documents), self._seed, _BLOCKS, number)
            )
            packing = packing.reordered(permutation(packing.num_packs, self._seed, _PACKS, number))
        return _Block(number, begin, tuple(end), documents, packing)

    def _draw(self, index: int, place: _Place, target: int) -> tuple[list[Documents], _Place]:
        """Documents of one source from a place on, until the tokens drawn in all reach the target."""
        source = self._sources[index]
        parts: list[Documents] = []
        empty = 0
        while place.drawn < target or not parts:
            documents = source.open_shard(self._shard(index, place))
            empty = empty + 1 if len(documents) == 0 else 0
            if empty == source.num_shards:
                raise DataError(f"source {source.name!r} has no usable document in any of its {empty} files")
            if self._shuffle:
                order = permutation(
                    len(documents), self._seed, _DOCUMENTS, index, place.one_pass, self._shard(index, place)
                )
                documents = documents.select(order)
            rest = documents.select(np.arange(place.document, len(documents)))
            wanted = int(np.searchsorted(np.cumsum(rest.length), max(target - place.drawn, 1))) + 1
            taken = rest.select(np.arange(min(wanted, len(rest))))
            if len(taken):
                parts.append(taken)
            place = self._after(source, place, len(taken), len(documents), int(taken.length.sum()))
        return parts, place

    def _shard(self, index: int, place: _Place) -> int:
        source = self._sources[index]
        if not self._shuffle:
            return place.shard
        return int(permutation(source.num_shards, self._seed, _SHARDS, index, place.one_pass)[place.shard])

    def _after(self, source: StreamSource, place: _Place, taken: int, size: int, tokens: int) -> _Place:
        document, shard, one_pass = place.document + taken, place.shard, place.one_pass
        if document == size:
            document, shard = 0, shard + 1
        if shard == source.num_shards:
            shard, one_pass = 0, one_pass + 1
        return _Place(one_pass, shard, document, place.drawn + tokens)
