from __future__ import annotations

from pathlib import Path

import pytest

from training.transport import diagnosis
from training.transport.evidence import Evidence

LINES = [
    ("plugin-not-found", b"NET/Plugin : No plugin found (libnccl-net.so), using internal implementation"),
    ("plugin-not-found", b"Plugin load (libnccl-net.so) returned 2 : cannot open shared object file"),
    ("plugin-not-found", b"NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin."),
    ("plugin-not-found", b"NET/Plugin: Could not find: ofi libnccl-net-ofi.so"),
    (
        "plugin-glibc",
        b"NET/Plugin: libnccl-net.so: libc.so.6: version `GLIBC_2.38' not found (required by x)",
    ),
    ("plugin-disabled", b"NCCL_NET_PLUGIN set by environment to none"),
    ("network-forced", b"NCCL_NET set by environment to Socket"),
    ("network-forced", b"NCCL_NET set by environment to socket"),
    ("no-network", b"Failed to initialize any NET plugin"),
    ("device-not-mounted", b"fi_getinfo: provider efa output empty list"),
    ("device-not-mounted", b"fi_getinfo() call failed: No data available"),
    ("no-eligible-provider", b"NET/OFI No eligible providers were found"),
    ("only-efa-supported", b"NET/OFI Only EFA provider is supported"),
    ("libfabric-too-old", b"NET/OFI EFA provider requires at least libfabric version 1.22.0."),
    ("security-group", b"NET/OFI Unable to insert remote address into address vector for device 0. RC: -22"),
    ("security-group", b"Unresponsive receiver (reachable by EFA device but handshake failed)"),
    ("wrong-interface", b"NET/Socket : Using [0]pod-id-link0:169.254.170.23<0>"),
    ("wrong-interface", b"Bootstrap: Using pod-id-link0:169.254.170.23<0>"),
    ("no-interface", b"NET/Socket : No usable listening interface found"),
    ("no-interface", b"Bootstrap : no socket interface found"),
    ("memlock", b"NET/OFI Unable to register memory (type = 2) for device 0. RC: -12"),
    ("memlock", b"NET/OFI mmap failed: Cannot allocate memory"),
    ("plugin-failed", b"NET/OFI Unable to find a protocol that worked.  Failing initialization."),
    ("plugin-failed", b"Failed to initialize NET plugin Libfabric"),
]
HARMLESS = [
    b"Bootstrap: Using eth0:10.0.1.12<0>",
    b"NET/Socket : Using [0]eth0:10.0.1.12<0>",
    b"NET/IB : No device found.",
    b"NCCL_NET set by environment to Libfabric",
    b"NCCL_NET_PLUGIN set by environment to ofi",
    b"TUNER/Plugin: Could not find: libnccl-tuner.so",
    b"Failed to initialize NET plugin IB",
    b"NET/OFI Need to force simple protocol: GDR not supported",
    b"NET/Plugin: Failed to find ncclCollNetPlugin_v8 symbol.",
]


@pytest.mark.parametrize(("kind", "line"), LINES)
def test_symptom(kind: str, line: bytes) -> None:
    assert diagnosis.symptom_of(line) == kind


@pytest.mark.parametrize("line", HARMLESS)
def test_healthy_lines_are_no_symptom(line: bytes) -> None:
    assert diagnosis.symptom_of(line) is None


def test_sentence_says_what_where_and_what_to_change() -> None:
    found = diagnosis.explain("security-group", Evidence(file="h.1.log", line=12, text="the line"))
    assert found.where == "h.1.log:12"
    assert found.seen.endswith("the line")
    assert "to itself and from itself" in found.change


def test_every_kind_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "transport.md").read_text(encoding="utf-8")
    kinds = {kind for kind, _ in LINES} | {"no-log", "no-efa-device", "provider-forced"}
    assert [kind for kind in sorted(kinds) if f"| `{kind}` |" not in page] == []
