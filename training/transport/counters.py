"""EFA hardware counters: read from sysfs, subtracted, and set against the bytes that the job must have sent.

The counters are of the device and count every byte it moved, whichever process or pod asked for it.
Source of the names: the efa driver of Linux (drivers/infiniband/hw/efa/efa_verbs.c).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from training.transport.records import HostCounters, NodeCounters

SYSFS_ROOT = Path("/sys/class/infiniband")
AMAZON_PCI_VENDOR = 0x1D0F

#: The device may count this much less than the collectives' payload. It adds headers and retransmits on top,
#: so a healthy job counts at least its payload; the tenth is for what the formula does not know of NCCL's
#: choices. It is less than one of eight channels (12.5 %), so a channel that went elsewhere is still missed.
#: 2026-12-01
LOWER_TOLERANCE = 0.9
#: The device may count this many times the payload: NCCL's LL protocol sends two bytes for each, evaluation
#: and the first broadcast of weights come on top, as do small all-reduces and connection set-up (the
#: constant). More than that means the expectation is not of this job, or another job used the device.
#: 2026-12-01
UPPER_FACTOR = 3
UPPER_SLACK_BYTES = 1 << 30

_COUNTER_MODULUS = 1 << 64
_REQUIRED = ("tx_bytes", "rx_bytes")


def read_node(host: str, sysfs_root: Path = SYSFS_ROOT) -> NodeCounters:
    """Hardware counters of every EFA device of this node, now.

    Devices of another vendor are left out. What cannot be read is a sentence in ``problems``, not an error: a
    job must not fail for its evidence.
    """
    devices: dict[str, dict[str, int]] = {}
    problems: list[str] = []
    try:
        folders = sorted(sysfs_root.iterdir())
    except FileNotFoundError:
        folders = []
    except OSError as error:
        folders = []
        problems.append(f"{sysfs_root}: {error.strerror or error}")
    for folder in folders:
        try:
            if _is_amazon(folder):
                devices[folder.name] = _read_device(folder / "ports" / "1" / "hw_counters")
        except OSError as error:
            problems.append(f"{folder.name}: {error.filename or folder}: {error.strerror or error}")
        except ValueError as error:
            problems.append(f"{folder.name}: {error}")
    if not devices and not problems:
        problems.append(f"no EFA device in {sysfs_root}")
    return NodeCounters(host=host, devices=devices, problems=tuple(problems))


def _is_amazon(folder: Path) -> bool:
    try:
        vendor = (folder / "device" / "vendor").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return True  # no PCI parent to ask; a device without EFA's counters fails below
    return int(vendor, 16) == AMAZON_PCI_VENDOR


def _read_device(folder: Path) -> dict[str, int]:
    """Raises OSError or ValueError for the two counters that the verdict needs; another one is left out."""
    values: dict[str, int] = {}
    for path in sorted(folder.iterdir()):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            if path.name in _REQUIRED:
                raise
            continue
        if text.isdecimal():
            values[path.name] = int(text)
    lacking = [name for name in _REQUIRED if name not in values]
    if lacking:
        raise ValueError(f"{folder} lacks {' and '.join(lacking)}")
    return values


class NodeTransport(BaseModel):
    """What the EFA devices of one host moved during the job, beside what its collectives must have sent.

    Bytes over all devices of the host. ``agrees`` is None where there is nothing to compare; ``note`` says
    why, or by how much they differ.
    """

    model_config = ConfigDict(frozen=True)

    host: str
    tx_bytes: int | None
    rx_bytes: int | None
    expected_bytes: int | None
    counters: dict[str, int]
    agrees: bool | None
    note: str

    @property
    def carried(self) -> bool:
        """Whether the devices moved at least what the collectives needed."""
        return bool(self.expected_bytes) and not _too_little(self)


def compare_with_expected(host: str, counters: HostCounters | None) -> NodeTransport:
    """Subtract before from after and compare with the expected bytes, each direction on its own."""
    if counters is None:
        return _incomparable(host, None, "no counters of this host")
    if counters.problems:
        return _incomparable(host, counters, "; ".join(counters.problems))
    if not counters.devices:
        return _incomparable(host, counters, "no EFA device")
    deltas: dict[str, int] = {}
    for device, values in counters.devices.items():
        try:
            for name, delta in _device_delta(values.before, values.after).items():
                deltas[name] = deltas.get(name, 0) + delta
        except ValueError as error:
            return _incomparable(host, counters, f"{device}: {error}")
    node = NodeTransport(
        host=host,
        tx_bytes=deltas["tx_bytes"],
        rx_bytes=deltas["rx_bytes"],
        expected_bytes=counters.expected_bytes,
        counters=deltas,
        agrees=None,
        note="",
    )
    if counters.expected_bytes is None:
        return node.model_copy(update={"note": "the job recorded no expected bytes to compare with"})
    if counters.expected_bytes == 0:
        return node.model_copy(update={"note": "the job completed no step that had to cross the network"})
    agrees = not _too_little(node) and not _too_much(node)
    return node.model_copy(update={"agrees": agrees, "note": _sentence(node)})


def _device_delta(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Raises ValueError for a counter that is absent on one side or ran backwards without wrapping."""
    for name in _REQUIRED:
        for moment, values in (("before", before), ("after", after)):
            if name not in values:
                raise ValueError(f"{name} {moment} the job is missing")
    deltas: dict[str, int] = {}
    for name in sorted(before.keys() & after.keys()):
        delta = after[name] - before[name]
        if delta < 0:
            # A 64-bit counter that wrapped was in its upper half; anything else is a device that started
            # anew.
            if before[name] < _COUNTER_MODULUS // 2:
                raise ValueError(
                    f"{name} fell from {before[name]} to {after[name]}: the device or the node was replaced "
                    "or reset"
                )
            delta += _COUNTER_MODULUS
        deltas[name] = delta
    return deltas


def _incomparable(host: str, counters: HostCounters | None, note: str) -> NodeTransport:
    return NodeTransport(
        host=host,
        tx_bytes=None,
        rx_bytes=None,
        expected_bytes=None if counters is None else counters.expected_bytes,
        counters={},
        agrees=None,
        note=note,
    )


def _too_little(node: NodeTransport) -> bool:
    least = LOWER_TOLERANCE * (node.expected_bytes or 0)
    return node.tx_bytes is None or node.rx_bytes is None or min(node.tx_bytes, node.rx_bytes) < least


def _too_much(node: NodeTransport) -> bool:
    most = UPPER_FACTOR * (node.expected_bytes or 0) + UPPER_SLACK_BYTES
    return max(node.tx_bytes or 0, node.rx_bytes or 0) > most


def _sentence(node: NodeTransport) -> str:
    counted = f"EFA counted {_gb(node.tx_bytes)} sent and {_gb(node.rx_bytes)} received"
    expected = f"the collectives must have moved {_gb(node.expected_bytes)} each way"
    if _too_little(node):
        return f"{counted}, but {expected}: the rest took another way"
    if _too_much(node):
        return f"{counted}, far more than the {_gb(node.expected_bytes)} of the collectives: other traffic"
    return f"{counted}; {expected}"


def _gb(num_bytes: int | None) -> str:
    return "nothing" if num_bytes is None else f"{num_bytes / 1e9:,.3f} GB"
