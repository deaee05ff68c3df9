"""Builds NCCL log sets line by line, in the spelling of each NCCL and aws-ofi-nccl version.

The line formats are those of NVIDIA/nccl (src/debug.cc, src/init.cc, src/transport/net.cc, src/plugin) and of
aws/aws-ofi-nccl (src/nccl_ofi_net.cpp) at the versions named. A set is a ``Job``: lines per rank, plus what
the job itself records (ranks.json, counters.json). Cases change the lines of a healthy job and write it to a
folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXPECTED_BYTES = 10_400_000_000  # one full-shard step of a 1.5 B model, docs/transport.md


@dataclass(frozen=True)
class Versions:
    """NCCL and plugin version, and with them the spelling of every line."""

    nccl: str = "2.29.7"
    plugin: str = "1.20.0"

    @staticmethod
    def _number(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split("."))

    @property
    def network(self) -> str:
        return "AWS Libfabric" if self._number(self.plugin) < (1, 13) else "Libfabric"

    def provider_line(self, provider: str = "efa", num_nics: int = 1) -> str:
        plugin = self._number(self.plugin)
        if plugin >= (1, 14):
            fabric = "efa-direct" if provider == "efa" and plugin >= (1, 16) else provider
            fabric = fabric if provider == "efa" else "10.0.0.0/16"
            return f"NET/OFI Selected provider is {provider}, fabric is {fabric} (found {num_nics} nics)"
        if plugin >= (1, 9):
            return f"NET/OFI Selected Provider is {provider} (found {num_nics} nics)"
        return f"NET/OFI Selected Provider is {provider}"

    def missing_plugin_lines(self) -> list[str]:
        nccl = self._number(self.nccl)
        if nccl < (2, 20):
            return ["NET/Plugin : No plugin found (libnccl-net.so), using internal implementation"]
        if nccl < (2, 27):
            return ["NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin."]
        return ["NET/Plugin: Could not find: libnccl-net.so"]

    def assigned_lines(self, network: str) -> list[str]:
        if self._number(self.nccl) < (2, 27):
            return []
        return [f"Initialized NET plugin {network}", f"Assigned NET plugin {network} to comm"]

    def device(self, local_rank: int) -> str:
        """What stands in brackets after a rank: the PCI bus id before 2.19, the NVML index from then on."""
        return f"{0x18 + 16 * local_rank:x}0" if self._number(self.nccl) < (2, 19) else str(local_rank)

    def communicator_line(
        self, phase: str, rank: int, size: int, local_rank: int, comm_id: str, split: tuple[str, int] | None
    ) -> str:
        """``split`` is the parent's pointer and the color of a communicator that is a part of another."""
        nccl = self._number(self.nccl)
        in_front = f"[Rank {rank}] " if nccl >= (2, 30) else ""
        name = "" if nccl < (2, 19) else "ncclCommInitRankConfig " if split is None else "ncclCommSplit "
        head = (
            f"{in_front}{name}comm {pointer(comm_id)} rank {rank} nranks {size} cudaDev {local_rank} "
            f"nvmlDev {local_rank} busId {0x18 + 16 * local_rank:x}0"
        )
        if split is None:
            return f"{head} commId {comm_id} - Init {phase}"
        parent, color = split
        if nccl < (2, 22):  # every split has the same commId
            return f"{head} parent {parent} color {color} key {rank} commId 0xa1b2c3 - Init {phase}"
        dash = "- " if phase == "START" and nccl < (2, 28) else " - "
        return f"{head} parent {parent} splitCount 1 color {color} key {rank}{dash}Init {phase}"


def pointer(comm_id: str) -> str:
    """A pointer for a communicator; in life it differs between processes, which the reader must not mind."""
    return f"0x55{int(comm_id, 16) & 0xFFFFFFFF:08x}"


@dataclass
class RankLog:
    rank: int
    host: str
    pid: int
    local_rank: int
    messages: list[str] = field(default_factory=list[str])

    def log(self, *messages: str) -> None:
        self.messages += messages

    def lines(self) -> list[str]:
        """Log lines: a message that begins with ``WARN `` gets a warning's prefix, one with ``raw `` none."""
        prefix = f"{self.host}:{self.pid}:{self.pid + 87} [{self.local_rank}]"
        return [
            message.removeprefix("raw ")
            if message.startswith("raw ")
            else f"[2026-11-30 08:15:02] {prefix} nccl_ofi_net.cpp:334 NCCL {message}"
            if message.startswith("WARN ")
            else f"{prefix} NCCL INFO {message}"
            for message in self.messages
        ]

    def replace(self, old: str, new: str, *, only_first: bool = False) -> None:
        hits = [i for i, message in enumerate(self.messages) if old in message]
        assert hits, f"rank {self.rank} logs no {old!r}"
        for i in hits[:1] if only_first else hits:
            self.messages[i] = self.messages[i].replace(old, new)

    def drop(self, text: str, *, only_first: bool = False) -> None:
        hits = [i for i, message in enumerate(self.messages) if text in message]
        assert hits, f"rank {self.rank} logs no {text!r}"
        for i in reversed(hits[:1] if only_first else hits):
            del self.messages[i]


@dataclass
class Job:
    """One attempt of a job: its ranks' logs and what it records about itself."""

    versions: Versions
    ranks: list[RankLog]
    counters: dict[str, Any] = field(default_factory=dict[str, Any])
    backend: str | None = None

    @property
    def hosts(self) -> list[str]:
        return list(dict.fromkeys(rank.host for rank in self.ranks))

    def each(self, change: Callable[[RankLog], object]) -> Job:
        for rank in self.ranks:
            change(rank)
        return self

    def count_bytes(
        self, share: float = 1.02, expected: int | None = EXPECTED_BYTES, devices: int = 1
    ) -> Job:
        """Counters of every host: ``share`` of the expected bytes, spread over its devices."""
        moved = int(share * (expected or EXPECTED_BYTES)) // devices
        for host in self.hosts:
            self.counters[host] = {
                f"rdmap0s{6 + i}": {
                    "before": {
                        "tx_bytes": 5_000 + i,
                        "rx_bytes": 7_000 + i,
                        "retrans_bytes": 0,
                        "rx_drops": 1,
                    },
                    "after": {
                        "tx_bytes": 5_000 + i + moved,
                        "rx_bytes": 7_000 + i + moved,
                        "retrans_bytes": 640,
                        "rx_drops": 1,
                    },
                }
                for i in range(devices)
            }
            if expected is not None:
                self.counters[host]["expected_bytes"] = expected
        return self

    def records(self) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = [
            {"rank": r.rank, "host": r.host, "pid": r.pid, "local_rank": r.local_rank} for r in self.ranks
        ]
        return (
            records if self.backend is None else [{**record, "backend": self.backend} for record in records]
        )

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for rank in self.ranks:
            if rank.messages:
                text = "".join(f"{line}\n" for line in rank.lines())
                (folder / f"{rank.host}.{rank.pid}.log").write_text(text, encoding="utf-8")
        (folder / "ranks.json").write_text(json.dumps(self.records()), encoding="utf-8")
        if self.counters:
            (folder / "counters.json").write_text(json.dumps(self.counters), encoding="utf-8")
        return folder


def job(
    *,
    hosts: int = 2,
    gpus: int = 4,
    versions: Versions = Versions(),
    num_channels: int = 2,
    num_nics: int = 1,
    gpudirect: bool = False,
    hybrid: bool = False,
    split: bool = False,
    first_pid: int = 1201,
    world_id: str = "0x43cd2ca05a3d557",
) -> Job:
    """A healthy job over EFA: a ring over all ranks per channel, with ``hybrid`` also one shard group per
    node and one replica group per local rank (own communicators, or ``split`` from the first one)."""
    ranks = [
        RankLog(
            rank=node * gpus + local,
            host=f"ray-train-gpu-worker-{'abcdefgh'[node]}7x2q",
            pid=first_pid + 11 * local + node,
            local_rank=local,
        )
        for node in range(hosts)
        for local in range(gpus)
    ]
    built = Job(versions, ranks)
    for rank in ranks:
        _start(rank, versions, num_nics)
    _communicator(built, ranks, world_id, num_channels, gpudirect, parent=None, color=0)
    if hybrid:
        parent = pointer(world_id) if split else None
        for node in range(hosts):
            members = ranks[node * gpus : (node + 1) * gpus]
            _communicator(built, members, f"0x5aa0{node}", num_channels, gpudirect, parent, color=node)
        for local in range(gpus):
            members = ranks[local::gpus]
            _communicator(
                built, members, f"0x6bb0{local}", num_channels, gpudirect, parent, color=100 + local
            )
    return built.count_bytes(devices=num_nics)


def _start(rank: RankLog, versions: Versions, num_nics: int) -> None:
    if rank.rank == 0:
        rank.log(f"raw NCCL version {versions.nccl}+cuda13.0")
    rank.log(
        "NCCL_SOCKET_IFNAME set by environment to eth0",
        f"Bootstrap: Using eth0:10.0.{rank.rank}.12<0>",
        f"NCCL_NET set by environment to {versions.network}",
        "NCCL_NET_PLUGIN set by environment to ofi",
        f"NET/OFI Initializing aws-ofi-nccl {versions.plugin}",
        "NET/OFI Using Libfabric version 2.1",
        "NET/OFI No eligible providers were found",  # the RDMA protocol's try, before SENDRECV finds one
        versions.provider_line(num_nics=num_nics),
        "NET/OFI Using transport protocol SENDRECV",
        "NET/OFI Need to force simple protocol: GDR not supported",
    )


def _communicator(
    built: Job,
    members: list[RankLog],
    comm_id: str,
    num_channels: int,
    gpudirect: bool,
    parent: str | None,
    color: int,
) -> None:
    versions, size = built.versions, len(members)
    split = None if parent is None else (parent, color)
    num_nodes = len({m.host for m in members})
    for index, rank in enumerate(members):
        rank.log(*versions.assigned_lines(versions.network))
        rank.log(f"Using network {versions.network}")
        rank.log(versions.communicator_line("START", index, size, rank.local_rank, comm_id, split))
        rank.log(
            f"comm {pointer(comm_id)} rank {index} nRanks {size} nNodes {num_nodes} localRanks "
            f"{size // num_nodes} localRank {index % (size // num_nodes)} MNNVL 0",
            "Trees [0] -1/-1/-1->0->1 [1] -1/-1/-1->0->1",
        )
        rank.log(versions.communicator_line("COMPLETE", index, size, rank.local_rank, comm_id, split))
    if size == 1:
        return
    for channel in range(num_channels):
        ring = _ring(size, size // num_nodes, channel)
        for place, source in enumerate(ring):
            _connect(built.versions, members, channel, source, ring[(place + 1) % size], gpudirect)
    for rank in members:
        rank.log("Connected all rings, use ring PXN 0 GDR 0")


def _ring(size: int, ranks_per_node: int, channel: int) -> list[int]:
    """Order of the ranks: node by node, entering each node at another rank per channel, as NCCL spreads its
    load.
    """
    return [
        first + (channel + step) % ranks_per_node
        for first in range(0, size, ranks_per_node)
        for step in range(ranks_per_node)
    ]


def _connect(
    versions: Versions, members: list[RankLog], channel: int, source: int, target: int, gpudirect: bool
) -> None:
    sender, receiver = members[source], members[target]
    pair = (
        f"Channel {channel:02d}/0 : {source}[{versions.device(sender.local_rank)}] -> "
        f"{target}[{versions.device(receiver.local_rank)}]"
    )
    if sender.host == receiver.host:
        sender.log(f"{pair} via SHM/direct/direct")
        return
    suffix = "/GDRDMA" if gpudirect else ""
    sender.log(f"{pair} [send] via NET/{versions.network}/{channel if gpudirect else 0}{suffix}")
    receiver.log(f"{pair} [receive] via NET/{versions.network}/{channel if gpudirect else 0}{suffix}")


def to_sockets(rank: RankLog, versions: Versions) -> None:
    """What the rank logs when the plugin did not start and NCCL took its own sockets."""
    network = versions.network
    rank.messages = [m for m in rank.messages if not m.startswith(("NET/OFI", "NCCL_NET set"))]
    rank.messages = [
        m.replace(f"Using network {network}", "Using network Socket")
        .replace(f"NET/{network}/", "NET/Socket/")
        .replace(f"NET plugin {network}", "NET plugin Socket")
        for m in rank.messages
    ]
    start = next(i for i, message in enumerate(rank.messages) if message.startswith("Bootstrap"))
    rank.messages[start + 1 : start + 1] = [
        "NET/IB : No device found.",
        f"NET/Socket : Using [0]eth0:10.0.{rank.rank}.12<0>",
    ]


def to_tcp_provider(rank: RankLog, versions: Versions) -> None:
    """What the rank logs when libfabric's tcp provider was forced: everything but the provider stays."""
    efa = next(m for m in rank.messages if "elected" in m)
    rank.replace(efa, versions.provider_line("tcp"))
