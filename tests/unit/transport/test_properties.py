from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.transport.builder import Job, Versions, job, to_sockets
from tests.unit.transport.corpus import VERSIONS
from training.transport.log_reader import read_logs
from training.transport.verdict import judge

DECISIVE = (b"elected", b"Using network", b"via NET/", b"Init COMPLETE")

shapes = st.fixed_dictionaries(
    {
        "hosts": st.integers(2, 3),
        "gpus": st.integers(1, 3),
        "versions": st.sampled_from(VERSIONS),
        "num_channels": st.integers(1, 3),
        "hybrid": st.booleans(),
        "split": st.booleans(),
    }
)


def _interleave(built: Job, draw: st.DataObject, num_files: int) -> list[list[str]]:
    """The ranks' lines in files of several ranks each, every rank's own order kept, any interleaving."""
    files: list[list[str]] = [[] for _ in range(num_files)]
    for number, file in enumerate(files):
        queues = [list(reversed(rank.lines())) for rank in built.ranks[number::num_files]]
        while queues:
            index = draw.draw(st.integers(0, len(queues) - 1))
            file += [
                queues[index].pop() for _ in range(min(draw.draw(st.integers(1, 9)), len(queues[index])))
            ]
            if not queues[index]:
                del queues[index]
    return files


@settings(max_examples=25, deadline=None)
@given(shapes, st.integers(1, 3), st.data(), st.booleans())
def test_interleaving_does_not_change_the_verdict(
    shape: dict[str, object], num_files: int, data: st.DataObject, fall_back: bool
) -> None:
    built = job(**shape)  # pyright: ignore[reportArgumentType]
    if fall_back:
        to_sockets(built.ranks[0], built.versions)
    with tempfile.TemporaryDirectory() as temporary:
        folder = built.write(Path(temporary))
        apart = judge(folder, require="efa")
        for path in folder.glob("*.log"):
            path.unlink()
        for number, lines in enumerate(_interleave(built, data, num_files)):
            (folder / f"{number}.log").write_text("".join(f"{line}\n" for line in lines))
        together = judge(folder, require="efa")
    assert apart.verdict == together.verdict == ("mixed" if fall_back else "efa")
    assert [r.internode_channels for r in apart.ranks] == [r.internode_channels for r in together.ranks]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_cut_log_is_efa_only_if_nothing_decisive_is_gone(data: st.DataObject) -> None:
    built = job(gpus=2, versions=data.draw(st.sampled_from(VERSIONS)), hybrid=data.draw(st.booleans()))
    with tempfile.TemporaryDirectory() as temporary:
        folder = built.write(Path(temporary))
        path = data.draw(st.sampled_from(sorted(folder.glob("*.log"))))
        content = path.read_bytes()
        length = data.draw(st.integers(0, len(content) - 1))
        path.write_bytes(content[:length])
        report = judge(folder, require="efa")
    lost = content[length:]
    cut_in_line = length > 0 and content[length - 1 : length] != b"\n"
    if cut_in_line or any(word in lost for word in DECISIVE):
        assert report.verdict == "unknown"
    else:
        assert report.verdict == "efa"


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=2000), st.integers(0, 7))
def test_foreign_bytes_in_place_of_a_log_are_never_efa(content: bytes, rank: int) -> None:
    built = job()
    with tempfile.TemporaryDirectory() as temporary:
        folder = built.write(Path(temporary))
        path = folder / f"{built.ranks[rank].host}.{built.ranks[rank].pid}.log"
        path.write_bytes(content)
        assert judge(folder, require="efa").verdict == "unknown"


line_parts = st.sampled_from(
    [
        b"h:1:2 [0] NCCL INFO ",
        b"h:1:2 [0] x.cc:7 NCCL WARN ",
        b"Using network ",
        b"Libfabric",
        b"Socket",
        b"NET/OFI Selected provider is ",
        b"efa",
        b"Channel 00/0 : 0[0] -> 1[0] [send] via NET/",
        b"/0",
        b"ncclCommInitRank comm 0x1 rank 0 nranks 2 ",
        b"commId 0x2 - Init ",
        b"START",
        b"COMPLETE",
        b"\n",
        b"\r\n",
        b"\x00",
        b"[repeated 3x across cluster]",
    ]
)


@settings(max_examples=100, deadline=None)
@given(st.lists(line_parts, max_size=40))
def test_reader_takes_any_mixture_of_parts_without_error(parts: list[bytes]) -> None:
    content = b"".join(parts)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "h.1.log"
        path.write_bytes(content)
        logs = read_logs(Path(temporary))
    assert logs.num_bytes == len(content)
    for log in logs.processes.values():
        for evidence in (*log.providers.values(), *log.networks.values()):
            line = content.split(b"\n")[evidence.line - 1].decode("utf-8", errors="replace")
            assert line.strip()[:280] in evidence.text or evidence.text in line


def test_every_fact_keeps_its_file_and_line(tmp_path: Path) -> None:
    built = job(versions=Versions())
    folder = built.write(tmp_path)
    report = judge(folder, require="efa")
    for rank in report.ranks:
        assert rank.evidence
        for evidence in rank.evidence:
            lines = (folder / evidence.file).read_text().splitlines()
            assert lines[evidence.line - 1] == evidence.text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("tx_bytes"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "rank",
                    "host",
                    "pid",
                    "local_rank",
                    "backend",
                    "before",
                    "after",
                    "tx_bytes",
                    "expected_bytes",
                    "problems",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(json_values, st.sampled_from(["ranks.json", "counters.json"]))
def test_foreign_json_in_place_of_a_record_is_unknown_and_no_error(value: object, name: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = job(gpus=1).write(Path(temporary))
        (folder / name).write_text(json.dumps(value))
        assert judge(folder, require="efa").verdict == "unknown"
