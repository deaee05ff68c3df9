"""Tokenizers: loaded with a pinned revision, or trained from the job's own text."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub.errors import HfHubHTTPError
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.data.errors import DataError

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

CHATML_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
"""ChatML with `generation` markers around what the assistant says, its turn end included."""

# The pre-tokenization of Qwen2 (transformers 5.13, models/qwen2/tokenization_qwen2.py): a tokenizer trained
# here cuts text the way the model family's own one does.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_tokenizer(source: str, revision: str | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of a local folder or a hub id, at a revision. No code from the hub is run. Raises
    DataError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, HfHubHTTPError) as error:
        where = f" at revision {revision}" if revision else ""
        raise DataError(
            f"no tokenizer could be loaded from {source!r}{where}: {_first_line(error)}. Give a folder that "
            "holds tokenizer.json, or a hub id that this machine may read."
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise DataError(
            f"the tokenizer of {source!r} is {type(tokenizer).__name__}, without character offsets; answer "
            "masks need a fast one (a tokenizer.json)"
        )
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with ChatML turns, the same for the same texts in the same order.

    `<|endoftext|>`, `<|im_start|>` and `<|im_end|>` are tokens 0, 1 and 2; a turn's end is the end of
    generation. Raises DataError when vocab_size leaves no room for merges (256 bytes and 3 special tokens).
    """
    special = [END_OF_TEXT, TURN_START, TURN_END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet) + len(special):
        raise DataError(
            f"a tokenizer of {vocab_size} tokens cannot be trained: bytes and special tokens alone are "
            f"{len(alphabet) + len(special)}; use some thousands"
        )
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue] - a property in Rust
    backend.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHATML_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face folder that AutoTokenizer loads."""
    tokenizer.save_pretrained(str(folder))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """Hash of everything that decides how text becomes ids: vocabulary, merges, rules, special tokens."""
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    digest.update(json.dumps(special, sort_keys=True).encode())
    return digest.hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
