"""Logs that NCCL really wrote; real/README.md says how they came about."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest

from tests.unit.transport.builder import EXPECTED_BYTES
from training.transport.log_reader import read_logs
from training.transport.verdict import Verdict, judge

REAL = Path(__file__).parent / "real"
SETS = sorted(path.name for path in REAL.iterdir() if path.is_dir())


@pytest.mark.parametrize("name", SETS)
def test_every_line_is_read_without_complaint(name: str) -> None:
    logs = read_logs(REAL / name)
    assert logs.damage == []
    assert logs.nccl_version == "2.28.9+cuda13.0"
    assert len(logs.processes) == len(list((REAL / name).glob("*.log")))


@pytest.mark.parametrize(
    ("name", "verdict", "diagnosis"),
    [
        ("one-gpu", "none", []),
        ("one-gpu-plugin-missing", "none", []),
        ("two-nodes-tcp-leg", "tcp", ["plugin-disabled"]),
        ("four-nodes-sockets-split", "tcp", ["plugin-not-found"]),
    ],
)
def test_verdict(name: str, verdict: Verdict, diagnosis: list[str]) -> None:
    report = judge(REAL / name, require="efa")
    assert report.verdict == verdict
    assert [found.kind for found in report.diagnosis] == diagnosis


def test_refusal_to_start_is_diagnosed(tmp_path: Path) -> None:
    """The same log, with a second node that the job recorded: nothing crossed, and the diagnosis says why."""
    folder = tmp_path / "attempt"
    shutil.copytree(REAL / "one-gpu-plugin-missing", folder)
    ranks = json.loads((folder / "ranks.json").read_text())
    (folder / "ranks.json").write_text(json.dumps([*ranks, {**ranks[0], "rank": 1, "host": "other"}]))
    report = judge(folder, require="efa")
    assert report.verdict == "unknown"
    assert {"plugin-not-found", "no-network", "no-log"} <= {found.kind for found in report.diagnosis}


def as_efa(folder: Path) -> dict[str, list[str]]:
    """The four-node set as it would read with the plugin: file -> lines. The rest stays as NCCL wrote it."""
    files: dict[str, list[str]] = {}
    for path in sorted((REAL / "four-nodes-sockets-split").glob("*.log")):
        lines = [
            line.replace("NET/Socket/0", "NET/Libfabric/0").replace("network Socket", "network Libfabric")
            for line in path.read_text().splitlines()
        ]
        prefix = lines[0].partition(" NCCL INFO ")[0]
        provider = f"{prefix} NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 1 nics)"
        files[path.name] = [*lines[:8], provider, *lines[8:]]
    folder.mkdir()
    shutil.copy(REAL / "four-nodes-sockets-split" / "ranks.json", folder)
    moved = {"tx_bytes": EXPECTED_BYTES, "rx_bytes": EXPECTED_BYTES}
    device = {"before": {"tx_bytes": 0, "rx_bytes": 0}, "after": moved}
    counters = {f"node{i}": {"rdmap0s6": device, "expected_bytes": EXPECTED_BYTES} for i in range(4)}
    (folder / "counters.json").write_text(json.dumps(counters))
    return files


def write(folder: Path, files: dict[str, list[str]]) -> Path:
    for name, lines in files.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_real_structure_over_efa_is_efa_and_no_line_of_it_can_be_lost(tmp_path: Path) -> None:
    folder = tmp_path / "attempt"
    healthy = as_efa(folder)
    assert judge(write(folder, healthy), require="efa").verdict == "efa"
    survivors: list[str] = []
    for name, lines in healthy.items():
        for number, line in enumerate(lines):
            if not any(word in line for word in ("Selected", "Using network", "via NET/", "Init COMPLETE")):
                continue
            for new in ([], [line.replace("NET/Libfabric", "NET/Socket").replace("is efa", "is tcp")]):
                if new == [line]:
                    continue
                mutated = copy.deepcopy(healthy)
                mutated[name][number : number + 1] = new
                if judge(write(folder, mutated), require="efa").verdict == "efa":
                    survivors.append(f"{name}:{number + 1} -> {new}: {line}")
    assert survivors == []
