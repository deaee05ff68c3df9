"""What is missing in the evidence of an attempt, or contradicts itself: sentences that make the verdict unknown."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from training.transport import nccl_lines
from training.transport.attempt import AttemptEvidence, RankEvidence, ranges, where
from training.transport.evidence import Evidence
from training.transport.log_reader import ProcessLog


def missing_evidence(attempt: AttemptEvidence) -> Iterator[str]:
    """What is missing or contradictory, one sentence each; nothing when the logs can be judged."""
    yield from attempt.logs.damage
    yield from foreign_lines(attempt)
    silent = [rank for rank in attempt.ranks if rank.log is None]
    if silent:
        yield f"no NCCL log of rank {ranges(r.record.rank for r in silent)} ({len(attempt.ranks)} ranks ran)"
    yield from _incomplete_ranks(attempt)
    if not silent:
        yield from _other_number_of_nodes(attempt)
        yield from _incomplete_communicators(attempt)
        # Where every rank has TCP alone, that is what carried the data, whether its channels were logged or not.
        if {rank.path for rank in attempt.ranks} != {"tcp"}:
            yield from _unmatched_channels(attempt)
            yield from _unconnected(attempt)


def foreign_lines(attempt: AttemptEvidence, *, hosts_only: bool = False) -> Iterator[str]:
    own = {(rank.record.host, rank.record.pid) for rank in attempt.ranks}
    for process, log in sorted(attempt.logs.processes.items()):
        if process not in own and not (hosts_only and process[0] in attempt.hosts):
            yield (
                f"{where(log.first_line)} is of {process[0]} pid {process[1]}, which is no rank of "
                "this attempt: logs of another attempt or job"
            )


def _incomplete_ranks(attempt: AttemptEvidence) -> Iterator[str]:
    """What single ranks' logs lack, ranks that lack the same taken together."""
    lacking: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for rank in attempt.ranks:
        if rank.log is not None:
            for problem, evidence in _incomplete_rank(attempt, rank, rank.log):
                lacking[problem].append((rank.record.rank, where(evidence)))
    for problem, places in lacking.items():
        place = f" ({places[0][1]})" if places[0][1] else ""
        yield f"rank {ranges(number for number, _ in places)}: {problem}{place}"


def _incomplete_rank(
    attempt: AttemptEvidence, rank: RankEvidence, log: ProcessLog
) -> Iterator[tuple[str, Evidence | None]]:
    num_ranks = len(attempt.ranks)
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


def _other_number_of_nodes(attempt: AttemptEvidence) -> Iterator[str]:
    """NCCL counts the nodes of each communicator by itattempt."""
    num_nodes = max(rank.log.num_nodes for rank in attempt.ranks if rank.log is not None)
    num_hosts = len(attempt.hosts)
    if num_nodes > num_hosts:
        yield f"NCCL saw {num_nodes} nodes in a communicator, but ranks.json lists {num_hosts} hosts"
    elif num_nodes == 1:
        yield f"NCCL saw one node in every communicator, but ranks.json lists {num_hosts} hosts"


def _incomplete_communicators(attempt: AttemptEvidence) -> Iterator[str]:
    """Communicators that not all of their ranks logged."""
    for identity, members in attempt.communicators().items():
        for size in sorted({size for size, _ in members}):
            absent = sorted(set(range(size)) - {rank for of_size, rank in members if of_size == size})
            if absent:
                yield (
                    f"communicator {' '.join(identity)} has {size} ranks, but no log shows its rank "
                    f"{ranges(absent)}: logs of another attempt, or lost lines"
                )


def _unmatched_channels(attempt: AttemptEvidence) -> Iterator[str]:
    """Both ends of a connection print it, so a line without its counterpart means that one is lost."""
    balance: Counter[tuple[object, ...]] = Counter()
    example: dict[tuple[object, ...], Evidence] = {}
    for rank in attempt.ranks:
        for channel, group in rank.channels.items():
            for number, count in group.numbers.items():
                key = (channel.source, channel.target, channel.devices, number)
                balance[key] += count if channel.sends else -count
                example.setdefault(key, group.evidence)
    lopsided = [key for key, difference in balance.items() if difference]
    if lopsided and not _one_direction(attempt):
        source, target, _, number = lopsided[0]
        yield (
            f"{len(lopsided)} channel(s) were logged by one end only, such as channel {number} from "
            f"rank {source} to {target} ({where(example[lopsided[0]])}): lines are missing"
        )


def _one_direction(attempt: AttemptEvidence) -> bool:
    """Logs filtered to the sending or to the receiving ends still show every connection once."""
    return len({channel.sends for rank in attempt.ranks for channel in rank.channels}) == 1


def _unconnected(attempt: AttemptEvidence) -> Iterator[str]:
    named = {peer for rank in attempt.ranks for peer in rank.peers}
    for rank in attempt.ranks:
        if rank.record.rank in named and not rank.internode:
            yield (
                f"other hosts have channels with rank {rank.record.rank}, whose own log shows none: "
                "lines are missing"
            )
    for host in attempt.hosts:
        ends = {c.sends for rank in attempt.ranks if rank.record.host == host for c in rank.internode}
        if len(ends) < (1 if _one_direction(attempt) else 2):
            direction = "" if not ends else " to" if False in ends else " from"
            yield f"no rank of {host} has a channel{direction or ' to or from'} another host"
