"""Files and data sets to rows, each with the line it stands on. A row that cannot be read is a row with an
error."""

import csv
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from training.data.errors import DataError
from training.data.formats import RowError

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz")
_ROWS_PER_BATCH = 1000
_CSV_FIELD_BYTES = 1 << 30  # the module's own limit of 128 KiB is shorter than a long document


@dataclass(frozen=True)
class Row:
    """A row, or the error that took its place. `line` counts from 1."""

    line: int
    value: Any


def is_readable(name: str) -> bool:
    """Whether a file's name ends like data that can be read."""
    return name.lower().endswith(SUFFIXES)


def read_file(path: Path, name: str) -> Iterator[Row]:
    """The rows of a file; `name` is what messages call it. Raises DataError where the rest cannot be read."""
    suffix = Path(name.lower().removesuffix(".gz")).suffix
    if suffix == ".parquet":
        yield from _parquet(path, name)
        return
    try:
        with _open(path, name) as stream:
            if suffix == ".csv":
                yield from _csv(stream, name)
            elif suffix == ".json" and _starts_with_bracket(path, name):
                yield from _json_array(stream, name)
            else:
                yield from _json_lines(stream)
    except (OSError, EOFError) as error:
        raise DataError(f"{name} cannot be read: {error}") from error


def _open(path: Path, name: str) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if name.lower().endswith(".gz") else path.open("rb")


def _starts_with_bracket(path: Path, name: str) -> bool:
    with _open(path, name) as stream:
        while block := stream.read(4096):
            text = block.lstrip(b"\xef\xbb\xbf \t\r\n")
            if text:
                return text.startswith(b"[")
    return False


def _json_lines(stream: IO[bytes]) -> Iterator[Row]:
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue  # a blank line holds no row
        yield Row(number, _json_line(line))


def _json_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowError("invalid UTF-8", f"byte 0x{line[error.start]:02x} at column {error.start + 1}")
    except json.JSONDecodeError as error:
        return RowError("invalid JSON", f"{error.msg} at column {error.colno}")
    except RecursionError:
        return RowError("invalid JSON", "nested too deeply")


_SPACE_OR_COMMA = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")


def _json_array(stream: IO[bytes], name: str) -> Iterator[Row]:
    # surrogateescape keeps a broken byte inside its own row, where the check of the text finds it.
    text = stream.read().decode("utf-8", errors="surrogateescape").removeprefix("\ufeff")
    decoder = json.JSONDecoder()
    place, line, counted = text.index("[") + 1, 1, 0
    while True:
        gap = _SPACE_OR_COMMA.match(text, place)
        place = gap.end() if gap else place
        line += text.count("\n", counted, place)
        counted = place
        if text[place : place + 1] == "]":
            return
        try:
            value, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{name}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno}), so no row "
                "after it can be read. Mend the file, or store one object per line (.jsonl), where a bad "
                "row is only one row."
            ) from error
        yield Row(line, value)


def _csv(stream: IO[bytes], name: str) -> Iterator[Row]:
    csv.field_size_limit(_CSV_FIELD_BYTES)
    lines = (line.decode("utf-8", errors="surrogateescape") for line in stream)
    first = next(lines, "").removeprefix("\ufeff")
    reader = csv.reader(_chain(first, lines), strict=True)
    try:
        header = next(reader, [])
        if not header:
            raise DataError(f"{name} is empty: a CSV file needs a first line with the names of its columns")
        start = reader.line_num + 1
        for cells in reader:
            if cells:
                yield Row(start, _csv_row(header, cells))
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{name}:{reader.line_num}: not valid CSV ({error}), so no row after it can be read"
        ) from error


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _csv_row(header: list[str], cells: list[str]) -> Any:
    if len(cells) != len(header):
        return RowError("wrong number of columns", f"{len(cells)} cells under {len(header)} column names")
    return dict(zip(header, cells, strict=True))


def _parquet(path: Path, name: str) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            yield from _arrow_rows(file.iter_batches(batch_size=_ROWS_PER_BATCH))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name} cannot be read as Parquet: {error}") from error


def _arrow_rows(batches: Iterator[Any]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        try:
            values: list[Any] = batch.to_pylist()
        except UnicodeDecodeError:
            values = [_arrow_row(batch.slice(index, 1)) for index in range(batch.num_rows)]
        for value in values:
            number += 1
            yield Row(number, value)


def _arrow_row(batch: Any) -> Any:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return RowError("invalid UTF-8", f"byte 0x{error.object[error.start]:02x} in {error.object[:20]!r}")


# Hugging Face data sets


def is_saved_dataset(folder: Path) -> bool:
    """Whether a folder was written by `datasets`' save_to_disk."""
    return (folder / "dataset_dict.json").exists() or (
        (folder / "state.json").exists() and (folder / "dataset_info.json").exists()
    )


def load_saved_dataset(folder: Path, split: str | None) -> Any:
    """The one data set of a saved folder, or its named split. Raises DataError."""
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(folder))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"saved data set {str(folder)!r} cannot be read: {error}") from error
    if isinstance(saved, DatasetDict):
        wanted = split or "train"
        if wanted not in saved:
            known = ", ".join(str(name) for name in saved)
            raise DataError(f"saved data set {str(folder)!r} has no split {wanted!r}; it has: {known}")
        return saved[wanted]
    if split is not None:
        raise DataError(f"saved data set {str(folder)!r} has no splits: leave out split")
    return saved


def hub_revision(name: str, revision: str | None) -> str:
    """The commit that a revision (default: the main branch) of a hub data set points to. Raises DataError."""
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        commit = HfApi().dataset_info(name, revision=revision).sha
    except RepositoryNotFoundError as error:
        raise DataError(
            f"the hub has no data set {name!r}, or it is private or gated and no token (HF_TOKEN) that may "
            "read it is set"
        ) from error
    except RevisionNotFoundError as error:
        raise DataError(f"data set {name!r} has no revision {revision!r}") from error
    except (HfHubHTTPError, OfflineModeIsEnabled, httpx.HTTPError, OSError) as error:
        raise DataError(
            f"the hub could not be asked for data set {name!r} ({error}). Pin revision to a full commit (40 "
            "hex digits) to need no question."
        ) from error
    assert commit is not None
    return commit


def load_hub_dataset(name: str, subset: str | None, split: str, revision: str) -> Any:
    """Download a hub data set (or take it from the local cache). No code from the hub is run. Raises
    DataError."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        return load_dataset(name, subset, split=split, revision=revision)
    except (DatasetNotFoundError, OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"data set {name!r} (subset {subset}, split {split!r}) cannot be loaded: {error}"
        ) from error


def read_dataset(dataset: Any) -> Iterator[Row]:
    """The rows of a `datasets` data set."""
    yield from _arrow_rows(
        batch for table in dataset.with_format("arrow").iter(_ROWS_PER_BATCH) for batch in table.to_batches()
    )
