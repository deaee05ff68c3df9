"""What the collectives of an attempt must have sent from node to node, by what was trained."""

from __future__ import annotations

import torch

from training.job import JobSpec
from training.model import CausalLM, num_parameters
from training.parallel import World, compute_dtype
from training.planning import Sharding, holds_reference
from training.transport.expected import ParameterGroup, expected_bytes_per_node


def sent_bytes_per_node(
    job: JobSpec, model: CausalLM, sharding: Sharding, world: World, num_steps: int, num_eval_batches: int
) -> int:
    """Bytes that each node sends to others, per direction, over the steps and held-out batches of an attempt."""
    parameter_bytes = compute_dtype(job, world.device).itemsize
    num_references = 0
    if job.objective.kind == "dpo":
        num_references = num_steps * job.batch.accumulation + num_eval_batches
    sent = expected_bytes_per_node(
        parameter_groups(model, sharding),
        scheme=sharding.scheme,
        world_size=world.size,
        gpus_per_node=world.local_size,
        num_steps=num_steps,
        accumulation=job.batch.accumulation,
        parameter_bytes=parameter_bytes,
        reduce_bytes=getattr(torch, job.parallel.reduce_dtype).itemsize,
        num_forward_only=num_eval_batches + (0 if holds_reference(job) else num_references),
    )
    if holds_reference(job):
        sent += expected_bytes_per_node(
            [ParameterGroup(num_parameters=num_parameters(model), resharded=True)],
            scheme=sharding.scheme,
            world_size=world.size,
            gpus_per_node=world.local_size,
            num_steps=0,
            parameter_bytes=parameter_bytes,
            num_forward_only=num_references,
        )
    return sent


def parameter_groups(model: CausalLM, sharding: Sharding) -> list[ParameterGroup]:
    """The FSDP groups: one per block, and the root with what is left."""
    groups = [
        ParameterGroup(
            num_parameters=sum(p.numel() for p in block.parameters()),
            num_trainable=sum(p.numel() for p in block.parameters() if p.requires_grad),
            resharded=sharding.reshard_after_forward,
        )
        for block in model.blocks
    ]
    root = ParameterGroup(
        num_parameters=num_parameters(model) - sum(group.num_parameters for group in groups),
        num_trainable=num_parameters(model, trainable_only=True) - sum(g.num_reduced for g in groups),
        resharded=False,
    )
    return [*groups, root]
