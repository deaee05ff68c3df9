"""Preference pairs: every common layout is read, bad rows are named, a pair is never split and none is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from training.data.batch import IGNORE, Batch
from training.data.cache import TokenShard
from training.data.config import DataSpec
from training.data.documents import RowLayout, shard_documents
from training.data.errors import DataError
from training.data.formats import Pair, RowError, parse_row
from training.data.loader import OrderIdentity, PackedLoader
from training.data.pipeline import DataBundle, build
from training.data.report import SourceReport
from training.data.streams import PreparedPacks, StreamedPacks, StreamSource
from training.data.texts import texts

Write = Callable[..., Path]

USER = {"role": "user", "content": "hello cat"}
SYSTEM = {"role": "system", "content": "on the mat"}
GOOD = {"role": "assistant", "content": "the cat said hello"}
BAD = {"role": "assistant", "content": "sat"}
ASK = {"role": "user", "content": "and on?"}


def pair_of(row: dict[str, Any], **fields: str) -> Pair:
    parsed = parse_row(row, "preference", fields)
    assert isinstance(parsed, Pair)
    return parsed


TEXTS = {"prompt": "hello cat", "chosen": "the cat said hello", "rejected": "sat"}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (TEXTS, [USER]),
        ({**TEXTS, "system": "on the mat"}, [SYSTEM, USER]),
        ({"prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": [BAD]}, [SYSTEM, USER]),
        ({"prompt": [USER], "chosen": "the cat said hello", "rejected": "sat"}, [USER]),
        ({"prompt": "hello cat", "chosen": [GOOD], "rejected": [BAD]}, [USER]),
        # Without a prompt of its own: the messages that both begin with.
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
        ({"chosen": [USER, BAD, ASK, GOOD], "rejected": [USER, BAD, ASK, BAD]}, [USER, BAD, ASK]),
        ({"prompt": None, "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
        # The prompt besides, and both conversations whole (UltraFeedback's layout).
        ({"prompt": "hello cat", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
        ({"prompt": "hello cat", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, [SYSTEM, USER]),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
        # ShareGPT's names.
        (
            {
                "chosen": [{"from": "human", "value": "hello cat"}, {"from": "gpt", "value": "the cat said hello"}],
                "rejected": [{"from": "human", "value": "hello cat"}, {"from": "gpt", "value": "sat"}],
            },
            [USER],
        ),
    ],
)  # fmt: skip
def test_the_common_layouts_become_the_same_pair(row: dict[str, Any], prompt: list[dict[str, str]]) -> None:
    pair = pair_of(row)
    assert pair.chosen.messages == [*prompt, GOOD]
    assert pair.rejected.messages == [*prompt, BAD]
    assert pair.chosen.completion_from == pair.rejected.completion_from == len(prompt)
    assert pair.chosen.group == pair.rejected.group is not None


def test_columns_of_other_names_are_mapped() -> None:
    row = {"question": "hello cat", "better": "the cat said hello", "worse": "sat"}
    pair = pair_of(row, prompt="question", chosen="better", rejected="worse")
    assert (pair.chosen.messages, pair.rejected.messages) == ([USER, GOOD], [USER, BAD])


def test_an_answer_may_go_on_over_several_turns() -> None:
    pair = pair_of({"prompt": [USER], "chosen": [GOOD, ASK, GOOD], "rejected": [BAD]})
    assert pair.chosen.messages == [USER, GOOD, ASK, GOOD]
    assert pair.rejected.messages == [USER, BAD]


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({"prompt": "a", "chosen": "b"}, "missing field", "no field 'rejected'; the row has: prompt, chosen"),
        ({"messages": [USER]}, "missing field", "no field 'chosen'; the row has: messages"),
        ({"chosen": "b", "rejected": "c"}, "missing field", "no field 'prompt', without which 'chosen' and"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "empty", "field 'prompt' is empty"),
        ({"prompt": None, "chosen": "b", "rejected": "c"}, "empty", "field 'prompt' is null"),
        ({"prompt": "a", "chosen": "b", "rejected": "  "}, "no answer", "field 'rejected' holds only white space"),
        ({"prompt": "a", "chosen": None, "rejected": "c"}, "no answer", "field 'chosen' is null"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "wrong type", "field 'chosen' must be text, found a number"),
        ({"prompt": "a", "chosen": [GOOD], "rejected": "c"}, "wrong type", "field 'chosen' is a list and 'rejected' is text"),
        ({"prompt": "a", "chosen": "same", "rejected": "same"}, "equal answers", "fields 'chosen' and 'rejected' say the same"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "no answer", "'chosen' ends where the messages"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "no answer", "field 'rejected' ends where"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "no prompt", "do not begin with the same message"),
        ({"chosen": [USER, GOOD], "rejected": [ASK, BAD]}, "no prompt", "do not begin with the same message"),
        ({"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, ASK, BAD]}, "wrong role", "at a message of role 'user'"),
        ({"prompt": "else", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "prompt differs", "not the one in field 'prompt'"),
        ({"prompt": "a", "chosen": [], "rejected": [BAD]}, "empty", "field 'chosen' is an empty list"),
        ({"prompt": "a", "chosen": [{"role": "robot"}], "rejected": [BAD]}, "wrong role", "chosen[0].role is 'robot'"),
        ({**TEXTS, "tools": "none"}, "wrong type", "field 'tools' must be a list, found text"),
        (["a"], "wrong type", "a row must be an object"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_pair_says_why(row: Any, reason: str, detail: str) -> None:
    with pytest.raises(RowError) as raised:
        parse_row(row, "preference", {})
    assert raised.value.reason == reason
    assert detail in raised.value.detail


# From rows to batches


@pytest.fixture
def build_pairs(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Callable[..., DataBundle]:
    def build_it(*, tokens: int = 128, rank: int = 0, world_size: int = 1, **spec: Any) -> DataBundle:
        return build(
            DataSpec(**{"max_length": 48, **spec}).for_pairs(),
            tokenizer,
            seed=0,
            tokens_per_batch=tokens,
            rank=rank,
            world_size=world_size,
            work_dir=tmp_path / "work",
        )

    return build_it


Build = Callable[..., DataBundle]


def pair_rows(count: int) -> list[dict[str, str]]:
    return [
        {
            "prompt": f"number {n}",
            "chosen": f"{n} " + "the cat sat " * (1 + n % 3),
            "rejected": f"no {n} " + "mat " * (1 + n % 4),
        }
        for n in range(count)
    ]


def answers_of(batch: Batch, tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, str]]:
    """The learnt tokens of both sequences of each pair, as text."""
    borders = batch.cu_seqlens.tolist()
    found: list[str] = []
    for start, end in zip(borders[: 2 * batch.num_pairs], borders[1:], strict=False):
        labels = batch.labels[start:end]
        found.append(tokenizer.decode(labels[labels != IGNORE].tolist()))
    return list(zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize("packing", [True, False])
def test_the_answers_alone_are_learnt_and_stand_beside_each_other(
    build_pairs: Build, write_jsonl: Write, tokenizer: PreTrainedTokenizerFast, packing: bool
) -> None:
    rows = pair_rows(31)
    bundle = build_pairs(source=str(write_jsonl(rows)), packing=packing, tokens=192)
    seen: Counter[tuple[str, str]] = Counter()
    for _ in range(bundle.num_packs(1)):
        batch = next(bundle.train_loader)
        assert batch.num_documents == 2 * batch.num_pairs
        borders = batch.cu_seqlens.tolist()
        for start, end in zip(borders, borders[1:], strict=False):
            assert batch.position_ids[start:end].tolist() == list(range(end - start))
        seen.update(answers_of(batch, tokenizer))
        if not packing:
            assert batch.num_pairs <= 2
            assert set(np.diff(borders)) == {48}
    assert seen == Counter((f"{row['chosen']}<|im_end|>", f"{row['rejected']}<|im_end|>") for row in rows)
    assert bundle.report.lines()[-1].startswith("training: 31 pairs in ")
    assert bundle.report.train_documents == 31


def test_messages_without_a_prompt_and_texts_give_the_same_tokens(
    build_pairs: Build, write_jsonl: Write
) -> None:
    lists = [{"chosen": [USER, GOOD], "rejected": [USER, BAD]}]
    one = next(build_pairs(source=str(write_jsonl(lists, "lists.jsonl"))).train_loader)
    other = next(build_pairs(source=str(write_jsonl([TEXTS], "texts.jsonl"))).train_loader)
    assert one.input_ids.tolist() == other.input_ids.tolist()
    assert one.labels.tolist() == other.labels.tolist()


def test_bad_rows_are_counted_by_reason_and_listed_by_line(build_pairs: Build, write_jsonl: Write) -> None:
    rows = [*pair_rows(3), {"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "a", "chosen": "b"}]
    [source] = build_pairs(source=str(write_jsonl(rows))).report.sources
    assert (source.rows_read, source.rows_used) == (5, 3)
    assert source.rejected == {"equal answers": 1, "missing field": 1}
    assert [row.line for row in source.examples] == [4, 5]
    with pytest.raises(
        DataError, match=r"bad row: .*rows.jsonl:4: equal answers: fields 'chosen' and 'rejected'"
    ):
        build_pairs(source=str(write_jsonl(rows)), on_bad_row="stop")


def test_a_file_without_pairs_says_what_the_objective_needs(build_pairs: Build, write_jsonl: Write) -> None:
    with pytest.raises(DataError) as raised:
        build_pairs(source=str(write_jsonl([{"messages": [USER, GOOD]}] * 3)))
    message = str(raised.value)
    assert "3 rows read, rejected missing field: 3" in message
    assert "rows.jsonl:1: missing field: no field 'chosen'; the row has: messages" in message
    assert "objective.kind dpo needs rows with the fields chosen and rejected" in message


def test_a_file_of_pairs_for_supervised_training_names_line_and_key(
    build_data: Build, write_jsonl: Write
) -> None:
    with pytest.raises(DataError) as raised:
        build_data(source=str(write_jsonl(pair_rows(2))))
    assert "rows.jsonl:1: the fields chosen and rejected are a preference pair" in str(raised.value)
    assert "set objective.kind: dpo" in str(raised.value)


def test_a_pair_too_long_for_a_micro_batch_is_refused(build_pairs: Build, write_jsonl: Write) -> None:
    with pytest.raises(
        DataError, match="two sequences of up to max_length 48: they do not fit a micro-batch of 90"
    ):
        build_pairs(source=str(write_jsonl(pair_rows(2))), tokens=90)


LONG = [
    {"prompt": "a", "chosen": "cat " * 90, "rejected": "mat"},
    {"prompt": "cat " * 90, "chosen": "yes", "rejected": "no"},
    {"prompt": "a", "chosen": "cat " * 90, "rejected": "cat " * 91},
    {"prompt": "a", "chosen": "cat", "rejected": "mat"},
]


def test_pairs_that_are_too_long_are_counted_and_skipped(build_pairs: Build, write_jsonl: Write) -> None:
    [source] = build_pairs(source=str(write_jsonl(LONG))).report.sources
    assert source.rejected == {"too long": 3}
    assert source.rows_used == 1
    assert source.examples[0].line == 1
    assert source.examples[0].detail.startswith("chosen ")
    assert ", rejected " in source.examples[0].detail
    assert source.examples[0].detail.endswith(" tokens, max_length is 48")
    with pytest.raises(DataError, match=r"rows.jsonl:1: too long: chosen .* data.too_long: truncate"):
        build_pairs(source=str(write_jsonl(LONG)), too_long="stop")


def test_truncation_keeps_the_beginning_of_both_and_rejects_what_lost_its_difference(
    build_pairs: Build, write_jsonl: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    bundle = build_pairs(source=str(write_jsonl(LONG)), too_long="truncate", shuffle=False)
    [source] = bundle.report.sources
    assert (source.rows_used, source.rows_truncated) == (2, 1)
    assert source.rejected == {"too long": 2}
    assert [row.line for row in source.examples] == [2, 3]
    assert (
        "no token of one of the answers, or no difference, within the first 48" in source.examples[0].detail
    )
    batch = next(bundle.train_loader)
    [(chosen, rejected), (short, _)] = sorted(answers_of(batch, tokenizer), key=lambda pair: -len(pair[0]))
    assert batch.max_seqlen == 48
    assert ("cat " * 90).startswith(chosen.strip())
    assert (rejected, short) == ("mat<|im_end|>", "cat<|im_end|>")
    assert source.supervised_tokens == sum(
        int((batch.labels[a:b] != IGNORE).sum())
        for a, b in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False)
    )


def test_pairs_of_one_prompt_are_held_out_together(
    build_pairs: Build, write_jsonl: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"prompt": f"number {n // 4}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(80)]
    bundle = build_pairs(source=str(write_jsonl(rows)), validation={"fraction": 0.3})
    assert bundle.validation is not None
    held = {
        int(chosen.removeprefix("yes ").removesuffix("<|im_end|>")) // 4
        for batch in bundle.validation
        for chosen, _ in answers_of(batch, tokenizer)
    }
    trained = {
        int(chosen.removeprefix("yes ").removesuffix("<|im_end|>")) // 4
        for _ in range(bundle.num_packs(1))
        for chosen, _ in answers_of(next(bundle.train_loader), tokenizer)
    }
    assert held
    assert not held & trained
    assert held | trained == set(range(20))


def test_a_tokenizer_is_trained_on_prompts_once_and_on_both_answers(
    write_jsonl: Write, tmp_path: Path
) -> None:
    spec = DataSpec(source=str(write_jsonl([TEXTS]))).for_pairs()
    assert list(texts(spec, tmp_path)) == ["hello cat", "the cat said hello", "sat"]


# Packing, in general


def numbered_pairs(sizes: list[tuple[int, int]]) -> TokenShard:
    """Pair p: its chosen sequence is tokens 2 p + 1, its rejected one 2 p + 2, of the given lengths."""
    lengths = np.array([chosen + rejected for chosen, rejected in sizes], np.int64)
    tokens = [token for p, (a, b) in enumerate(sizes) for token in [2 * p + 1] * a + [2 * p + 2] * b]
    return TokenShard(
        name="numbered",
        key="",
        format="preference",
        rows_read=len(sizes),
        rejected={},
        examples=[],
        from_cache=False,
        tokens=np.array(tokens, np.uint32),
        supervised=np.ones(len(tokens), np.bool_),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        lines=np.arange(len(sizes), dtype=np.int64),
        learnt=(lengths - 2).astype(np.int32),
        groups=np.arange(len(sizes), dtype=np.uint64),
        rejected_from=np.array([chosen for chosen, _ in sizes], np.int64),
    )


def numbers_in(batch: Batch) -> list[int]:
    """The number of each pair of a batch; fails where a pair is not whole, or its sequences are not in order."""
    found: list[int] = []
    borders = batch.cu_seqlens.tolist()
    for p in range(batch.num_pairs):
        chosen, rejected = (
            set(batch.input_ids[borders[i] : borders[i + 1]].tolist()) - {0} for i in (2 * p, 2 * p + 1)
        )
        assert len(chosen) == len(rejected) == 1
        first = chosen.pop()
        assert rejected.pop() == first + 1
        found.append((first - 1) // 2)
    return found


SIZES = st.lists(st.tuples(st.integers(2, 16), st.integers(2, 16)), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(
    sizes=SIZES,
    packing=st.booleans(),
    tokens=st.integers(32, 90),
    seed=st.integers(0, 9),
    world=st.integers(1, 3),
)
def test_pairs_are_never_split_and_none_is_lost(
    sizes: list[tuple[int, int]], packing: bool, tokens: int, seed: int, world: int
) -> None:
    layout = RowLayout(tokens - tokens % 16, 16, packing, pad=0, pairs=True)
    report = SourceReport(source="numbered")
    documents = shard_documents(numbered_pairs(sizes), 16, "skip", report)
    assert report.tokens == sum(a + b for a, b in sizes)

    def loaders() -> list[PackedLoader]:
        identity = OrderIdentity("", "", {}, seed)
        return [
            PackedLoader(
                PreparedPacks([(documents, 1.0)], layout, seed=seed, shuffle=True),
                identity,
                rank=r,
                world_size=world,
            )
            for r in range(world)
        ]

    packs = PreparedPacks([(documents, 1.0)], layout, seed=seed, shuffle=True).num_packs(world)
    ranks = loaders()
    seen: Counter[int] = Counter()
    for step in range(packs // world):
        if step == packs // world // 2:  # a restart in the middle
            states = [loader.state_dict() for loader in ranks]
            ranks = loaders()
            for loader, state in zip(ranks, states, strict=True):
                loader.load_state_dict(state)
        for loader in ranks:
            batch = next(loader)
            numbers = numbers_in(batch)
            assert batch.num_tokens == sum(sum(sizes[n]) for n in numbers)
            assert batch.num_supervised == batch.num_tokens - 2 * len(numbers)
            seen.update(numbers)
    assert seen == Counter(dict.fromkeys(range(len(sizes)), world))


@settings(max_examples=20, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 9))
def test_streaming_splits_no_pair_and_loses_none(sizes: list[tuple[int, int]], seed: int) -> None:
    layout = RowLayout(64, 16, packing=True, pad=0, pairs=True)
    documents = shard_documents(numbered_pairs(sizes), 16, "skip", SourceReport(source=""))
    stream = StreamedPacks(
        [StreamSource("one", 1, 1.0, lambda _: documents)], layout, seed=seed, shuffle=True
    )
    seen: Counter[int] = Counter()
    while stream.cursor()["block"] == 0:
        seen.update(numbers_in(stream.take(1, 0)))
    counts = [seen[n] for n in range(len(sizes))]
    assert sum(a + b for n in seen.elements() for a, b in [sizes[n]]) >= 256 * 64  # what a block holds
    assert max(counts) - min(counts) <= 1


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(2, 40), st.integers(2, 40)), min_size=1, max_size=30),
    limit=st.integers(8, 40),
)
def test_truncation_counts_what_it_keeps(sizes: list[tuple[int, int]], limit: int) -> None:
    report = SourceReport(source="")
    documents = shard_documents(numbered_pairs(sizes), limit, "truncate", report)
    kept = [(min(a, limit), min(b, limit)) for a, b in sizes]
    assert documents.first_length.tolist() == [a for a, _ in kept]
    assert documents.rejected_length.tolist() == [b for _, b in kept]
    assert documents.learnt.tolist() == [a + b - 2 for a, b in kept]
    assert report.rows_truncated == sum(max(pair) > limit for pair in sizes)
    assert report.rows_used == len(sizes)
