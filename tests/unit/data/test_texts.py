from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.data.helpers import chat_row, text_rows
from training.data.config import DataSpec
from training.data.errors import DataError
from training.data.texts import texts

Write = Callable[..., Path]


def test_every_text_of_every_source_in_order(write_jsonl: Write, tmp_path: Path) -> None:
    chats = write_jsonl([chat_row("hello", "the cat"), {"messages": []}, chat_row("ho", "hat")])
    plain = write_jsonl(text_rows(5), "plain.jsonl")
    spec = DataSpec(
        mixture=[{"source": str(chats), "weight": 1}, {"source": str(plain), "weight": 1, "limit": 2}]  # type: ignore[arg-type]
    )
    assert list(texts(spec, tmp_path)) == [
        "hello",
        "the cat",
        "ho",
        "hat",
        *(row["text"] for row in text_rows(2)),
    ]


def test_random_ids_have_no_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a tokenizer cannot be trained on source random"):
        list(texts(DataSpec(source="random"), tmp_path))
