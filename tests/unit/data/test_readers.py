import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from training.data.errors import DataError
from training.data.formats import RowError
from training.data.readers import read_file


def read(path: Path) -> list[tuple[int, Any]]:
    """Line and value of each row, a bad one as its message."""
    return [
        (row.line, str(row.value) if isinstance(row.value, RowError) else row.value)
        for row in read_file(path, path.name)
    ]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "A.JSONL"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\n{"text": "b"}'
    assert read(write(tmp_path / name, content)) == [(1, {"text": "a"}), (3, {"text": "b"})]


def test_bad_json_lines_keep_their_place(tmp_path: Path) -> None:
    content = b'{"text": "a"}\n{"text": \n{"text": "b\xff"}\n' + b"[" * 200_000 + b'\n{"text": "c"}\n'
    assert read(write(tmp_path / "a.jsonl", content)) == [
        (1, {"text": "a"}),
        (2, "invalid JSON: Expecting value at column 1"),
        (3, "invalid UTF-8: byte 0xff at column 12"),
        (4, "invalid JSON: nested too deeply"),
        (5, {"text": "c"}),
    ]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_json_array_knows_the_line_of_each_row(tmp_path: Path, name: str) -> None:
    content = b'[\n  {"text": "a"},\n  {\n    "text": "b"\n  }, {"text": "c"}\n]'
    assert read(write(tmp_path / name, content)) == [
        (2, {"text": "a"}),
        (3, {"text": "b"}),
        (5, {"text": "c"}),
    ]


def test_broken_json_array_is_an_error_since_rows_would_vanish(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", b'[{"text": "a"},\n {"text": ]\n')
    with pytest.raises(DataError, match=r"a\.json:2: not valid JSON .*no row after it can be read.*\.jsonl"):
        read(path)


def test_truncated_json_array_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.json:2: not valid JSON"):
        read(write(tmp_path / "a.json", b'[{"text": "a"},\n'))


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_csv_with_quoted_line_breaks(tmp_path: Path, name: str) -> None:
    content = b'prompt,completion\nhi,"line one\nline ""two"""\nho,x\n'
    assert read(write(tmp_path / name, content)) == [
        (2, {"prompt": "hi", "completion": 'line one\nline "two"'}),
        (4, {"prompt": "ho", "completion": "x"}),
    ]


def test_csv_row_of_another_width(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "a.csv", b"a,b\n1,2\n1,2,3\n1\n"))
    assert rows[1:] == [
        (3, "wrong number of columns: 3 cells under 2 column names"),
        (4, "wrong number of columns: 1 cells under 2 column names"),
    ]


def test_csv_without_header(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv is empty: a CSV file needs a first line"):
        read(write(tmp_path / "a.csv", b""))


def test_csv_that_cannot_be_parsed_further(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv:3: not valid CSV"):
        read(write(tmp_path / "a.csv", b'a,b\n1,2\n1,"x"y"\n'))


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b", None]}), path)
    assert read(path) == [(1, {"text": "a"}), (2, {"text": "b"}), (3, {"text": None})]


def test_parquet_with_one_broken_string_loses_one_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    strings = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0\4\0\0\0"), pa.py_buffer(b"ab\xffc")]
    )
    pq.write_table(pa.table({"text": strings}), path)
    assert read(path) == [
        (1, {"text": "a"}),
        (2, "invalid UTF-8: byte 0xff in b'b\\xff'"),
        (3, {"text": "c"}),
    ]


def test_file_that_is_no_parquet(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        read(write(tmp_path / "a.parquet", b"words"))


def test_cut_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 10_000)[:-20])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read"):
        read(path)


def test_row_counts_survive_large_files(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", b"".join(json.dumps({"text": str(n)}).encode() + b"\n" for n in range(5000))
    )
    rows = read(path)
    assert [line for line, _ in rows] == list(range(1, 5001))
