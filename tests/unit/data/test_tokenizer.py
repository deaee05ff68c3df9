import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.data.errors import DataError
from training.data.tokenizer import load_tokenizer, save_tokenizer, tokenizer_fingerprint, train_bpe

TRAIN = (
    "from training.data.tokenizer import train_bpe, tokenizer_fingerprint; from pydoc_data.topics import topics; "
    "print(tokenizer_fingerprint(train_bpe((topics[name] for name in sorted(topics)), 1000)))"
)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_a_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    import unicodedata

    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer("<|im_start|>user")["input_ids"][0] == 1


def test_vocabulary_has_the_size_that_was_asked_for() -> None:
    from pydoc_data.topics import topics

    assert len(train_bpe(topics.values(), 1000)) == 1000


def test_vocabulary_ends_where_the_text_has_no_more_pairs() -> None:
    assert len(train_bpe(["the cat"], 1000)) < 280


def test_no_room_for_merges_is_an_error() -> None:
    with pytest.raises(
        DataError, match="a tokenizer of 259 tokens cannot be trained: bytes and special tokens alone"
    ):
        train_bpe(["a"], 259)


@pytest.mark.slow
def test_the_same_tokenizer_in_every_process() -> None:
    prints = {
        subprocess.run(
            [sys.executable, "-c", TRAIN],
            env={"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads, "PATH": "", "HOME": "/tmp"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed, threads in (("1", "1"), ("2", "4"))
    }
    assert len(prints) == 1


def test_saved_folder_loads_with_transformers_alone(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    save_tokenizer(tokenizer, tmp_path)
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the cat"}]
    for loaded in (AutoTokenizer.from_pretrained(str(tmp_path)), load_tokenizer(str(tmp_path))):
        assert loaded.apply_chat_template(chat) == tokenizer.apply_chat_template(chat)
        assert loaded.eos_token_id == tokenizer.eos_token_id
    assert tokenizer_fingerprint(load_tokenizer(str(tmp_path))) == tokenizer_fingerprint(tokenizer)


def test_fingerprint_tells_tokenizers_apart(tokenizer: PreTrainedTokenizerFast) -> None:
    other = train_bpe(["the cat sat"] * 10, 300)
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(tokenizer)


def test_folder_without_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer could be loaded from '.*'.*holds tokenizer\.json"):
        load_tokenizer(str(tmp_path))
