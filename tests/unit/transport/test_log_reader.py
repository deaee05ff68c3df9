from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.transport.builder import job
from training.transport import log_reader
from training.transport.log_reader import read_logs
from training.transport.verdict import judge

CHANNEL = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Libfabric/0"


def read(tmp_path: Path, text: str) -> log_reader.LogSet:
    (tmp_path / "h.1.log").write_text(text)
    return read_logs(tmp_path)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_chunk_size_does_not_change_what_is_read(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = job(hybrid=True).write(tmp_path)
    whole = judge(folder, require="efa")
    monkeypatch.setattr(log_reader, "_CHUNK_BYTES", chunk)
    assert judge(folder, require="efa") == whole


def test_repeated_lines_do_not_grow_what_is_kept(tmp_path: Path) -> None:
    logs = read(tmp_path, f"{CHANNEL}\n" * 1000)
    (process,) = logs.processes.values()
    (group,) = process.channels().values()
    assert group.numbers == {(0, 0): 1000}
    assert group.evidence.line == 1


def test_carriage_returns_are_no_part_of_a_line(tmp_path: Path) -> None:
    (process,) = read(tmp_path, f"{CHANNEL}\r\n").processes.values()
    assert [channel.network for channel in process.channels()] == ["Libfabric"]


def test_line_without_end_is_bounded(tmp_path: Path) -> None:
    logs = read(tmp_path, "x" * 200_000)
    assert any("more than 65536 bytes" in sentence for sentence in logs.damage)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (CHANNEL.replace("->", "=>"), "of an unknown form"),
        (CHANNEL.removeprefix("h:1:2 [0]"), "no host and process id"),
        (CHANNEL[30:], "only a part of a line"),
        ("h:1:2 [0] NCCL INFO Using network ", "names no network"),
        ("h:1:2 [0] NCCL INFO NET/OFI Selected provider is (found 1 nics)", "provider in an unknown form"),
        (
            "h:1:2 [0] NCCL INFO ncclCommInitRank comm 0x1 rank - Init START",
            "communicator of an unknown form",
        ),
    ],
)
def test_lines_that_are_not_whole_are_named_with_their_place(line: str, says: str, tmp_path: Path) -> None:
    (sentence,) = read(tmp_path, f"\n{line}\n").damage
    assert says in sentence
    assert "h.1.log:2" in sentence


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "h.1.log").mkdir()
    assert read_logs(tmp_path).damage == ["h.1.log cannot be read: Is a directory"]
