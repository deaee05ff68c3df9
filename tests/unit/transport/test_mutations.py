"""No single line can be lost or altered without the verdict leaving ``efa``."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.transport.builder import Job, Versions, job
from training.transport.verdict import judge

HEALTHY = {
    "world": lambda: job(),
    "hybrid": lambda: job(hosts=2, gpus=2, hybrid=True, split=True),
    "old": lambda: job(gpus=2, versions=Versions("2.18.6", "1.7.4")),
    "newest": lambda: job(hosts=3, gpus=1, versions=Versions("2.30.4", "1.22.0"), hybrid=True),
    "p5": lambda: job(gpus=4, num_channels=4, num_nics=16, gpudirect=True),
}
DECISIVE = ("elected", "Using network", "via NET/", "Init COMPLETE")
FLIPS = (
    ("is efa", "is tcp"),
    ("is efa", "is sockets"),
    ("is efa", "is verbs"),
    ("is efa", "is"),
    ("Using network ", "Using network Socket"),
    ("Using network ", "Using network IB"),
    ("Using network ", "Using net"),
    ("via NET/", "via NET/Socket/"),
    ("via NET/", "via NET/IB/"),
    ("via NET/", "via SHM/"),
    ("via NET/", "via P2P/"),
    ("[send]", "[receive]"),
    ("[receive]", "[send]"),
    (" -> ", " <- "),
    ("Channel 00", "Channel 01"),
    ("/GDRDMA", ""),
    ("COMPLETE", "START"),
)


def _altered(message: str) -> Iterator[str]:
    for old, new in FLIPS:
        if old not in message:
            continue
        if new.startswith(
            ("Using network ", "via NET/Socket", "via NET/IB")
        ):  # the name changes, the rest stays
            before, _, after = message.partition(old)
            rest = after.partition("/")[2] if old == "via NET/" else ""
            yield before + new + rest
        else:
            yield message.replace(old, new, 1)


def _mutations(healthy: Job) -> Iterator[tuple[str, Job]]:
    for index, rank in enumerate(healthy.ranks):
        for line, message in enumerate(rank.messages):
            if not any(word in message for word in DECISIVE):
                continue
            for new in (None, *_altered(message)):
                mutated = copy.deepcopy(healthy)
                messages = mutated.ranks[index].messages
                messages[line : line + 1] = [] if new is None else [new]
                yield f"rank {index}: {message!r} -> {new!r}", mutated


@pytest.mark.parametrize("name", HEALTHY)
def test_no_single_line_lost_or_altered_leaves_efa(name: str, tmp_path: Path) -> None:
    healthy = HEALTHY[name]()
    gpudirect = name == "p5"
    assert judge(healthy.write(tmp_path / "0"), require="efa", gpudirect_required=gpudirect).verdict == "efa"
    survivors: list[str] = []
    number = 0
    for number, (what, mutated) in enumerate(_mutations(healthy), start=1):
        folder = mutated.write(tmp_path / str(number))
        if judge(folder, require="efa", gpudirect_required=gpudirect).verdict == "efa":
            survivors.append(what)
    assert number > 50
    assert not survivors


@pytest.mark.parametrize("name", HEALTHY)
def test_no_rank_host_or_counter_can_be_left_out(name: str, tmp_path: Path) -> None:
    folder = HEALTHY[name]().write(tmp_path / "attempt-0")
    ranks = json.loads((folder / "ranks.json").read_text())
    for index in range(len(ranks)):
        (folder / "ranks.json").write_text(json.dumps(ranks[:index] + ranks[index + 1 :]))
        assert judge(folder, require="efa").verdict == "unknown"
    (folder / "ranks.json").write_text(json.dumps(ranks))
    counters = json.loads((folder / "counters.json").read_text())
    for host, devices in counters.items():
        for device in [key for key in devices if key != "expected_bytes"]:
            for moment in ("before", "after"):
                for counter in ("tx_bytes", "rx_bytes"):
                    changed = copy.deepcopy(counters)
                    del changed[host][device][moment][counter]
                    (folder / "counters.json").write_text(json.dumps(changed))
                    assert judge(folder, require="efa").verdict == "unknown"


def test_no_log_file_can_be_left_out(tmp_path: Path) -> None:
    folder = job(hybrid=True).write(tmp_path / "attempt-0")
    for path in sorted(folder.glob("*.log")):
        content = path.read_bytes()
        path.unlink()
        assert judge(folder, require="efa").verdict == "unknown"
        path.write_bytes(content)
    assert judge(folder, require="efa").verdict == "efa"
