"""What single lines of an NCCL log mean, for NCCL 2.18 to 2.31 and aws-ofi-nccl 1.7 to 1.22.

Sources: NVIDIA/nccl src/debug.cc (prefix), src/init.cc (communicators, "Using network"), src/transport/net.cc
(channels), src/plugin/net.cc and plugin_open.cc; aws/aws-ofi-nccl src/nccl_ofi_net.cpp (provider). Spellings
changed over the versions: "Provider" became "provider" in plugin 1.14, "AWS Libfabric" became "Libfabric" in
1.13, a communicator's line got "[Rank N]" in front in NCCL 2.30.
"""

from __future__ import annotations

import re
from typing import NamedTuple

#: host:pid:tid [cuda device], after an optional timestamp and whatever a log shipper put in front.
PREFIX = re.compile(rb"([A-Za-z0-9][A-Za-z0-9_.-]*):(\d{1,10}):\d{1,10} \[-?\d+\]")

CHANNEL = re.compile(
    rb"(?:Channel|Ring) (?P<channel>\d{1,4})(?:/(?P<connection>\d{1,2}))? : "
    rb"(?P<source>\d{1,9})(?:\[(?P<source_device>[0-9a-f]+)\])? -> "
    rb"(?P<target>\d{1,9})(?:\[(?P<target_device>[0-9a-f]+)\])? "
    rb"\[(?P<direction>send|receive)\] via NET/(?P<network>[^/]+)/\d+(?:\(\d+\))?"
    rb"(?P<gpudirect>/GDRDMA(?:\(PCI\))?)?(?:/Shared)?"
)
NETWORK = re.compile(rb"Using network (?P<network>[A-Za-z][\w .-]*)")
PROVIDER = re.compile(
    rb"NET/OFI Selected [Pp]rovider is (?P<provider>[\w-]+)(?:;[\w;-]+)?"
    rb"(?:, fabric is (?P<fabric>[^()]+?))?(?: \(found \d+ nics\))?"
)
COMMUNICATOR = re.compile(
    rb"(?:\[Rank \d+\] )?(?:\w+ )?comm (?P<pointer>\S+) rank (?P<rank>\d{1,9}) nranks (?P<size>\d{1,9}) "
    rb"(?P<details>.*?)- Init (?P<phase>START|COMPLETE)"
)
COMMUNICATOR_DETAIL = re.compile(rb"\b(parent|splitCount|color|commId) (\S+?)(?=[ -]|$)")
TOPOLOGY = re.compile(rb"comm \S+ rank \d+ nRanks \d+ nNodes (?P<nodes>\d{1,9}) ")
VERSION = re.compile(rb"NCCL version (?P<version>[0-9][\w.+-]*)")
PLUGIN_VERSION = re.compile(rb"NET/OFI Initializing aws-ofi-nccl (?P<version>[\w.+-]+)")

#: Names under which the aws-ofi-nccl plugin registers itself with NCCL.
EFA_NETWORKS = frozenset({"libfabric", "aws libfabric", "ofi"})
SOCKET_NETWORKS = frozenset({"socket"})
EFA_PROVIDERS = frozenset({"efa"})
#: libfabric providers that run over the kernel's TCP/IP.
TCP_PROVIDERS = frozenset({"tcp", "sockets", "udp", "net"})


class Channel(NamedTuple):
    """One direction of one channel between two ranks of a communicator, as one of its ends printed it."""

    source: int
    target: int
    devices: tuple[bytes | None, bytes | None]
    sends: bool
    network: str
    gpudirect: bool

    @property
    def own_rank(self) -> int:
        return self.source if self.sends else self.target

    @property
    def peer_rank(self) -> int:
        return self.target if self.sends else self.source


def parse_channel(message: bytes) -> tuple[Channel, tuple[int, int]] | None:
    """The channel and its (channel, connection) number, or None when the line is not of form CHANNEL."""
    match = CHANNEL.fullmatch(message)
    if match is None:
        return None
    channel = Channel(
        source=int(match["source"]),
        target=int(match["target"]),
        devices=(match["source_device"], match["target_device"]),
        sends=match["direction"] == b"send",
        network=match["network"].decode(errors="replace"),
        gpudirect=match["gpudirect"] is not None,
    )
    return channel, (int(match["channel"]), int(match["connection"] or 0))
