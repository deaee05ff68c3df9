import re
import threading
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from training.data.chat import Encoded, Encoder, resolve_template
from training.data.errors import DataError
from training.data.formats import Conversation, Pair, PlainText, RowError
from training.data.tokenizer import CHATML_TEMPLATE

# ChatML the way Qwen2.5's own template writes it: a default system prompt, tool turns gathered in one user turn,
# no `generation` markers.
QWEN_STYLE = """\
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}{{- '\\n<tool_call>' + call.function.name + '</tool_call>' }}{%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# The way reasoning models' templates do: what the assistant thought is kept in the last turn only.
FORGETS_THOUGHTS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {{- message.content if loop.last else message.content.split('</think>')[-1] }}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "and the mat?"}
ANSWER = {"role": "assistant", "content": "the cat sat"}
SECOND = {"role": "assistant", "content": "on it"}
CHAT = [SYSTEM, HELLO, ANSWER, MORE, SECOND]


def without_markers(template: str) -> str:
    return re.sub(r"\{%-? (end)?generation %\}\n? *", "", template)


def encode_all(encoder: Encoder, *examples: Any) -> list[Encoded | RowError]:
    [results] = encoder.encode([examples])
    return results


def encode(
    tokenizer: PreTrainedTokenizerFast, template: str | None, mask: Any, *examples: Any
) -> list[Encoded]:
    results = encode_all(Encoder(tokenizer, template, mask), *examples)
    assert all(isinstance(result, Encoded) for result in results), results
    return results  # type: ignore[return-value]


def learnt(tokenizer: PreTrainedTokenizerFast, document: Encoded) -> str:
    return tokenizer.decode(document.ids[document.supervised].tolist())


messages = st.lists(
    st.tuples(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.text(min_size=1)),
    min_size=1,
    max_size=4,
).map(
    lambda turns: [
        message
        for question, answer in turns
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    ]
)


@settings(max_examples=60, deadline=None)
@given(chat=messages)
def test_mask_equals_that_of_transformers_where_the_template_marks_it(
    tokenizer: PreTrainedTokenizerFast, chat: list[dict[str, str]]
) -> None:
    theirs = tokenizer.apply_chat_template(
        chat, chat_template=CHATML_TEMPLATE, return_assistant_tokens_mask=True, return_dict=True
    )
    [ours] = encode(tokenizer, CHATML_TEMPLATE, "assistant", Conversation(chat, len(chat) - 1))
    assert ours.ids.tolist() == theirs["input_ids"]
    assert ours.supervised.tolist() == [bool(value) for value in theirs["assistant_masks"]]


@settings(max_examples=60, deadline=None)
@given(chat=messages)
def test_prefixes_find_the_tokens_that_markers_would_mark(
    tokenizer: PreTrainedTokenizerFast, chat: list[dict[str, str]]
) -> None:
    conversation = Conversation(chat, len(chat) - 1)
    [marked] = encode(tokenizer, CHATML_TEMPLATE, "assistant", conversation)
    [derived] = encode(tokenizer, without_markers(CHATML_TEMPLATE), "assistant", conversation)
    assert derived.ids.tolist() == marked.ids.tolist()
    assert derived.supervised.tolist() == marked.supervised.tolist()


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, QWEN_STYLE])
def test_every_assistant_turn_is_learnt_with_its_end_and_nothing_else(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    [document] = encode(tokenizer, template, "assistant", Conversation(CHAT, 4))
    assert learnt(tokenizer, document) == "the cat sat<|im_end|>on it<|im_end|>"


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, QWEN_STYLE])
def test_mask_completion_learns_the_last_turn_only(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    [document] = encode(tokenizer, template, "completion", Conversation(CHAT, 4))
    assert learnt(tokenizer, document) == "on it<|im_end|>"


def test_mask_all_learns_every_token(tokenizer: PreTrainedTokenizerFast) -> None:
    [document] = encode(tokenizer, CHATML_TEMPLATE, "all", Conversation(CHAT, 4))
    assert document.supervised.all()


def test_tool_calls_are_learnt_and_tool_answers_are_not(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [
        HELLO,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "a mat"},
        {"role": "tool", "content": "a hat"},
        SECOND,
    ]
    [document] = encode(tokenizer, QWEN_STYLE, "assistant", Conversation(chat, 4))
    assert learnt(tokenizer, document) == "<tool_call>look</tool_call><|im_end|>on it<|im_end|>"


def test_plain_text_is_learnt_whole_and_ends_with_the_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    [document] = encode(tokenizer, None, "auto", PlainText("the cat sat"))
    assert tokenizer.decode(document.ids.tolist()) == "the cat sat<|im_end|>"
    assert document.supervised.all()


def test_results_keep_the_order_of_mixed_examples(tokenizer: PreTrainedTokenizerFast) -> None:
    results = encode_all(
        Encoder(tokenizer, CHATML_TEMPLATE, "auto"),
        PlainText("one"),
        Conversation([HELLO, ANSWER], 1),
        PlainText("two"),
    )
    texts = [tokenizer.decode(result.ids.tolist()) for result in results if isinstance(result, Encoded)]
    assert texts[0] == "one<|im_end|>"
    assert "the cat sat" in texts[1]
    assert texts[2] == "two<|im_end|>"


def test_template_that_rewrites_earlier_turns_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [HELLO, {"role": "assistant", "content": "<think>hm</think>the cat"}, MORE, SECOND]
    with pytest.raises(DataError) as caught:
        encode_all(Encoder(tokenizer, FORGETS_THOUGHTS, "assistant"), Conversation(chat, 3))
    message = str(caught.value)
    assert "renders a conversation differently once it goes on (message 1, character " in message
    assert "'<think>hm</think>the cat" in message
    assert "{% generation %}" in message
    assert "mask: completion" in message


def test_mask_completion_works_with_a_template_that_rewrites_earlier_turns(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    chat = [HELLO, {"role": "assistant", "content": "<think>hm</think>the cat"}, MORE, SECOND]
    [document] = encode(tokenizer, FORGETS_THOUGHTS, "completion", Conversation(chat, 3))
    assert learnt(tokenizer, document) == "on it<|im_end|>"


def test_row_that_the_template_refuses_is_a_bad_row(tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    [result] = encode_all(Encoder(tokenizer, template, "assistant"), Conversation(CHAT, 4))
    assert isinstance(result, RowError)
    assert str(result) == "refused by the chat template: roles must alternate"


def test_conversation_without_any_template_says_what_to_do() -> None:
    from tokenizers import Tokenizer, models

    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    assert resolve_template(bare, None) is None
    with pytest.raises(
        DataError, match=r"no chat template and lacks the tokens <\|im_start\|> and <\|im_end\|>"
    ):
        encode_all(Encoder(bare, None, "auto"), Conversation(CHAT, 4))
    with pytest.raises(
        DataError, match=r"chat_template chatml needs <\|im_start\|> and <\|im_end\|> as single tokens"
    ):
        resolve_template(bare, "chatml")
    with pytest.raises(DataError, match="plain text needs a tokenizer with an end-of-text token"):
        encode_all(Encoder(bare, None, "auto"), PlainText("a"))


def test_template_file_overrides_the_tokenizers(tokenizer: PreTrainedTokenizerFast, tmp_path: Any) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("X")
    assert resolve_template(tokenizer, str(path)) == "X"
    assert resolve_template(tokenizer, None) == CHATML_TEMPLATE
    with pytest.raises(DataError, match=r"chat_template '.*absent.jinja' cannot be read"):
        resolve_template(tokenizer, str(tmp_path / "absent.jinja"))


def test_ambiguous_marks_with_mask_completion_are_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    template = CHATML_TEMPLATE.replace(
        "{%- generation %}", "{%- generation %}x{%- endgeneration %}{%- generation %}"
    )
    with pytest.raises(DataError, match="marks 4 generated parts for 2 assistant turns"):
        encode_all(Encoder(tokenizer, template, "completion"), Conversation(CHAT, 4))


def test_batches_come_out_in_order_with_errors_in_their_place(tokenizer: PreTrainedTokenizerFast) -> None:
    broken = RowError("empty", "nothing")
    batches = [[PlainText(f"cat {n} {m}") for m in range(n)] + [broken] for n in range(5)]
    results = list(Encoder(tokenizer, None, "auto").encode(batches))
    assert [len(batch) for batch in results] == [1, 2, 3, 4, 5]
    for number, batch in enumerate(results):
        assert batch[-1] is broken
        texts = [tokenizer.decode(one.ids.tolist()) for one in batch[:-1] if isinstance(one, Encoded)]
        assert texts == [f"cat {number} {m}<|im_end|>" for m in range(number)]


@pytest.mark.parametrize("mask", ["assistant", "completion"])
def test_plain_text_with_a_mask_of_turns_is_an_error(tokenizer: PreTrainedTokenizerFast, mask: Any) -> None:
    with pytest.raises(DataError, match=f"mask '{mask}' is impossible with plain text, which has no turns"):
        encode_all(Encoder(tokenizer, None, mask), PlainText("the cat"))


mixed_text = st.lists(
    st.sampled_from(
        [
            "the cat sat",
            " ",
            "\n",
            "\n\n",
            "it's 12",
            "naïve “x”",
            "猫",
            "e\u0301",
            "😀",
            "<|im_end|>",
            "\u00a0",
            "ſ",
        ]
    ),
    min_size=1,
    max_size=5,
).map(lambda parts: "a" + "".join(parts))
conversations = st.lists(st.tuples(mixed_text, mixed_text), min_size=1, max_size=3).map(
    lambda turns: Conversation(
        [
            message
            for question, answer in turns
            for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
        ],
        2 * len(turns) - 1,
        group="g" if len(turns) > 1 else None,
    )
)
pairs = st.tuples(mixed_text, mixed_text, mixed_text).map(
    lambda texts: Pair(
        *(
            Conversation(
                [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": text}],
                1,
                group=texts[0],
            )
            for text in texts[1:]
        )
    )
)
plain_texts = st.builds(PlainText, mixed_text | st.just(""))
errors = st.just(RowError("empty", "nothing"))


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, QWEN_STYLE])
@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(st.lists(conversations | pairs | plain_texts | errors, max_size=5), max_size=4),
    data=st.data(),
)
def test_table_of_pretokens_changes_no_document(
    tokenizer: PreTrainedTokenizerFast, template: str, batches: list[list[Any]], data: st.DataObject
) -> None:
    mask: Any = data.draw(st.sampled_from(["auto", "all"]))
    with_table, without = Encoder(tokenizer, template, mask), Encoder(tokenizer, template, mask)
    assert with_table._table is not None
    without._table = None
    found, wanted = list(with_table.encode(batches)), list(without.encode(batches))
    assert [list(map(_told, batch)) for batch in found] == [list(map(_told, batch)) for batch in wanted]


def _told(result: Encoded | RowError) -> Any:
    if isinstance(result, RowError):
        return str(result)
    assert result.ids.dtype == "uint32"
    assert result.supervised.dtype == "bool"
    return result.ids.tolist(), result.supervised.tolist(), result.group, result.rejected_from


def test_plain_text_keeps_the_special_tokens_of_a_tokenizer_that_adds_them(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    begins = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    encoder = Encoder(begins, CHATML_TEMPLATE, "auto")
    text, chat = encode_all(encoder, PlainText("the cat"), Conversation([HELLO, ANSWER], 1))
    assert isinstance(text, Encoded)
    assert isinstance(chat, Encoded)
    assert begins.decode(text.ids.tolist()) == "<|im_start|>the cat<|im_end|>"
    assert begins.decode(chat.ids.tolist()).startswith("<|im_start|>user\nhello<|im_end|>")


def test_failure_of_the_tokenizer_reaches_the_caller_and_leaves_no_thread(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder(tokenizer, None, "auto")
    tokenized = encoder._tokenized

    def fails(parts: Any) -> Any:
        if any("猫 3" in part.text for part in parts):
            raise MemoryError("no room")
        return tokenized(parts)

    monkeypatch.setattr(encoder, "_tokenized", fails)
    threads = threading.active_count()
    results = encoder.encode([[PlainText(f"猫 {n}")] for n in range(6)])
    assert len(list(islice(results, 3))) == 3
    with pytest.raises(MemoryError, match="no room"):
        next(results)
    assert threading.active_count() == threads
