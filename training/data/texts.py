"""The plain text of a job's training sources: what a tokenizer is trained on."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from training.data.config import DataSpec, SourceSpec
from training.data.errors import DataError
from training.data.formats import Conversation, Pair, PlainText, RowError, detect_format, parse_row
from training.data.readers import Row
from training.data.sources import resolve


def texts(spec: DataSpec, work_dir: Path) -> Iterator[str]:
    """Every message and text of the sources, in order, of a preference pair its prompt once; bad rows are left to
    the tokenization to report.

    Raises DataError where a source has no text at all (`random`).
    """
    for source in spec.sources():
        if source.kind == "random":
            raise DataError("a tokenizer cannot be trained on source random: it has ids and no text")
        shards = resolve(source, work_dir).shards
        rows = (row for shard in shards for row in shard.rows())
        for row in islice(rows, source.limit):
            yield from _texts_of(row, source)


def _texts_of(row: Row, source: SourceSpec) -> Iterator[str]:
    value = row.value
    if isinstance(value, dict):
        row_format = source.format if source.format != "auto" else detect_format([str(key) for key in value])
        if row_format is None:
            return
        try:
            value = parse_row(value, row_format, source.fields)
        except RowError:
            return
    if isinstance(value, Pair):
        yield from _contents(value.chosen.messages)
        yield from _contents(value.rejected.messages[value.rejected.completion_from :])
    elif isinstance(value, Conversation):
        yield from _contents(value.messages)
    elif isinstance(value, PlainText):
        yield value.text


def _contents(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    return (message["content"] for message in messages if isinstance(message.get("content"), str))
