"""The loss and gradient of the sharded, packed, accumulated model equal those of a plain Hugging Face model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.unit.training.jobs import VOCAB, ragged_batch, split_documents, tiny_architecture, tiny_job
from tests.unit.training.processes import run_ranks
from training.attention import layout_of
from training.data.batch import IGNORE, Batch
from training.job import ArchitectureSpec
from training.loss import linear_cross_entropy, reference_cross_entropy
from training.model import FAMILIES, CausalLM, config_of, init_weights
from training.optimizer import gradient_norm
from training.parallel import Sharding, begin_micro_batch, join_world, mesh_of, shard

ROWS = 8
TOKENS = 64


def test_chunked_loss_equals_the_plain_one() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, VOCAB, (50,))
    targets[::3] = IGNORE
    grads: list[tuple[Any, ...]] = []
    losses: list[float] = []
    for loss in (
        linear_cross_entropy(hidden, weight, targets, chunk_tokens=16),
        reference_cross_entropy(hidden, weight, targets),
    ):
        grads.append(torch.autograd.grad(loss / 7, (hidden, weight)))
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for ours, plain in zip(*grads, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 70), chunk=st.integers(1, 80), seed=st.integers(0, 2**16), ignored=st.floats(0, 1)
)
def test_the_chunk_size_does_not_matter(tokens: int, chunk: int, seed: int, ignored: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 8, generator=generator)
    weight = torch.randn(11, 8, generator=generator)
    targets = torch.randint(0, 11, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < ignored] = IGNORE
    whole = linear_cross_entropy(hidden, weight, targets, chunk_tokens=1000)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk), whole)


def _config(**changes: Any) -> Any:
    architecture = ArchitectureSpec(**tiny_architecture(**changes))
    return config_of(architecture, vocab_size=VOCAB, eos_token_id=1, pad_token_id=0)


def _plain_truth(config: Any, batches: list[Batch]) -> tuple[float, float]:
    """Mean loss and gradient norm by transformers alone: every document by itself, all logits held, one process."""
    model = CausalLM(config)
    model.materialize(torch.device("cpu"))
    init_weights(model, seed=3)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    plain.load_state_dict(model.hf.state_dict(), strict=True)
    total = torch.zeros(())
    for batch in batches:
        for document in split_documents(batch):
            logits = plain(input_ids=document.input_ids[None]).logits[0].float()
            total = total + F.cross_entropy(logits, document.labels, ignore_index=IGNORE, reduction="sum")
    loss = total / sum(batch.num_supervised for batch in batches)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    return loss.item(), norm.item()


def _sharded(
    config: Any, batches: list[Batch], accumulation: int, scheme: str, reshard: bool, checkpoint_every: int
) -> tuple[float, float]:
    """The same by the product's own code on this rank."""
    world = join_world()
    model = CausalLM(config)
    sharding = Sharding(scheme, reshard, checkpoint_every, reason="test")  # pyright: ignore[reportArgumentType]
    mesh = mesh_of(world, sharding.scheme)
    shard(model, tiny_job(), world, sharding, mesh)
    model.materialize(torch.device("cpu"))
    init_weights(model, seed=3)
    supervised = sum(batch.num_supervised for batch in batches)
    total = torch.zeros(())
    mine = batches[world.rank * accumulation : (world.rank + 1) * accumulation]
    for index, batch in enumerate(mine):
        begin_micro_batch(model, sharding, last=index == len(mine) - 1)
        loss = model(batch, layout_of(batch, TOKENS, world.device)) / supervised
        loss.backward()
        total += loss.detach()
    torch.distributed.all_reduce(total)
    group = None if world.size == 1 else mesh.get_group("shard")
    return total.item(), gradient_norm(model.parameters(), group).item()


CASES = [
    # world size, accumulation, scheme, ranks per node, reshard after forward, activation checkpointing
    (1, 8, "full", 1, False, 0),
    (2, 4, "full", 2, True, 0),
    (4, 2, "full", 4, False, 1),
    (4, 2, "hybrid", 2, True, 2),
    (4, 1, "hybrid", 2, False, 0),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "accumulation", "scheme", "local_size", "reshard", "checkpoint_every"), CASES
)
def test_sharded_loss_and_gradient_norm_equal_the_plain_ones(
    world_size: int, accumulation: int, scheme: str, local_size: int, reshard: bool, checkpoint_every: int
) -> None:
    config = _config()
    batches = [
        ragged_batch(seed, TOKENS, num_documents=1 + seed % 5) for seed in range(world_size * accumulation)
    ]
    truth = _plain_truth(config, batches)
    results = run_ranks(
        _sharded,
        world_size,
        config,
        batches,
        accumulation,
        scheme,
        reshard,
        checkpoint_every,
        local_size=local_size,
    )
    for loss, norm in results:
        assert loss == pytest.approx(truth[0], rel=1e-5)
        assert norm == pytest.approx(truth[1], rel=1e-4)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_loss_and_gradients_equal_unpacked_ones(family: str) -> None:
    config = _config(family=family)
    batch = ragged_batch(seed=11, tokens=TOKENS, num_documents=5)
    gradients: list[dict[str, torch.Tensor]] = []
    losses: list[float] = []
    for parts in ([batch], split_documents(batch)):
        model = CausalLM(config)
        model.materialize(torch.device("cpu"))
        init_weights(model, seed=5)
        total = torch.zeros(())
        for part in parts:
            loss = model(part, layout_of(part, TOKENS, torch.device("cpu")))
            loss.backward()
            total += loss.detach()
        losses.append(total.item())
        gradients.append(
            {name: p.grad.clone() for name, p in model.hf.named_parameters() if p.grad is not None}
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert gradients[0].keys() == gradients[1].keys()
    for name, packed in gradients[0].items():
        torch.testing.assert_close(
            packed, gradients[1][name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert losses[0] == pytest.approx(_plain_loss(config, batch), rel=1e-5)


def _plain_loss(config: Any, batch: Batch) -> float:
    model = CausalLM(config)
    model.materialize(torch.device("cpu"))
    init_weights(model, seed=5)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    plain.load_state_dict(model.hf.state_dict(), strict=True)
    with torch.no_grad():
        return sum(
            F.cross_entropy(
                plain(input_ids=d.input_ids[None]).logits[0], d.labels, ignore_index=IGNORE, reduction="sum"
            ).item()
            for d in split_documents(batch)
            if d.num_supervised
        )
