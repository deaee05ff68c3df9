"""A small tokenizer, and rows written to files."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from training.data.config import DataSpec
from training.data.pipeline import DataBundle, build
from training.data.tokenizer import train_bpe


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    words = [f"the cat number {n} sat on mat {n * n} and said hello" for n in range(400)]
    return train_bpe(words, 600)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: Iterable[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def build_data(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Callable[..., DataBundle]:
    """build() with a shared work folder; keyword arguments of DataSpec, and `rank`, `world_size`, `seed`, `tokens`."""

    def build_it(
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        tokens: int = 128,
        work: str = "work",
        **spec: Any,
    ) -> DataBundle:
        return build(
            DataSpec(**{"max_length": 64, **spec}),
            tokenizer,
            seed=seed,
            tokens_per_batch=tokens,
            rank=rank,
            world_size=world_size,
            work_dir=tmp_path / work,
        )

    return build_it
