"""Bytes that a job's collectives must have sent across the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ParameterGroup(BaseModel):
    """Parameters that FSDP gathers together: one per ``fully_shard`` call, the root's own ones included.

    ``resharded`` is whether the group is freed after its forward and gathered again in backward
    (``reshard_after_forward``; FSDP2 never frees the root's group).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_parameters: int = Field(gt=0)
    resharded: bool


def expected_bytes_per_node(
    groups: Sequence[ParameterGroup],
    *,
    scheme: Literal["full", "hybrid"],
    world_size: int,
    gpus_per_node: int,
    num_steps: int,
    accumulation: int = 1,
    parameter_bytes: int = 2,
    reduce_bytes: int = 4,
    reduce_every_microbatch: bool = True,
    num_forward_only: int = 0,
) -> int:
    """Bytes that each node sends across its network interfaces, per direction, over the whole job."""
    raise NotImplementedError
