"""Bytes that a job's collectives must have sent across the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Scheme = Literal["full", "hybrid"]


class ParameterGroup(BaseModel):
    """Parameters that FSDP gathers together: one per ``fully_shard`` call, the root's own ones included.

    ``resharded`` is whether the group is freed after its forward and gathered again in backward
    (``reshard_after_forward``; FSDP2 never frees the root's group). ``num_trainable`` of the parameters get a
    gradient, which is reduced; by default all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_parameters: int = Field(gt=0)
    resharded: bool
    num_trainable: int | None = Field(default=None, ge=0)

    @property
    def num_reduced(self) -> int:
        return self.num_parameters if self.num_trainable is None else self.num_trainable


def expected_bytes_per_node(
    groups: Sequence[ParameterGroup],
    *,
    scheme: Scheme,
    world_size: int,
    gpus_per_node: int,
    num_steps: int,
    accumulation: int = 1,
    parameter_bytes: int = 2,
    reduce_bytes: int = 4,
    reduce_every_microbatch: bool | None = None,
    kept_between_microbatches: bool | None = None,
    num_forward_only: int = 0,
) -> int:
    """Bytes that each node sends to others, per direction, over ``num_steps`` completed optimizer steps.

    ``parameter_bytes`` and ``reduce_bytes`` are the width of one element in an all-gather (bf16: 2) and in a
    gradient reduction (fp32: 4). ``accumulation`` is the microbatches of a step. ``reduce_every_microbatch``
    is whether gradients cross the network after each microbatch or once per step; by default every microbatch
    with ``full`` and once with ``hybrid`` (``set_requires_all_reduce(False)`` on all microbatches but the
    last). ``kept_between_microbatches`` is whether groups that are not resharded after forward stay gathered
    until the step's last backward (``set_reshard_after_backward(False)`` on the others); by default when no
    group is resharded. Both defaults are what ``training.parallel.begin_micro_batch`` does.
    ``num_forward_only`` is the forward passes without backward (evaluation batches).

    Formulas (P parameters, N ranks, b bytes per element):

    * full: a ring of N ranks enters and leaves each node once, and over that edge go (N-1)/N of the payload in
      an all-gather as in a reduce-scatter (NVIDIA/nccl-tests doc/PERFORMANCE.md, ring bounds). NCCL takes the
      ring for both with more than one GPU per node, and PAT with one, which moves the same bytes per rank.
      Per microbatch: one all-gather of every group, a second one of each resharded group, one reduce-scatter
      of all. A forward pass alone gathers the resharded groups; the others stay gathered for the pass after
      it, which then does without.
    * hybrid (replicas are nodes, shards are in the node): only the all-reduce of gradients crosses, each of
      the node's g GPUs with its P/g. Two nodes: a ring all-reduce sends 2(n-1)/n = 1 times the payload. More
      nodes: at least 1 times, the least that any node sends in NCCL's double binary tree, where a ring sends
      up to 2.

    It is a lower bound: padding of shards, all-reduces of the loss and the gradient norm, loading and export
    are not in it. One node gives 0. Raises ValueError for a world that does not fill its nodes.
    """
    if world_size < 1 or gpus_per_node < 1 or (world_size > gpus_per_node and world_size % gpus_per_node):
        raise ValueError(
            f"{world_size} ranks do not fill nodes of {gpus_per_node} GPUs: the world size must be a "
            "multiple of the GPUs per node, or fit in one node"
        )
    if world_size <= gpus_per_node:
        return 0
    num_parameters = sum(group.num_parameters for group in groups)
    num_reduced = sum(group.num_reduced for group in groups)
    if reduce_every_microbatch is None:
        reduce_every_microbatch = scheme == "full"
    num_reductions = num_steps * (accumulation if reduce_every_microbatch else 1)
    if scheme == "hybrid":
        return num_reductions * num_reduced * reduce_bytes
    num_resharded = sum(group.num_parameters for group in groups if group.resharded)
    num_kept = num_parameters - num_resharded
    if kept_between_microbatches is None:
        kept_between_microbatches = num_resharded == 0
    num_microbatches = num_steps * accumulation
    gathered = (
        num_microbatches * 2 * num_resharded
        + (num_steps if kept_between_microbatches else num_microbatches) * num_kept
        + num_forward_only * num_resharded
    )
    payload_bytes = gathered * parameter_bytes + num_reductions * num_reduced * reduce_bytes
    return payload_bytes * (world_size - 1) // world_size
