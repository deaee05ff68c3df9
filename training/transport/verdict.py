"""The verdict: which network carried the collectives of one attempt, and what proves it.

``efa`` needs all of it: every rank's own log, whole; the EFA provider and its network in each; channels to
another host on both ends of each connection; no socket anywhere on the data path; and hardware counters that
agree with the bytes the collectives must have moved. Less is ``unknown`` and says what is missing.
docs/transport.md explains it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from training.transport import diagnosis, nccl_lines
from training.transport.counters import NodeTransport, compare_with_expected
from training.transport.diagnosis import Diagnosis
from training.transport.evidence import Evidence
from training.transport.log_reader import (
    ChannelGroup,
    LogSet,
    ProcessLog,
    read_logs,
)
from training.transport.nccl_lines import Channel
from training.transport.records import (
    Backend,
    EvidenceError,
    HostCounters,
    RankRecord,
    load_counters,
    load_ranks,
)

Verdict = Literal["efa", "tcp", "mixed", "none", "unknown"]
Require = Literal["efa", "any"]

_MAX_EVIDENCE = 6
_MAX_SENTENCES = 5

#: identity of a communicator -> (its size, rank in it) -> ranks of the job that have this place.
_Members = defaultdict[tuple[str, ...], defaultdict[tuple[int, int], set[int]]]


class RankTransport(BaseModel):
    """What one rank's log says. ``network`` and ``provider`` are None when its log does not name them.

    ``internode_channels`` counts the channel ends of this rank whose other end is on another host;
    ``gpudirect`` says whether all of them move data between GPU and network device without host memory, None
    without channels.
    """

    model_config = ConfigDict(frozen=True)

    rank: int
    host: str
    pid: int
    local_rank: int
    provider: str | None
    network: str | None
    internode_channels: int
    gpudirect: bool | None
    evidence: tuple[Evidence, ...]


class TransportReport(BaseModel):
    """``transport.json``: the verdict, its reason, and per rank and per node what it rests on."""

    model_config = ConfigDict(frozen=True)

    verdict: Verdict
    reason: str
    attempt: str
    required: Require
    backend: Backend | None
    nccl_version: str | None
    plugin_version: str | None
    ranks: tuple[RankTransport, ...]
    nodes: tuple[NodeTransport, ...]
    diagnosis: tuple[Diagnosis, ...]


def judge(attempt_dir: Path, *, require: Require, gpudirect_required: bool = False) -> TransportReport:
    """Judge the evidence in ``nccl/<attempt>/``. Bad or missing evidence is ``unknown`` with the reason, no
    error.

    ``gpudirect_required``: on instance types with GPUDirect RDMA (p4d and later) a channel that goes through
    host memory makes the verdict ``mixed``.
    """
    try:
        ranks = load_ranks(attempt_dir)
    except EvidenceError as error:
        return _report(attempt_dir, require, "unknown", f"which ranks ran is not known: {error}")
    backends = {record.backend for record in ranks}
    if backends == {"gloo"}:
        return _judge_gloo(attempt_dir, require, ranks)
    if len(backends) > 1:
        return _report(
            attempt_dir,
            require,
            "unknown",
            "ranks.json names both gloo and nccl as the backend",
            ranks=_silent(ranks),
        )
    return _Judgement(attempt_dir, require, gpudirect_required, ranks).report()


def exit_status(report: TransportReport, require: Require) -> Literal[0, 13, 14]:
    """0 proven or not required, 13 another transport than required (``none`` included), 14 unknown."""
    if require == "any" or report.verdict == "efa":
        return 0
    return 14 if report.verdict == "unknown" else 13


def _judge_gloo(attempt_dir: Path, require: Require, ranks: Sequence[RankRecord]) -> TransportReport:
    hosts = sorted({record.host for record in ranks})
    verdict: Verdict = "tcp" if len(hosts) > 1 else "none"
    reason = (
        f"the backend is gloo, which sends over TCP sockets between {len(hosts)} hosts"
        if verdict == "tcp"
        else f"all {len(ranks)} ranks ran on {hosts[0]} (backend gloo): nothing crossed a network"
    )
    return _report(attempt_dir, require, verdict, reason, ranks=_silent(ranks), backend="gloo")


@dataclass(slots=True)
class _RankEvidence:
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
                kinds |= {_provider_kind(provider) for provider in self.providers}
            else:
                kinds.add("other")
        if not kinds:
            return "unknown"
        if "other" in kinds:
            return "other"
        if kinds == {"efa"}:
            return "efa"
        return "tcp" if kinds == {"tcp"} else "mixed"


def _provider_kind(provider: str) -> str:
    if provider in nccl_lines.EFA_PROVIDERS:
        return "efa"
    return "tcp" if provider in nccl_lines.TCP_PROVIDERS else "other"


class _Judgement:
    def __init__(
        self, attempt_dir: Path, require: Require, gpudirect_required: bool, records: Sequence[RankRecord]
    ) -> None:
        self.attempt_dir = attempt_dir
        self.require: Require = require
        self.gpudirect_required = gpudirect_required
        self.logs: LogSet = read_logs(attempt_dir)
        self.ranks = [self._evidence_of(record) for record in records]
        self.hosts = sorted({record.host for record in records})
        self.nodes: tuple[NodeTransport, ...] = ()
        self._place_channels()

    def _evidence_of(self, record: RankRecord) -> _RankEvidence:
        log = self.logs.processes.get((record.host, record.pid))
        return _RankEvidence(record, log, {} if log is None else log.channels())

    def report(self) -> TransportReport:
        if len(self.hosts) == 1:
            return self._one_host()
        self.nodes, counter_problem = self._read_counters()
        missing = list(self._missing())
        if missing:
            return self._result("unknown", self._incomplete(missing))
        paths = {rank.path for rank in self.ranks}
        if paths == {"efa"}:
            return self._efa(counter_problem)
        if "other" in paths:
            other = ", ".join(
                sorted({name for rank in self.ranks for name in (*rank.networks, *rank.providers)})
            )
            return self._result("unknown", f"the data path is neither EFA nor TCP: {other}")
        if paths == {"tcp"}:
            return self._tcp()
        ways = "; ".join(
            f"rank {_ranges(r.record.rank for r in self.ranks if r.path == path)} {text}"
            for path, text in (("efa", "on EFA"), ("tcp", "on TCP"), ("mixed", "on both"))
            if path in paths
        )
        return self._result("mixed", f"not all ranks used the same network: {ways}")

    # -- the evidence that must be there, whatever it then says ------------------------------------

    def _incomplete(self, missing: Sequence[str]) -> str:
        """The first sentences, how many more there are, and whether what is there shows another transport."""
        sentences = list(missing[:_MAX_SENTENCES])
        if len(missing) > _MAX_SENTENCES:
            sentences.append(f"and {len(missing) - _MAX_SENTENCES} more of this kind")
        elsewhere = [rank.record.rank for rank in self.ranks if rank.path in ("tcp", "mixed")]
        if elsewhere:
            sentences.append(f"the lines that are there show TCP on rank {_ranges(elsewhere)}")
        return "; ".join(sentences)

    def _missing(self) -> Iterator[str]:
        """What is missing or contradictory, one sentence each; nothing when the logs can be judged."""
        yield from self.logs.damage
        yield from self._foreign()
        silent = [rank for rank in self.ranks if rank.log is None]
        if silent:
            yield f"no NCCL log of rank {_ranges(r.record.rank for r in silent)} ({len(self.ranks)} ranks ran)"
        yield from self._incomplete_ranks()
        if not silent:
            yield from self._other_number_of_nodes()
            yield from self._incomplete_communicators()
            yield from self._unmatched_channels()
            yield from self._unconnected()

    def _foreign(self, *, hosts_only: bool = False) -> Iterator[str]:
        own = {(rank.record.host, rank.record.pid) for rank in self.ranks}
        for process, log in sorted(self.logs.processes.items()):
            if process not in own and not (hosts_only and process[0] in self.hosts):
                yield (
                    f"{_where(log.first_line)} is of {process[0]} pid {process[1]}, which is no rank of "
                    "this attempt: logs of another attempt or job"
                )

    def _incomplete_ranks(self) -> Iterator[str]:
        """What single ranks' logs lack, ranks that lack the same taken together."""
        lacking: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for rank in self.ranks:
            if rank.log is not None:
                for problem, evidence in self._incomplete_rank(rank, rank.log):
                    lacking[problem].append((rank.record.rank, _where(evidence)))
        for problem, places in lacking.items():
            where = f" ({places[0][1]})" if places[0][1] else ""
            yield f"rank {_ranges(number for number, _ in places)}: {problem}{where}"

    def _incomplete_rank(self, rank: _RankEvidence, log: ProcessLog) -> Iterator[tuple[str, Evidence | None]]:
        num_ranks = len(self.ranks)
        if not log.networks:
            yield "no 'Using network' line", None
        elif log.num_network_lines < log.num_communicators:
            lines = f"{log.num_network_lines} 'Using network' lines"
            yield f"{log.num_communicators} communicators, but {lines}", None
        if not log.providers and any(n.lower() in nccl_lines.EFA_NETWORKS for n in log.networks):
            yield "no 'Selected provider' line, although the network is the plugin's", None
        for communicator in log.communicators.values():
            size = communicator.size
            if communicator.num_completed < communicator.num_started:
                yield f"a communicator of {size} ranks was never complete", communicator.evidence
            if size > num_ranks:
                yield (
                    f"in a communicator of {size} ranks, but ranks.json lists {num_ranks}",
                    communicator.evidence,
                )
        worlds = [c for c in log.communicators.values() if c.size == num_ranks and c.is_root]
        if worlds and all(c.rank != rank.record.rank for c in worlds):
            yield "another rank in the communicator of all ranks than in ranks.json", worlds[0].evidence
        for channel, group in rank.unplaced.items():
            ends = f"{channel.source} to {channel.target}"
            yield f"a channel from rank {ends}, which fits none of its communicators", group.evidence

    def _other_number_of_nodes(self) -> Iterator[str]:
        """NCCL counts the nodes of each communicator by itself."""
        num_nodes = max(rank.log.num_nodes for rank in self.ranks if rank.log is not None)
        num_hosts = len(self.hosts)
        if num_nodes > num_hosts:
            yield f"NCCL saw {num_nodes} nodes in a communicator, but ranks.json lists {num_hosts} hosts"
        elif num_nodes == 1:
            yield f"NCCL saw one node in every communicator, but ranks.json lists {num_hosts} hosts"

    def _incomplete_communicators(self) -> Iterator[str]:
        """Communicators that not all of their ranks logged."""
        for identity, members in self._communicators().items():
            for size in sorted({size for size, _ in members}):
                absent = sorted(set(range(size)) - {rank for of_size, rank in members if of_size == size})
                if absent:
                    yield (
                        f"communicator {' '.join(identity)} has {size} ranks, but no log shows its rank "
                        f"{_ranges(absent)}: logs of another attempt, or lost lines"
                    )

    def _unmatched_channels(self) -> Iterator[str]:
        """Both ends of a connection print it, so a line without its counterpart means that one is lost."""
        balance: Counter[tuple[object, ...]] = Counter()
        example: dict[tuple[object, ...], Evidence] = {}
        for rank in self.ranks:
            for channel, group in rank.channels.items():
                for number, count in group.numbers.items():
                    key = (channel.source, channel.target, channel.devices, number)
                    balance[key] += count if channel.sends else -count
                    example.setdefault(key, group.evidence)
        lopsided = [key for key, difference in balance.items() if difference]
        if lopsided and not self._one_direction():
            source, target, _, number = lopsided[0]
            yield (
                f"{len(lopsided)} channel(s) were logged by one end only, such as channel {number} from "
                f"rank {source} to {target} ({_where(example[lopsided[0]])}): lines are missing"
            )

    def _one_direction(self) -> bool:
        """Logs filtered to the sending or to the receiving ends still show every connection once."""
        return len({channel.sends for rank in self.ranks for channel in rank.channels}) == 1

    def _unconnected(self) -> Iterator[str]:
        named = {peer for rank in self.ranks for peer in rank.peers}
        for rank in self.ranks:
            if rank.record.rank in named and not rank.internode:
                yield (
                    f"other hosts have channels with rank {rank.record.rank}, whose own log shows none: "
                    "lines are missing"
                )
        for host in self.hosts:
            ends = {c.sends for rank in self.ranks if rank.record.host == host for c in rank.internode}
            if len(ends) < (1 if self._one_direction() else 2):
                direction = "" if not ends else " to" if False in ends else " from"
                yield f"no rank of {host} has a channel{direction or ' to or from'} another host"

    # -- verdicts ----------------------------------------------------------------------------------

    def _one_host(self) -> TransportReport:
        host = self.hosts[0]
        elsewhere = list(self._foreign(hosts_only=True))
        for rank in self.ranks:
            if rank.log is None:
                continue
            if rank.log.num_nodes > 1:
                elsewhere.append(
                    f"rank {rank.record.rank} was in a communicator over {rank.log.num_nodes} nodes"
                )
            elsewhere += [
                f"rank {rank.record.rank} was in a communicator of {c.size} ranks, but ranks.json lists "
                f"{len(self.ranks)}"
                for c in rank.log.communicators.values()
                if c.size > len(self.ranks)
            ]
        if elsewhere:
            return self._result("unknown", f"ranks.json lists {host} alone, but {'; '.join(elsewhere[:3])}")
        return self._result("none", f"all {len(self.ranks)} ranks ran on {host}: nothing crossed a network")

    def _efa(self, counter_problem: str | None) -> TransportReport:
        if counter_problem is not None:
            return self._result("unknown", f"the logs show EFA on all ranks, but {counter_problem}")
        doubtful = [node for node in self.nodes if not node.agrees]
        if doubtful:
            details = "; ".join(f"{node.host}: {node.note}" for node in doubtful)
            return self._result(
                "unknown", f"the logs show EFA on all ranks, but the counters do not bear it out: {details}"
            )
        staged = [rank.record.rank for rank in self.ranks if any(not c.gpudirect for c in rank.internode)]
        if self.gpudirect_required and staged:
            return self._result(
                "mixed",
                f"EFA carried the data, but rank {_ranges(staged)} moved it through host memory where this "
                "instance type must use GPUDirect RDMA",
            )
        num_channels = sum(rank.num_internode for rank in self.ranks)
        return self._result(
            "efa",
            f"all {len(self.ranks)} ranks on {len(self.hosts)} hosts selected EFA, {num_channels} channel "
            "ends cross hosts on it and none on sockets, and the counters of every host agree",
        )

    def _tcp(self) -> TransportReport:
        carried = [node for node in self.nodes if node.carried]
        if carried and len(carried) == len(self.hosts):
            return self._result(
                "unknown",
                "the logs show TCP on all ranks, but the EFA devices of every host moved the collectives' "
                "bytes: logs and counters are not of the same run, or another job used the devices",
            )
        networks = sorted({name for rank in self.ranks for name in rank.networks})
        providers = sorted({name for rank in self.ranks for name in rank.providers})
        how = f"network {_join(networks)}" + (f", provider {_join(providers)}" if providers else "")
        return self._result("tcp", f"all {len(self.ranks)} ranks sent over TCP ({how})")

    # -- placing channels --------------------------------------------------------------------------

    def _place_channels(self) -> None:
        """Sort each rank's network channels: to another host, or not to be told.

        Channel lines carry ranks of their communicator and not of the job, and not which communicator. NCCL
        uses the network inside a node only when told to (NCCL_NET_DISABLE_INTRA=0), so a channel counts as
        crossing when some communicator of the process puts its other end on another host, and as not crossing
        when none does.
        """
        members = self._communicators()
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

    def _possible_peers(self, rank: _RankEvidence, channel: Channel, members: _Members) -> set[int]:
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

    def _communicators(self) -> _Members:
        members: _Members = defaultdict(lambda: defaultdict(set))
        for rank in self.ranks:
            if rank.log is not None:
                for view in rank.log.communicators.values():
                    if view.identity is not None:
                        members[view.identity][view.size, view.rank].add(rank.record.rank)
        return members

    # -- the report --------------------------------------------------------------------------------

    def _read_counters(self) -> tuple[tuple[NodeTransport, ...], str | None]:
        counters: dict[str, HostCounters] = {}
        problem = None
        try:
            counters = load_counters(self.attempt_dir)
        except EvidenceError as error:
            problem = f"the EFA counters are not known: {error}"
        return tuple(compare_with_expected(host, counters.get(host)) for host in self.hosts), problem

    def _result(self, verdict: Verdict, reason: str) -> TransportReport:
        plugin = sorted(
            {r.log.plugin_version for r in self.ranks if r.log is not None and r.log.plugin_version}
        )
        return _report(
            self.attempt_dir,
            self.require,
            verdict,
            reason,
            ranks=tuple(_rank_transport(rank) for rank in self.ranks),
            nodes=self.nodes,
            diagnosis=() if verdict in ("efa", "none") else tuple(self._diagnose()),
            backend="nccl",
            nccl_version=self.logs.nccl_version,
            plugin_version=", ".join(plugin) or None,
        )

    def _diagnose(self) -> Iterator[Diagnosis]:
        seen: set[str] = set()
        for rank in self.ranks:
            if rank.log is None:
                yield diagnosis.no_log(rank.record.rank, rank.record.host, rank.record.pid)
                continue
            on_efa = "efa" in {_provider_kind(provider) for provider in rank.log.providers}
            for kind, evidence in rank.log.symptoms.items():
                if kind not in seen and not (on_efa and diagnosis.harmless_with_efa(kind)):
                    seen.add(kind)
                    yield diagnosis.explain(kind, evidence)
            for provider, evidence in rank.log.providers.items():
                if _provider_kind(provider) != "efa" and provider not in seen:
                    seen.add(provider)
                    yield diagnosis.provider_forced(provider, evidence)
        for kind, evidence in self.logs.symptoms.items():
            if kind not in seen:
                seen.add(kind)
                yield diagnosis.explain(kind, evidence)
        for node in self.nodes:
            if "no EFA device" in node.note:
                yield diagnosis.no_device(node.host)


def _rank_transport(rank: _RankEvidence) -> RankTransport:
    channels = list(rank.internode)
    return RankTransport(
        **rank.record.model_dump(exclude={"backend"}),
        provider=", ".join(rank.providers) or None,
        network=", ".join(rank.networks) or None,
        internode_channels=rank.num_internode,
        gpudirect=all(channel.gpudirect for channel in channels) if channels else None,
        evidence=tuple(_evidence(rank)),
    )


def _evidence(rank: _RankEvidence) -> list[Evidence]:
    lines = [*rank.providers.values(), *rank.networks.values()]
    sockets_first = sorted(
        rank.internode.items(), key=lambda item: item[0].network.lower() in nccl_lines.EFA_NETWORKS
    )
    lines += [group.evidence for _, group in sockets_first]
    return lines[:_MAX_EVIDENCE]


def _silent(ranks: Sequence[RankRecord]) -> tuple[RankTransport, ...]:
    return tuple(_rank_transport(_RankEvidence(record, None)) for record in ranks)


def _report(
    attempt_dir: Path,
    require: Require,
    verdict: Verdict,
    reason: str,
    *,
    ranks: tuple[RankTransport, ...] = (),
    nodes: tuple[NodeTransport, ...] = (),
    diagnosis: tuple[Diagnosis, ...] = (),
    backend: Backend | None = None,
    nccl_version: str | None = None,
    plugin_version: str | None = None,
) -> TransportReport:
    return TransportReport(
        verdict=verdict,
        reason=reason,
        attempt=attempt_dir.name,
        required=require,
        backend=backend,
        nccl_version=nccl_version,
        plugin_version=plugin_version,
        ranks=ranks,
        nodes=nodes,
        diagnosis=diagnosis,
    )


def _where(evidence: Evidence | None) -> str:
    return "" if evidence is None else f"{evidence.file}:{evidence.line}"


def _join(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)


def _ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 3, 5 as "0-3, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else _join(run) for run in runs)
