"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290): of two answers to a prompt, the chosen one is
to become likelier than the rejected one, measured from where the model began.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from training.adapters import adapters_disabled
from training.attention import PackedLayout
from training.data.batch import Batch
from training.errors import UsageError
from training.job import JobSpec
from training.model import CausalLM, init_weights, load_weights
from training.parallel import World, compute_dtype, shard
from training.planning import Sharding
from training.sources import ModelSource


@dataclass(frozen=True)
class PairLoss:
    """Of P pairs. loss: summed, float32 scalar. rewards: float32 [P], beta times the log-ratio of policy and reference."""

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def dpo_loss(policy: Tensor, reference: Tensor, beta: float, label_smoothing: float) -> PairLoss:
    """Equation 7 of the paper; label_smoothing is the conservative form of its authors, for pairs whose order is wrong
    with that probability (https://ericmitchell.ai/cdpo.pdf).

    policy, reference: log-probabilities of the answers, float32 [2 P]: chosen and rejected by turns.
    """
    rewards = beta * (policy - reference)
    chosen, rejected = rewards[0::2], rewards[1::2]
    margin = chosen - rejected
    losses = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return PairLoss(losses.sum(), chosen.detach(), rejected.detach())


class Preference:
    """The objective of a job on preference pairs: its loss is a mean over pairs.

    reference: the model that training starts from; None where that is the policy without its adapters.
    """

    MEASURES: tuple[str, ...] = ("reward_accuracy", "chosen_reward", "rejected_reward", "reward_margin")
    EXTRA_FORWARDS: int = 1

    def __init__(self, job: JobSpec, policy: CausalLM, reference: CausalLM | None) -> None:
        assert job.objective.beta is not None
        assert job.objective.label_smoothing is not None
        self.beta = job.objective.beta
        self.label_smoothing = job.objective.label_smoothing
        self.policy = policy
        self.reference = reference

    def count(self, batch: Batch) -> int:
        """Pairs of a micro-batch."""
        return batch.num_pairs

    def loss(self, batch: Batch, layout: PackedLayout) -> Tensor:
        """Sums over the pairs of one micro-batch, float32 [1 + measures]: the loss, then MEASURES."""
        answers = slice(0, 2 * batch.num_pairs)
        reference = self._reference_log_probs(batch, layout)[answers]
        policy = self.policy(batch, layout, document_log_probs=True)[answers]
        pairs = dpo_loss(policy, reference, self.beta, self.label_smoothing)
        chosen, rejected = pairs.chosen_rewards, pairs.rejected_rewards
        measures = ((chosen > rejected).float(), chosen, rejected, chosen - rejected)
        return torch.stack([pairs.loss, *(values.sum() for values in measures)])

    @torch.no_grad()
    def _reference_log_probs(self, batch: Batch, layout: PackedLayout) -> Tensor:
        if self.reference is not None:
            return self.reference(batch, layout, document_log_probs=True)
        with adapters_disabled(self.policy):
            return self.policy(batch, layout, document_log_probs=True)


def frozen_reference(
    job: JobSpec, source: ModelSource, world: World, sharding: Sharding, mesh: DeviceMesh
) -> CausalLM:
    """The model that training starts from, in the dtype of the computation, sharded as the policy is and held gathered
    nowhere. It is filled from the job's model source and never from a checkpoint.
    """
    reference = CausalLM(source.config)
    dtype = compute_dtype(job, world.device)
    for parameter in reference.parameters():  # not .to(): rotary frequencies stay float32
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(False)
    layout = Sharding(sharding.scheme, reshard_after_forward=True, checkpoint_every=0, reason=sharding.reason)
    shard(reference, job, world, layout, mesh, reshard_root=True)
    reference.materialize(world.device)
    if source.weights is None:
        init_weights(reference, job.seed)
    else:
        load_weights(reference, source.weights)
    return reference.eval()


def check_reference(found: str, recorded: str | None) -> None:
    """Raises UsageError where a resumed run's reference is not the one that the run began with."""
    if recorded is not None and found != recorded:
        raise UsageError(
            "objective.kind dpo compares with the model that the run began with, but model.source now holds other "
            f"weights (fingerprint {found}, the checkpoint's is {recorded}): put the first ones back, or start anew with "
            "run.resume: false"
        )
