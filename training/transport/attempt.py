"""The evidence of one attempt: each rank's log, and which of its network channels lead to another host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from training.transport import nccl_lines
from training.transport.evidence import Evidence
from training.transport.log_reader import ChannelGroup, LogSet, ProcessLog
from training.transport.nccl_lines import Channel
from training.transport.records import RankRecord

#: identity of a communicator -> (its size, rank in it) -> ranks of the job that have this place.
Members = defaultdict[tuple[str, ...], defaultdict[tuple[int, int], set[int]]]


@dataclass(slots=True)
class RankEvidence:
    """One rank's log, with its channels sorted by where their other end is."""

    record: RankRecord
    log: ProcessLog | None
    channels: dict[Channel, ChannelGroup] = field(default_factory=dict[Channel, ChannelGroup])
    internode: dict[Channel, ChannelGroup] = field(default_factory=dict[Channel, ChannelGroup])
    peers: set[int] = field(default_factory=set[int])
    unplaced: dict[Channel, ChannelGroup] = field(default_factory=dict[Channel, ChannelGroup])

    @property
    def providers(self) -> dict[str, Evidence]:
        return {} if self.log is None else self.log.providers

    @property
    def networks(self) -> dict[str, Evidence]:
        return {} if self.log is None else self.log.networks

    @property
    def num_internode(self) -> int:
        return sum(group.numbers.total() for group in self.internode.values())

    @property
    def path(self) -> Literal["efa", "tcp", "mixed", "other", "unknown"]:
        """What this rank's data path is made of, by its own log."""
        kinds: set[str] = set()
        for network in {*self.networks, *(channel.network for channel in self.channels)}:
            name = network.lower()
            if name in nccl_lines.SOCKET_NETWORKS:
                kinds.add("tcp")
            elif name in nccl_lines.EFA_NETWORKS:
                kinds |= {provider_kind(provider) for provider in self.providers}
            else:
                kinds.add("other")
        if not kinds:
            return "unknown"
        if "other" in kinds:
            return "other"
        if kinds == {"efa"}:
            return "efa"
        return "tcp" if kinds == {"tcp"} else "mixed"


def provider_kind(provider: str) -> str:
    if provider in nccl_lines.EFA_PROVIDERS:
        return "efa"
    return "tcp" if provider in nccl_lines.TCP_PROVIDERS else "other"


class AttemptEvidence:
    """The logs of an attempt, sorted by the ranks that the job recorded."""

    def __init__(self, logs: LogSet, records: Sequence[RankRecord]) -> None:
        self.logs = logs
        self.ranks = [self._of_rank(record) for record in records]
        self.hosts = sorted({record.host for record in records})
        self._place_channels()

    def _of_rank(self, record: RankRecord) -> RankEvidence:
        log = self.logs.processes.get((record.host, record.pid))
        return RankEvidence(record, log, {} if log is None else log.channels())

    def _place_channels(self) -> None:
        """Sort each rank's network channels: to another host, or not to be told.

        Channel lines carry ranks of their communicator and not of the job, and not which communicator. NCCL
        uses the network inside a node only when told to (NCCL_NET_DISABLE_INTRA=0), so a channel counts as
        crossing when some communicator of the process puts its other end on another host, and as not crossing
        when none does.
        """
        members = self.communicators()
        host_of = {rank.record.rank: rank.record.host for rank in self.ranks}
        for rank in self.ranks:
            for channel, group in rank.channels.items():
                peers = self._possible_peers(rank, channel, members)
                elsewhere = {peer for peer in peers if host_of[peer] != rank.record.host}
                if elsewhere:
                    rank.internode[channel] = group
                    if len(elsewhere) == 1:
                        rank.peers |= elsewhere
                elif not peers:
                    rank.unplaced[channel] = group

    def _possible_peers(self, rank: RankEvidence, channel: Channel, members: Members) -> set[int]:
        """Ranks of the job that may be the other end, over all communicators in which this end fits."""
        assert rank.log is not None
        if not rank.log.communicators:
            everyone = {other.record.rank for other in self.ranks}
            return {channel.peer_rank} & everyone if channel.own_rank == rank.record.rank else set()
        peers: set[int] = set()
        for communicator in rank.log.communicators.values():
            if communicator.rank != channel.own_rank or communicator.size <= channel.peer_rank:
                continue
            if communicator.identity is None:
                peers |= {other.record.rank for other in self.ranks if other is not rank}
            else:
                peers |= members[communicator.identity].get((communicator.size, channel.peer_rank), set())
        return peers

    def communicators(self) -> Members:
        """Communicators whose NCCL version prints what tells them apart."""
        members: Members = defaultdict(lambda: defaultdict(set))
        for rank in self.ranks:
            if rank.log is not None:
                for view in rank.log.communicators.values():
                    if view.identity is not None:
                        members[view.identity][view.size, view.rank].add(rank.record.rank)
        return members


def where(evidence: Evidence | None) -> str:
    """file:line, nothing without evidence."""
    return "" if evidence is None else f"{evidence.file}:{evidence.line}"


def join(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 3, 5 as "0-3, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else join(run) for run in runs)
