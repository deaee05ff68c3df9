"""Process groups, the device mesh, and how the model is sharded over it with FSDP2."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from training.errors import UsageError
from training.job import JobSpec
from training.kernels import float8, qkv, swiglu
from training.metrics import peak_flops
from training.model import CausalLM
from training.planning import Hardware, Sharding, keeps_gathered

# A collective that waits longer has lost a peer: the process group gives up and the worker group is restarted.
# Long enough for the slowest rank to load a model and compile (2026-12: 90 s compile, minutes of download).
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=15)


@dataclass(frozen=True)
class World:
    """Who this rank is. `control` is a gloo group for small host-side agreements; it never touches the accelerator."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    control: dist.ProcessGroup
    checkpoint: dist.ProcessGroup

    @property
    def num_nodes(self) -> int:
        return self.size // self.local_size

    @property
    def node_rank(self) -> int:
        return self.rank // self.local_size


def join_world() -> World:
    """Joins the process group of torchrun or Ray Train, or makes one of a single process.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, as torchrun and Ray Train set them.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    size = dist.get_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    if size % local_size:
        raise RuntimeError(
            f"{size} ranks do not divide into nodes of {local_size}: every node needs as many ranks"
        )
    return World(
        rank=dist.get_rank(),
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        device=device,
        control=_gloo_group(COLLECTIVE_TIMEOUT),
        # Checkpoints are coordinated in a thread of their own: their messages must not mix with the loop's.
        checkpoint=_gloo_group(datetime.timedelta(hours=1)),
    )


def _gloo_group(timeout: datetime.timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def hardware_of(world: World, target: Mapping[str, Any] | None = None) -> Hardware:
    """What this rank runs on. target: the stack's facts, whose speeds are used where it has them; else those of a
    machine that nothing is known of: PCIe, 10 Gbit/s.
    """
    facts = target or {}
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        name, memory = properties.name, properties.total_memory
    else:
        name, memory = "CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.local_size
    peak, _ = peak_flops(world.device)
    return Hardware(
        gpu_name=name,
        num_nodes=world.num_nodes,
        gpus_per_node=world.local_size,
        gpu_memory_gib=memory / 2**30,
        peak_tflops=None if peak is None else peak / 1e12,
        in_node_gb_per_second=float(facts.get("in_node_gb_per_second", 5.0)),
        network_gbps=float(facts.get("network_gbps", 10.0)),
    )


def mesh_of(world: World, scheme: Literal["full", "hybrid"]) -> DeviceMesh:
    if scheme == "hybrid":
        return init_device_mesh(
            world.device.type, (world.num_nodes, world.local_size), mesh_dim_names=("replicate", "shard")
        )
    return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))


def compute_dtype(job: JobSpec, device: torch.device) -> torch.dtype:
    match job.model.dtype:
        case "float32":
            return torch.float32
        case "bfloat16":
            return torch.bfloat16
        case "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32


def shard(
    model: CausalLM,
    job: JobSpec,
    world: World,
    sharding: Sharding,
    mesh: DeviceMesh,
    reshard_root: bool = False,
) -> None:
    """Wraps every block and then the root, which holds embedding, final norm and output layer.

    Order: activation checkpointing, compilation, sharding. The tied embedding stays with the root, so that embedding
    and output layer are one FSDP group. Gradients are summed, not averaged: the loss is normalized by tokens.
    """
    dtype = compute_dtype(job, world.device)
    model.keeps_gathered = keeps_gathered(job, world.size, sharding)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=dtype if model.keeps_gathered else getattr(torch, job.parallel.reduce_dtype),
    )
    compiled = world.device.type == "cuda" if job.model.compile == "auto" else job.model.compile
    _fuse_blocks(model, job, world.device)
    if compiled:
        model.hf.model.norm.forward = torch.compile(model.hf.model.norm.forward)
    for index, block in enumerate(model.blocks):
        if sharding.checkpoint_every and index % sharding.checkpoint_every == 0:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if compiled:
            block.forward = torch.compile(block.forward)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=sharding.reshard_after_forward)
    # The root is needed again at once in backward (the output layer is its last part): it is freed between only where
    # no backward comes (reshard_root).
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_root)
    if model.keeps_gathered:
        root = _fsdp(model)
        root.set_requires_gradient_sync(False)
        root.set_reshard_after_backward(False)
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            if world.device.type == "cpu":  # gloo has no average
                module.set_force_sum_reduction_for_comms(True)


def _fuse_blocks(model: CausalLM, job: JobSpec, device: torch.device) -> None:
    """On CUDA the blocks that can run by our fused operations do; with model.float8 every block must."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if job.model.float8 and 10 * major + minor < 89:
        found = f"a GPU of capability {major}.{minor}" if device.type == "cuda" else "no CUDA device"
        raise UsageError(
            f"model.float8 needs a GPU of compute capability 8.9 or later (L4, H100); found {found}. Set model.float8: false"
        )
    if device.type != "cuda":
        return
    mlp = float8.Float8MLP if job.model.float8 else swiglu.SwiGLUMLP
    attention = float8.Float8Attention if job.model.float8 else qkv.FusedQKVAttention
    for block in model.blocks:
        fused = [
            swiglu.use(cast("nn.Module", block.mlp), mlp),
            qkv.use(cast("nn.Module", block.self_attn), attention),
        ]
        if job.model.float8 and not all(fused):
            raise UsageError(
                f"model.float8 is not possible for {model.config.model_type} with these layers: it needs a gated MLP with "
                "SiLU and attention of Qwen2, Llama or Mistral, without adapters. Set model.float8: false"
            )


def release_gathered(model: CausalLM) -> None:
    """Puts the masters in the place of weights that stayed gathered; the next forward gathers again. To be called before
    masters are changed by anything but the optimizer, or read by their names.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def begin_micro_batch(model: CausalLM, sharding: Sharding, last: bool) -> None:
    """Sets up communication of one micro-batch: what is not needed before the optimizer step waits for the last one.

    Hybrid: the all-reduce across nodes happens once per step. Full: gradients are reduced per micro-batch, because
    keeping them unsharded would cost 4 bytes per parameter on every GPU.
    """
    if model.keeps_gathered:
        return
    root = _fsdp(model)
    if sharding.scheme == "hybrid":
        root.set_requires_all_reduce(last)
    if not sharding.reshard_after_forward:
        root.set_reshard_after_backward(last)


def _fsdp(model: CausalLM) -> FSDPModule:
    assert isinstance(model, FSDPModule)
    return model
