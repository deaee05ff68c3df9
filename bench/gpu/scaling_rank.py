"""One rank of `bench.gpu.scaling`: joins the process group and runs the stages of its plan."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import training.loop as loop
from bench.gpu.ours import Clock, Ours, clean, emit, make_job
from training import checkpoint as ckpt
from training.errors import UsageError
from training.evidence import Evidence
from training.job import JobSpec
from training.metrics import memory
from training.parallel import World, hardware_of, join_world
from training.planning import NETWORK_EFFICIENCY, Hardware, ModelShape, Scheme, predict
from training.storage import open_storage
from training.transport.probe import ProbeResult, probe

Link = Literal["direct", "sockets"]

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "vocab_size": 512, "max_position_embeddings": 512}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How much each stage does: the shape of Qwen2.5-1.5B, or one that a CPU trains in moments."""

    architecture: dict[str, Any]
    tokens: int
    """In a step of each GPU, where the time is measured."""
    learning_tokens: int
    """In a micro-batch of the stages that compare losses."""
    length: int
    learning_rate: float
    data: dict[str, Any]
    """What the stages that compare losses train on: text, whose loss falls quickly, so that a wrong state shows."""
    most_steps: int
    seconds: dict[Link, float]
    """Of measured steps for each layout."""
    probe_bytes: int
    save_at: int
    """After which step a checkpoint is written."""
    steps_after_save: int


# 128 MiB lies between the payloads of a block's gather (90 MiB) and its reduction (180 MiB). 2026-12-01
FULL = Size({}, 16_384, 4_096, 2_048, 2e-4, {"source": "python-docs"}, 20, {"direct": 10.0, "sockets": 30.0},
            128 << 20, 12, 30)  # fmt: skip
SMALL = Size(TINY, 256, 256, 128, 3e-3, {"source": "python-docs", "limit": 200}, 4, {"direct": 1.0, "sockets": 1.0},
             1 << 18, 6, 4)  # fmt: skip

FEWEST_STEPS = 3
COMPARED_STEPS = 4
EQUALITY_STEPS = 8


@dataclass(frozen=True)
class Plan:
    """What the launcher asks of every rank of one launch."""

    attempt: str
    link: Link
    stages: list[str]
    sizes: list[int]
    """World sizes of the whole benchmark, the largest first."""
    tiny: bool
    deadline: float
    """Seconds since 1970 at which nothing new is begun."""
    folder: str
    """Shared by all ranks of all launches."""


class Rank:
    def __init__(self, plan: Plan, world: World) -> None:
        self.plan = plan
        self.world = world
        self.size = SMALL if plan.tiny else FULL
        self.folder = Path(plan.folder)

    def emit(self, kind: str, **values: Any) -> None:
        if self.world.rank == 0:
            emit(kind, link=self.plan.link, world_size=self.world.size, **values)

    def agreed(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        shared = [value]
        dist.broadcast_object_list(shared, src=0, group=self.world.control)
        return shared[0]

    def has_time(self, seconds: float, what: str) -> bool:
        """Whether as much is left of the time box; what there is no time for is reported."""
        left = self.agreed(self.plan.deadline - time.time())
        if left >= (0.0 if self.plan.tiny else seconds):
            return True
        self.emit(
            "not run", what=what, reason=f"{left:.0f} s were left of the time box, {seconds:.0f} s are needed"
        )
        return False

    def job(self, tokens: int, **changes: Any) -> JobSpec:
        return make_job(tokens, self.size.length, self.size.architecture, **changes)

    def learning_job(self, micro_batches: int = 1, **changes: Any) -> JobSpec:
        """Steps of the same text, whatever the number of ranks that share them."""
        return self.job(
            self.size.learning_tokens * micro_batches, data=self.size.data, batch__accumulation=micro_batches,
            optimizer__learning_rate=self.size.learning_rate, **changes,
        )  # fmt: skip

    def trainer(self, job: JobSpec, world: World | None = None, folder: str = "run") -> Ours:
        torch._dynamo.reset()
        clean()
        return Ours(job, self.world.rank == 0, world or self.world, self.folder / folder)

    # Weak scaling

    def scaling(self) -> None:
        """Time of a step at the same work per GPU, in each layout, beside the communication model."""
        rates = self.measure_link() if self.world.size > 1 else None
        for scheme in ("full", "hybrid") if rates else ("full",):
            if self.has_time(60, f"steps, {scheme} sharding"):
                self.time_layout(scheme, rates)

    def time_layout(self, scheme: Scheme, rates: Rates | None) -> None:
        clock = Clock()
        world = two_nodes(self.world) if scheme == "hybrid" else self.world
        job = self.job(self.size.tokens, parallel__sharding=scheme)
        ours = self.trainer(job, world)
        built_s = clock.lap()
        ours.steps(1)
        first_step_s = clock.lap()
        usual = self.agreed(statistics.median(ours.steps(3)))
        count = max(FEWEST_STEPS, min(self.size.most_steps, int(self.size.seconds[self.plan.link] / usual)))
        seconds = ours.steps(count + 1)
        overlap = self.profile(ours) if self.world.size > 1 else {}
        median = statistics.median(seconds)
        self.emit(
            "scaling", scheme=scheme, step_ms=median * 1e3, step_ms_low=min(seconds) * 1e3,
            step_ms_high=max(seconds) * 1e3, steps=count,
            tokens_per_second_per_gpu=self.size.tokens / median, **overlap,
            **self.prediction(job, ours, world, rates), memory=memory(self.world.device), built_s=built_s,
            first_step_s=first_step_s,
        )  # fmt: skip
        ours.close()

    def measure_link(self) -> Rates:
        """Bus bandwidth over all ranks, and of the groups that hybrid sharding over two halves uses."""
        half = two_nodes(self.world)
        by_node = probe([self.size.probe_bytes], node=f"node-{half.node_rank}", num_rounds=3)
        by_place = probe([self.size.probe_bytes], node=f"place-{half.local_rank}", num_rounds=3)
        rates = Rates(
            everywhere=rate(by_node, "world"),
            in_node=rate(by_node, "node") if half.local_size > 1 else None,
            across=rate(by_place, "node") * half.local_size,
        )
        self.emit("link", **dataclasses.asdict(rates), payload_bytes=self.size.probe_bytes,
                  measurements=[m.model_dump() for m in (*by_node.measurements, *by_place.measurements)])  # fmt: skip
        return rates

    def prediction(self, job: JobSpec, ours: Ours, world: World, rates: Rates | None) -> dict[str, Any]:
        """What `finetune plan` would say of this job on this device with the link that was measured.
        Where the device's peak is not known, its communication alone."""
        hardware = hardware_of(world)
        if rates is not None:
            hardware = rates.on(hardware)
        elif hardware.peak_tflops is None:
            return {}
        shape = ModelShape.of_config(ours.trainer.source.config.to_dict())
        predicted = predict(job, shape, hardware)
        return {
            "predicted_step_ms": predicted.step_seconds * 1e3,
            "limited_by": predicted.limited_by,
            "predicted_parts_ms": {name: s * 1e3 for name, s in predicted.step_parts.items()},
        }

    def profile(self, ours: Ours, steps: int = 2) -> dict[str, float]:
        """Milliseconds of communication in a step, and of the part of it beside which nothing else ran."""
        from torch.profiler import ProfilerActivity, profile

        cuda = self.world.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
            ours.steps(steps)
            if cuda:
                torch.cuda.synchronize()
        assert found.profiler is not None
        events = found.profiler.kineto_results.events()
        communication, compute = sort_events(events, cuda)
        total, exposed = overlap(communication, compute)
        return {"communication_ms": total / steps / 1e6, "exposed_ms": exposed / steps / 1e6}

    # Checkpoints

    def checkpoint(self) -> None:
        """Saved on the most ranks, resumed on each number of them: the losses that follow must be the same."""
        largest, smallest = self.plan.sizes[0], self.plan.sizes[-1]
        if self.world.size == largest and self.has_time(60, "saving a checkpoint"):
            self.save_checkpoint()
        if largest % self.world.size == 0 and self.has_time(40, "resuming"):
            self.resume(largest // self.world.size)
            if self.world.size == smallest:
                self.resume(largest // self.world.size, moments=False)

    def checkpoint_job(self, micro_batches: int) -> JobSpec:
        return self.learning_job(micro_batches, checkpoint__every=self.size.save_at, run__resume=True)

    def save_checkpoint(self) -> None:
        ours = self.trainer(self.checkpoint_job(1), folder="checkpoint")
        trainer, save_at = ours.trainer, self.size.save_at
        published: list[ckpt.Published] = []
        trainer.checkpointer.on_published = published.append
        trainer._save_if_due = lambda _, *rest: (
            ours.save_due(False, *rest) if trainer.progress.step == save_at else None
        )
        usual = statistics.median(ours.steps(save_at - 1)[2:])
        seconds = ours.steps(1 + self.size.steps_after_save)
        lost = sum(seconds) - usual * len(seconds)
        losses = ours.losses()[save_at : save_at + COMPARED_STEPS]
        if published:
            self.emit("save", losses=losses, usual_step_ms=usual * 1e3, slowest_step_ms=max(seconds) * 1e3,
                      steps=len(seconds), lost_s=lost, share_of_50_steps=lost / (50 * usual),
                      blocked_s=trainer.checkpoint_seconds, written_s=published[0].seconds,
                      gib=published[0].bytes / 2**30)  # fmt: skip
        ours.close()

    def resume(self, micro_batches: int, moments: bool = True) -> None:
        """moments: False forgets the optimizer's state, to show that the comparison would see it."""
        ours = self.trainer(self.checkpoint_job(micro_batches), folder="checkpoint")
        trainer = ours.trainer
        dist.barrier(group=self.world.control)
        started = time.monotonic()
        name = trainer._resume()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        load_s = time.monotonic() - started
        if name is None:
            self.emit("not run", what="resuming", reason="there is no complete checkpoint")
            return ours.close()
        if not moments:
            state = trainer.optimizer
            for tensor in (*state.exp_avg.values(), *state.exp_avg_sq.values(), state.num_updates):
                tensor.zero_()
        trainer.total_steps = trainer.progress.step
        ours.steps(COMPARED_STEPS)
        self.emit("resume", losses=ours.losses(), step=trainer.progress.step, moments=moments, load_s=load_s)
        return ours.close()

    # Equality

    def equality(self) -> None:
        """The same training on two ranks and on one."""
        if self.world.size > 2 or 2 not in self.plan.sizes:
            return
        variants: dict[str, dict[str, Any]] = {
            "packing": {},
            "adapter": {"adapter__rank": 16},
            "float8": {"model__float8": True},
        }
        if self.world.size == 2:
            variants["packing, hybrid"] = {"parallel__sharding": "hybrid"}
        for name, changes in variants.items():
            if not self.has_time(40, f"equality: {name}"):
                continue
            try:
                self.losses_of(name, changes)
            except UsageError as error:  # float8 on a device that has none
                self.emit("not run", what=f"equality: {name}", reason=str(error))

    def losses_of(self, name: str, changes: dict[str, Any]) -> None:
        job = self.learning_job(2 // self.world.size, **changes)
        world = two_nodes(self.world) if job.parallel.sharding == "hybrid" else self.world
        ours = self.trainer(job, world)
        ours.steps(EQUALITY_STEPS)
        self.emit("equality", variant=name, losses=ours.losses())
        ours.close()


@dataclass(frozen=True)
class Rates:
    """Measured bus bandwidths, GB/s: per rank over all ranks, per rank inside a half, of a half to the other one."""

    everywhere: float
    in_node: float | None
    across: float

    def on(self, hardware: Hardware) -> Hardware:
        """The hardware with this link. The plan takes a share of the line rate, and what was measured is that share."""
        per_rank = self.everywhere if hardware.num_nodes == 1 else self.in_node
        return dataclasses.replace(
            hardware,
            in_node_gb_per_second=per_rank or hardware.in_node_gb_per_second,
            network_gbps=self.across * 8 / NETWORK_EFFICIENCY,
        )


def rate(found: ProbeResult, scope: str) -> float:
    """Of all-gather and reduce-scatter together, GB/s."""
    return statistics.harmonic_mean([m.bus_gb_per_second for m in found.measurements if m.scope == scope])


def two_nodes(world: World) -> World:
    """The ranks of one host taken for two nodes, as hybrid sharding needs."""
    local_size = world.size // 2
    return dataclasses.replace(world, local_size=local_size, local_rank=world.rank % local_size)


Span = tuple[int, int]


def sort_events(events: Iterable[Any], cuda: bool) -> tuple[list[Span], list[Span]]:
    """Communication and the rest of a profile, as (start, end) in nanoseconds."""
    communication: list[Span] = []
    compute: list[Span] = []
    for event in events:
        if cuda and event.device_type() != torch.autograd.DeviceType.CUDA:
            continue
        span = (event.start_ns(), event.start_ns() + event.duration_ns())
        name = event.name()
        if name.startswith(("nccl", "gloo:")):
            communication.append(span)
        elif cuda or name.startswith("aten::"):
            compute.append(span)
    if not communication or not compute:
        raise RuntimeError(
            f"the profile holds {len(communication)} events of communication and {len(compute)} others: did the names change?"
        )
    return communication, compute


def overlap(communication: Iterable[Span], compute: Iterable[Span]) -> tuple[int, int]:
    """Time in which anything is communicated, and the part of it in which nothing is computed."""
    ours, others = joined(communication), joined(compute)
    total = sum(end - start for start, end in ours)
    hidden = 0
    index = 0
    for start, end in ours:
        while index < len(others) and others[index][1] <= start:
            index += 1
        at = index
        while at < len(others) and others[at][0] < end:
            hidden += min(end, others[at][1]) - max(start, others[at][0])
            at += 1
    return total, total - hidden


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not touch, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def logs_of(folder: Path) -> Path:
    """Where the ranks of all launches log."""
    return folder / "logs"


STAGES: dict[str, Callable[[Rank], None]] = {
    "scaling": Rank.scaling,
    "checkpoint": Rank.checkpoint,
    "equality": Rank.equality,
}


def main(path: str) -> None:
    # torch before 2.13 has these by other names.
    for new, old in (("all_gather_single", "all_gather_into_tensor"),
                     ("reduce_scatter_single", "reduce_scatter_tensor")):  # fmt: skip
        if not hasattr(dist, new):
            setattr(dist, new, getattr(dist, old))
    plan = Plan(**json.loads(Path(path).read_text()))
    world = join_world()
    folder = Path(plan.folder)
    # The logs are judged where NCCL writes them: a launch that fails leaves them too.
    Evidence(open_storage(str(folder)), logs_of(folder), world, plan.attempt).publish_ranks()
    rank = Rank(plan, world)
    rank.emit("environment", device=loop.device_name(world.device), versions=loop.versions())
    for stage in plan.stages:
        STAGES[stage](rank)
    dist.barrier(group=world.control)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
