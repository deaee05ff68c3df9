"""Memory and time of a job before it runs, and the layout that follows from them.

Plain arithmetic, without torch: the command line plans with it, and the loop lays the model out by the same rules.
The constants were fitted to measurements where there are any; each says which. `finetune plan` prints the result, and
the report sets it beside what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from training.job import AdapterSpec, ArchitectureSpec, JobSpec
from training.transport.expected import ParameterGroup, expected_bytes_per_node

Scheme = Literal["full", "hybrid"]

GIB = 2.0**30
# Share of the GPU's memory that a plan may fill: the allocator's fragments, NCCL's buffers and the CUDA context
# (about 1 GiB on every GPU) need the rest. 2026-12.
USABLE_SHARE = 0.92
# Model FLOP/s utilization of the compute part of a step. H200: 0.54 of 989 measured 2026-12-01; L4, whose 72 W cap
# holds it back, is an assumption (a GEMM at half of the peak), as are the others.
COMPUTE_EFFICIENCY: Mapping[str, float] = {"NVIDIA L4": 0.42, "NVIDIA H200": 0.54}
DEFAULT_EFFICIENCY = 0.45
# Part of the line rate that collectives reach over EFA. An assumption: no measurement of these types is published.
NETWORK_EFFICIENCY = 0.8
# Part of the communication that does not hide behind the compute of the same step.
EXPOSED_SHARE = 0.15


@dataclass(frozen=True)
class Sharding:
    """The resolved form of the job's `parallel` section."""

    scheme: Scheme
    reshard_after_forward: bool
    checkpoint_every: int
    """Every k-th block is recomputed in backward; 0: none."""
    reason: str


@dataclass(frozen=True)
class Hardware:
    """What a job runs on. gpu_memory_gib and the speeds are per GPU, network_gbps (Gbit/s, one direction) per node."""

    gpu_name: str
    num_nodes: int
    gpus_per_node: int
    gpu_memory_gib: float
    peak_tflops: float | None
    in_node_gb_per_second: float
    network_gbps: float
    hourly_usd: float | None = None

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.gpus_per_node


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    query_size: int
    kv_size: int
    vocab_size: int
    tied: bool
    qkv_bias: bool = False

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """From the keys of a Hugging Face config.json."""
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        return cls(
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            query_size=heads * head_dim,
            kv_size=int(config.get("num_key_value_heads") or heads) * head_dim,
            vocab_size=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=config.get("model_type") == "qwen2",
        )

    @classmethod
    def of_architecture(cls, architecture: ArchitectureSpec) -> ModelShape:
        head_dim = architecture.hidden_size // architecture.num_heads
        return cls(
            num_layers=architecture.num_layers,
            hidden_size=architecture.hidden_size,
            intermediate_size=architecture.intermediate_size,
            query_size=architecture.num_heads * head_dim,
            kv_size=architecture.num_kv_heads * head_dim,
            vocab_size=architecture.vocab_size,
            tied=architecture.tie_embeddings,
            qkv_bias=architecture.family == "qwen2",
        )

    @property
    def block_parameters(self) -> int:
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        bias = self.query_size + 2 * self.kv_size if self.qkv_bias else 0
        return attention + bias + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(input, output) size of each linear layer of a block, in the order of job.BLOCK_LINEARS."""
        hidden, intermediate = self.hidden_size, self.intermediate_size
        return {
            "q_proj": (hidden, self.query_size),
            "k_proj": (hidden, self.kv_size),
            "v_proj": (hidden, self.kv_size),
            "o_proj": (self.query_size, hidden),
            "gate_proj": (hidden, intermediate),
            "up_proj": (hidden, intermediate),
            "down_proj": (intermediate, hidden),
        }

    def adapter_parameters(self, adapter: AdapterSpec) -> int:
        """Parameters of the adapters of a block."""
        sizes = [self.linears[target] for target in adapter.targets]
        magnitudes = sum(size for _, size in sizes) if adapter.kind == "dora" else 0
        return adapter.rank * sum(map(sum, sizes)) + magnitudes

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return self.num_layers * self.block_parameters + embeddings + self.hidden_size

    @property
    def matmul_parameters(self) -> int:
        """Parameters that take part in a matrix product per token: the look-up of the embedding is none."""
        return self.num_layers * self.block_parameters + self.embedding_parameters


@dataclass(frozen=True)
class _Counts:
    """Parameters of each FSDP group and of the whole model, adapters included, and how many of them are trained."""

    block: int
    root: int
    total: int
    block_trained: int
    root_trained: int
    total_trained: int

    @classmethod
    def of(cls, job: JobSpec, shape: ModelShape) -> _Counts:
        root = shape.num_parameters - shape.num_layers * shape.block_parameters
        if job.adapter is None:
            block, total = shape.block_parameters, shape.num_parameters
            return cls(block, root, total, block, root, total)
        adapters = shape.adapter_parameters(job.adapter)
        total_adapters = shape.num_layers * adapters
        return cls(
            block=shape.block_parameters + adapters,
            root=root,
            total=shape.num_parameters + total_adapters,
            block_trained=adapters,
            root_trained=0,
            total_trained=total_adapters,
        )


@dataclass(frozen=True)
class Prediction:
    """What `finetune plan` says. Times are seconds per optimizer step, memory is GiB on each GPU."""

    memory_gib: float
    memory_parts: dict[str, float]
    gpu_memory_gib: float
    fits: bool
    step_seconds: float
    step_parts: dict[str, float]
    tokens_per_second: float
    steps: int | None
    hours: float | None
    cost_usd: float | None
    limited_by: str
    sharding: Sharding
    parameters: int
    trainable_parameters: int

    def document(self) -> dict[str, Any]:
        return asdict(self)


def predict(job: JobSpec, shape: ModelShape, hardware: Hardware, steps: int | None = None) -> Prediction:
    """Memory, time and price of a job. steps: optimizer steps where the job counts epochs; None leaves hours open."""
    steps = job.steps if job.steps is not None else steps
    sharding = choose_sharding(job, shape, hardware)
    parts = memory_parts(job, shape, hardware, sharding)
    memory = sum(parts.values())
    compute, in_node, across = step_parts(job, shape, hardware, sharding)
    network = max(in_node, across)
    step = max(compute, network) + EXPOSED_SHARE * min(compute, network)
    counts = _Counts.of(job, shape)
    hours = None if steps is None else steps * step / 3600
    return Prediction(
        memory_gib=memory,
        memory_parts=parts,
        gpu_memory_gib=hardware.gpu_memory_gib,
        fits=memory <= USABLE_SHARE * hardware.gpu_memory_gib,
        step_seconds=step,
        step_parts={"compute": compute, "in_node": in_node, "cross_node": across},
        tokens_per_second=job.batch.tokens_per_gpu * hardware.world_size / step,
        steps=steps,
        hours=hours,
        cost_usd=None if hours is None or hardware.hourly_usd is None else hours * hardware.hourly_usd,
        limited_by=_limit(compute, in_node, across),
        sharding=sharding,
        parameters=counts.total,
        trainable_parameters=counts.total_trained,
    )


def _limit(compute: float, in_node: float, across: float) -> str:
    slowest = max(compute, in_node, across)
    if slowest == compute:
        return "compute"
    return "network between nodes" if slowest == across else "interconnect in the node"


def choose_sharding(job: JobSpec, shape: ModelShape, hardware: Hardware) -> Sharding:
    """Layout of a job: what the job file fixes stays; `auto` parts become the fastest layout that fits the memory.

    Tried in the order of step time, without recomputation first: weights kept after the forward, freed after it, then
    every fourth, every second and every block recomputed.
    """
    schemes = _schemes(job, hardware)
    reshards = _choices(job.parallel.reshard_after_forward, (False, True))
    checkpointing = _choices(_every(job.parallel.activation_checkpointing), (0, 4, 2, 1))
    candidates = [
        Sharding(scheme, reshard, every, "")
        for every in checkpointing
        for scheme in schemes
        for reshard in reshards
    ]
    budget = USABLE_SHARE * hardware.gpu_memory_gib
    fitting = [c for c in candidates if sum(memory_parts(job, shape, hardware, c).values()) <= budget]
    if not fitting:
        smallest = min(candidates, key=lambda c: sum(memory_parts(job, shape, hardware, c).values()))
        need = sum(memory_parts(job, shape, hardware, smallest).values())
        reason = f"nothing fits {budget:.1f} GiB: the smallest layout needs {need:.1f} GiB per GPU"
        return Sharding(smallest.scheme, smallest.reshard_after_forward, smallest.checkpoint_every, reason)
    best = min(fitting, key=lambda c: _step_seconds(job, shape, hardware, c))
    return Sharding(
        best.scheme, best.reshard_after_forward, best.checkpoint_every, _reason(job, shape, hardware, best)
    )


def _schemes(job: JobSpec, hardware: Hardware) -> tuple[Scheme, ...]:
    if job.parallel.sharding != "auto":
        return (job.parallel.sharding,)
    if hardware.num_nodes == 1 or hardware.gpus_per_node == 1:
        return ("full",)
    return ("hybrid", "full")


def _choices(asked: Any, possible: tuple[Any, ...]) -> tuple[Any, ...]:
    return possible if asked == "auto" else (asked,)


def _every(asked: Literal["auto", "none", "full"] | int) -> Literal["auto"] | int:
    if asked == "auto":
        return "auto"
    if isinstance(asked, int):
        return asked
    return 0 if asked == "none" else 1


def _reason(job: JobSpec, shape: ModelShape, hardware: Hardware, chosen: Sharding) -> str:
    memory = sum(memory_parts(job, shape, hardware, chosen).values())
    compute, in_node, across = step_parts(job, shape, hardware, chosen)
    where = {
        "hybrid": "sharded in the node and replicated across nodes",
        "full": f"sharded over all {hardware.world_size} ranks",
    }[chosen.scheme]
    kept = "freed after the forward" if chosen.reshard_after_forward else "kept until the backward"
    recomputed = {0: "nothing recomputed", 1: "every block recomputed"}.get(
        chosen.checkpoint_every, f"every {chosen.checkpoint_every}. block recomputed"
    )
    return (
        f"{where}, weights {kept}, {recomputed}: {memory:.1f} of {hardware.gpu_memory_gib:.1f} GiB, and the fastest that "
        f"fits (compute {compute:.2f} s, in the node {in_node:.2f} s, between nodes {across:.2f} s a step)"
    )


# Memory


def memory_parts(job: JobSpec, shape: ModelShape, hardware: Hardware, sharding: Sharding) -> dict[str, float]:
    """GiB on each GPU at the peak, by part. Within 9 % of twelve measured peaks (bench/results/gpu-memory.json, one H200,
    2026-12-01), which a test holds it to.

    State: 12 bytes per own parameter (float32 master and two moments). The reference model of a preference objective: 2
    bytes, and its gathered blocks are gone before the peak. Weights: the root always, blocks two at a time or
    all of them, in bfloat16. Last: what the peak adds to these, the largest of the loss of one chunk, of the block being
    recomputed with its gradients, and of the sharded gradients, which replace the activations as backward goes on.

    With adapters, by the same reasoning and not yet measured: frozen parameters are 2 bytes in bfloat16 and have no
    state and no gradient.
    """
    counts = _Counts.of(job, shape)
    shards = hardware.gpus_per_node if sharding.scheme == "hybrid" else hardware.world_size
    gathered_blocks = 2 if sharding.reshard_after_forward else shape.num_layers
    tokens = job.batch.micro_batch_tokens
    activations = tokens * activation_bytes_per_token(shape, sharding.checkpoint_every, job.adapter)
    gathered = keeps_gathered(job, hardware.world_size, sharding)
    chunk = min(LOSS_CHUNK_TOKENS, tokens)
    output_gradient = 4.0 * shape.embedding_parameters if counts.root_trained else 0.0
    loss = LOSS_BYTES_PER_LOGIT * chunk * shape.vocab_size + output_gradient
    recomputed = tokens * _block_bytes_per_token(shape, job.adapter) if sharding.checkpoint_every else 0.0
    backward = tokens * BACKWARD_NUMBERS * 2.0 * shape.intermediate_size
    unreduced = 0.0 if gathered else 4.0 * max(2 * counts.block_trained, counts.root_trained)
    gradients = (2.0 if gathered else 4.0) * counts.total_trained / shards
    parts = {
        "masters and moments": 12.0 * counts.total_trained / shards,
        **({"reference model": 2.0 * shape.num_parameters / shards} if holds_reference(job) else {}),
        "gathered weights": 2.0 * (counts.root + gathered_blocks * counts.block),
        "activations": activations,
        "loss or gradients": max(
            loss, recomputed + backward + unreduced, gradients + unreduced - activations
        ),
    }
    if job.adapter is not None:
        parts["frozen weights"] = 2.0 * (counts.total - counts.total_trained) / shards
    return {name: value / GIB for name, value in parts.items()}


def keeps_gathered(job: JobSpec, world_size: int, sharding: Sharding) -> bool:
    """Whether the gathered weights of one step are those of the next.

    One rank has nothing to gather and nothing to reduce. Its optimizer reads the gradients as autograd made them, and
    writes the weights in the dtype of the computation beside the masters: FSDP's casts and copies of both are not needed,
    10 to 13 ms of a step of Qwen2.5-1.5B (H200, 2026-12-01). Not with gradient accumulation, whose sum is kept in
    reduce_dtype.
    """
    return world_size == 1 and job.batch.accumulation == 1 and not sharding.reshard_after_forward


def holds_reference(job: JobSpec) -> bool:
    """Whether a frozen copy of the model is kept beside the trained one. With adapters the reference is the trained model
    without them.
    """
    return job.objective.kind == "dpo" and job.adapter is None


# Tokens whose logits are held at a time (training/loss.py; a test keeps them equal).
LOSS_CHUNK_TOKENS = 4096
# Logits and their gradient in bfloat16, by the fused kernel (training/kernels): 2.6 of the 3.5 GiB measured for the loss
# of Qwen2.5-1.5B on 2026-12-01; the rest is the float32 gradient of the output layer.
LOSS_BYTES_PER_LOGIT = 4.5
# What the backward of an MLP makes besides what the forward kept, in numbers per intermediate channel: the product of gate
# and up, its gradient, and the gradients of both. 123.7 KiB a token with the recomputed block were measured for
# Qwen2.5-1.5B on 2026-12-01, 124 by this.
BACKWARD_NUMBERS = 4


def activation_bytes_per_token(
    shape: ModelShape, checkpoint_every: int, adapter: AdapterSpec | None = None
) -> float:
    """Bytes kept for the backward of one token, all blocks together: for Qwen2.5-1.5B 1,512, 798 and 84 KiB with none,
    every second and every block recomputed (measured 2026-12-01: 1,523, 804 and 84).
    """
    recomputed = math.ceil(shape.num_layers / checkpoint_every) if checkpoint_every else 0
    kept = shape.num_layers - recomputed
    return kept * _block_bytes_per_token(shape, adapter) + recomputed * 2.0 * shape.hidden_size


def _block_bytes_per_token(shape: ModelShape, adapter: AdapterSpec | None) -> float:
    kept = 5 * shape.hidden_size + shape.query_size + 2 * shape.kv_size + 2 * shape.intermediate_size
    if adapter is not None:
        kept += _adapter_numbers_per_token(shape, adapter)
    return 2.0 * kept


def _adapter_numbers_per_token(shape: ModelShape, adapter: AdapterSpec) -> int:
    """What adapters keep for the backward of one token in one block, in numbers.

    Of each adapted layer the result of A, its input after dropout, and with DoRA the output before it is scaled. An
    adapted MLP does not run by the kernel that makes the product of gate and up anew.
    """
    sizes = [shape.linears[target] for target in adapter.targets]
    kept = adapter.rank * len(sizes)
    kept += sum(size for size, _ in sizes) if adapter.dropout else 0
    kept += sum(size for _, size in sizes) if adapter.kind == "dora" else 0
    mlp = {"gate_proj", "up_proj", "down_proj"}
    return kept + (shape.intermediate_size if mlp & set(adapter.targets) else 0)


# Time


def step_parts(
    job: JobSpec, shape: ModelShape, hardware: Hardware, sharding: Sharding
) -> tuple[float, float, float]:
    """Seconds of an optimizer step if each part ran alone: (compute, in the node, between nodes)."""
    return (
        _compute_seconds(job, shape, hardware, sharding),
        _in_node_bytes(job, shape, hardware, sharding) / (hardware.in_node_gb_per_second * 1e9),
        _cross_node_bytes(job, shape, hardware, sharding)
        / (hardware.network_gbps / 8 * 1e9 * NETWORK_EFFICIENCY),
    )


def _step_seconds(job: JobSpec, shape: ModelShape, hardware: Hardware, sharding: Sharding) -> float:
    compute, in_node, across = step_parts(job, shape, hardware, sharding)
    network = max(in_node, across)
    return max(compute, network) + EXPOSED_SHARE * min(compute, network)


def _compute_seconds(job: JobSpec, shape: ModelShape, hardware: Hardware, sharding: Sharding) -> float:
    """6 N FLOPs per token and causal attention over documents of max_length; recomputation repeats the forward, and so
    does a reference model.

    A frozen parameter has 4 instead of 6: no gradient of its own.
    """
    if hardware.peak_tflops is None:
        return 0.0
    attention = 2.0 * shape.num_layers * shape.query_size * job.data.max_length
    multiplied = trained = shape.matmul_parameters
    if job.adapter is not None:
        trained = _Counts.of(job, shape).total_trained
        multiplied += trained
    forward = 2.0 * multiplied + attention
    backward = 2.0 * (multiplied + trained) + 2 * attention
    recomputed = 1 / sharding.checkpoint_every if sharding.checkpoint_every else 0.0
    reference = 1 if job.objective.kind == "dpo" else 0
    flops = ((1 + recomputed + reference) * forward + backward) * job.batch.tokens_per_gpu
    efficiency = COMPUTE_EFFICIENCY.get(hardware.gpu_name, DEFAULT_EFFICIENCY)
    return flops / (hardware.peak_tflops * 1e12 * efficiency)


def _cross_node_bytes(job: JobSpec, shape: ModelShape, hardware: Hardware, sharding: Sharding) -> float:
    """Bytes a node sends per step; the formulas and their sources stand in transport/expected.py."""
    if hardware.num_nodes == 1:
        return 0.0
    counts = _Counts.of(job, shape)
    block = ParameterGroup(
        num_parameters=counts.block,
        num_trainable=counts.block_trained,
        resharded=sharding.reshard_after_forward,
    )
    root = ParameterGroup(num_parameters=counts.root, num_trainable=counts.root_trained, resharded=False)
    num_references = job.batch.accumulation if job.objective.kind == "dpo" else 0
    reference = expected_bytes_per_node(
        [ParameterGroup(num_parameters=shape.num_parameters, resharded=True)],
        scheme=sharding.scheme,
        world_size=hardware.world_size,
        gpus_per_node=hardware.gpus_per_node,
        num_steps=0,
        num_forward_only=num_references if holds_reference(job) else 0,
    )
    return reference + expected_bytes_per_node(
        [*[block] * shape.num_layers, root],
        scheme=sharding.scheme,
        world_size=hardware.world_size,
        gpus_per_node=hardware.gpus_per_node,
        num_steps=1,
        accumulation=job.batch.accumulation,
        parameter_bytes=2,
        reduce_bytes=4 if job.parallel.reduce_dtype == "float32" else 2,
        num_forward_only=0 if holds_reference(job) else num_references,
    )


def _in_node_bytes(job: JobSpec, shape: ModelShape, hardware: Hardware, sharding: Sharding) -> float:
    """Bytes a GPU sends to its neighbour in the node per step: a ring passes (n-1)/n of each payload."""
    ranks = hardware.gpus_per_node if sharding.scheme == "hybrid" else hardware.world_size
    if hardware.gpus_per_node == 1 or ranks == 1:
        return 0.0
    counts = _Counts.of(job, shape)
    blocks = shape.num_layers * counts.block
    gathers = 2.0 * (counts.total + (blocks if sharding.reshard_after_forward else 0))
    reduced = (4.0 if job.parallel.reduce_dtype == "float32" else 2.0) * counts.total_trained
    if holds_reference(job):
        gathers += 2.0 * shape.num_parameters
    elif job.objective.kind == "dpo" and sharding.reshard_after_forward:
        gathers += 2.0 * blocks
    return (ranks - 1) / ranks * (gathers + reduced) * job.batch.accumulation
