"""Tokenized once per content and node, whole or not at all."""

import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.unit.data.helpers import text_rows
from training.data.cache import TokenCache
from training.data.config import SourceSpec
from training.data.pipeline import DataBundle
from training.data.readers import Row
from training.data.sources import Shard
from training.data.tokenizer import load_tokenizer, save_tokenizer

Build = Callable[..., DataBundle]
Write = Callable[..., Path]


def from_cache(bundle: DataBundle) -> int:
    return bundle.report.sources[0].from_cache


def test_second_run_reads_the_tokens_of_the_first(build_data: Build, write_jsonl: Write) -> None:
    path = write_jsonl(text_rows(20))
    first, second = build_data(source=str(path)), build_data(source=str(path))
    assert (from_cache(first), from_cache(second)) == (0, 1)
    assert next(first.train_loader).input_ids.equal(next(second.train_loader).input_ids)
    assert first.report.fingerprint == second.report.fingerprint


def test_equal_content_under_another_name_is_not_tokenized_again(
    build_data: Build, write_jsonl: Write
) -> None:
    rows = [*text_rows(20), {"text": ""}]
    build_data(source=str(write_jsonl(rows, "a.jsonl")))
    bundle = build_data(source=str(write_jsonl(rows, "b.jsonl")))
    assert from_cache(bundle) == 1
    assert str(bundle.report.sources[0].examples[0]).startswith("b.jsonl:21: empty")


def test_changed_content_under_the_same_name_is(build_data: Build, write_jsonl: Write) -> None:
    build_data(source=str(write_jsonl(text_rows(20))))
    bundle = build_data(source=str(write_jsonl(text_rows(20, "u"))))
    assert from_cache(bundle) == 0


def test_lengths_and_policies_use_the_same_tokens(build_data: Build, write_jsonl: Write) -> None:
    path = write_jsonl(text_rows(20))
    build_data(source=str(path))
    for settings in (
        {"max_length": 16},
        {"too_long": "split", "max_length": 16},
        {"packing": False},
        {"seed": 3},
    ):
        assert from_cache(build_data(source=str(path), **settings)) == 1


@pytest.mark.parametrize(
    "settings", [{"mask": "all"}, {"format": "text"}, {"limit": 5}, {"chat_template": "{file}"}]
)
def test_what_changes_the_tokens_changes_the_key(
    build_data: Build, write_jsonl: Write, tmp_path: Path, settings: dict[str, Any]
) -> None:
    (tmp_path / "t.jinja").write_text("x")
    settings = {
        key: str(tmp_path / "t.jinja") if value == "{file}" else value for key, value in settings.items()
    }
    path = write_jsonl(text_rows(20))
    build_data(source=str(path))
    assert from_cache(build_data(source=str(path), **settings)) == 0


def _tokenize(folder: str, root: str, log: str, barrier: Any) -> None:
    def rows() -> Iterator[Row]:
        with Path(log).open("a") as stream:
            stream.write("read\n")
        yield from (Row(n + 1, row) for n, row in enumerate(text_rows(300)))

    cache = TokenCache(Path(root), load_tokenizer(folder), "auto", None, "skip")
    barrier.wait()
    shard = cache.get(Shard("rows", "rows", lambda: "key", rows), SourceSpec(source="rows.jsonl"))
    assert shard.num_documents == 300


@pytest.mark.slow
def test_one_process_of_a_node_tokenizes_and_the_others_wait(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    log = tmp_path / "log"
    processes = [
        context.Process(
            target=_tokenize, args=(str(tmp_path / "tokenizer"), str(tmp_path / "cache"), str(log), barrier)
        )
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert log.read_text() == "read\n"


def test_entry_that_a_dead_process_left_half_written_is_made_anew(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    cache = TokenCache(tmp_path, tokenizer, "auto", None, "skip")
    spec = SourceSpec(source="rows.jsonl")

    def dies() -> Iterator[Row]:
        yield Row(1, {"text": "the cat"})
        yield Row(2, {"text": "sat"})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.get(Shard("rows", "rows", lambda: "key", dies), spec)
    assert not list(tmp_path.glob("*/*/meta.json"))
    leftover = next(tmp_path.glob("*/*.partial"))
    assert leftover.is_dir()

    whole = Shard("rows", "rows", lambda: "key", lambda: iter([Row(1, {"text": "the cat"})]))
    assert cache.get(whole, spec).num_documents == 1
    assert not leftover.exists()


def test_deleted_cache_is_only_slower(build_data: Build, write_jsonl: Write, tmp_path: Path) -> None:
    path = write_jsonl(text_rows(20))
    first = build_data(source=str(path))
    shutil.rmtree(tmp_path / "work")
    second = build_data(source=str(path))
    assert from_cache(second) == 0
    assert next(second.train_loader).input_ids.equal(next(first.train_loader).input_ids)
