"""Documents as views into token shards, and the row that a pack of them becomes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from training.data.batch import IGNORE, Batch
from training.data.cache import TokenShard, stop_message
from training.data.config import LongPolicy
from training.data.errors import DataError
from training.data.packing import Packing, best_fit_decreasing
from training.data.report import EXAMPLES_PER_REASON, BadRow, SourceReport

TOO_LONG = "too long"

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Documents:
    """n documents, each one sequence of tokens of shard `shard[d]`, or the two of a preference pair.

    The first sequence (of a pair the chosen one) begins at start[d], the rejected one at rejected_start[d] and has
    rejected_length[d] tokens, 0 where the document is no pair. `length` and `learnt` count both: wherever documents
    are drawn, packed or held out, a pair is one.
    """

    shards: list[TokenShard]
    shard: IntArray
    start: IntArray
    length: IntArray
    learnt: IntArray
    group: npt.NDArray[np.uint64]
    rejected_start: IntArray
    rejected_length: IntArray

    def __len__(self) -> int:
        return len(self.length)

    @property
    def first_length(self) -> IntArray:
        """Tokens of the first sequence of each document."""
        return self.length - self.rejected_length

    def sequences(self, index: int) -> list[tuple[int, int]]:
        """Start and length of each sequence of a document, in its shard."""
        rejected = int(self.rejected_length[index])
        first = (int(self.start[index]), int(self.length[index]) - rejected)
        return [first, (int(self.rejected_start[index]), rejected)] if rejected else [first]

    def select(self, chosen: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> "Documents":
        """The chosen documents, by index or by mask."""
        return Documents(
            self.shards,
            self.shard[chosen],
            self.start[chosen],
            self.length[chosen],
            self.learnt[chosen],
            self.group[chosen],
            self.rejected_start[chosen],
            self.rejected_length[chosen],
        )

    @staticmethod
    def concatenate(parts: Sequence["Documents"]) -> "Documents":
        """All documents of the parts, in order."""
        shards: list[TokenShard] = []
        index: list[IntArray] = [np.zeros(0, np.int64)]
        for part in parts:
            index.append(part.shard + len(shards))
            shards += part.shards
        empty = np.zeros(0, np.int64)
        return Documents(
            shards,
            np.concatenate(index),
            np.concatenate([empty, *(part.start for part in parts)]),
            np.concatenate([empty, *(part.length for part in parts)]),
            np.concatenate([empty, *(part.learnt for part in parts)]),
            np.concatenate([np.zeros(0, np.uint64), *(part.group for part in parts)]),
            np.concatenate([empty, *(part.rejected_start for part in parts)]),
            np.concatenate([empty, *(part.rejected_length for part in parts)]),
        )


def shard_documents(
    shard: TokenShard, max_length: int, policy: LongPolicy, report: SourceReport
) -> Documents:
    """The documents of a shard under the length policy, counted in the source's report. Raises DataError."""
    _count(shard, report)
    documents = _whole(shard)
    long = np.flatnonzero(np.maximum(documents.first_length, documents.rejected_length) > max_length)
    num_rows = len(documents)
    if len(long):
        if policy == "split":
            documents = _split(shard, max_length)
        elif policy == "truncate":
            documents, lost = _truncated(documents, long, max_length)
            answer = (
                "an answer"
                if not documents.rejected_length.any()
                else "one of the answers, or no difference,"
            )
            _reject(
                shard,
                lost,
                report,
                lambda _: f"no token of {answer} within the first {max_length} (max_length)",
            )
            report.rows_truncated += len(long) - len(lost)
            documents = documents.select(np.setdiff1d(np.arange(num_rows), lost))
            num_rows = len(documents)
        else:
            whole = documents
            _reject(shard, long, report, lambda d: f"{_size(whole, d)} tokens, max_length is {max_length:,}")
            if policy == "stop":
                rows = [row for row in report.examples if row.reason == TOO_LONG and row.file == shard.name]
                raise DataError(
                    stop_message(rows, {TOO_LONG: len(long)})
                    + " data.too_long: truncate keeps their beginnings."
                )
            documents = documents.select(np.setdiff1d(np.arange(num_rows), long))
            num_rows = len(documents)
    report.rows_used += num_rows
    report.documents += len(documents)
    report.tokens += int(documents.length.sum())
    report.supervised_tokens += int(documents.learnt.sum())
    return documents


def _whole(shard: TokenShard) -> Documents:
    start, length = shard.offsets[:-1], np.diff(shard.offsets)
    pair = shard.rejected_from > 0
    return Documents(
        [shard],
        np.zeros(shard.num_documents, np.int64),
        start,
        length,
        shard.learnt.astype(np.int64),
        shard.groups,
        start + shard.rejected_from,
        np.where(pair, length - shard.rejected_from, 0),
    )


def _size(documents: Documents, index: int) -> str:
    first, rejected = int(documents.first_length[index]), int(documents.rejected_length[index])
    return f"chosen {first:,}, rejected {rejected:,}" if rejected else f"{first:,}"


def _truncated(documents: Documents, long: IntArray, max_length: int) -> tuple[Documents, IntArray]:
    """The documents with every sequence cut to max_length, and which of the long ones have thereby lost what is
    learnt from them: all of an answer, or of a pair the difference between the answers.
    """
    (shard,) = documents.shards
    rejected_length = np.minimum(documents.rejected_length, max_length)
    length = np.minimum(documents.first_length, max_length) + rejected_length
    cut = replace(documents, length=length, rejected_length=rejected_length, learnt=documents.learnt.copy())
    lost: list[int] = []
    for index in long.tolist():
        parts = [slice(start, start + size) for start, size in cut.sequences(index)]
        answers = [int(shard.supervised[part][1:].sum()) for part in parts]
        cut.learnt[index] = sum(answers)
        equal = len(parts) == 2 and np.array_equal(shard.tokens[parts[0]], shard.tokens[parts[1]])
        if min(answers) == 0 or equal:
            lost.append(index)
    return cut, np.array(lost, np.int64)


def _count(shard: TokenShard, report: SourceReport) -> None:
    formats = {name for name in (*report.format.split(", "), shard.format) if name != "auto"}
    report.format = ", ".join(sorted(formats)) or "auto"
    report.rows_read += shard.rows_read
    report.from_cache += shard.from_cache
    for reason, count in shard.rejected.items():
        report.rejected[reason] = report.rejected.get(reason, 0) + count
    for row in shard.examples:
        _example(row, report)


def _example(row: BadRow, report: SourceReport) -> None:
    if sum(known.reason == row.reason for known in report.examples) < EXAMPLES_PER_REASON:
        report.examples.append(row)


def _reject(
    shard: TokenShard, documents: IntArray, report: SourceReport, detail: Callable[[int], str]
) -> None:
    if not len(documents):
        return
    report.rejected[TOO_LONG] = report.rejected.get(TOO_LONG, 0) + len(documents)
    for document in documents[:EXAMPLES_PER_REASON].tolist():
        line = int(shard.lines[document])
        _example(BadRow(file=shard.name, line=line, reason=TOO_LONG, detail=detail(document)), report)


def _split(shard: TokenShard, max_length: int) -> Documents:
    """Every document as pieces of at most max_length that overlap by one token, so that each token is
    predicted."""
    if shard.format != "text":
        raise DataError(
            f"too_long: split cuts a document into several, which only format text survives; {shard.name} "
            f"holds {shard.format}. Use too_long: truncate or skip."
        )
    full = np.diff(shard.offsets)
    pieces = np.maximum(1, -(-(full - 1) // (max_length - 1)))
    index = np.repeat(np.arange(len(full)), pieces)
    number = np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = number * (max_length - 1)
    length = np.minimum(full[index] - begin, max_length)
    none = np.zeros(len(index), np.int64)
    start = shard.offsets[:-1][index] + begin
    return Documents([shard], none, start, length, length - 1, shard.groups[index], none, none)


@dataclass(frozen=True)
class RowLayout:
    """How documents are laid into a row.

    tokens      tokens of a row
    max_length  no document is longer, padding included; without packing, the length of every slot
    packing     several documents to a row, as many as fit; else one to a slot
    pad         token id of the padding
    pairs       documents are preference pairs: without packing, two slots each
    """

    tokens: int
    max_length: int
    packing: bool
    pad: int
    pairs: bool = False

    def group(self, lengths: IntArray, order: IntArray) -> Packing:
        """Documents (taken in `order`) grouped into rows."""
        if self.packing:
            packed = best_fit_decreasing(lengths[order], self.tokens)
            return Packing(order[packed.documents], packed.offsets)
        slots = self.tokens // self.max_length // (2 if self.pairs else 1)
        return Packing(order, np.append(np.arange(0, len(order), slots), len(order)).astype(np.int64))

    def batch(self, documents: Documents, pack: IntArray) -> Batch:
        """The row of one pack. The sequences of a pair follow each other."""
        input_ids = np.full(self.tokens, self.pad, np.int64)
        labels = np.full(self.tokens, IGNORE, np.int64)
        borders = [0]
        used = 0
        for document in pack.tolist():
            shard = documents.shards[documents.shard[document]]
            for start, length in documents.sequences(document):
                here = borders[-1]
                ids = shard.tokens[start : start + length].astype(np.int64)
                learnt = shard.supervised[start + 1 : start + length]
                input_ids[here : here + length] = ids
                labels[here : here + length - 1] = np.where(learnt, ids[1:], IGNORE)
                borders.append(here + (length if self.packing else self.max_length))
                used += length
        num_sequences = len(borders) - 1
        while borders[-1] < self.tokens:
            borders.append(min(borders[-1] + self.max_length, self.tokens))
        cu_seqlens = np.array(borders, np.int32)
        sizes = np.diff(cu_seqlens)
        position_ids = np.arange(self.tokens) - np.repeat(cu_seqlens[:-1].astype(np.int64), sizes)
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(position_ids),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            max_seqlen=int(sizes.max()),
            num_supervised=int((labels != IGNORE).sum()),
            num_tokens=used,
            num_documents=num_sequences,
            num_pairs=len(pack) if self.pairs else 0,
        )
