"""One global order of packs: the same for every world size, and continued exactly after a restart."""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.unit.data.helpers import documents_of, text_rows
from training.data.batch import Batch
from training.data.cache import TokenShard
from training.data.documents import Documents, RowLayout
from training.data.errors import DataError
from training.data.loader import OrderIdentity, PackedLoader
from training.data.pipeline import DataBundle
from training.data.shuffle import permutation
from training.data.streams import PackStream, PreparedPacks, StreamedPacks, StreamSource

Build = Callable[..., DataBundle]
Write = Callable[..., Path]

LAYOUT = RowLayout(tokens=32, max_length=16, packing=True, pad=0)


def numbered(count: int, first: int = 1) -> Documents:
    """Documents that can be told apart: document d is 2 to 16 times the token `first + d`."""
    lengths = np.array([2 + (7 * d) % 15 for d in range(count)], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    shard = TokenShard(
        name="numbered",
        key="",
        format="text",
        rows_read=count,
        rejected={},
        examples=[],
        from_cache=False,
        tokens=np.repeat(np.arange(first, first + count), lengths).astype(np.uint32),
        supervised=np.ones(int(offsets[-1]), np.bool_),
        offsets=offsets,
        lines=np.arange(count, dtype=np.int64),
        learnt=(lengths - 1).astype(np.int32),
        groups=np.arange(count, dtype=np.uint64),
        rejected_from=np.zeros(count, np.int64),
    )
    zeros = np.zeros(count, np.int64)
    return Documents([shard], zeros, offsets[:-1], lengths, lengths - 1, shard.groups, zeros, zeros)


def prepared(sizes: list[int], weights: list[float] | None = None, seed: int = 0) -> PreparedPacks:
    firsts = [1 + sum(sizes[:i]) for i in range(len(sizes))]
    parts = [numbered(size, first) for size, first in zip(sizes, firsts, strict=True)]
    return PreparedPacks(
        list(zip(parts, weights or [1.0] * len(sizes), strict=True)), LAYOUT, seed=seed, shuffle=True
    )


def streamed(
    sizes: list[int], weights: list[float] | None = None, seed: int = 0, *, shuffle: bool = True
) -> StreamedPacks:
    """Sources of four shards each."""
    firsts = [1 + sum(4 * size for size in sizes[:i]) for i in range(len(sizes))]
    sources = [
        StreamSource(
            f"s{i}", 4, weight, lambda shard, first=first, size=size: numbered(size, first + shard * size)
        )
        for i, (first, size, weight) in enumerate(
            zip(firsts, sizes, weights or [1.0] * len(sizes), strict=True)
        )
    ]
    return StreamedPacks(sources, LAYOUT, seed=seed, shuffle=shuffle)


def loader(stream: PackStream, rank: int = 0, world_size: int = 1, seed: int = 0) -> PackedLoader:
    return PackedLoader(
        stream, OrderIdentity("c", "t", {"packing": True}, seed), rank=rank, world_size=world_size
    )


def pack_ids(batch: Batch) -> tuple[int, ...]:
    """The documents of a batch."""
    return tuple(batch.input_ids[batch.cu_seqlens[:-1].long()].tolist()[: batch.num_documents])


def run(
    make: Callable[[], PackStream], world: int, steps: int, state: dict[str, Any] | None = None
) -> tuple[list[Any], Any]:
    """The packs of `steps` micro-steps of a whole world in global order, and the state after them."""
    loaders = [loader(make(), rank, world) for rank in range(world)]
    if state is not None:
        for one in loaders:
            one.load_state_dict(json.loads(json.dumps(state)))
    packs = [pack_ids(next(one)) for _ in range(steps) for one in loaders]
    states = [one.state_dict() for one in loaders]
    assert all(other == states[0] for other in states)
    return packs, states[0]


MAKERS: dict[str, Callable[[], PackStream]] = {
    "prepared": lambda: prepared([23]),
    "mixture": lambda: prepared([23, 40], [3.0, 1.0]),
    "streamed": lambda: streamed([80]),
    "streamed mixture": lambda: streamed([60, 40], [1.0, 2.0]),
}


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=8, deadline=None)
@given(worlds=st.lists(st.integers(1, 5), min_size=1, max_size=4), steps=st.integers(0, 25))
def test_restarts_at_any_world_size_neither_repeat_nor_skip(name: str, worlds: list[int], steps: int) -> None:
    make = MAKERS[name]
    state: dict[str, Any] | None = None
    packs: list[Any] = []
    for world in worlds:
        more, state = run(make, world, steps, state)
        packs += more
    whole, _ = run(make, 1, len(packs))
    assert packs == whole


def test_streamed_restart_inside_a_later_block() -> None:
    def make() -> PackStream:
        return streamed([50, 20], [1.0, 1.0])

    whole, _ = run(make, 1, 700)  # a block is 256 rows
    first, state = run(make, 2, 200)
    assert state["cursor"]["block"] == 1
    rest, _ = run(make, 3, 100, state)
    assert first + rest == whole


def test_an_epoch_that_the_ranks_do_not_divide_is_carried_into_the_next() -> None:
    stream = prepared([23])
    size = stream.plan(0).num_packs
    assert size % 4
    packs, state = run(lambda: prepared([23]), 4, size)  # four epochs
    counts = Counter(itertools.chain.from_iterable(packs))
    assert counts == dict.fromkeys(range(1, 24), 4)
    assert (state["epoch"], state["packs"]) == (4, 4 * size)
    for epoch in range(4):
        seen = sorted(itertools.chain.from_iterable(packs[epoch * size : (epoch + 1) * size]))
        assert seen == list(range(1, 24))


def test_every_epoch_has_its_own_order_and_seeds_differ() -> None:
    size = prepared([23]).plan(0).num_packs
    packs, _ = run(lambda: prepared([23]), 1, 2 * size)
    other, _ = run(lambda: prepared([23], seed=1), 1, size)
    assert packs[:size] != packs[size:]
    assert packs[:size] != other


def test_the_order_is_written_in_stone() -> None:
    """A resumed run must find the order of the version that began it: a change here breaks every checkpoint."""
    assert permutation(10, 7, 1, 0).tolist() == [2, 1, 7, 3, 5, 8, 4, 9, 0, 6]
    packs, _ = run(lambda: prepared([9]), 1, 3)
    assert packs == [(3, 5), (2, 4, 6, 8, 1), (7, 9)]


def test_mixture_gives_every_source_its_share_and_drops_nothing() -> None:
    stream = prepared([40, 40], [3.0, 1.0])
    assert stream.per_epoch == [120, 40]
    packs, _ = run(lambda: prepared([40, 40], [3.0, 1.0]), 1, stream.plan(0).num_packs)
    counts = Counter(itertools.chain.from_iterable(packs))
    assert all(counts[document] == 3 for document in range(1, 41))
    assert all(counts[document] == 1 for document in range(41, 81))


def test_part_of_a_pass_that_an_epoch_leaves_over_opens_the_next() -> None:
    make = MAKERS["mixture"]
    stream = make()
    assert isinstance(stream, PreparedPacks)
    [often, once] = stream.per_epoch
    assert (once, often % 23 != 0) == (40, True)
    number = sum(stream.plan(epoch).num_packs for epoch in range(23))
    packs, state = run(make, 1, number)
    assert state["epoch"] == 23
    counts = Counter(itertools.chain.from_iterable(packs))
    assert {counts[document] for document in range(1, 24)} == {often}  # 23 epochs are `often` whole passes
    assert {counts[document] for document in range(24, 64)} == {23}


def test_streamed_passes_hold_every_document_once() -> None:
    stream = streamed([100])
    counts: Counter[int] = Counter()
    while stream.cursor()["block"] < 3:
        counts.update(pack_ids(stream.take(1, 0)))
    passes = stream.epoch
    assert passes >= 3
    assert set(counts) == set(range(1, 401))
    assert set(counts.values()) == {passes, passes + 1}


def test_streamed_mixture_keeps_the_shares_of_tokens() -> None:
    stream = streamed([100, 100], [3.0, 1.0])
    tokens = Counter[bool]()
    for _ in range(512):
        batch = stream.take(1, 0)
        ids = batch.input_ids[batch.input_ids > 0]
        tokens[True] += int((ids <= 400).sum())
        tokens[False] += int((ids > 400).sum())
    assert tokens[True] / tokens.total() == pytest.approx(0.75, abs=0.01)


def test_streamed_files_come_in_order_without_shuffling() -> None:
    stream = streamed([200], shuffle=False)
    first = pack_ids(stream.take(1, 0))
    assert 1 in first
    assert max(pack_ids(stream.take(100, 99))) < 800


def test_streamed_source_without_documents_is_an_error() -> None:
    stream = StreamedPacks(
        [StreamSource("void", 3, 1.0, lambda _: numbered(0))], LAYOUT, seed=0, shuffle=True
    )
    with pytest.raises(DataError, match="source 'void' has no usable document in any of its 3 files"):
        stream.take(1, 0)


def test_unshuffled_epochs_keep_the_order_of_the_file(
    build_data: Build, write_jsonl: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = text_rows(20)
    bundle = build_data(source=str(write_jsonl(rows)), shuffle=False, packing=False)
    seen = [
        text
        for _ in range(bundle.num_packs(1))
        for text in documents_of(next(bundle.train_loader), tokenizer)
    ]
    assert seen == [row["text"] for row in rows]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"seed \(was 0, now 1\)"),
        ({"tokens": 256}, r"tokens_per_batch \(was 128, now 256\)"),
        ({"max_length": 32}, r"max_length \(was 64, now 32\)"),
        ({"packing": False}, r"packing \(was True, now False\)"),
        ({"validation": {"count": 3}}, r"held_out \(was None, now 'count 3'\)"),
        ({"mask": "all"}, "the tokenizer, chat template or mask"),
        ({"source": "other"}, "the content of the data files"),
    ],
)
def test_position_of_another_job_is_refused_by_what_changed(
    build_data: Build, write_jsonl: Write, change: dict[str, Any], message: str
) -> None:
    paths = {"rows": write_jsonl(text_rows(30)), "other": write_jsonl(text_rows(31), "other.jsonl")}
    before: dict[str, Any] = {"source": "rows"}
    states = []
    for settings_ in (before, {**before, **change}):
        bundle = build_data(**{**settings_, "source": str(paths[settings_["source"]])})
        states.append((bundle, bundle.train_loader.state_dict()))
    with pytest.raises(DataError, match=message) as caught:
        states[1][0].train_loader.load_state_dict(states[0][1])
    assert "Resume with the same data section, seed and files" in str(caught.value)


def test_position_of_another_version_is_refused(build_data: Build, write_jsonl: Write) -> None:
    one = build_data(source=str(write_jsonl(text_rows(5)))).train_loader
    with pytest.raises(DataError, match="has version 99, this program reads 1"):
        one.load_state_dict({**one.state_dict(), "version": 99})


def test_validation_source_and_work_folder_do_not_change_the_order(
    build_data: Build, write_jsonl: Write
) -> None:
    path, held = write_jsonl(text_rows(30)), write_jsonl(text_rows(3), "held.jsonl")
    first = build_data(source=str(path)).train_loader
    next(first)
    second = build_data(
        source=str(path), validation={"source": {"source": str(held)}}, work="other"
    ).train_loader
    second.load_state_dict(first.state_dict())
    assert next(first).input_ids.equal(next(second).input_ids)
