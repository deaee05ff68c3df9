"""The training function: fine-tunes a causal language model with FSDP2.

Knows torch.distributed and nothing of Ray: it runs under Ray Train, under torchrun, or alone in one process.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import platform
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from training import checkpoint as ckpt
from training.adapters import attach, fingerprint
from training.attention import layout_of
from training.control import Control
from training.data.batch import Batch
from training.data.pipeline import DataBundle
from training.data.pipeline import build as build_data
from training.determinism import use_deterministic_kernels
from training.errors import FinetuneError, JobStopped, UsageError
from training.export import export, export_adapter
from training.flight import Recorder
from training.hangs import Report, leave_report
from training.harness import check_harness, run_harness
from training.job import JobSpec
from training.metrics import (
    MetricsLog,
    PartTimer,
    StepRecord,
    Throughput,
    flops_per_step,
    memory,
    peak_flops,
)
from training.model import (
    CausalLM,
    base_parameters,
    init_adapters,
    init_weights,
    load_weights,
    num_parameters,
    parameter_names,
)
from training.objective import Objective, Supervised
from training.optimizer import ShardedAdamW, gradient_norm
from training.parallel import (
    World,
    begin_micro_batch,
    compute_dtype,
    hardware_of,
    join_world,
    mesh_of,
    release_gathered,
    shard,
)
from training.planning import Hardware, ModelShape, Sharding, choose_sharding
from training.preference import Preference, check_reference, frozen_reference
from training.samples import answer_prompts
from training.schedule import learning_rate
from training.sources import ModelSource, prepare_source
from training.stability import SpikeDetector
from training.storage import Storage
from training.tracking.trackers import Tracking
from training.traffic import sent_bytes_per_node
from training.transport.collect import nccl_host
from training.watchdog import Watchdog

log = logging.getLogger(__name__)

RESULT_SUFFIX = ".result.json"


@dataclass
class Hooks:
    """What the loop tells and asks the world around it."""

    event: Callable[[dict[str, Any]], None] = lambda _: None
    """Something a person may want to see at once: attempt, progress, checkpoint, evaluation. Called on rank 0."""
    preempted: Callable[[], bool] = lambda: False
    """True when nodes are about to be taken away: the loop writes a checkpoint and ends the attempt. All ranks call it
    at the same step, every few seconds."""
    metrics: Callable[[dict[str, Any]], None] = lambda _: None
    """This rank's line of a step, as it stands in metrics.jsonl. Called on every rank."""


@dataclass
class TrainResult:
    """What one attempt came to; rank 0's copy goes into the run folder."""

    attempt: str
    steps: int
    tokens: int
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    first_eval_loss: float | None
    exported: dict[str, Any]
    """The checkpoint whose weights were exported, and their held-out loss."""
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    mfu: float | None
    mfu_reason: str | None
    peak_memory_gib: float
    resumed_from: str | None
    checkpoint: str | None
    world_size: int
    nodes: int
    device: str
    parameters: int
    sharding: dict[str, Any]
    data: dict[str, Any]
    versions: dict[str, str]
    trainable_parameters: int
    expected_bytes: dict[str, int]
    """By host: what its collectives must have sent to other hosts in this attempt."""
    checkpoint_blocked_seconds: float = 0.0
    measures: dict[str, float] = field(default_factory=dict[str, float])
    """The objective's measures of the last step and the last evaluation."""


class Preempted(FinetuneError):
    """The node is being taken away; a checkpoint was written."""


class NonFiniteLoss(FinetuneError):
    """A loss or gradient is NaN or infinite, and the job's policy is to stop."""


class LossSpike(FinetuneError):
    """A loss is far above the last ones, and the job's policy is to stop, or nothing is there to go back to."""


@dataclass(frozen=True)
class _Agreement:
    """What all ranks agreed on before a step."""

    supervised_tokens: int
    tokens: int
    count: int
    """What the loss is a mean over: supervised tokens, or pairs."""
    stop: bool
    preempted: bool


@dataclass(frozen=True)
class _PendingStep:
    """A step whose numbers are still on the device."""

    step: int
    tokens: int
    supervised_tokens: int
    agreed: _Agreement
    lengths: list[int]
    batches: list[Batch]
    numbers: Tensor
    """Loss, measures of the objective and gradient norm, on their way to the host."""
    learning_rate: float
    seconds: Callable[[], dict[str, float]]
    eval_loss: float | None
    eval_measures: dict[str, float]
    skipped: str | None


@dataclass
class _Progress:
    """Where the loop stands: what a checkpoint saves besides tensors."""

    step: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    first_loss: float | None = None
    first_eval_loss: float | None = None
    reference: str | None = None
    """Fingerprint of the model that a preference objective compares with."""
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, int] | None = None
    """Sizes of the model that is trained."""
    adapter: dict[str, Any] | None = None
    """What the trained tensors belong to, where they are adapters: their shape and the frozen weights beside them."""


def train(
    job: JobSpec,
    storage: Storage,
    work_dir: Path,
    hooks: Hooks | None = None,
    attempt: str | None = None,
    world: World | None = None,
    hardware: Hardware | None = None,
) -> TrainResult:
    """Trains a job to its last step and exports the model.

    storage: the run folder. work_dir: scratch space of this node. Every rank calls it with the same arguments.

    Raises JobStopped when asked to stop (after a checkpoint), Preempted on a preemption notice (likewise), UsageError or
    DataError for what the job file asks wrongly, NonFiniteLoss where the policy is to stop.
    """
    hooks = hooks or Hooks()
    world = world or join_world()
    torch.manual_seed(job.seed + world.rank)  # dropout of adapters; weights have generators of their own
    if job.deterministic:
        use_deterministic_kernels(world.device)
    attempt = attempt or new_attempt(storage, world)
    trainer = _Trainer(job, storage, work_dir, hooks, world, attempt, hardware or hardware_of(world))
    try:
        return trainer.run()
    finally:
        trainer.close()


def new_attempt(storage: Storage, world: World) -> str:
    """An identifier for this attempt, agreed on by all ranks: its number and a few random digits, never used before."""
    shared: list[str] = [""]
    if world.rank == 0:
        number = sum(not name.endswith(RESULT_SUFFIX) for name in storage.list("attempts"))
        shared = [f"{number:03d}-{uuid.uuid4().hex[:6]}"]
    dist.broadcast_object_list(shared, src=0, group=world.control)
    return shared[0]


class _Trainer:
    def __init__(
        self,
        job: JobSpec,
        storage: Storage,
        work_dir: Path,
        hooks: Hooks,
        world: World,
        attempt: str,
        hardware: Hardware,
    ) -> None:
        self.hardware = hardware
        self.job = job
        self.storage = storage
        self.work_dir = work_dir
        self.hooks = hooks
        self.world = world
        self.attempt = attempt
        self.progress = _Progress()
        self.control = Control(storage, world.rank)
        self.succeeded = False
        self.watchdog = Watchdog(job.resilience.step_timeout_seconds, self._report_hang)
        self.recorder = Recorder(storage, work_dir, attempt, world.rank)
        self.log: MetricsLog | None = None
        self.tracking: Tracking | None = None
        self.checkpoint_seconds = 0.0
        self.published: str | None = None
        self.last_loss: float | None = None
        self.last_eval_loss: float | None = None
        self.last_measures: dict[str, float] = {}
        self.last_eval_measures: dict[str, float] = {}
        self.reference_fingerprint: str | None = None
        self.throughput = Throughput()
        self.num_eval_batches = 0
        self.num_rollbacks = 0
        self.timer = PartTimer(world.device)
        self.spikes = SpikeDetector(job.resilience.spike_factor)
        self._last_progress_event = 0.0

    # Set-up

    def run(self) -> TrainResult:
        self.control.trap_signals()
        self._start_guests()
        self.prepare()
        resumed_from = self._resume()
        self._record_attempt(resumed_from)
        if self.world.rank == 0:
            step = self.progress.step if resumed_from else None
            self.log = MetricsLog(self.storage, self.work_dir, step)
        self.watchdog.start()
        self._loop()
        return self._finish(resumed_from)

    def prepare(self) -> None:
        """Makes all that the steps need: source, data, model, objective, optimizer, checkpointer."""
        self.source = prepare_source(self.job, self.storage, self.world, self.work_dir)
        self.data = self._build_data(self.source)
        self._check_same_data(self.data)
        self.total_steps = self._total_steps(self.data)
        self.model, self.sharding = self._build_model(self.source)
        config = self.source.config
        # The embedding is a look-up; as the output layer it is a matrix product, tied or not.
        matmul_parameters = num_parameters(self.model) - (
            0 if self.model.tied else config.vocab_size * config.hidden_size
        )
        self.shape = (matmul_parameters, config.num_hidden_layers, config.hidden_size)
        self.trainable_parameters = num_parameters(self.model, trainable_only=True)
        self.progress.model = {
            "num_hidden_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
        }
        self.num_frozen = 0 if self.job.adapter is None else matmul_parameters - self.trainable_parameters
        self.objective = self._build_objective(self.source)
        self.optimizer = ShardedAdamW(self.model.hf, self.job.optimizer)
        self.checkpointer = ckpt.Checkpointer(
            self.storage,
            self.world,
            attempt=self.attempt,
            keep=self.job.checkpoint.keep,
            asynchronous=self.job.checkpoint.asynchronous,
            work_dir=self.work_dir,
            on_published=self._on_published,
        )
        self.checkpointer.allocate(ckpt.training_state(self.optimizer, self.world))

    def _start_guests(self) -> None:
        """Looks for the evaluation harness and opens the runs of the job's trackers, on rank 0. Every rank raises what is
        wrong with them."""
        problem: list[str | None] = [None]
        if self.world.rank == 0:
            try:
                check_harness(self.job)
                self.tracking = Tracking(self.job, self.storage, self.work_dir, self._warn, self._event)
            except UsageError as error:
                problem = [str(error)]
        dist.broadcast_object_list(problem, src=0, group=self.world.control)
        if problem[0] is not None:
            raise UsageError(problem[0])

    def _build_data(self, source: ModelSource) -> DataBundle:
        return build_data(
            self.job.training_data,
            source.tokenizer,
            seed=self.job.seed,
            tokens_per_batch=self.job.batch.micro_batch_tokens,
            rank=self.world.rank,
            world_size=self.world.size,
            work_dir=self.work_dir / "data",
            vocab_size=source.config.vocab_size,
        )

    def _check_same_data(self, data: DataBundle) -> None:
        """Every rank takes its rows out of one order: over other documents that would be another order."""
        fingerprints: list[Any] = [None] * self.world.size
        dist.all_gather_object(fingerprints, data.report.fingerprint, group=self.world.control)
        others = [rank for rank, found in enumerate(fingerprints) if found != fingerprints[0]]
        if others:
            raise UsageError(
                f"ranks {', '.join(map(str, others))} read other data than rank 0 (this is rank {self.world.rank} on "
                f"{socket.gethostname()}): a file of data.source differs between the nodes. Put the data on a volume "
                "that all nodes share, or on S3"
            )

    def _total_steps(self, data: DataBundle) -> int:
        if self.job.steps is not None:
            return self.job.steps
        assert self.job.epochs is not None
        packs_per_step = self.world.size * self.job.batch.accumulation
        return math.ceil(data.num_packs(self.job.epochs) / packs_per_step)

    def _build_model(self, source: ModelSource) -> tuple[CausalLM, Sharding]:
        model = CausalLM(source.config)
        if self.job.adapter is not None:
            attach(model, model.blocks, self.job.adapter, compute_dtype(self.job, self.world.device))
        shape = ModelShape.of_config(source.config.to_dict())
        sharding = choose_sharding(self.job, shape, self.hardware)
        self.mesh = mesh_of(self.world, sharding.scheme)
        shard(model, self.job, self.world, sharding, self.mesh)
        model.materialize(self.world.device)
        if source.weights is None:
            init_weights(model, self.job.seed)
        else:
            load_weights(model, source.weights)
        if self.job.adapter is not None:
            init_adapters(model, self.job.seed)
            self.progress.adapter = {
                **self.job.adapter.model_dump(mode="json", include={"kind", "rank", "targets"}),
                "scaling": self.job.adapter.scaling,
                "weights": fingerprint(base_parameters(model), self._shard_group()),
            }
        model.train()
        return model, sharding

    def _build_objective(self, source: ModelSource) -> Objective:
        if self.job.objective.kind == "supervised":
            return Supervised(self.model)
        if self.job.adapter is not None:
            return Preference(self.job, self.model, reference=None)
        reference = frozen_reference(self.job, source, self.world, self.sharding, self.mesh)
        self.reference_fingerprint = fingerprint(parameter_names(reference), self._shard_group())
        self.progress.reference = self.reference_fingerprint
        return Preference(self.job, self.model, reference)

    def _resume(self) -> str | None:
        name = self._newest_checkpoint() if self.job.run.resume else None
        if name is not None:
            self._restore(name)
        return name

    def _newest_checkpoint(self) -> str | None:
        """The newest complete checkpoint of the run folder, as rank 0 sees it."""
        shared: list[str | None] = [None]
        if self.world.rank == 0:
            complete = ckpt.complete_checkpoints(self.storage, warn=self._warn)
            shared = [complete[-1] if complete else None]
        dist.broadcast_object_list(shared, src=0, group=self.world.control)
        return shared[0]

    def _restore(self, name: str) -> None:
        saved_progress = ckpt.saved_progress(self.storage, name)
        saved, mine = saved_progress.get("model"), self.progress.model
        if saved is not None and saved != mine:
            raise UsageError(
                f"checkpoint {name} in {self.storage.uri} is of a model with {_sizes_text(saved)}, this job's has "
                f"{_sizes_text(mine)}: it cannot go on from there. Give the job its earlier model, or another run.path, or "
                "set run.resume: false to remove what is there"
            )
        saved, mine = saved_progress.get("adapter"), self.progress.adapter
        if saved != mine:
            raise UsageError(
                f"checkpoint {name} in {self.storage.uri} trains {_adapter_text(saved)}, this job {_adapter_text(mine)}: "
                "it cannot go on from there. Give the job its earlier adapter and model, or another run.path, or set "
                "run.resume: false to remove what is there"
            )
        release_gathered(self.model)
        state = ckpt.training_state(self.optimizer, self.world)
        progress = ckpt.restore(self.storage, name, state, self.world, self.work_dir)
        self.progress = _Progress(**progress)
        if self.reference_fingerprint is not None:
            check_reference(self.reference_fingerprint, self.progress.reference)
        self.progress.reference = self.reference_fingerprint
        self.data.train_loader.load_state_dict(self.progress.data)
        self.published = name

    def _record_attempt(self, resumed_from: str | None) -> None:
        record = {
            "attempt": self.attempt,
            "resumed_from": resumed_from,
            "step": self.progress.step,
            "world_size": self.world.size,
            "nodes": self.world.num_nodes,
            "time": time.time(),
        }
        if self.world.rank == 0:
            self.storage.write_text(f"attempts/{self.attempt}.json", json.dumps(record))
            self.hooks.event({"event": "attempt", **record, "steps": self.total_steps})

    # The loop

    def _loop(self) -> None:
        pending: _PendingStep | None = None
        # What lives from here on lives to the end: the collector need not walk through it again and again.
        gc.collect()
        gc.freeze()
        if self.progress.step == 0:
            self._evaluate(step=0)
        while self.progress.step < self.total_steps:
            current = self._step()
            if pending is not None:
                self._account(pending)
            pending = current
            last = self.progress.step == self.total_steps
            ending = last or current.agreed.stop or current.agreed.preempted
            if self.world.device.type == "cpu" or ending:
                self._account(pending)
                pending = None
            if ending and not last:
                self._end_early(current.agreed)
        self.checkpointer.wait()

    def _step(self) -> _PendingStep:
        """One optimizer step, with the evaluation and the checkpoint that are due after it."""
        step = self.progress.step
        self.watchdog.mark(step, "data")
        self.timer.start()
        batches = [next(self.data.train_loader) for _ in range(self.job.batch.accumulation)]
        agreed = self._agree(batches)
        self.timer.end("data")

        self.watchdog.mark(step, "forward and backward")
        sums = self._forward_backward(batches, agreed.count)

        self.watchdog.mark(step, "optimizer")
        grad_norm = gradient_norm(self.optimizer.working_weights().values(), self._shard_group())
        rate = learning_rate(self.job.schedule, self.job.optimizer.learning_rate, step, self.total_steps)
        skipped = self._spike(step, sums[0], batches)
        if skipped is None:
            self.optimizer.step(rate, grad_norm)
        self.optimizer.zero_grad()
        # Sent now, read one step later: reading the device's tensors then would wait for all that is queued by then.
        numbers = torch.cat((sums, grad_norm[None])).to("cpu", non_blocking=True)
        self.timer.end("optimizer")

        self.progress.step = step + 1
        self.progress.tokens += agreed.tokens
        self.progress.supervised_tokens += agreed.supervised_tokens
        self.progress.data = self.data.train_loader.state_dict()
        if skipped == "rollback":
            self._roll_back()
        last = self.progress.step == self.total_steps
        due = last or self.progress.step % self.job.evaluation.every == 0
        eval_loss = self._evaluate(self.progress.step) if due and skipped is None else None
        self.timer.end("evaluation")
        if skipped is None:
            self._save_if_due(last, agreed, eval_loss)
        self.timer.end("checkpoint")
        return _PendingStep(
            step=step + 1,
            tokens=self.progress.tokens,
            supervised_tokens=self.progress.supervised_tokens,
            agreed=agreed,
            lengths=[length for batch in batches for length in document_lengths(batch)],
            batches=batches,
            numbers=numbers,
            learning_rate=rate,
            seconds=self.timer.take(),
            eval_loss=eval_loss,
            eval_measures={} if eval_loss is None else self.last_eval_measures,
            skipped=skipped,
        )

    def _end_early(self, agreed: _Agreement) -> None:
        self.checkpointer.wait()
        if agreed.stop:
            raise JobStopped(f"stopped on request after step {self.progress.step} of {self.total_steps}")
        raise Preempted(f"preempted: checkpoint {self.published} was written at step {self.progress.step}")

    def _spike(self, step: int, loss: Tensor, batches: list[Batch]) -> Literal["skip", "rollback"] | None:
        """What the job's policy does with this step's loss: None where it is no spike (or not finite, see _account).

        Reading the loss before the update makes the host wait for the device: only where the policy asks for it.
        """
        policy = self.job.resilience.loss_spike
        if policy == "ignore":
            return None
        value = float(loss)
        if not math.isfinite(value) or not self.spikes.is_spike(value):
            return None
        what = (
            f"step {step + 1}: loss {value:.4g} is more than {self.spikes.factor:g} times the median "
            f"{self.spikes.median:.4g} of the last steps. The batch: {self._where_from(batches)}"
        )
        self._event({"event": "loss_spike", "step": step + 1, "what": what, "policy": policy})
        if policy == "stop":
            raise LossSpike(
                f"{what}. The update was not applied. Look at these documents, lower optimizer.learning_rate, or set "
                "resilience.loss_spike to skip or rollback"
            )
        return policy

    def _roll_back(self) -> None:
        """Back to the newest checkpoint, but on with the data: the batch that made the spike is not seen again."""
        self.checkpointer.wait()
        name = self._newest_checkpoint()
        if name is None:
            raise LossSpike(
                "a loss spike asks for a rollback, but no checkpoint is there yet; lower checkpoint.every"
            )
        data = self.progress.data
        self._restore(name)
        self.progress.data = data
        self.data.train_loader.load_state_dict(data)
        self.num_rollbacks += 1
        # Steps are counted again from the checkpoint on: what they write must not meet what stands there.
        self.checkpointer.attempt = f"{self.attempt}-r{self.num_rollbacks}"
        if self.log is not None:
            self.log.close()
            self.log = MetricsLog(self.storage, self.work_dir, self.progress.step)

    def _forward_backward(self, batches: list[Batch], count: int) -> Tensor:
        """Gradients of the mean loss of the step. Returns that loss and the objective's measures, means over all ranks."""
        total = torch.zeros(1 + len(self.objective.MEASURES), device=self.world.device)
        for index, batch in enumerate(batches):
            begin_micro_batch(self.model, self.sharding, last=index == len(batches) - 1)
            layout = layout_of(batch, self.job.data.max_length, self.world.device)
            sums = self.objective.loss(to_device(batch, self.world.device), layout) / max(count, 1)
            self.timer.end("forward")
            sums[0].backward()
            self.timer.end("backward")
            total += sums.detach()
        dist.all_reduce(total)
        return total

    def _agree(self, batches: list[Batch]) -> _Agreement:
        """What the ranks must know of each other before a step: one small all-reduce on the host."""
        mine = torch.tensor(
            [
                sum(batch.num_supervised for batch in batches),
                sum(batch.num_tokens for batch in batches),
                sum(self.objective.count(batch) for batch in batches),
                int(self.control.stop_asked()),
                int(self.control.preemption_poll_due()),
            ],
            dtype=torch.int64,
        )
        if self.world.size > 1:
            dist.all_reduce(mine, group=self.world.control)
        supervised, tokens, count, stop, poll = mine.tolist()
        return _Agreement(supervised, tokens, count, bool(stop), bool(poll) and self.hooks.preempted())

    @torch.no_grad()
    def _evaluate(self, step: int) -> float | None:
        """Held-out loss (per supervised token or per pair), over all ranks; None where nothing is held out."""
        if self.data.validation is None:
            return None
        self.watchdog.mark(step - 1, "evaluation")
        self.model.eval()
        totals = torch.zeros(2 + len(self.objective.MEASURES), dtype=torch.float64)
        for batch in itertools.islice(self.data.validation, self.job.evaluation.max_batches):
            layout = layout_of(batch, self.job.data.max_length, self.world.device)
            totals[:-1] += self.objective.loss(to_device(batch, self.world.device), layout).cpu()
            totals[-1] += self.objective.count(batch)
            self.num_eval_batches += 1
        self.model.train()
        dist.all_reduce(totals, group=self.world.control)
        loss, *measures = (totals[:-1] / totals[-1]).tolist()
        self.last_eval_measures = {
            f"eval_{name}": value for name, value in zip(self.objective.MEASURES, measures, strict=True)
        }
        if self.progress.first_eval_loss is None:
            self.progress.first_eval_loss = loss
        if step == 0:
            self._record(
                StepRecord(
                    step=0,
                    tokens=0,
                    supervised_tokens=0,
                    loss=None,
                    learning_rate=0.0,
                    grad_norm=None,
                    tokens_per_second=0.0,
                    seconds={},
                    memory=memory(self.world.device),
                    attempt=self.attempt,
                    eval_loss=loss,
                    measures=self.last_eval_measures,
                )
            )
        self.last_eval_loss = loss
        self._event({"event": "evaluation", "step": step, "eval_loss": loss, **self.last_eval_measures})
        return loss

    def _save_if_due(self, last: bool, agreed: _Agreement, eval_loss: float | None) -> None:
        due = last or self.progress.step % self.job.checkpoint.every == 0
        if not (due or agreed.stop or agreed.preempted):
            return
        self.watchdog.mark(self.progress.step - 1, "checkpoint")
        started = time.monotonic()
        state = ckpt.training_state(self.optimizer, self.world)
        self.checkpointer.save(state, self.progress.step, dict(self.progress.__dict__), eval_loss)
        self.checkpoint_seconds += time.monotonic() - started

    # Reporting

    def _account(self, pending: _PendingStep) -> None:
        """Reads a step's numbers off the device and writes its line. On CUDA it is called one step late and never waits."""
        seconds = pending.seconds()  # waits for this step's end on the device, and not for what came after it
        loss, *values, grad_norm = pending.numbers.tolist()
        self.last_measures = dict(zip(self.objective.MEASURES, values, strict=True))
        skipped = pending.skipped
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            skipped = self._non_finite(pending, loss, grad_norm)
        elif self.progress.first_loss is None:
            self.progress.first_loss = loss
        self.last_loss = loss
        duration = sum(seconds.values())
        training_seconds = duration - seconds["checkpoint"] - seconds["evaluation"]
        flops = self.world.size * flops_per_step(*self.shape, pending.lengths, self.num_frozen)
        flops += (
            self.world.size * self.objective.EXTRA_FORWARDS * flops_per_step(*self.shape, pending.lengths) / 3
        )
        self.throughput.add(pending.agreed.tokens, flops, training_seconds)
        record = StepRecord(
            step=pending.step,
            tokens=pending.tokens,
            supervised_tokens=pending.supervised_tokens,
            loss=loss if math.isfinite(loss) else None,
            learning_rate=pending.learning_rate,
            grad_norm=grad_norm if math.isfinite(grad_norm) else None,
            tokens_per_second=pending.agreed.tokens / training_seconds,
            seconds=seconds,
            memory=memory(self.world.device),
            attempt=self.attempt,
            eval_loss=pending.eval_loss,
            skipped=skipped,
            measures=self.last_measures | pending.eval_measures,
        )
        self._record(record)
        self._progress_event(record)

    def _record(self, record: StepRecord) -> None:
        """A line for metrics.jsonl, the job's trackers and whoever watches this rank."""
        line = record.line()
        self.hooks.metrics(line)
        if self.log is not None:
            self.log.write(record)
        if self.tracking is not None:
            self.tracking.record(line)

    def _non_finite(self, pending: _PendingStep, loss: float, grad_norm: float) -> str:
        """The optimizer has left everything untouched; say where it came from, and stop where that is the policy."""
        where = self._where_from(pending.batches)
        what = f"step {pending.step}: loss {loss}, gradient norm {grad_norm}. The batch: {where}"
        self._event({"event": "non_finite", "step": pending.step, "what": what})
        if self.job.resilience.non_finite == "stop":
            raise NonFiniteLoss(
                f"{what}. The update was not applied. Lower optimizer.learning_rate, look at these documents, or set "
                "resilience.non_finite: skip to go on without such steps"
            )
        return "non_finite"

    def _where_from(self, batches: list[Batch]) -> str:
        """Which documents each rank had in its hands. Every rank calls it."""
        documents = [text for batch in batches for text in self._document_beginnings(batch)]
        mine = f"rank {self.world.rank} ({socket.gethostname()}): {', '.join(documents[:5])}"
        everyone: list[Any] = [None] * self.world.size
        dist.all_gather_object(everyone, mine, group=self.world.control)
        return "; ".join(everyone)

    def _document_beginnings(self, batch: Batch) -> list[str]:
        """The first words of each document of a batch: enough to find it in the data."""
        starts = batch.cu_seqlens.tolist()[: batch.num_documents]
        return [
            repr(self.source.tokenizer.decode(batch.input_ids[start : start + 16].tolist()))
            for start in starts
        ]

    def _progress_event(self, record: StepRecord) -> None:
        now = time.monotonic()
        if now - self._last_progress_event < 1.0 and record.step != self.total_steps:
            return
        self._last_progress_event = now
        memory_gib = record.memory.get("peak_gib", record.memory.get("rss_gib"))
        self._event(
            {
                "event": "progress",
                "step": record.step,
                "steps": self.total_steps,
                "loss": record.loss,
                "eval_loss": self.last_eval_loss,
                **record.measures,
                "tokens_per_second": round(record.tokens_per_second, 1),
                "seconds_left": round(self.throughput.seconds_left(self.total_steps - record.step), 1),
                "memory_gib": None if memory_gib is None else round(memory_gib, 2),
            }
        )

    def _event(self, event: dict[str, Any]) -> None:
        if self.world.rank == 0:
            self.hooks.event(event)

    def _on_published(self, published: ckpt.Published) -> None:
        self.published = published.name
        if self.log is not None:  # a resumed run must find the lines up to its checkpoint
            self.log.upload()
        line = {"event": "checkpoint", **published.__dict__}
        self.hooks.event(line)

    def _warn(self, text: str) -> None:
        log.warning(text)
        self.hooks.event({"event": "warning", "text": text})

    def _report_hang(self, step: int, phase: str, stack: str) -> None:
        seconds = self.watchdog.timeout_seconds
        report = Report(self.world.rank, socket.gethostname(), step, phase, stack, seconds)
        leave_report(
            self.storage, self.attempt, report, self.world.size, self.recorder.dump, self.hooks.event
        )

    def _shard_group(self) -> dist.ProcessGroup | None:
        if self.world.size == 1:
            return None
        return self.mesh.get_group("shard")

    # The end

    def _finish(self, resumed_from: str | None) -> TrainResult:
        self.watchdog.stop()
        release_gathered(self.model)
        exported = self._take_weights_to_export()
        dtype = torch.bfloat16 if self.world.device.type == "cuda" else torch.float32
        target = (self.source.tokenizer, self.storage, self.world, self.work_dir)
        if self.job.adapter is not None:
            export_adapter(self.model, self.job, self.source.revision, *target)
        if self.job.adapter is None or self.job.adapter.merge:
            export(self.model, *target, dtype)
        self._answer_prompts()
        peak, mfu_reason = peak_flops(self.world.device)
        throughput = self.throughput
        mfu = None if peak is None else throughput.utilization(peak * self.world.size)
        peak_memory = memory(self.world.device)
        result = TrainResult(
            attempt=self.attempt,
            steps=self.progress.step,
            tokens=self.progress.tokens,
            first_loss=self.progress.first_loss,
            last_loss=self.last_loss,
            eval_loss=self.last_eval_loss,
            first_eval_loss=self.progress.first_eval_loss,
            exported=exported,
            tokens_per_second=throughput.tokens_per_second,
            tokens_per_second_per_gpu=throughput.tokens_per_second / self.world.size,
            mfu=mfu,
            mfu_reason=mfu_reason if mfu is None else None,
            peak_memory_gib=peak_memory.get("peak_gib", peak_memory.get("rss_gib", 0.0)),
            resumed_from=resumed_from,
            checkpoint=self.published,
            world_size=self.world.size,
            nodes=self.world.num_nodes,
            device=device_name(self.world.device),
            parameters=num_parameters(self.model),
            trainable_parameters=self.trainable_parameters,
            sharding=dict(self.sharding.__dict__),
            data=self.data.report.model_dump(mode="json"),
            versions=versions(),
            expected_bytes=self._expected_bytes(),
            checkpoint_blocked_seconds=self.checkpoint_seconds,
            measures=self.last_measures | self.last_eval_measures,
        )
        if self.world.rank == 0:
            self.storage.write_text(f"attempts/{self.attempt}{RESULT_SUFFIX}", json.dumps(result.__dict__))
        self._run_harness()
        self.succeeded = True
        return result

    def _take_weights_to_export(self) -> dict[str, Any]:
        """The last weights stay where they are; the best ones are loaded from their checkpoint."""
        best: list[Any] = [None, False]
        if self.job.checkpoint.export == "best" and self.world.rank == 0:
            chosen = ckpt.best_checkpoint(self.storage)
            # Only rank 0 knows what was published last, and loading takes all ranks.
            best = [chosen, chosen is not None and chosen.name != self.published]
        dist.broadcast_object_list(best, src=0, group=self.world.control)
        chosen, is_earlier = best
        if chosen is None:
            return {"checkpoint": self.published, "eval_loss": self.last_eval_loss}
        if is_earlier:
            weights = self.optimizer.parameters
            ckpt.restore_weights(self.storage, chosen.name, weights, self.world, self.work_dir)
        return {"checkpoint": chosen.name, "eval_loss": chosen.eval_loss}

    def _run_harness(self) -> None:
        """Last of all and without a collective after it: it may take longer than ranks wait for each other."""
        spec = self.job.evaluation.harness
        if self.world.rank != 0 or spec is None:
            return
        found = run_harness(spec, self.storage, self.work_dir, self.world.device)
        if "error" in found:
            self._warn(f"evaluation.harness failed, and the run is whole without it: {found['error']}")

    def _expected_bytes(self) -> dict[str, int]:
        hosts: list[Any] = [None] * self.world.size
        dist.all_gather_object(hosts, nccl_host(), group=self.world.control)
        num_steps = self.throughput.steps
        sent = sent_bytes_per_node(
            self.job, self.model, self.sharding, self.world, num_steps, self.num_eval_batches
        )
        return dict.fromkeys(hosts, sent)

    def _answer_prompts(self) -> None:
        """The export is proven by using it: loaded back, it answers the job's prompts."""
        evaluation = self.job.evaluation
        if self.world.rank == 0 and evaluation.prompts:
            samples = answer_prompts(
                self.storage, evaluation.prompts, self.work_dir, self.world.device, evaluation.max_new_tokens
            )
            self.hooks.event({"event": "samples", "samples": samples})
        dist.barrier(group=self.world.control)

    def close(self) -> None:
        gc.unfreeze()
        self.watchdog.stop()
        if self.log is not None:
            self.log.close()
        if self.tracking is not None:
            self.tracking.close(succeeded=self.succeeded)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copies that the host does not wait for: on CUDA they start from pinned memory."""
    if device.type == "cuda":
        names = ("input_ids", "labels", "position_ids", "cu_seqlens")
        batch = replace(batch, **{name: getattr(batch, name).pin_memory() for name in names})
    return batch.to(device)


def document_lengths(batch: Batch) -> list[int]:
    """Lengths of the documents of a batch, without the padding behind them."""
    borders = batch.cu_seqlens.tolist()[: batch.num_documents + 1]
    return [after - before for before, after in zip(borders, borders[1:], strict=False)]


def _sizes_text(sizes: dict[str, int] | None) -> str:
    return ", ".join(f"{name} {size:,}" for name, size in (sizes or {}).items())


def _adapter_text(adapter: dict[str, Any] | None) -> str:
    if adapter is None:
        return "all weights"
    targets = ", ".join(adapter["targets"])
    return (
        f"{adapter['kind']} of rank {adapter['rank']} and scaling {adapter['scaling']:g} on {targets} beside weights "
        f"with checksum {adapter['weights']}"
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def versions() -> dict[str, str]:
    import transformers

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.cuda.is_available():
        from torch.cuda import nccl

        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(str(part) for part in nccl.version())
    return found
