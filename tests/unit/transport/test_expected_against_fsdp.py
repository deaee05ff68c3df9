"""The formula against the collectives that FSDP2 really calls, on rank 0 of 8 in a process group that moves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from training.adapters import LoRALinear
from training.job import AdapterSpec
from training.transport.expected import ParameterGroup, expected_bytes_per_node

WORLD, GPUS, WIDTH, BLOCKS, RANK = 8, 4, 64, 3, 8


class Model(nn.Module):
    """Blocks that are groups of their own, and a head in the root's group."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().sum()


def adapted() -> Model:
    """The same with its weights frozen and an adapter in each block."""
    model = Model().requires_grad_(False).to(torch.bfloat16)
    for index in range(BLOCKS):
        base = model.blocks[index]
        assert isinstance(base, nn.Linear)
        model.blocks[index] = LoRALinear(base, AdapterSpec(rank=RANK))
    return model


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


class Counter:
    """Bytes that cross to other nodes in the collectives of one rank's groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        for name, payload in (
            ("all_gather_into_tensor", lambda output, _: output),
            ("all_gather_single", lambda output, _: output),
            ("reduce_scatter_tensor", lambda _, whole: whole),
            ("reduce_scatter_single", lambda _, whole: whole),
        ):
            self._watch(monkeypatch, name, payload)
        self._watch_all_reduce(monkeypatch)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str, payload: Any) -> None:
        real = getattr(dist, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            first = kwargs.get("output_tensor", kwargs.get("output", args[0] if args else None))
            second = kwargs.get("input_tensor", kwargs.get("input", args[1] if len(args) > 1 else None))
            group = kwargs.get("group")
            if dist.get_world_size(group) == WORLD:  # a ring over all ranks crosses each node once
                self.num_bytes += payload(first, second).nbytes * (WORLD - 1) // WORLD
            return real(*args, **kwargs)

        monkeypatch.setattr(dist, name, watched)

    def _watch_all_reduce(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = dist.all_reduce

        def watched(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if (
                dist.get_world_size(kwargs.get("group")) == WORLD // GPUS
            ):  # each GPU of the node with its part
                self.num_bytes += tensor.nbytes * GPUS
            return real(tensor, *args, **kwargs)

        monkeypatch.setattr(dist, "all_reduce", watched)


def _mesh(scheme: Any) -> DeviceMesh:
    if scheme == "full":
        return init_device_mesh("cpu", (WORLD,))
    return init_device_mesh("cpu", (WORLD // GPUS, GPUS), mesh_dim_names=("replicate", "shard"))


@pytest.mark.parametrize("scheme", ["full", "hybrid"])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("with_adapters", [False, True])
@pytest.mark.usefixtures("world")
def test_formula_counts_what_fsdp_sends(
    scheme: Any, reshard: bool, accumulation: int, with_adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = _mesh(scheme)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = adapted() if with_adapters else Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    root = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    assert isinstance(root, FSDPModule)
    counter = Counter(monkeypatch)
    num_steps, num_eval = 4, 5
    for _ in range(num_steps):
        for microbatch in range(accumulation):
            last = microbatch == accumulation - 1
            if scheme == "hybrid":
                root.set_requires_all_reduce(last)
            if not reshard:
                root.set_reshard_after_backward(last)
            model(torch.ones(2, WIDTH)).backward()
    trained = counter.num_bytes
    with torch.no_grad():
        for _ in range(num_eval):
            model(torch.ones(2, WIDTH))
    low_rank = 2 * WIDTH * RANK if with_adapters else 0
    block_size, head_size = WIDTH * WIDTH + low_rank, 2 * WIDTH * WIDTH
    trainable = (low_rank, 0) if with_adapters else (block_size, head_size)
    groups = [
        ParameterGroup(num_parameters=block_size, num_trainable=trainable[0], resharded=reshard)
    ] * BLOCKS
    groups.append(ParameterGroup(num_parameters=head_size, num_trainable=trainable[1], resharded=False))
    size: dict[str, Any] = {"scheme": scheme, "world_size": WORLD, "gpus_per_node": GPUS}
    steps: dict[str, Any] = size | {"num_steps": num_steps, "accumulation": accumulation}
    assert trained == expected_bytes_per_node(groups, **steps)
    kept_for_the_next_pass = 0
    if scheme == "full":
        kept = sum(group.num_parameters for group in groups if not group.resharded)
        kept_for_the_next_pass = kept * 2 * (WORLD - 1) // WORLD
    expected = expected_bytes_per_node(groups, **steps, num_forward_only=num_eval)
    assert counter.num_bytes == expected + kept_for_the_next_pass


@pytest.mark.parametrize("scheme", ["full", "hybrid"])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("with_adapters", [False, True])
@pytest.mark.usefixtures("world")
def test_formula_counts_the_reference_of_preference_pairs(
    scheme: Any, reshard: bool, with_adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen copy, gathered group by group for every micro-batch; or one more forward of the model with adapters."""
    mesh = _mesh(scheme)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = adapted() if with_adapters else Model()
    copy = Model().to(torch.bfloat16).requires_grad_(False)
    for one, frees, frees_root in ((model, reshard, False), (copy, True, True)):
        for block in one.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)
        fully_shard(one, mesh=mesh, mp_policy=policy, reshard_after_forward=frees_root)
    counter = Counter(monkeypatch)
    num_steps = 4
    for _ in range(num_steps):
        with torch.no_grad():
            (model if with_adapters else copy)(torch.ones(2, WIDTH))
        model(torch.ones(2, WIDTH)).backward()
    low_rank = 2 * WIDTH * RANK if with_adapters else 0
    block_size, head_size = WIDTH * WIDTH, 2 * WIDTH * WIDTH
    trained = (low_rank, 0) if with_adapters else (block_size, head_size)
    block = ParameterGroup(num_parameters=block_size + low_rank, num_trainable=trained[0], resharded=reshard)
    root = ParameterGroup(num_parameters=head_size, num_trainable=trained[1], resharded=False)
    size: dict[str, Any] = {"scheme": scheme, "world_size": WORLD, "gpus_per_node": GPUS}
    expected = expected_bytes_per_node(
        [*[block] * BLOCKS, root],
        **size,
        num_steps=num_steps,
        num_forward_only=num_steps if with_adapters else 0,
    )
    if not with_adapters:
        whole = ParameterGroup(num_parameters=BLOCKS * block_size + head_size, resharded=True)
        expected += expected_bytes_per_node([whole], **size, num_steps=0, num_forward_only=num_steps)
    # Rounded group by group here, once there.
    assert counter.num_bytes == pytest.approx(expected, abs=num_steps * 4 * (BLOCKS + 1))
    assert counter.num_bytes > 0
