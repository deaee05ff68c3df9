"""What a row says: a conversation or a plain text, checked field by field."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from training.data.config import FIELDS_OF_FORMAT, Format

ROLES = ("system", "developer", "user", "assistant", "tool")

# The names that the ShareGPT layout uses (`conversations: [{from, value}]`).
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}


class RowError(Exception):
    """A row that cannot be trained on: a reason to count by, and the detail that a person needs to fix it."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Conversation:
    """Messages of a chat, and where its completion begins.

    completion_from: index of the first message that mask `completion` may learn from.
    group: documents of one group are held out together.
    """

    messages: list[dict[str, Any]]
    completion_from: int
    tools: list[Any] | None = None
    group: str | None = None


@dataclass(frozen=True)
class PlainText:
    """Text without turns."""

    text: str
    group: str | None = None


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt: the conversations differ from message `completion_from` on."""

    chosen: Conversation
    rejected: Conversation


Example = Conversation | PlainText | Pair


def detect_format(columns: Sequence[str]) -> Format | None:
    """The format that a row with these columns has, or None. Preference pairs are no format to be found: the job's
    objective asks for them, and many sets of pairs hold `messages` or `prompt` and `completion` besides."""
    names = set(columns)
    if names & {"messages", "conversations"}:
        return "messages"
    if {"prompt", "completion"} <= names:
        return "prompt-completion"
    if {"instruction", "output"} <= names:
        return "instruction"
    if "text" in names:
        return "text"
    return None


def parse_row(row: object, row_format: Format, fields: Mapping[str, str]) -> Example:
    """The example that a row holds. Raises RowError."""
    if not isinstance(row, Mapping):
        raise RowError("wrong type", f"a row must be an object with named fields, found {_kind(row)}")
    cells = _Cells(row, row_format, fields)
    match row_format:
        case "messages":
            return _conversation(cells)
        case "prompt-completion":
            return _prompt_completion(cells)
        case "instruction":
            return _instruction(cells)
        case "text":
            return PlainText(cells.text("text"))
        case "preference":
            return _pair(cells)
        case "auto":
            raise AssertionError("auto is resolved before rows are parsed")


class _Cells:
    """The fields of one row under the names of its format."""

    def __init__(self, row: Mapping[str, Any], row_format: Format, fields: Mapping[str, str]):
        self._row = row
        self._fields = fields
        if row_format == "messages" and "messages" not in fields and "messages" not in row:
            self._fields = {**fields, "messages": "conversations"} if "conversations" in row else fields

    def column(self, field: str) -> str:
        return self._fields.get(field, field)

    def __contains__(self, field: str) -> bool:
        return self.column(field) in self._row

    def names(self) -> str:
        return ", ".join(str(name) for name in self._row) or "none"

    def get(self, field: str) -> Any:
        return self._row.get(self.column(field))

    def require(self, field: str) -> Any:
        column = self.column(field)
        if column not in self._row:
            raise RowError("missing field", f"no field {column!r}; the row has: {self.names()}")
        return self._row[column]

    def text(self, field: str, *, empty: str = "empty") -> str:
        """A required text that is not blank; `empty` is the reason when it is."""
        value = self.require(field)
        if value is None or value == "":
            raise RowError(empty, f"field {self.column(field)!r} is {'null' if value is None else 'empty'}")
        text = _text(value, f"field {self.column(field)!r}")
        if not text.strip():
            raise RowError(empty, f"field {self.column(field)!r} holds only white space")
        return text

    def optional_text(self, field: str) -> str:
        value = self.get(field)
        return "" if value is None else _text(value, f"field {self.column(field)!r}")


def _conversation(cells: _Cells) -> Conversation:
    messages = _messages(cells.require("messages"), cells.column("messages"))
    last = _last_answer(messages)
    return Conversation(messages, completion_from=last, tools=_tools(cells))


def _tools(cells: _Cells) -> list[Any] | None:
    tools = cells.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise RowError("wrong type", f"field {cells.column('tools')!r} must be a list, found {_kind(tools)}")
    return tools or None


def _prompt_completion(cells: _Cells) -> Conversation:
    prompt, completion = cells.require("prompt"), cells.require("completion")
    if isinstance(prompt, list) or isinstance(completion, list):
        head = _messages(prompt, cells.column("prompt"))
        tail = _messages(completion, cells.column("completion"))
        _last_answer(tail)
        return Conversation([*head, *tail], completion_from=len(head))
    question = cells.text("prompt")
    answer = cells.text("completion", empty="no answer")
    return _exchange(cells.optional_text("system"), question, answer)


def _instruction(cells: _Cells) -> Conversation:
    question = cells.text("instruction")
    context = cells.optional_text("input")
    answer = cells.text("output", empty="no answer")
    return _exchange(
        cells.optional_text("system"), f"{question}\n\n{context}" if context.strip() else question, answer
    )


def _pair(cells: _Cells) -> Pair:
    prompt, chosen, rejected = _prompt_and_answers(cells)
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        where = f"field {cells.column(name)!r}"
        if not answer:
            raise RowError("no answer", f"{where} ends where the messages that both share end")
        if answer[0]["role"] != "assistant":
            raise RowError(
                "wrong role",
                f"{where} parts from the other at a message of role {answer[0]['role']!r}: the first message in "
                "which the two differ must be the assistant's",
            )
    if chosen == rejected:
        raise RowError(
            "equal answers",
            f"fields {cells.column('chosen')!r} and {cells.column('rejected')!r} say the same: nothing is preferred",
        )
    system = cells.optional_text("system")
    if system.strip() and prompt[0]["role"] not in ("system", "developer"):
        prompt = [{"role": "system", "content": system}, *prompt]
    # Pairs of one prompt are held out together.
    group = json.dumps(prompt, sort_keys=True, default=str)
    tools = _tools(cells)
    return Pair(
        Conversation([*prompt, *chosen], completion_from=len(prompt), tools=tools, group=group),
        Conversation([*prompt, *rejected], completion_from=len(prompt), tools=tools, group=group),
    )


_Messages = list[dict[str, Any]]


def _prompt_and_answers(cells: _Cells) -> tuple[_Messages, _Messages, _Messages]:
    """The messages that both answers follow, and those of each answer."""
    values = [cells.require("chosen"), cells.require("rejected")]
    lists = [isinstance(value, list) for value in values]
    if lists == [False, False]:
        if "prompt" not in cells:
            raise RowError(
                "missing field",
                f"no field {cells.column('prompt')!r}, without which 'chosen' and 'rejected' must be lists of "
                f"messages that begin alike; the row has: {cells.names()}",
            )
        chosen, rejected = (
            [{"role": "assistant", "content": cells.text(name, empty="no answer")}]
            for name in ("chosen", "rejected")
        )
        return _prompt(cells), chosen, rejected
    if lists != [True, True]:
        raise RowError(
            "wrong type",
            f"field {cells.column('chosen')!r} is {_kind(values[0])} and {cells.column('rejected')!r} is "
            f"{_kind(values[1])}: both must be texts, or both lists of messages",
        )
    chosen, rejected = (
        _messages(value, cells.column(name))
        for name, value in zip(("chosen", "rejected"), values, strict=True)
    )
    shared = _shared(chosen, rejected)
    if cells.get("prompt") is None:
        if not shared:
            raise RowError(
                "no prompt",
                f"there is no field {cells.column('prompt')!r}, and {cells.column('chosen')!r} and "
                f"{cells.column('rejected')!r} do not begin with the same message",
            )
        return chosen[:shared], chosen[shared:], rejected[shared:]
    prompt = _prompt(cells)
    if chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
        return prompt, chosen[len(prompt) :], rejected[len(prompt) :]
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        return prompt, chosen, rejected
    if shared and chosen[shared - 1] == prompt[-1]:  # the prompt is the last question of the conversation
        return chosen[:shared], chosen[shared:], rejected[shared:]
    raise RowError(
        "prompt differs",
        f"{cells.column('chosen')!r} and {cells.column('rejected')!r} hold a prompt of their own that is not the one "
        f"in field {cells.column('prompt')!r}",
    )


def _prompt(cells: _Cells) -> _Messages:
    value = cells.require("prompt")
    if isinstance(value, list):
        return _messages(value, cells.column("prompt"))
    return [{"role": "user", "content": cells.text("prompt")}]


def _shared(chosen: _Messages, rejected: _Messages) -> int:
    """How many messages both begin with."""
    number = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        number += 1
    return number


def _exchange(system: str, question: str, answer: str) -> Conversation:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if system.strip():
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, completion_from=len(messages) - 1)


def exchange(question: str, answer: str, *, group: str) -> Conversation:
    """One question with its answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Conversation(messages, completion_from=1, group=group)


def _messages(value: object, column: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RowError("wrong type", f"field {column!r} must be a list of messages, found {_kind(value)}")
    if not value:
        raise RowError("empty", f"field {column!r} is an empty list")
    return [_message(entry, f"{column}[{index}]") for index, entry in enumerate(value)]


def _message(entry: object, where: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise RowError("wrong type", f"{where} must be {{role, content}}, found {_kind(entry)}")
    message: dict[str, Any] = {str(key): value for key, value in entry.items() if value is not None}
    if "role" not in message and "from" in message:
        role = message.pop("from")
        message = {
            "role": _SHAREGPT_ROLES.get(str(role), role),
            "content": message.pop("value", None),
            **message,
        }
    role = message.get("role")
    if role not in ROLES:
        raise RowError("wrong role", f"{where}.role is {role!r}; allowed: {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        content = _joined_parts(content, where)
    if content is None and message.get("tool_calls"):
        content = ""
    if content is None:
        raise RowError("missing field", f"{where} has no content")
    message["content"] = _text(content, f"{where}.content")
    if role == "user" and not message["content"].strip():
        raise RowError("empty", f"{where}.content, a user's turn, is empty")
    if role == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
        raise RowError("no answer", f"{where}.content, an assistant's turn, is empty")
    return message


def _joined_parts(parts: list[Any], where: str) -> str:
    texts: list[str] = []
    for index, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            found = part.get("type") if isinstance(part, Mapping) else _kind(part)
            raise RowError(
                "not text", f"{where}.content[{index}] is {found!r}; only text parts can be trained on"
            )
        texts.append(_text(part.get("text"), f"{where}.content[{index}].text"))
    return "".join(texts)


def _last_answer(messages: list[dict[str, Any]]) -> int:
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "assistant":
            return index
    roles = ", ".join(str(message["role"]) for message in messages)
    raise RowError("no answer", f"no message is from the assistant (roles: {roles})")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        _refuse(value, where)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(
            "invalid UTF-8", f"{where} holds a broken character at position {error.start}"
        ) from error
    return value


def _refuse(value: object, where: str) -> NoReturn:
    raise RowError("wrong type", f"{where} must be text, found {_kind(value)}")


def _kind(value: object) -> str:
    names = {
        "NoneType": "null",
        "bool": "true/false",
        "int": "a number",
        "float": "a number",
        "str": "text",
        "list": "a list",
        "dict": "an object",
    }
    found = type(value).__name__
    return names.get(found, found)


def expected_columns() -> str:
    """The columns that each format needs, for messages."""
    return "; ".join(f"{name}: {', '.join(fields)}" for name, fields in FIELDS_OF_FORMAT.items())
