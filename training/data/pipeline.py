"""From the `data` section of a job file to the batches of one rank."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from training.data.batch import Batch
from training.data.cache import TokenCache, TokenShard, stop_message
from training.data.config import DataSpec, LongPolicy, SourceSpec, ValidationSpec
from training.data.documents import Documents, RowLayout, shard_documents
from training.data.errors import DataError
from training.data.loader import OrderIdentity, PackedLoader
from training.data.packing import Packing
from training.data.report import DataReport, SourceReport
from training.data.shuffle import random_bits, splitmix64
from training.data.sources import Resolved, resolve
from training.data.streams import PreparedPacks, StreamedPacks, StreamSource

_RANDOM_ROWS = 2048
_PAIR_FIELDS = (
    ". objective.kind dpo needs rows with the fields chosen and rejected, and prompt unless both are lists of messages "
    "that begin alike; data.fields maps other names (docs/data.md)"
)


@dataclass(frozen=True)
class Validation:
    """Held-out documents in rows, dealt out to the ranks."""

    documents: Documents
    packing: Packing
    layout: RowLayout
    rank: int
    world_size: int

    @property
    def num_batches(self) -> int:
        """Batches of every rank."""
        return -(-self.packing.num_packs // self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        """This rank's batches, from the start. Ranks without a row of their own at the end get one of
        padding."""
        for step in range(self.num_batches):
            pack = step * self.world_size + self.rank
            chosen = self.packing.pack(pack) if pack < self.packing.num_packs else np.zeros(0, np.int64)
            yield self.layout.batch(self.documents, chosen)


@dataclass(frozen=True)
class DataBundle:
    """What a rank trains on.

    train_loader   endless iterator of micro-batches, with state_dict() and load_state_dict()
    report         what was read, used and rejected; while streaming it grows
    validation     the held-out batches, or None when the job holds nothing out
    """

    train_loader: PackedLoader
    report: DataReport
    validation: Validation | None
    _prepared: PreparedPacks | None

    def num_packs(self, epochs: int) -> int:
        """Micro-batches, over all ranks, of the first `epochs` passes. Raises DataError when streaming."""
        if self._prepared is None:
            raise DataError(
                "the length of an epoch is not known while streaming: give the job `steps` instead of "
                "`epochs`"
            )
        return self._prepared.num_packs(epochs)


def build(
    spec: DataSpec,
    tokenizer: PreTrainedTokenizerFast | None,
    *,
    seed: int,
    tokens_per_batch: int,
    rank: int,
    world_size: int,
    work_dir: Path,
    vocab_size: int | None = None,
) -> DataBundle:
    """Read, tokenize (once per node, cached under work_dir) and pack. Every rank calls it with the same
    arguments.

    tokens_per_batch: tokens of one micro-batch of one rank.
    work_dir: a local folder that the processes of a node share; kept between runs, it saves tokenizing again.
    tokenizer: may be None for source `random`, with vocab_size in its place.
    Raises DataError.
    """
    layout = _layout(spec, tokenizer, tokens_per_batch)
    builder = _Builder(spec, tokenizer, vocab_size, seed, work_dir)
    training = [builder.source(source) for source in spec.sources()]

    held_out: Documents | None = None
    prepared: PreparedPacks | None = None
    if spec.streaming:
        stream = StreamedPacks(
            [
                builder.stream(source, weighted.weight)
                for source, weighted in zip(training, spec.sources(), strict=True)
            ],
            layout,
            seed=seed,
            shuffle=spec.shuffle,
        )
    else:
        documents = [builder.documents(source) for source in training]
        if spec.validation is not None and spec.validation.source is None:
            documents, held_out = _held_out(documents, spec.validation)
        for source, left in zip(training, documents, strict=True):
            if not len(left):
                raise DataError(_nothing_left(source.report))
        weighted = [(left, source.weight) for left, source in zip(documents, spec.sources(), strict=True)]
        stream = prepared = PreparedPacks(weighted, layout, seed=seed, shuffle=spec.shuffle)
        for source, left, number in zip(training, documents, prepared.per_epoch, strict=True):
            source.report.passes_per_epoch = number / len(left)
    if spec.validation is not None and spec.validation.source is not None:
        source = builder.source(spec.validation.source)
        held_out = builder.documents(source)
        if not len(held_out):
            raise DataError(_nothing_left(source.report))

    validation = None if held_out is None else _validation(held_out, layout, rank, world_size)
    identity = builder.identity(training, layout)
    _finish_report(builder.report, identity, prepared, validation, layout, world_size)
    loader = PackedLoader(stream, identity, rank=rank, world_size=world_size)
    return DataBundle(loader, builder.report, validation, prepared)


def _layout(spec: DataSpec, tokenizer: PreTrainedTokenizerFast | None, tokens: int) -> RowLayout:
    if spec.pairs and 2 * spec.max_length > tokens:
        raise DataError(
            f"a preference pair is two sequences of up to max_length {spec.max_length:,}: they do not fit a micro-batch "
            f"of {tokens:,} tokens per GPU. Lower data.max_length or raise the batch's tokens."
        )
    if spec.max_length > tokens:
        raise DataError(
            f"max_length {spec.max_length:,} is longer than a micro-batch of {tokens:,} tokens per GPU: a "
            "document could not fit. Lower data.max_length or raise the batch's tokens."
        )
    if not spec.packing and tokens % spec.max_length:
        raise DataError(
            f"without packing a micro-batch is made of slots of max_length: {tokens:,} tokens are not a "
            f"multiple of {spec.max_length:,}. Use {tokens // spec.max_length * spec.max_length:,} tokens, "
            "or packing: true."
        )
    pad = 0
    if tokenizer is not None:
        known = [tokenizer.pad_token_id, tokenizer.eos_token_id]
        pad = next((token for token in known if isinstance(token, int)), 0)
    return RowLayout(tokens, spec.max_length, spec.packing, pad, spec.pairs)


@dataclass(frozen=True)
class _Source:
    """A source with its shards found, or None for random ids, and its part of the report."""

    spec: SourceSpec
    resolved: Resolved | None
    report: SourceReport


class _Builder:
    """Holds what every source needs: the cache, the policies and the report."""

    def __init__(
        self,
        spec: DataSpec,
        tokenizer: PreTrainedTokenizerFast | None,
        vocab_size: int | None,
        seed: int,
        work_dir: Path,
    ):
        self._spec = spec
        self._seed = seed
        self._work_dir = work_dir
        self._policy: LongPolicy = spec.too_long or spec.on_bad_row
        self._vocab_size = vocab_size or (len(tokenizer) if tokenizer is not None else None)
        self._cache = (
            TokenCache(work_dir / "tokens", tokenizer, spec.mask, spec.chat_template, spec.on_bad_row)
            if tokenizer is not None
            else None
        )
        self._shard_keys: list[str] = []
        self.report = DataReport()

    def source(self, spec: SourceSpec) -> _Source:
        """Find a source's shards."""
        resolved = None if spec.kind == "random" else resolve(spec, self._work_dir)
        report = SourceReport(source=spec.source)
        if resolved is not None:
            report.revision = resolved.revision
            report.files = len(resolved.shards)
            report.ignored_files = resolved.ignored_files
        self.report.sources.append(report)
        return _Source(spec, resolved, report)

    def documents(self, source: _Source) -> Documents:
        """All documents of a source."""
        if source.resolved is None:
            return self._random(source)
        parts: list[Documents] = []
        left = source.spec.limit
        for index in range(len(source.resolved.shards)):
            if left == 0:
                break
            shard = self._open(source, index, left)
            left = None if left is None else left - shard.rows_read
            parts.append(shard_documents(shard, self._spec.max_length, self._policy, source.report))
        return Documents.concatenate(parts)

    def stream(self, source: _Source, weight: float) -> StreamSource:
        """A source whose shards are opened when their turn comes."""
        assert source.resolved is not None
        counted: set[int] = set()

        def open_shard(index: int) -> Documents:
            # A later pass over the same shard is not counted a second time.
            report = SourceReport(source=source.spec.source) if index in counted else source.report
            counted.add(index)
            return shard_documents(
                self._open(source, index, None), self._spec.max_length, self._policy, report
            )

        return StreamSource(source.spec.source, len(source.resolved.shards), weight, open_shard)

    def _open(self, source: _Source, index: int, max_rows: int | None) -> TokenShard:
        assert source.resolved is not None
        if self._cache is None:
            raise DataError(f"source {source.spec.source!r} needs a tokenizer")
        shard = self._cache.get(source.resolved.shards[index], source.spec, max_rows=max_rows)
        if self._spec.on_bad_row == "stop" and shard.rejected:
            raise DataError(stop_message(shard.examples, shard.rejected))
        return shard

    def _random(self, source: _Source) -> Documents:
        """Documents of max_length random ids, all of them learnt."""
        if self._vocab_size is None:
            raise DataError("source random needs a tokenizer or vocab_size")
        rows, length = source.spec.limit or _RANDOM_ROWS, self._spec.max_length
        ids = (random_bits(rows * length, self._seed) % np.uint64(self._vocab_size)).astype(np.uint32)
        shard = TokenShard(
            name="random",
            key=f"random {self._vocab_size} {rows} {length} {self._seed}",
            format="random",
            rows_read=rows,
            rejected={},
            examples=[],
            from_cache=False,
            tokens=ids,
            supervised=np.ones(rows * length, np.bool_),
            offsets=np.arange(rows + 1, dtype=np.int64) * length,
            lines=np.arange(1, rows + 1, dtype=np.int64),
            learnt=np.full(rows, length - 1, np.int32),
            groups=splitmix64(np.arange(rows, dtype=np.uint64)),
            rejected_from=np.zeros(rows, np.int64),
        )
        return shard_documents(shard, length, self._policy, source.report)

    def identity(self, sources: Sequence[_Source], layout: RowLayout) -> OrderIdentity:
        """What the order of the packs is a function of."""
        content = hashlib.sha256()
        for source in sources:
            if source.resolved is None:
                content.update(f"random {self._vocab_size} {source.spec.limit}".encode())
                continue
            content.update(json.dumps([source.spec.format, sorted(source.spec.fields.items())]).encode())
            for shard in source.resolved.shards:
                # Streaming, the files may be too many to read before the first step.
                content.update((shard.identity if self._spec.streaming else shard.key()).encode())
        settings: dict[str, Any] = {
            "tokens_per_batch": layout.tokens,
            "max_length": self._spec.max_length,
            "packing": self._spec.packing,
            "shuffle": self._spec.shuffle,
            "streaming": self._spec.streaming,
            "too_long": self._policy,
            "weights": [source.weight for source in self._spec.sources()],
            "limits": [source.limit for source in self._spec.sources()],
            "held_out": _held_out_setting(self._spec.validation),
        }
        tokenizer_key = "none" if self._cache is None else self._cache.tokenizer_key
        return OrderIdentity(content.hexdigest(), tokenizer_key, settings, self._seed)


def _held_out_setting(validation: ValidationSpec | None) -> str | None:
    """The part of the validation settings that takes documents away from training."""
    if validation is None or validation.source is not None:
        return None
    return (
        f"fraction {validation.fraction}" if validation.fraction is not None else f"count {validation.count}"
    )


def _held_out(parts: list[Documents], validation: ValidationSpec) -> tuple[list[Documents], Documents]:
    """Split every source by the hash of its groups, so that what belongs together stays on one side."""
    groups = np.concatenate([part.group for part in parts])
    if validation.fraction is not None:
        limit = np.uint64(int(validation.fraction * 2**64))
        wanted = f"fraction {validation.fraction}"
    else:
        assert validation.count is not None
        wanted = f"count {validation.count}"
        if validation.count >= len(groups):
            raise DataError(
                f"validation {wanted} takes all {len(groups):,} documents: none is left to train on"
            )
        limit = np.partition(groups, validation.count)[validation.count]
    masks = [part.group < limit for part in parts]
    held = Documents.concatenate([part.select(mask) for part, mask in zip(parts, masks, strict=True)])
    if not len(held):
        raise DataError(f"validation {wanted} of {len(groups):,} documents holds out none: ask for more")
    return [part.select(~mask) for part, mask in zip(parts, masks, strict=True)], held


def _validation(documents: Documents, layout: RowLayout, rank: int, world_size: int) -> Validation:
    packing = layout.group(documents.length, np.arange(len(documents), dtype=np.int64))
    return Validation(documents, packing, layout, rank, world_size)


def _nothing_left(report: SourceReport) -> str:
    rejected = ", ".join(f"{reason}: {count:,}" for reason, count in report.rejected.items())
    shown = "; ".join(str(row) for row in report.examples[:3])
    return (
        f"source {report.source!r} has no document to train on: {report.rows_read:,} rows read"
        + (f", rejected {rejected} ({shown})" if rejected else "")
        + (f", {report.documents:,} held out for validation" if report.documents else "")
        + (_PAIR_FIELDS if report.format == "preference" else "")
    )


def _finish_report(
    report: DataReport,
    identity: OrderIdentity,
    prepared: PreparedPacks | None,
    validation: Validation | None,
    layout: RowLayout,
    world_size: int,
) -> None:
    report.fingerprint = hashlib.sha256(
        json.dumps([identity.content, identity.tokenizer, identity.settings, identity.seed]).encode()
    ).hexdigest()
    if validation is not None:
        report.validation_documents = len(validation.documents)
        report.validation_tokens = int(validation.documents.length.sum())
        report.validation_supervised_tokens = int(validation.documents.learnt.sum())
    if prepared is None:
        return
    plan = prepared.plan(0)
    report.pairs = layout.pairs
    report.train_documents = len(prepared.documents)
    report.train_tokens = int(prepared.documents.length.sum())
    report.train_supervised_tokens = int(prepared.documents.learnt.sum())
    report.packs_per_epoch = plan.num_packs
    report.packing_efficiency = int(prepared.documents.length[plan.documents].sum()) / (
        plan.num_packs * layout.tokens
    )
    if plan.num_packs < world_size:
        report.warnings.append(
            f"an epoch is {plan.num_packs:,} rows of {layout.tokens:,} tokens, fewer than the {world_size} "
            "ranks: a single step repeats documents; use fewer tokens per batch, fewer ranks or more data"
        )
