"""Rows to batches: what a batch holds, what the report counts, what is held out."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from tests.unit.data.helpers import chat_row, documents_of, text_rows
from training.data.batch import IGNORE, Batch
from training.data.config import DataSpec
from training.data.errors import DataError
from training.data.pipeline import DataBundle, build

Build = Callable[..., DataBundle]
Write = Callable[..., Path]


def epoch_batches(bundle: DataBundle) -> list[Batch]:
    return [next(bundle.train_loader) for _ in range(bundle.num_packs(1))]


@pytest.mark.parametrize("packing", [True, False])
def test_labels_are_the_next_token_and_never_cross_a_border(
    build_data: Build, write_jsonl: Write, packing: bool
) -> None:
    path = write_jsonl([chat_row(f"hello {n}", "the cat sat " * (1 + n % 4)) for n in range(40)])
    bundle = build_data(source=str(path), packing=packing)
    supervised = 0
    for batch in epoch_batches(bundle):
        borders = batch.cu_seqlens.tolist()
        assert (borders[0], borders[-1]) == (0, 128)
        assert batch.input_ids.shape == batch.labels.shape == batch.position_ids.shape == (128,)
        assert batch.max_seqlen == max(np.diff(borders)) <= 64
        for start, end in zip(borders, borders[1:], strict=False):
            assert batch.position_ids[start:end].tolist() == list(range(end - start))
            assert batch.labels[end - 1] == IGNORE
        learnt = (batch.labels != IGNORE).nonzero().flatten()
        assert batch.labels[learnt].tolist() == batch.input_ids[learnt + 1].tolist()
        assert batch.num_supervised == len(learnt)
        supervised += len(learnt)
    assert supervised == bundle.report.train_supervised_tokens == bundle.report.sources[0].supervised_tokens


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_holds_every_document_once(
    build_data: Build, write_jsonl: Write, tokenizer: PreTrainedTokenizerFast, packing: bool
) -> None:
    rows = text_rows(101)
    bundle = build_data(source=str(write_jsonl(rows)), packing=packing)
    seen = Counter(text for batch in epoch_batches(bundle) for text in documents_of(batch, tokenizer))
    assert seen == Counter(row["text"] for row in rows)
    assert bundle.train_loader.epoch == 1


def test_without_packing_every_slot_is_one_document_of_max_length(
    build_data: Build, write_jsonl: Write
) -> None:
    bundle = build_data(source=str(write_jsonl(text_rows(7))), packing=False)
    batches = epoch_batches(bundle)
    assert [batch.num_documents for batch in batches] == [2, 2, 2, 1]
    assert all(batch.cu_seqlens.tolist() == [0, 64, 128] for batch in batches)


def test_files_of_every_kind_in_a_folder(build_data: Build, write_jsonl: Write, tmp_path: Path) -> None:
    write_jsonl(text_rows(5, "a"), "data/a.jsonl")
    (tmp_path / "data/b.json").write_text(json.dumps(text_rows(5, "b")))
    (tmp_path / "data/c.csv").write_text("prompt,completion\n" + "hello,the cat\n" * 5)
    pq.write_table(pa.Table.from_pylist(text_rows(5, "d")), tmp_path / "data/d.parquet")
    (tmp_path / "data/README.md").write_text("about")
    (tmp_path / "data/_SUCCESS").write_text("")
    report = build_data(source=str(tmp_path / "data")).report
    [source] = report.sources
    assert (source.files, source.rows_read, source.rows_used) == (4, 20, 20)
    assert source.ignored_files == ["README.md"]
    assert source.format == "prompt-completion, text"
    assert "not data, ignored: README.md" in "\n".join(report.lines())


def test_bad_rows_are_counted_by_reason_and_listed_by_line(build_data: Build, write_jsonl: Write) -> None:
    path = write_jsonl([*text_rows(4), {"text": ""}, {"text": 7}, {"text": "cat " * 200}, {"txt": "a"}])
    with path.open("ab") as stream:
        stream.write(b'{"text": "\xff"}\n')
    report = build_data(source=str(path)).report
    [source] = report.sources
    assert source.rejected == {
        "empty": 1,
        "wrong type": 1,
        "missing field": 1,
        "invalid UTF-8": 1,
        "too long": 1,
    }
    assert source.rows_read == source.rows_used + sum(source.rejected.values()) == 9
    text = "\n".join(report.lines())
    assert "rows.jsonl:5: empty: field 'text' is empty" in text
    assert "rows.jsonl:6: wrong type: field 'text' must be text, found a number" in text
    assert "rows.jsonl:7: too long: 202 tokens, max_length is 64" in text
    assert "rows.jsonl:9: invalid UTF-8: byte 0xff at column 11" in text


def test_only_the_first_rows_of_a_reason_are_listed(build_data: Build, write_jsonl: Write) -> None:
    [source] = build_data(source=str(write_jsonl([*text_rows(4), *[{"text": ""}] * 9]))).report.sources
    assert source.rejected == {"empty": 9}
    assert [row.line for row in source.examples] == [5, 6, 7, 8, 9]


def test_stop_names_the_row(build_data: Build, write_jsonl: Write) -> None:
    path = write_jsonl([*text_rows(4), {"text": ""}])
    with pytest.raises(DataError) as caught:
        build_data(source=str(path), on_bad_row="stop")
    assert str(caught.value) == (
        "bad row: rows.jsonl:5: empty: field 'text' is empty. Mend the data, or set data.on_bad_row: skip to train "
        "without such rows."
    )


def test_stop_in_the_middle_names_the_row_and_leaves_no_thread(build_data: Build, write_jsonl: Write) -> None:
    rows = [chat_row(f"hello {n}", "the cat 猫" if n % 3 else "the cat") for n in range(1700)]
    rows[1300] = {"messages": [{"role": "user", "content": "hello"}]}
    threads = threading.active_count()
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1301: no answer: no message is from the assistant"
    ) as caught:
        build_data(source=str(write_jsonl(rows)), on_bad_row="stop")
    assert threading.active_count() == threads, caught


def test_stop_finds_bad_rows_that_an_earlier_run_has_cached(build_data: Build, write_jsonl: Write) -> None:
    path = write_jsonl([*text_rows(4), {"text": ""}])
    build_data(source=str(path))
    with pytest.raises(DataError, match=r"bad row: rows\.jsonl:5: empty"):
        build_data(source=str(path), on_bad_row="stop")


def test_too_long_stop_names_the_row_and_the_way_out(build_data: Build, write_jsonl: Write) -> None:
    path = write_jsonl([*text_rows(2), {"text": "cat " * 200}])
    with pytest.raises(
        DataError, match=r"rows\.jsonl:3: too long: 202 tokens, max_length is 64.*too_long: truncate"
    ):
        build_data(source=str(path), too_long="stop")


def test_truncate_keeps_the_beginning_and_counts_it(build_data: Build, write_jsonl: Write) -> None:
    bundle = build_data(source=str(write_jsonl([{"text": "cat " * 200}])), too_long="truncate")
    [batch] = epoch_batches(bundle)
    assert batch.num_tokens == 64
    [source] = bundle.report.sources
    assert (source.rows_used, source.rows_truncated, source.rejected) == (1, 1, {})


def test_truncate_rejects_a_row_whose_answer_is_cut_off(build_data: Build, write_jsonl: Write) -> None:
    rows = [chat_row(), chat_row("cat " * 200)]
    [source] = build_data(source=str(write_jsonl(rows)), too_long="truncate").report.sources
    assert source.rejected == {"too long": 1}
    assert str(source.examples[0]) == (
        "rows.jsonl:2: too long: no token of an answer within the first 64 (max_length)"
    )
    assert (source.rows_used, source.rows_truncated) == (1, 0)


def test_split_predicts_every_token_of_a_long_text_once(
    build_data: Build, write_jsonl: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = ["cat " * 200, "hello"]
    bundle = build_data(source=str(write_jsonl([{"text": text} for text in texts])), too_long="split")
    [source] = bundle.report.sources
    assert source.rows_used == 2
    assert source.documents == 4 + 1  # 202 tokens in pieces of 64 that overlap by one
    labels = Counter(
        label for batch in epoch_batches(bundle) for label in batch.labels.tolist() if label != IGNORE
    )
    encoded = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert labels == Counter(token for ids in encoded for token in ids[1:])
    assert source.supervised_tokens == labels.total()


def test_split_of_conversations_is_refused(build_data: Build, write_jsonl: Write) -> None:
    with pytest.raises(DataError, match=r"only format text survives; rows\.jsonl holds messages"):
        build_data(source=str(write_jsonl([chat_row("cat " * 99)])), too_long="split")


def test_limit_counts_rows_over_files(build_data: Build, write_jsonl: Write, tmp_path: Path) -> None:
    for name in "abc":
        write_jsonl(text_rows(10, name), f"data/{name}.jsonl")
    assert build_data(source=str(tmp_path / "data"), limit=15).report.sources[0].rows_read == 15


def test_unknown_columns_are_an_error_that_lists_the_known(build_data: Build, write_jsonl: Write) -> None:
    with pytest.raises(DataError) as caught:
        build_data(source=str(write_jsonl([{"question": "a", "answer": "b"}])))
    message = str(caught.value)
    assert "rows.jsonl:1: no known format has the fields question, answer." in message
    assert "prompt-completion: prompt, completion, system" in message
    assert "data.fields" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "absent.jsonl"}, r"source 'absent\.jsonl' does not exist \(looked in .*hf://owner/name"),
        ({"source": "{tmp}/empty"}, r"holds none of \.jsonl, .*; it is empty"),
        ({"source": "{tmp}/words"}, r"holds none of \.jsonl, .*; it holds: a\.txt"),
        ({"source": "{tmp}/words/a.txt"}, r"a\.txt' is not one of \.jsonl"),
        ({"source": "{tmp}/rows.jsonl", "split": "train"}, r"split 'train' is only for a data set"),
        (
            {"source": "{tmp}/rows.jsonl", "max_length": 256},
            r"max_length 256 is longer than a micro-batch of 128 tokens",
        ),
        (
            {"source": "{tmp}/rows.jsonl", "max_length": 48, "packing": False},
            r"128 tokens are not a multiple of 48. Use 96",
        ),
        ({"source": "{tmp}/blank.jsonl"}, r"has no document to train on: 0 rows read"),
        ({"source": "{tmp}/bad.jsonl"}, r"1 rows read, rejected empty: 1 \(bad\.jsonl:1: empty"),
        ({"source": "{tmp}/rows.jsonl", "validation": {"count": 30}}, r"takes all 30 documents"),
        ({"source": "{tmp}/rows.jsonl", "validation": {"fraction": 1e-9}}, r"of 30 documents holds out none"),
    ],
)
def test_what_cannot_be_trained_on_says_why(
    build_data: Build, write_jsonl: Write, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    write_jsonl(text_rows(30))
    write_jsonl([], "blank.jsonl")
    write_jsonl([{"text": ""}], "bad.jsonl")
    (tmp_path / "empty").mkdir()
    (tmp_path / "words").mkdir()
    (tmp_path / "words/a.txt").write_text("a")
    settings = {**settings, "source": settings["source"].replace("{tmp}", str(tmp_path))}
    with pytest.raises(DataError, match=message):
        build_data(**settings)


def test_held_out_documents_are_never_trained_on(
    build_data: Build, write_jsonl: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = text_rows(200) + text_rows(50)  # the first 50 twice
    bundle = build_data(source=str(write_jsonl(rows)), validation={"fraction": 0.2})
    assert bundle.validation is not None
    held = Counter(text for batch in bundle.validation for text in documents_of(batch, tokenizer))
    trained = Counter(text for batch in epoch_batches(bundle) for text in documents_of(batch, tokenizer))
    assert held + trained == Counter(row["text"] for row in rows)
    assert not held.keys() & trained.keys()
    assert 20 <= sum(held.values()) <= 80
    assert bundle.report.validation_documents == sum(held.values())


def test_held_out_count_is_exact_and_does_not_depend_on_the_seed(
    build_data: Build, write_jsonl: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_jsonl(text_rows(100))
    held = []
    for seed in (0, 1):
        validation = build_data(source=str(path), validation={"count": 10}, seed=seed).validation
        assert validation is not None
        held.append({text for batch in validation for text in documents_of(batch, tokenizer)})
    assert len(held[0]) == 10
    assert held[0] == held[1]


def test_every_rank_evaluates_the_same_number_of_batches(
    build_data: Build, write_jsonl: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    train, held = write_jsonl(text_rows(10)), write_jsonl(text_rows(33, "v"), "held.jsonl")
    seen: Counter[str] = Counter()
    counts = []
    for rank in range(3):
        validation = build_data(
            source=str(train), validation={"source": {"source": str(held)}}, rank=rank, world_size=3
        ).validation
        assert validation is not None
        batches = list(validation)
        counts.append(len(batches))
        seen.update(text for batch in batches for text in documents_of(batch, tokenizer))
    assert len(set(counts)) == 1
    assert seen == Counter(row["text"] for row in text_rows(33, "v"))


def test_random_ids_need_no_tokenizer(tmp_path: Path) -> None:
    def one(seed: int) -> Batch:
        spec = DataSpec(source="random", max_length=64, limit=32)
        bundle = build(
            spec,
            None,
            seed=seed,
            tokens_per_batch=128,
            rank=0,
            world_size=1,
            work_dir=tmp_path,
            vocab_size=1000,
        )
        return next(bundle.train_loader)

    batch = one(0)
    assert batch.cu_seqlens.tolist() == [0, 64, 128]
    assert batch.num_supervised == 2 * 63
    assert 500 < int(batch.input_ids.max()) < 1000
    assert batch.input_ids.equal(one(0).input_ids)
    assert not batch.input_ids.equal(one(1).input_ids)


def test_fewer_rows_than_ranks_is_a_warning(build_data: Build, write_jsonl: Write) -> None:
    report = build_data(source=str(write_jsonl(text_rows(3))), world_size=8).report
    assert "fewer than the 8 ranks: a single step repeats documents" in report.warnings[0]


def test_saved_dataset(build_data: Build, tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    train, test = Dataset.from_list(text_rows(12)), Dataset.from_list(text_rows(5))
    DatasetDict({"train": train, "test": test}).save_to_disk(str(tmp_path / "saved"))
    train.save_to_disk(str(tmp_path / "single"))
    assert build_data(source=str(tmp_path / "saved")).report.sources[0].rows_used == 12
    assert build_data(source=str(tmp_path / "saved"), split="test").report.sources[0].rows_used == 5
    assert build_data(source=str(tmp_path / "single")).report.sources[0].rows_used == 12
    with pytest.raises(DataError, match=r"has no split 'dev'; it has: train, test"):
        build_data(source=str(tmp_path / "saved"), split="dev")
    with pytest.raises(DataError, match="has no splits: leave out split"):
        build_data(source=str(tmp_path / "single"), split="train")


def test_folder_that_looks_like_a_hub_id(
    build_data: Build, write_jsonl: Write, tmp_path: Path, monkeypatch: Any
) -> None:
    write_jsonl(text_rows(3), "data/train/a.jsonl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"write \./data/train or hf://data/train"):
        build_data(source="data/train")
    assert build_data(source="./data/train").report.sources[0].rows_used == 3
