"""Bus bandwidth of all-gather and reduce-scatter, in nodes and across them, over sizes, against a floor.

Runs inside a process group of any backend. Bus bandwidth as nccl-tests defines it (doc/PERFORMANCE.md): the
payload times (n-1)/n over the time. Over a ring that is what crosses each link, so across nodes it is the
rate of a node's network interfaces together, in one direction, and comparable with their line rate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict

from training.transport.collect import nccl_host

#: Payload of the whole collective in bytes: from a small layer's parameters to a whole 1.5 B model's
# gradients.
DEFAULT_SIZES = (1 << 20, 8 << 20, 64 << 20, 256 << 20, 1 << 30)
#: Part of the line rate that the largest size must reach across nodes. A good EFA set-up is taken for 0.8,
# TCP on the
#: same interface for 0.4 (g6.12xlarge: 4.0 and 2.0 of 5.0 GB/s); between them lies the floor. AWS's own
# release test
#: of the image asks for far less, 3 GB/s on the 50 GB/s of a p4d. 2026-12-01
FLOOR_SHARE = 0.6
_ROUND_SECONDS = 0.2
_MAX_ITERATIONS = 50
_NUM_WARM_UP = 3

Collective = Literal["all_gather", "reduce_scatter"]
Scope = Literal["node", "world"]


class Measurement(BaseModel):
    """One collective at one size. ``payload_bytes`` is the whole gathered or scattered tensor.

    Bandwidths are GB/s (1e9) over rounds of many iterations, each round as slow as its slowest rank.
    """

    model_config = ConfigDict(frozen=True)

    collective: Collective
    scope: Scope
    num_ranks: int
    payload_bytes: int
    seconds: float
    bus_gb_per_second: float
    bus_gb_per_second_low: float
    bus_gb_per_second_high: float


class ProbeResult(BaseModel):
    """``line`` and ``floor`` are GB/s per node and direction, None where the line rate is not known."""

    model_config = ConfigDict(frozen=True)

    verdict: Literal["passed", "failed", "not judged"]
    reason: str
    backend: str
    instance_type: str | None
    world_size: int
    num_nodes: int
    line_gb_per_second: float | None
    floor_gb_per_second: float | None
    measurements: tuple[Measurement, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """A table: collective, where, payload in MiB, milliseconds, bus GB/s and its spread over the rounds."""
        return [
            (
                m.collective.replace("_", "-"),
                f"{m.num_ranks} ranks "
                + ("in a node" if m.scope == "node" else f"on {self.num_nodes} nodes"),
                f"{m.payload_bytes / 2**20:,.1f}",
                f"{m.seconds * 1e3:,.2f}",
                f"{m.bus_gb_per_second:.2f}",
                f"{m.bus_gb_per_second_low:.2f} to {m.bus_gb_per_second_high:.2f}",
            )
            for m in self.measurements
        ]


def probe(
    sizes: Sequence[int] = DEFAULT_SIZES,
    *,
    network_gbps: float | None = None,
    instance_type: str | None = None,
    node: str | None = None,
    num_rounds: int = 5,
) -> ProbeResult:
    """Measure in the running default process group. Every rank calls it with the same arguments and gets the
    result.

    ``network_gbps`` is the line rate of a node's network interfaces together, in Gbit/s per direction.
    ``node`` names the node of this rank, by default the host. Raises ValueError for a payload that is smaller
    than the world.
    """
    world_size = dist.get_world_size()
    if not sizes or min(sizes) < 4 * world_size:
        raise ValueError(
            f"each payload needs at least 4 bytes for each of {world_size} ranks, found {list(sizes)}"
        )
    nodes: list[str | None] = [None] * world_size
    dist.all_gather_object(nodes, node or nccl_host())
    names = list(dict.fromkeys(nodes))
    on_cuda = "nccl" in dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    own_node, _ = dist.new_subgroups_by_enumeration(
        [[rank for rank, name in enumerate(nodes) if name == one] for one in names]
    )
    assert isinstance(own_node, dist.ProcessGroup)
    scopes: list[tuple[Scope, dist.ProcessGroup | None]] = []
    # Ranks of one node measure together, so every node must have the same number of them, and more than one.
    if len({nodes.count(name) for name in names}) == 1 and nodes.count(names[0]) > 1:
        scopes.append(("node", own_node))
    if len(names) > 1:
        scopes.append(("world", None))
    measurements = [
        _measure(collective, scope, group, size, device, num_rounds)
        for scope, group in scopes
        for size in sizes
        for collective in ("all_gather", "reduce_scatter")
    ]
    dist.destroy_process_group(own_node)
    line = None if network_gbps is None else network_gbps / 8
    verdict, reason = judge_bandwidth(measurements, line, instance_type)
    return ProbeResult(
        verdict=verdict,
        reason=reason,
        backend=dist.get_backend(),
        instance_type=instance_type,
        world_size=world_size,
        num_nodes=len(names),
        line_gb_per_second=line,
        floor_gb_per_second=None if line is None else FLOOR_SHARE * line,
        measurements=tuple(measurements),
    )


def judge_bandwidth(
    measurements: Sequence[Measurement], line: float | None, instance_type: str | None
) -> tuple[Literal["passed", "failed", "not judged"], str]:
    """The largest size across nodes against the floor, the slower of the two collectives deciding."""
    across = [m for m in measurements if m.scope == "world"]
    if not across:
        return "not judged", "all ranks are on one node: no network was measured"
    largest = max(m.payload_bytes for m in across)
    slowest = min((m for m in across if m.payload_bytes == largest), key=lambda m: m.bus_gb_per_second)
    measured = (
        f"{slowest.collective} of {largest / 2**20:,.0f} MiB across nodes reached "
        f"{slowest.bus_gb_per_second:.2f} GB/s"
    )
    if line is None:
        return "not judged", f"{measured}; the line rate of {instance_type or 'this machine'} is not known"
    floor = FLOOR_SHARE * line
    name = instance_type or "a node"
    against = f"floor {floor:.2f} GB/s, {FLOOR_SHARE:.0%} of the {line:.2f} GB/s line of {name}"
    if slowest.bus_gb_per_second < floor:
        return "failed", f"{measured}, below the {against}"
    return "passed", f"{measured} ({against})"


def _measure(
    collective: Collective,
    scope: Scope,
    group: dist.ProcessGroup | None,
    size: int,
    device: torch.device,
    num_rounds: int,
) -> Measurement:
    num_ranks = dist.get_world_size(group)
    shard = torch.ones(size // 4 // num_ranks, dtype=torch.float32, device=device)
    whole = torch.ones(shard.numel() * num_ranks, dtype=torch.float32, device=device)

    def run() -> None:
        if collective == "all_gather":
            dist.all_gather_single(whole, shard, group=group)
        else:
            dist.reduce_scatter_single(shard, whole, group=group)

    _slowest_seconds(run, _NUM_WARM_UP, device)
    estimate = _slowest_seconds(run, 1, device)
    iterations = max(1, min(_MAX_ITERATIONS, round(_ROUND_SECONDS / max(estimate, 1e-6))))
    rounds = [_slowest_seconds(run, iterations, device) / iterations for _ in range(num_rounds)]
    payload_bytes = whole.numel() * 4
    on_the_link = payload_bytes * (num_ranks - 1) / num_ranks / 1e9
    seconds = statistics.median(rounds)
    return Measurement(
        collective=collective,
        scope=scope,
        num_ranks=num_ranks,
        payload_bytes=payload_bytes,
        seconds=seconds,
        bus_gb_per_second=on_the_link / seconds,
        bus_gb_per_second_low=on_the_link / max(rounds),
        bus_gb_per_second_high=on_the_link / min(rounds),
    )


def _slowest_seconds(run: Callable[[], None], iterations: int, device: torch.device) -> float:
    """Seconds of the slowest rank of the world, equal on all ranks."""
    dist.barrier()
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(iterations):
        run()
    _synchronize(device)
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float32, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds.item())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
