"""The verdict: which network carried the collectives of one attempt, and what proves it.

``efa`` needs all of it: every rank's own log, whole; the EFA provider and its network in each; channels to
another host on both ends of each connection; no socket anywhere on the data path; and hardware counters that
agree with the bytes the collectives must have moved. Less is ``unknown`` and says what is missing.
docs/transport.md explains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from training.transport import diagnosis, nccl_lines
from training.transport.attempt import AttemptEvidence, RankEvidence, join, provider_kind, ranges
from training.transport.completeness import foreign_lines, missing_evidence
from training.transport.counters import NodeTransport, compare_with_expected
from training.transport.diagnosis import Diagnosis
from training.transport.evidence import Evidence
from training.transport.log_reader import read_logs
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
    gpudirect_required: bool
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


class _Judgement:
    def __init__(
        self, attempt_dir: Path, require: Require, gpudirect_required: bool, records: Sequence[RankRecord]
    ) -> None:
        self.attempt_dir = attempt_dir
        self.require: Require = require
        self.gpudirect_required = gpudirect_required
        self.attempt = AttemptEvidence(read_logs(attempt_dir), records)
        self.ranks, self.hosts = self.attempt.ranks, self.attempt.hosts
        self.nodes: tuple[NodeTransport, ...] = ()

    def report(self) -> TransportReport:
        if len(self.hosts) == 1:
            return self._one_host()
        self.nodes, counter_problem = self._read_counters()
        missing = list(missing_evidence(self.attempt))
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
            f"rank {ranges(r.record.rank for r in self.ranks if r.path == path)} {text}"
            for path, text in (("efa", "on EFA"), ("tcp", "on TCP"), ("mixed", "on both"))
            if path in paths
        )
        return self._result("mixed", f"not all ranks used the same network: {ways}")

    def _incomplete(self, missing: Sequence[str]) -> str:
        """The first sentences, how many more there are, and whether what is there shows another transport."""
        sentences = list(missing[:_MAX_SENTENCES])
        if len(missing) > _MAX_SENTENCES:
            sentences.append(f"and {len(missing) - _MAX_SENTENCES} more of this kind")
        elsewhere = [rank.record.rank for rank in self.ranks if rank.path in ("tcp", "mixed")]
        if elsewhere:
            sentences.append(f"the lines that are there show TCP on rank {ranges(elsewhere)}")
        return "; ".join(sentences)

    def _one_host(self) -> TransportReport:
        host = self.hosts[0]
        elsewhere = list(foreign_lines(self.attempt, hosts_only=True))
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
                f"EFA carried the data, but rank {ranges(staged)} moved it through host memory where this "
                "instance type must use GPUDirect RDMA",
            )
        num_channels = sum(rank.num_internode for rank in self.ranks)
        return self._result(
            "efa",
            f"all {len(self.ranks)} ranks on {len(self.hosts)} hosts selected EFA, {num_channels} channel "
            "ends cross hosts on it and none on sockets, and the counters of every host agree",
        )

    def _tcp(self) -> TransportReport:
        networks = sorted({name for rank in self.ranks for name in rank.networks})
        providers = sorted({name for rank in self.ranks for name in rank.providers})
        how = f"network {join(networks)}" + (f", provider {join(providers)}" if providers else "")
        reason = f"all {len(self.ranks)} ranks sent over TCP ({how})"
        if all(node.carried for node in self.nodes):
            reason += "; the EFA devices moved as many bytes, which were those of something else"
        return self._result("tcp", reason)

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
            gpudirect_required=self.gpudirect_required,
            nccl_version=self.attempt.logs.nccl_version,
            plugin_version=", ".join(plugin) or None,
        )

    def _diagnose(self) -> Iterator[Diagnosis]:
        seen: set[str] = set()
        for rank in self.ranks:
            if rank.log is None:
                yield diagnosis.no_log(rank.record.rank, rank.record.host, rank.record.pid)
                continue
            on_efa = "efa" in {provider_kind(provider) for provider in rank.log.providers}
            for kind, evidence in rank.log.symptoms.items():
                if kind not in seen and not (on_efa and diagnosis.harmless_with_efa(kind)):
                    seen.add(kind)
                    yield diagnosis.explain(kind, evidence)
            for provider, evidence in rank.log.providers.items():
                if provider_kind(provider) != "efa" and provider not in seen:
                    seen.add(provider)
                    yield diagnosis.provider_forced(provider, evidence)
        for kind, evidence in self.attempt.logs.symptoms.items():
            if kind not in seen:
                seen.add(kind)
                yield diagnosis.explain(kind, evidence)
        for node in self.nodes:
            if "no EFA device" in node.note:
                yield diagnosis.no_device(node.host)


def _rank_transport(rank: RankEvidence) -> RankTransport:
    channels = list(rank.internode)
    return RankTransport(
        **rank.record.model_dump(exclude={"backend"}),
        provider=", ".join(rank.providers) or None,
        network=", ".join(rank.networks) or None,
        internode_channels=rank.num_internode,
        gpudirect=all(channel.gpudirect for channel in channels) if channels else None,
        evidence=tuple(_evidence(rank)),
    )


def _evidence(rank: RankEvidence) -> list[Evidence]:
    lines = [*rank.providers.values(), *rank.networks.values()]
    sockets_first = sorted(
        rank.internode.items(), key=lambda item: item[0].network.lower() in nccl_lines.EFA_NETWORKS
    )
    lines += [group.evidence for _, group in sockets_first]
    return lines[:_MAX_EVIDENCE]


def _silent(ranks: Sequence[RankRecord]) -> tuple[RankTransport, ...]:
    return tuple(_rank_transport(RankEvidence(record, None)) for record in ranks)


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
    gpudirect_required: bool = False,
    nccl_version: str | None = None,
    plugin_version: str | None = None,
) -> TransportReport:
    return TransportReport(
        verdict=verdict,
        reason=reason,
        attempt=attempt_dir.name,
        required=require,
        gpudirect_required=gpudirect_required,
        backend=backend,
        nccl_version=nccl_version,
        plugin_version=plugin_version,
        ranks=ranks,
        nodes=nodes,
        diagnosis=diagnosis,
    )
