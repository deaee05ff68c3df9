from typing import Any

import pytest

from training.data.config import Format
from training.data.formats import Conversation, PlainText, RowError, detect_format, parse_row

USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "the cat"}


def roles_and_texts(example: Any) -> list[tuple[str, str]]:
    assert isinstance(example, Conversation)
    return [(message["role"], message["content"]) for message in example.messages]


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        (["id", "messages"], "messages"),
        (["conversations"], "messages"),
        (["prompt", "completion"], "prompt-completion"),
        (["instruction", "input", "output"], "instruction"),
        (["text", "source"], "text"),
        (["question", "answer"], None),
        (["prompt", "text"], "text"),
    ],
)
def test_format_is_read_off_the_columns(columns: list[str], found: str | None) -> None:
    assert detect_format(columns) == found


def test_messages() -> None:
    example = parse_row({"messages": [USER, ANSWER]}, "messages", {})
    assert roles_and_texts(example) == [("user", "hello"), ("assistant", "the cat")]
    assert isinstance(example, Conversation)
    assert example.completion_from == 1


def test_sharegpt_names() -> None:
    row = {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "the cat"}]}
    assert roles_and_texts(parse_row(row, "messages", {})) == [("user", "hello"), ("assistant", "the cat")]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    row = {"messages": [USER, {"role": "assistant", "content": parts}]}
    assert roles_and_texts(parse_row(row, "messages", {}))[-1] == ("assistant", "the cat")


def test_prompt_and_completion() -> None:
    row = {"prompt": "hello", "completion": "the cat", "system": "Be brief."}
    assert roles_and_texts(parse_row(row, "prompt-completion", {})) == [
        ("system", "Be brief."),
        ("user", "hello"),
        ("assistant", "the cat"),
    ]


def test_prompt_and_completion_as_messages() -> None:
    row = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    example = parse_row(row, "prompt-completion", {})
    assert isinstance(example, Conversation)
    assert (len(example.messages), example.completion_from) == (4, 3)


def test_instruction_with_input() -> None:
    row = {"instruction": "Say it", "input": "cat", "output": "the cat"}
    assert roles_and_texts(parse_row(row, "instruction", {})) == [
        ("user", "Say it\n\ncat"),
        ("assistant", "the cat"),
    ]


def test_fields_map_to_columns() -> None:
    row = {"question": "hello", "answer": "the cat"}
    example = parse_row(row, "prompt-completion", {"prompt": "question", "completion": "answer"})
    assert roles_and_texts(example) == [("user", "hello"), ("assistant", "the cat")]


def test_plain_text() -> None:
    assert parse_row({"text": "the cat"}, "text", {}) == PlainText("the cat")


@pytest.mark.parametrize(
    ("row", "row_format", "message"),
    [
        ("words", "text", "wrong type: a row must be an object with named fields, found text"),
        ([1], "text", "wrong type: a row must be an object with named fields, found a list"),
        ({"txt": "a"}, "text", "missing field: no field 'text'; the row has: txt"),
        ({"text": 7}, "text", "wrong type: field 'text' must be text, found a number"),
        ({"text": True}, "text", "wrong type: field 'text' must be text, found true/false"),
        ({"text": None}, "text", "empty: field 'text' is null"),
        ({"text": ""}, "text", "empty: field 'text' is empty"),
        ({"text": " \n"}, "text", "empty: field 'text' holds only white space"),
        ({"text": "a\ud800"}, "text", "invalid UTF-8: field 'text' holds a broken character at position 1"),
        ({"prompt": "a", "completion": ""}, "prompt-completion", "no answer: field 'completion' is empty"),
        ({"prompt": "", "completion": "a"}, "prompt-completion", "empty: field 'prompt' is empty"),
        ({"instruction": "a", "output": None}, "instruction", "no answer: field 'output' is null"),
        (
            {"messages": "a"},
            "messages",
            "wrong type: field 'messages' must be a list of messages, found text",
        ),
        ({"messages": []}, "messages", "empty: field 'messages' is an empty list"),
        ({"messages": ["a"]}, "messages", "wrong type: messages[0] must be {role, content}, found text"),
        ({"messages": [USER]}, "messages", "no answer: no message is from the assistant (roles: user)"),
        (
            {"messages": [{"role": "bot", "content": "a"}]},
            "messages",
            "wrong role: messages[0].role is 'bot'; allowed: system, developer, user, assistant, tool",
        ),
        (
            {"messages": [USER, {"role": "assistant"}]},
            "messages",
            "missing field: messages[1] has no content",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": " "}]},
            "messages",
            "no answer: messages[1].content, an assistant's turn, is empty",
        ),
        (
            {"messages": [{"role": "user", "content": ""}, ANSWER]},
            "messages",
            "empty: messages[0].content, a user's turn, is empty",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, ANSWER]},
            "messages",
            "not text: messages[0].content[0] is 'image'; only text parts can be trained on",
        ),
        (
            {"messages": [USER, ANSWER], "tools": "x"},
            "messages",
            "wrong type: field 'tools' must be a list, found text",
        ),
    ],
)
def test_bad_rows_say_what_was_found(row: Any, row_format: Format, message: str) -> None:
    with pytest.raises(RowError) as caught:
        parse_row(row, row_format, {})
    assert str(caught.value) == message
