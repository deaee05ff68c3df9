"""Examples to token ids, and which of the ids are learnt.

A template with `{% generation %}` markers says itself what the assistant generates. For one without
(Qwen2.5's), the span of a turn is found by rendering: the conversation up to the turn, with the prompt for an
answer, and the conversation up to its end must both be prefixes of the whole. Where they are not, the
template rewrites earlier turns, and a guess would put the loss on the wrong tokens: that is an error.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from tokenizers import Encoding
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from training.data.config import Mask
from training.data.errors import DataError
from training.data.formats import Conversation, Example, Pair, PlainText, RowError
from training.data.pretokens import PreTokenTable, Tokens
from training.data.tokenizer import CHATML_TEMPLATE, TURN_END, TURN_START

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """One document.

    ids            uint32 [n]
    supervised     bool [n]: the token is learnt (as the target of the position before it)
    rejected_from  of a preference pair, where its rejected sequence begins behind the chosen one; 0: no pair
    """

    ids: npt.NDArray[np.uint32]
    supervised: npt.NDArray[np.bool_]
    group: str | None = None
    rejected_from: int = 0


def resolve_template(tokenizer: PreTrainedTokenizerFast, override: str | None) -> str | None:
    """The template to render conversations with: the override, else the tokenizer's own, else ChatML.

    override: `chatml`, or the path of a Jinja file. None when the tokenizer has neither a template nor the
    tokens of ChatML. Raises DataError.
    """
    if override not in (None, "chatml"):
        path = Path(override).expanduser()
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"chat_template {override!r} cannot be read: {error}") from error
    if override is None and tokenizer.chat_template:
        return tokenizer.get_chat_template()
    known = tokenizer.get_vocab()
    missing = [token for token in (TURN_START, TURN_END) if token not in known]
    if not missing:
        return CHATML_TEMPLATE
    if override is None:
        return None
    raise DataError(
        f"chat_template chatml needs {' and '.join(missing)} as single tokens, which this tokenizer does "
        "not have"
    )


class Encoder:
    """Turns examples into documents with one tokenizer, template and mask."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: str | None, mask: Mask):
        self._tokenizer = tokenizer
        self._template = template
        self._mask = mask
        self._marked = template is not None and _GENERATION.search(template) is not None
        self._variables: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self._table = PreTokenTable.of(tokenizer.backend_tokenizer)
        self._plain_is_bare = tokenizer.backend_tokenizer.num_special_tokens_to_add(is_pair=False) == 0

    def encode(self, batches: Iterable[Sequence[Example | RowError]]) -> Iterator[list[Encoded | RowError]]:
        """Every example of every batch as a document, or why it cannot be one; a RowError passes through.

        What the table of pre-tokens cannot tell is tokenized outside the interpreter's lock, on all cores, while the
        next batch is rendered. Raises DataError for what no row can mend.
        """
        self._tokenizer.backend_tokenizer.no_truncation()
        self._tokenizer.backend_tokenizer.no_padding()
        with ThreadPoolExecutor(max_workers=1) as pool:
            waiting: _Waiting | None = None
            for batch in batches:
                rendered = [self._rendered(example) for example in batch]
                parts = [part for row in rendered for part in row.parts()]
                tokens = self._looked_up(parts)
                others = [part for part, known in zip(parts, tokens, strict=True) if known is None]
                following = _Waiting(rendered, tokens, pool.submit(self._tokenized, others))
                if waiting is not None:
                    yield self._documents(waiting)
                waiting = following
            if waiting is not None:
                yield self._documents(waiting)

    def _rendered(self, example: Example | RowError) -> "_Rendered":
        if isinstance(example, RowError):
            return _Rendered(error=example)
        if isinstance(example, PlainText):
            if self._mask in ("assistant", "completion"):
                raise DataError(
                    f"mask {self._mask!r} is impossible with plain text, which has no turns: use auto or all"
                )
            return _Rendered(text=example.text, group=example.group)
        if isinstance(example, Pair):
            chosen, rejected = self._rendered(example.chosen), self._rendered(example.rejected)
            failed = next((part for part in (chosen, rejected) if part.error is not None), None)
            return replace(chosen, rejected=rejected) if failed is None else failed
        try:
            text, spans = self.render(example)
        except RowError as error:
            return _Rendered(error=error)
        return _Rendered(text=text, spans=spans, group=example.group)

    def _looked_up(self, parts: Sequence["_Rendered"]) -> list[Tokens | None]:
        if self._table is None or not (self._plain_is_bare or all(part.spans is not None for part in parts)):
            return [None] * len(parts)
        return self._table.encode(part.text for part in parts)

    def _tokenized(self, parts: Sequence["_Rendered"]) -> list[Encoding]:
        """What the tokenizer itself makes of the texts."""
        encode = self._tokenizer.backend_tokenizer.encode_batch
        chats = [part.text for part in parts if part.spans is not None]
        plain = [part.text for part in parts if part.spans is None]
        # A template writes the special tokens itself; around plain text they are the tokenizer's business.
        of_chats = iter(encode(chats, add_special_tokens=False))
        of_plain = iter(encode(plain, add_special_tokens=True))
        return [next(of_plain if part.spans is None else of_chats) for part in parts]

    def _documents(self, waiting: "_Waiting") -> list[Encoded | RowError]:
        encodings = iter(waiting.encodings.result())
        tokens = iter([next(encodings) if known is None else known for known in waiting.tokens])
        documents: list[Encoded | RowError] = []
        for row in waiting.rendered:
            if row.error is not None:
                documents.append(row.error)
                continue
            parts = [_checked(self._document(next(tokens), part)) for part in row.parts()]
            documents.append(parts[0] if row.rejected is None else _joined(*parts))
        return documents

    def render(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The conversation as text, with the spans of characters that are learnt."""
        if self._template is None:
            raise DataError(
                "the data holds conversations, but the tokenizer has no chat template and lacks the tokens "
                f"{TURN_START} and {TURN_END} for ChatML: set data.chat_template to a Jinja file that suits "
                "the model, use the tokenizer of the instruction-tuned model, or train on plain text "
                "(format: text)"
            )
        if self._mask == "all":
            text, _ = self._apply(conversation.messages, conversation)
            return text, [(0, len(text))]
        if self._marked:
            text, spans = self._apply(conversation.messages, conversation, marked=True)
            return text, self._chosen(conversation, spans)
        return self._by_prefix(conversation)

    def _apply(
        self,
        messages: list[dict[str, Any]],
        conversation: Conversation,
        *,
        prompt: bool = False,
        marked: bool = False,
    ) -> tuple[str, list[Span]]:
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=conversation.tools,
                chat_template=self._template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise RowError("refused by the chat template", str(error)) from error
        return texts[0], [(int(start), int(end)) for start, end in spans[0]] if marked else []

    def _chosen(self, conversation: Conversation, spans: list[Span]) -> list[Span]:
        """Of the spans that the template marks, those that the mask keeps."""
        if self._mask != "completion":
            return spans
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if len(answers) != len(spans):
            raise DataError(
                f"mask completion: the chat template marks {len(spans)} generated parts for {len(answers)} "
                "assistant turns, so the last turn's cannot be told apart; use mask: assistant"
            )
        return [
            span for turn, span in zip(answers, spans, strict=True) if turn >= conversation.completion_from
        ]

    def _by_prefix(self, conversation: Conversation) -> tuple[str, list[Span]]:
        messages = conversation.messages
        text, _ = self._apply(messages, conversation)
        spans: list[Span] = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if self._mask == "completion" and turn < conversation.completion_from:
                continue
            before, _ = self._apply(messages[:turn], conversation, prompt=True) if turn else ("", [])
            after = text if turn + 1 == len(messages) else self._apply(messages[: turn + 1], conversation)[0]
            if not text.startswith(before) or not text.startswith(after) or len(after) <= len(before):
                raise DataError(_prefix_message(text, before if not text.startswith(before) else after, turn))
            # The turn's end token is learnt; the line break that templates put after it is never generated.
            spans.append((len(before), len(after.rstrip())))
        return text, spans

    def _document(self, tokens: Tokens | Encoding, part: "_Rendered") -> Encoded:
        ids = tokens.ids if isinstance(tokens, Tokens) else np.array(tokens.ids, dtype=np.uint32)
        if part.spans is None:
            return self._plain(ids, part)
        supervised = np.zeros(len(ids), dtype=np.bool_)
        borders = _tokens_at(tokens, [border for span in part.spans for border in span], len(part.text))
        for first, last in zip(borders[::2], borders[1::2], strict=True):
            supervised[first:last] = True
        return Encoded(ids, supervised, part.group)

    def _plain(self, ids: npt.NDArray[np.uint32], part: "_Rendered") -> Encoded:
        end = self._tokenizer.eos_token_id
        if not isinstance(end, int):
            raise DataError(
                "plain text needs a tokenizer with an end-of-text token (eos_token), which this one lacks"
            )
        if not len(ids) or ids[-1] != end:
            ids = np.append(ids, np.uint32(end))
        return Encoded(ids, np.ones(len(ids), dtype=np.bool_), part.group)


@dataclass(frozen=True)
class _Rendered:
    """A row as text. spans: the characters to learn, None for plain text."""

    text: str = ""
    spans: list[Span] | None = None
    group: str | None = None
    error: RowError | None = None
    rejected: "_Rendered | None" = None

    def parts(self) -> list["_Rendered"]:
        """The sequences of the row: none, one, or the two of a pair."""
        if self.error is not None:
            return []
        return [self] if self.rejected is None else [self, self.rejected]


@dataclass(frozen=True)
class _Waiting:
    """A batch on its way: tokens has a place for every part of every row, None where the next of the encodings
    belongs."""

    rendered: list[_Rendered]
    tokens: list[Tokens | None]
    encodings: Future[list[Encoding]]


def _tokens_at(tokens: Tokens | Encoding, characters: Sequence[int], length: int) -> list[int]:
    """Index of the first token at or after each character; the number of tokens where there is none."""
    if isinstance(tokens, Tokens):
        return tokens.ends.searchsorted(characters, side="right").tolist()
    return [_token_at(tokens, character, length) for character in characters]


def _token_at(encoding: Encoding, character: int, length: int) -> int:
    while character < length:
        token = encoding.char_to_token(character)
        if token is not None:
            return token
        character += 1
    return len(encoding.ids)


def _checked(document: Encoded) -> Encoded | RowError:
    if len(document.ids) < 2:
        return RowError("empty", f"{len(document.ids)} tokens: nothing to predict")
    if not np.count_nonzero(document.supervised[1:]):
        return RowError("no answer", "the chat template leaves no token of an assistant to learn")
    return document


def _joined(chosen: Encoded | RowError, rejected: Encoded | RowError) -> Encoded | RowError:
    """A pair as one document, its sequences end to end."""
    if isinstance(chosen, RowError):
        return chosen
    if isinstance(rejected, RowError):
        return rejected
    supervised = np.concatenate([chosen.supervised, rejected.supervised])
    supervised[len(chosen.ids)] = False  # nothing comes before the first token to predict it from
    return Encoded(
        np.concatenate([chosen.ids, rejected.ids]), supervised, chosen.group, rejected_from=len(chosen.ids)
    )


def _prefix_message(text: str, prefix: str, turn: int) -> str:
    same = next(
        (i for i, (a, b) in enumerate(zip(text, prefix, strict=False)) if a != b), min(len(text), len(prefix))
    )
    return (
        f"the chat template renders a conversation differently once it goes on (message {turn}, character "
        f"{same}: {text[same : same + 40]!r} in the whole, {prefix[same : same + 40]!r} in the part), so "
        "the assistant's tokens cannot be found in it. Set data.chat_template to a template with {% "
        "generation %} markers, or use mask: completion or mask: all."
    )
