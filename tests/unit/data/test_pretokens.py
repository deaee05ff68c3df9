"""The table of pre-tokens gives what the tokenizer gives, or nothing."""

import json
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from training.data import pretokens
from training.data.pretokens import PreTokenTable, Tokens

WORDS = [
    f"the cat number {n} sat on mat {n * n}, it's said: hello\n\n  naïve “Ωμέγα” Привет {n}"
    for n in range(400)
]


@pytest.fixture(scope="module", params=["", "{1,3}"], ids=["qwen", "llama"])
def backend(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """A tokenizer that merges across more than ASCII and cuts digits the way of either family."""
    from training.data.tokenizer import train_bpe

    spec = json.loads(train_bpe(WORDS, 600).backend_tokenizer.to_str())
    split = spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    split["Regex"] = split["Regex"].replace(r"|\p{N}|", rf"|\p{{N}}{request.param}|")
    return Tokenizer.from_str(json.dumps(spec))


def table_of(backend: Tokenizer) -> PreTokenTable:
    table = PreTokenTable.of(backend)
    assert table is not None
    return table


def assert_same(table: PreTokenTable, backend: Tokenizer, text: str) -> None:
    [ours], theirs = table.encode([text]), backend.encode(text, add_special_tokens=False)
    assert ours is not None, ascii(text)
    assert ours.ids.tolist() == theirs.ids, ascii(text)
    assert ours.ends.tolist() == [end for _, end in theirs.offsets], ascii(text)
    borders = range(len(text))
    assert ours.ends.searchsorted(borders, side="right").tolist() == [
        theirs.char_to_token(border) for border in borders
    ], ascii(text)


def test_every_character_it_takes_is_cut_as_the_tokenizer_cuts_it(backend: Tokenizer) -> None:
    table = table_of(backend)
    taken = [character for character in map(chr, range(0x110000)) if _is_taken(character)]
    assert len(taken) > 7000
    for c in taken:
        text = f"{c}ab{c}{c} {c}1{c}\n{c}'s'{c} \t{c}?{c}\n\n"
        if unicodedata.is_normalized("NFC", text):
            assert_same(table, backend, text)


def _is_taken(character: str) -> bool:
    return not pretokens._unsure().search(character)


texts = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.text(st.sampled_from(" \n\r\t'’slrveLm.,-_09aé²ſ\u00a0\u2028\u0301\u200b😀🏽\ufe0f")),
        st.sampled_from(
            ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "cat", "it's", "12345", "naïve", "  "]
        ),
    ),
    max_size=8,
).map("".join)


@settings(max_examples=400, deadline=None)
@given(text=texts)
def test_any_text_is_encoded_as_by_the_tokenizer_or_left_to_it(backend: Tokenizer, text: str) -> None:
    table = table_of(backend)
    if table.encode([text]) == [None]:
        assert not text.isascii()
    else:
        assert_same(table, backend, text)


@settings(max_examples=100, deadline=None)
@given(batch=st.lists(texts, max_size=6))
def test_texts_together_are_encoded_as_each_alone(backend: Tokenizer, batch: list[str]) -> None:
    table = table_of(backend)
    together, alone = table.encode(batch), [table.encode([text])[0] for text in batch]
    assert list(map(_listed, together)) == list(map(_listed, alone))


def _listed(tokens: Tokens | None) -> Any:
    return None if tokens is None else (tokens.ids.tolist(), tokens.ends.tolist())


@pytest.mark.parametrize("text", ["猫が座った", "cafe\u0301", "\u212b", "a\u200bb", "\u0378", "\U00010400"])
def test_text_it_is_not_sure_of_is_left_to_the_tokenizer(backend: Tokenizer, text: str) -> None:
    assert table_of(backend).encode([f"the cat {text}"]) == [None]


def test_longest_special_token_wins(backend: Tokenizer) -> None:
    longer = Tokenizer.from_str(backend.to_str())
    longer.add_special_tokens(["<|im_end|>>", "<|im"])
    assert_same(table_of(longer), longer, "<|im_end|>><|im_end|> > <|im<|im_start|>")


def test_full_table_starts_again_and_keeps_no_long_pretoken(
    backend: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretokens, "_MAX_PRETOKENS", 5)
    table = table_of(backend)
    for text in (
        "the cat sat on the mat and said hello",
        "naïve cat " * 3,
        "x" * 100,
        "é" * 100_000,
        "the cat",
    ):
        assert_same(table, backend, text)
        assert len(table._known) <= 5
        assert all(len(known) <= 64 for known in table._known)


def test_long_stretch_without_a_space_is_encoded_too(backend: Tokenizer) -> None:
    text = "é=" * 100 + "é" * 200_000
    [ours] = table_of(backend).encode([text])
    assert ours is not None
    assert ours.ids.tolist() == backend.encode(text, add_special_tokens=False).ids
    assert ours.ends[-1] == len(text)


def _with(**parts: Any) -> Callable[[dict[str, Any]], None]:
    return lambda spec: spec.update(parts)


def _with_model(**parts: Any) -> Callable[[dict[str, Any]], None]:
    return lambda spec: spec["model"].update(parts)


def _with_special(**parts: Any) -> Callable[[dict[str, Any]], None]:
    return lambda spec: spec["added_tokens"][1].update(parts)


def _other_split(spec: dict[str, Any]) -> None:
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\s+|\S+"}


def _with_prefix_space(spec: dict[str, Any]) -> None:
    spec["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


def _without_a_byte(spec: dict[str, Any]) -> None:
    spec["model"]["vocab"]["<lost>"] = spec["model"]["vocab"].pop("Ā")


def _with_two_tokens_of_one_id(spec: dict[str, Any]) -> None:
    spec["model"]["vocab"]["<twin>"] = spec["model"]["vocab"]["a"]


def _with_many_added_tokens(spec: dict[str, Any]) -> None:
    last = max(spec["model"]["vocab"].values())
    pattern = spec["added_tokens"][1]
    spec["added_tokens"] += [{**pattern, "id": last + 1 + n, "content": f"<extra{n}>"} for n in range(1024)]


def _template(times: int) -> dict[str, Any]:
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    pair = [sequence, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": [sequence] * times, "pair": pair, "special_tokens": {}}


_TRIMMED = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    "change",
    [
        _with(normalizer={"type": "NFKC"}),
        _with(pre_tokenizer={"type": "Whitespace"}),
        _with(pre_tokenizer=None),
        _with(post_processor=_TRIMMED),
        _with(post_processor={"type": "Sequence", "processors": [_TRIMMED]}),
        _with_model(dropout=0.1),
        _with_special(normalized=True),
        _with_special(lstrip=True),
        _with_special(rstrip=True),
        _with_special(single_word=True),
        _other_split,
        _with_prefix_space,
        _without_a_byte,
        _with_two_tokens_of_one_id,
        _with_many_added_tokens,
        _with(post_processor=_template(0)),
        _with(post_processor=_template(2)),
    ],
)
def test_tokenizer_of_another_kind_has_no_table(
    tokenizer: PreTrainedTokenizerFast, change: Callable[[dict[str, Any]], None]
) -> None:
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    change(spec)
    assert PreTokenTable.of(Tokenizer.from_str(json.dumps(spec))) is None


@pytest.mark.parametrize(
    "change",
    [
        _with(normalizer=None),
        _with(post_processor=None),
        _with(post_processor=_template(1)),
        _with(post_processor={**_TRIMMED, "trim_offsets": False}),
        _with(added_tokens=[]),
        _with_model(ignore_merges=True),
    ],
)
def test_what_changes_no_cut_keeps_the_table(
    tokenizer: PreTrainedTokenizerFast, change: Callable[[dict[str, Any]], None]
) -> None:
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    change(spec)
    backend = Tokenizer.from_str(json.dumps(spec))
    assert_same(table_of(backend), backend, "the cat<|im_end|> said hello 12 naïve “x”")


def test_special_tokens_read_as_text_have_no_table(tokenizer: PreTrainedTokenizerFast) -> None:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    assert PreTokenTable.of(backend) is None


def test_added_word_is_a_token_of_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_tokens([AddedToken("<tool_call>", normalized=False)])
    assert_same(table_of(backend), backend, "the cat.<tool_call>\nsat")
