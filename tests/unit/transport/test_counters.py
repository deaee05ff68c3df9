from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from training.transport.collect import read_counters, write_counters
from training.transport.counters import UPPER_SLACK_BYTES, compare_with_expected
from training.transport.records import DeviceCounters, HostCounters, NodeCounters, load_counters

AMAZON, MELLANOX = "0x1d0f", "0x15b3"


def make_device(root: Path, name: str, vendor: str | None = AMAZON, **counters: int) -> Path:
    folder = root / name / "ports" / "1" / "hw_counters"
    folder.mkdir(parents=True)
    for counter, value in ({"tx_bytes": 10, "rx_bytes": 20} | counters).items():
        (folder / counter).write_text(f"{value}\n")
    if vendor is not None:
        (root / name / "device").mkdir()
        (root / name / "device" / "vendor").write_text(f"{vendor}\n")
    return folder


def host(before: dict[str, int], after: dict[str, int], expected: int | None = 1000) -> HostCounters:
    return HostCounters(devices={"efa0": DeviceCounters(before=before, after=after)}, expected_bytes=expected)


def test_two_devices_are_read_and_other_vendors_left_out(tmp_path: Path) -> None:
    make_device(tmp_path, "rdmap0s6", tx_bytes=1, retrans_bytes=3)
    make_device(tmp_path, "rdmap0s7", tx_bytes=2)
    make_device(tmp_path, "mlx5_0", vendor=MELLANOX)
    counters = read_counters(tmp_path)
    assert counters.problems == ()
    assert set(counters.devices) == {"rdmap0s6", "rdmap0s7"}
    assert counters.devices["rdmap0s6"] == {"tx_bytes": 1, "rx_bytes": 20, "retrans_bytes": 3}


def test_no_device_is_a_problem_that_says_where(tmp_path: Path) -> None:
    assert read_counters(tmp_path / "absent").problems == (f"no EFA device in {tmp_path / 'absent'}",)
    make_device(tmp_path, "mlx5_0", vendor=MELLANOX)
    assert "no EFA device" in read_counters(tmp_path).problems[0]


def test_device_without_the_byte_counters_is_a_problem(tmp_path: Path) -> None:
    (make_device(tmp_path, "rdmap0s6") / "tx_bytes").unlink()
    counters = read_counters(tmp_path)
    assert counters.devices == {}
    assert "lacks tx_bytes" in counters.problems[0]


def test_device_without_counters_folder_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "rdmap0s6" / "ports" / "1").mkdir(parents=True)
    counters = read_counters(tmp_path)
    assert "hw_counters" in counters.problems[0]
    assert "No such file" in counters.problems[0]


@pytest.mark.parametrize(("denied", "is_problem"), [("tx_bytes", True), ("lifespan", False)])
def test_permission_denied(
    denied: str, is_problem: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as root, whom no mode bit stops, so the refusal is the file system call's."""
    make_device(tmp_path, "rdmap0s6", lifespan=12)
    read_text = Path.read_text

    def refuse(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.name == denied:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refuse)
    counters = read_counters(tmp_path)
    if is_problem:
        assert counters.devices == {}
        assert counters.problems == (
            f"rdmap0s6: {tmp_path}/rdmap0s6/ports/1/hw_counters/tx_bytes: Permission denied",
        )
    else:
        assert counters.problems == ()
        assert "lifespan" not in counters.devices["rdmap0s6"]


def test_wrapped_counter_counts_on() -> None:
    node = compare_with_expected(
        "h", host({"tx_bytes": 2**64 - 400, "rx_bytes": 0}, {"tx_bytes": 700, "rx_bytes": 1100})
    )
    assert (node.tx_bytes, node.rx_bytes, node.agrees) == (1100, 1100, True)


def test_counter_that_fell_is_a_reset_and_not_a_wrap() -> None:
    node = compare_with_expected(
        "h", host({"tx_bytes": 5000, "rx_bytes": 0}, {"tx_bytes": 70, "rx_bytes": 1100})
    )
    assert (node.agrees, node.tx_bytes) == (None, None)
    assert "efa0: tx_bytes fell from 5000 to 70" in node.note


def test_two_devices_add_up() -> None:
    half = DeviceCounters(before={"tx_bytes": 0, "rx_bytes": 0}, after={"tx_bytes": 510, "rx_bytes": 520})
    node = compare_with_expected("h", HostCounters(devices={"efa0": half, "efa1": half}, expected_bytes=1000))
    assert (node.tx_bytes, node.rx_bytes, node.agrees) == (1020, 1040, True)


@pytest.mark.parametrize(
    ("moved", "agrees"),
    [(899, False), (900, True), (1000, True), (3000, True), (3000 + UPPER_SLACK_BYTES + 1, False)],
)
def test_tolerance(moved: int, agrees: bool) -> None:
    zero = {"tx_bytes": 0, "rx_bytes": 0}
    for tx, rx in ((moved, 1000), (1000, moved)):
        assert compare_with_expected("h", host(zero, {"tx_bytes": tx, "rx_bytes": rx})).agrees is agrees


def test_written_counters_are_read_back(tmp_path: Path) -> None:
    before = NodeCounters(host="a", devices={"efa0": {"tx_bytes": 1, "rx_bytes": 2}})
    after = NodeCounters(host="a", devices={"efa0": {"tx_bytes": 11, "rx_bytes": 12}})
    path = write_counters(tmp_path, [before], [after], {"a": 10})
    assert json.loads(path.read_text()) == {
        "a": {
            "efa0": {"before": {"tx_bytes": 1, "rx_bytes": 2}, "after": {"tx_bytes": 11, "rx_bytes": 12}},
            "expected_bytes": 10,
        }
    }
    counters = load_counters(tmp_path)["a"]
    assert compare_with_expected("a", counters).agrees


def test_device_or_host_read_only_once_is_a_problem(tmp_path: Path) -> None:
    both = {"efa0": {"tx_bytes": 1, "rx_bytes": 2}}
    write_counters(
        tmp_path,
        [NodeCounters(host="a", devices=both | {"efa1": {"tx_bytes": 1, "rx_bytes": 2}})],
        [NodeCounters(host="a", devices=both), NodeCounters(host="b", devices=both)],
        {"a": 10, "b": 10},
    )
    counters = load_counters(tmp_path)
    assert counters["a"].problems == ("efa1 was read only before the job",)
    assert counters["b"].problems[0] == "before the job: the host was not read"
    assert compare_with_expected("a", counters["a"]).agrees is None
