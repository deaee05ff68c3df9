"""Best-fit decreasing: documents into as few fixed-length rows as is practical.

The remaining space of a row is a small integer, so rows are kept in one bucket per remaining space and the
tightest bucket that fits is the lowest set bit of an integer. Documents of one length are placed together:
the whole packing costs O(n log n) for the sort and a few vector operations per distinct length.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """Documents grouped into packs: pack p holds `documents[offsets[p]:offsets[p + 1]]`.

    documents  int64 [n], a permutation of 0..n-1
    offsets    int64 [num_packs + 1]
    """

    documents: IntArray
    offsets: IntArray

    @property
    def num_packs(self) -> int:
        return len(self.offsets) - 1

    def pack(self, index: int) -> IntArray:
        """Indices of the documents of one pack."""
        return self.documents[self.offsets[index] : self.offsets[index + 1]]

    def reordered(self, order: IntArray) -> "Packing":
        """The same packs in another order."""
        sizes = np.diff(self.offsets)[order]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        starts = np.repeat(self.offsets[:-1][order] - offsets[:-1], sizes)
        return Packing(self.documents[np.arange(len(self.documents)) + starts], offsets)


def best_fit_decreasing(lengths: IntArray, capacity: int) -> Packing:
    """Pack documents of the given lengths into rows of `capacity` tokens.

    Longest first, each into the fullest row that still has room; equal lengths keep their order, so the
    result depends on the arguments alone. Raises ValueError for a length outside 1..capacity.
    """
    count = len(lengths)
    if count == 0:
        return Packing(np.zeros(0, np.int64), np.zeros(1, np.int64))
    if lengths.min() < 1 or lengths.max() > capacity:
        raise ValueError(f"lengths must lie in 1..{capacity}; found {lengths.min()}..{lengths.max()}")

    order = np.argsort(-lengths, kind="stable")
    distinct, starts = np.unique(-lengths[order], return_index=True)
    ends = np.append(starts[1:], count)

    pack_of = np.empty(count, np.int64)  # by place in `order`
    rows = _Rows(capacity)
    for negative, start, end in zip(distinct.tolist(), starts.tolist(), ends.tolist(), strict=True):
        rows.place(-negative, pack_of[start:end])

    by_pack = np.argsort(pack_of, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(pack_of, minlength=rows.count))]).astype(np.int64)
    return Packing(order[by_pack], offsets)


class _Rows:
    """Open rows in buckets by remaining space."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.count = 0
        self._buckets: dict[int, list[IntArray]] = {}
        self._spaces = 0  # bit s is set where some row has s tokens left

    def place(self, length: int, pack_of: IntArray) -> None:
        """Give every document of one length its row, written into `pack_of`."""
        done, total = 0, len(pack_of)
        while done < total:
            fitting = self._spaces >> length
            space = length + (fitting & -fitting).bit_length() - 1 if fitting else self.capacity
            # The tightest row stays the tightest after it takes one, so it is filled before the next is
            # begun.
            per_row = space // length
            wanted = (total - done) // per_row
            if wanted:
                rows = self._take(space, wanted) if fitting else self._open(wanted)
                taken = len(rows) * per_row
                pack_of[done : done + taken] = np.repeat(rows, per_row)
                self._give(space - per_row * length, rows)
            else:
                rows = self._take(space, 1) if fitting else self._open(1)
                taken = total - done
                pack_of[done:] = rows[0]
                self._give(space - taken * length, rows)
            done += taken

    def _open(self, number: int) -> IntArray:
        rows = np.arange(self.count, self.count + number, dtype=np.int64)
        self.count += number
        return rows

    def _take(self, space: int, limit: int) -> IntArray:
        bucket = self._buckets[space]
        rows = bucket.pop()
        if len(rows) > limit:
            bucket.append(rows[limit:])
            rows = rows[:limit]
        elif not bucket:
            self._spaces &= ~(1 << space)
        return rows

    def _give(self, space: int, rows: IntArray) -> None:
        if space:
            self._buckets.setdefault(space, []).append(rows)
            self._spaces |= 1 << space
