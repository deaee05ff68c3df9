"""The tokenization cache: one folder per content, tokenizer and format, written once per node.

An entry holds every document of a shard uncut, so that max_length and the policies can change without
tokenizing again. Its key is made of what decides its content: the shard's bytes, the tokenizer, the template,
the mask and the format. Two sources with equal files share one entry.
"""

import hashlib
import json
import os
import shutil
import sys
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from training.data.chat import Encoded, Encoder, resolve_template
from training.data.config import Format, Mask, RowPolicy, SourceSpec
from training.data.errors import DataError
from training.data.formats import (
    Conversation,
    Example,
    Pair,
    PlainText,
    RowError,
    detect_format,
    expected_columns,
    parse_row,
)
from training.data.locks import file_lock
from training.data.readers import Row
from training.data.report import EXAMPLES_PER_REASON, BadRow
from training.data.sources import Shard
from training.data.tokenizer import tokenizer_fingerprint

# Part of every key: a change of how rows become tokens must change it, or old entries would be taken for new
# ones.
_LAYOUT = 2
_ROWS_PER_BATCH = 512

_ARRAYS: dict[str, type[np.generic]] = {
    "tokens": np.uint32,
    "supervised": np.bool_,
    "offsets": np.int64,
    "lines": np.int64,
    "learnt": np.int32,
    "groups": np.uint64,
    "rejected_from": np.int64,
}
_PER_TOKEN = ("tokens", "supervised")  # mapped from the disk; the others are small and read whole


@dataclass(frozen=True)
class TokenShard:
    """The documents of one shard.

    tokens      uint32 [T]
    supervised  bool [T]
    offsets     int64 [n + 1]; document d is tokens[offsets[d]:offsets[d + 1]]
    lines       int64 [n], where each document stands in its file
    learnt      int32 [n], labels to learn per document
    groups      uint64 [n], hash of what is held out together: the group, or the document itself
    rejected_from  int64 [n], where in the document its rejected sequence begins; 0: no preference pair
    """

    name: str
    key: str
    format: str
    rows_read: int
    rejected: dict[str, int]
    examples: list[BadRow]
    from_cache: bool
    tokens: npt.NDArray[np.uint32]
    supervised: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    lines: npt.NDArray[np.int64]
    learnt: npt.NDArray[np.int32]
    groups: npt.NDArray[np.uint64]
    rejected_from: npt.NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1


class TokenCache:
    """Shards as token ids, for one tokenizer, template and mask."""

    def __init__(
        self,
        root: Path,
        tokenizer: PreTrainedTokenizerFast,
        mask: Mask,
        chat_template: str | None,
        policy: RowPolicy,
    ):
        template = resolve_template(tokenizer, chat_template)
        self._root = root
        self._policy = policy
        self._encoder = Encoder(tokenizer, template, mask)
        self.tokenizer_key = _digest(tokenizer_fingerprint(tokenizer), template or "", mask)

    def get(self, shard: Shard, spec: SourceSpec, *, max_rows: int | None = None) -> TokenShard:
        """The documents of a shard, tokenized now if no process of this node has done so. Raises
        DataError."""
        key = _digest(
            _LAYOUT, shard.key(), self.tokenizer_key, spec.format, sorted(spec.fields.items()), max_rows
        )
        folder = self._root / key[:2] / key
        with file_lock(folder):
            from_cache = (folder / "meta.json").exists()
            if not from_cache:
                self._write(folder, shard, spec, max_rows)
        return _load(folder, shard.name, key, from_cache)

    def _write(self, folder: Path, shard: Shard, spec: SourceSpec, max_rows: int | None) -> None:
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that died; the lock is ours
        batches: deque[list[Row]] = deque()  # read, and not yet written
        row_format: Format | None = None if spec.format == "auto" else spec.format

        def parsed() -> Iterator[list[Example | RowError]]:
            nonlocal row_format
            for rows in _batches(shard.rows(), max_rows):
                first = next((row for row in rows if isinstance(row.value, dict)), None)
                if row_format is None and first is not None:
                    row_format = _detected(first, shard.name)
                batches.append(rows)
                yield [_example(row, row_format, spec) for row in rows]

        with _Writer(partial) as writer:
            for results in self._encoder.encode(parsed()):
                for row, result in zip(batches.popleft(), results, strict=True):
                    if isinstance(result, RowError):
                        writer.reject(self._bad_row(shard, row, result))
                    else:
                        writer.add(row.line, result)
            writer.finish("python-docs" if spec.kind == "python-docs" else row_format or "auto")
        partial.replace(folder)

    def _bad_row(self, shard: Shard, row: Row, error: RowError) -> BadRow:
        bad = BadRow(file=shard.name, line=row.line, reason=error.reason, detail=error.detail)
        if self._policy == "stop":
            raise DataError(stop_message([bad], {bad.reason: 1}))
        return bad


def stop_message(examples: list[BadRow], rejected: dict[str, int]) -> str:
    """What `on_bad_row: stop` says."""
    total = sum(rejected.values())
    shown = "; ".join(str(row) for row in examples[:EXAMPLES_PER_REASON])
    more = f" (and {total - len(examples[:EXAMPLES_PER_REASON])} more)" if total > EXAMPLES_PER_REASON else ""
    return f"bad row: {shown}{more}. Mend the data, or set data.on_bad_row: skip to train without such rows."


def _example(row: Row, row_format: Format | None, spec: SourceSpec) -> Example | RowError:
    if isinstance(row.value, RowError | Conversation | PlainText | Pair):
        return row.value
    try:
        return parse_row(row.value, row_format or "text", spec.fields)
    except RowError as error:
        return error


def _detected(row: Row, name: str) -> Format:
    columns = [str(column) for column in row.value]
    found = detect_format(columns)
    if found is None and {"chosen", "rejected"} <= set(columns):
        raise DataError(
            f"{name}:{row.line}: the fields chosen and rejected are a preference pair (data.format preference), which "
            "objective.kind supervised cannot learn from: set objective.kind: dpo"
        )
    if found is None:
        raise DataError(
            f"{name}:{row.line}: no known format has the fields {', '.join(columns) or '(none)'}. Known are "
            f"{expected_columns()}. Set data.format, and data.fields where the columns have other names."
        )
    return found


def _batches(rows: Iterator[Row], max_rows: int | None) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for number, row in enumerate(rows):
        if max_rows is not None and number >= max_rows:
            break
        batch.append(row)
        if len(batch) == _ROWS_PER_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


class _Writer:
    """Writes the files of an entry: tokens as they come, what is known per document at the end."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True)
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, IO[bytes]] = {}
        self._per_document = {
            name: array(np.dtype(_ARRAYS[name]).char) for name in _ARRAYS if name not in _PER_TOKEN
        }
        self._end = 0
        self._rows = 0
        self._rejected: dict[str, int] = {}
        self._examples: list[BadRow] = []

    def __enter__(self) -> Self:
        for name in _ARRAYS:
            self._files[name] = self._stack.enter_context((self._folder / f"{name}.bin").open("wb"))
        self._per_document["offsets"].append(0)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, line: int, document: Encoded) -> None:
        self._rows += 1
        self._end += len(document.ids)
        ids = document.ids.tobytes()
        self._files["tokens"].write(ids)
        self._files["supervised"].write(document.supervised.tobytes())
        identity = ids if document.group is None else document.group.encode()
        values = {
            "offsets": self._end,
            "lines": line,
            "learnt": int(np.count_nonzero(document.supervised[1:])),
            "rejected_from": document.rejected_from,
            "groups": int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), sys.byteorder),
        }
        for name, value in values.items():
            self._per_document[name].append(value)

    def reject(self, row: BadRow) -> None:
        self._rows += 1
        self._rejected[row.reason] = self._rejected.get(row.reason, 0) + 1
        if self._rejected[row.reason] <= EXAMPLES_PER_REASON:
            self._examples.append(row)

    def finish(self, row_format: str) -> None:
        for name, values in self._per_document.items():
            values.tofile(self._files[name])
        for stream in self._files.values():
            stream.flush()
            os.fsync(stream.fileno())
        meta = {
            "format": row_format,
            "rows_read": self._rows,
            "rejected": self._rejected,
            "examples": [row.model_dump() for row in self._examples],
        }
        (self._folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def _load(folder: Path, name: str, key: str, from_cache: bool) -> TokenShard:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    arrays: dict[str, Any] = {
        array: (_mapped if array in _PER_TOKEN else np.fromfile)(folder / f"{array}.bin", dtype)
        for array, dtype in _ARRAYS.items()
    }
    return TokenShard(
        name=name,
        key=key,
        format=meta["format"],
        rows_read=meta["rows_read"],
        rejected=meta["rejected"],
        # An entry is shared by files of equal content: the name is the one that this source gives it.
        examples=[BadRow.model_validate({**row, "file": name}) for row in meta["examples"]],
        from_cache=from_cache,
        **arrays,
    )


def _mapped(path: Path, dtype: type[np.generic]) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r")


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()
