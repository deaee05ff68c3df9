"""Tokenizers: loaded with a pinned revision, or trained from the job's own text."""

from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerFast


def load_tokenizer(source: str, revision: str | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of a local folder or a hub id. Raises DataError."""
    raise NotImplementedError


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with ChatML turns, the same for the same texts."""
    raise NotImplementedError


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face folder that AutoTokenizer loads."""
    tokenizer.save_pretrained(str(folder))
