"""How a model is laid out over the ranks, chosen by what fits."""

from __future__ import annotations

from training.job import JobSpec
from training.model import CausalLM
from training.parallel import Sharding, World


def choose_sharding(job: JobSpec, model: CausalLM, world: World) -> Sharding:
    scheme = job.parallel.sharding
    if scheme == "auto":
        scheme = "hybrid" if world.num_nodes > 1 and world.local_size > 1 else "full"
    reshard = job.parallel.reshard_after_forward
    ac = job.parallel.activation_checkpointing
    return Sharding(
        scheme=scheme,
        reshard_after_forward=world.num_nodes > 1 if reshard == "auto" else reshard,
        checkpoint_every={"auto": 0, "none": 0, "full": 1}[ac] if isinstance(ac, str) else ac,
        reason="",
    )
