"""Low-rank adapters beside frozen linear layers: LoRA (arXiv:2106.09685) and DoRA (arXiv:2402.09353).

An adapted layer keeps its weight under its Hugging Face name, frozen and in the dtype of the computation: FSDP would cast
a float32 copy to that dtype for every product, so it would cost twice the memory and change no result. The adapters are
float32 like any trained parameter. All of them belong to the FSDP group of their block, and only their gradients are
reduced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # pyright: ignore[reportPrivateUsage]

from training.job import AdapterSpec

_PARAMETERS = ("lora_A.weight", "lora_B.weight", "magnitude_offset")


class LoRALinear(nn.Module):
    """`x W^T + b + scaling * dropout(x) A^T B^T` with frozen W [out, in] and b, trained A [rank, in] and B [out, rank].

    Takes the place of a linear layer, whose weight and bias it takes over.
    """

    def __init__(self, base: nn.Linear, spec: AdapterSpec) -> None:
        super().__init__()
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        factory: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": torch.float32}
        self.lora_A = nn.Linear(base.in_features, spec.rank, **factory)
        self.lora_B = nn.Linear(spec.rank, base.out_features, **factory)
        self.dropout = nn.Dropout(spec.dropout)
        self.scaling = spec.scaling
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, cast("Tensor | None", self.bias))
        return y + self.low_rank(x) if self.enabled else y

    def low_rank(self, x: Tensor) -> Tensor:
        return self.scaling * self.lora_B(self.lora_A(self.dropout(x)))

    def merged_weight(self, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """[out, in] float32: the weight of a plain linear layer that computes the same.

        gather: makes a whole tensor, without gradient, of a sharded one; where it communicates, every rank calls this.
        """
        weight, a, b = (gather(w).float() for w in (self.weight, self.lora_A.weight, self.lora_B.weight))
        return weight + self.scaling * (b @ a)

    def peft_tensors(self, gather: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The adapter by the names that peft's files have."""
        return {
            "lora_A.weight": gather(self.lora_A.weight),
            "lora_B.weight": gather(self.lora_B.weight),
        }


class DoRALinear(LoRALinear):
    """`m / |V| * (x V^T) + b` with V = W + scaling * B A, |V| the norm of each of its rows, and m [out] trained.

    The norm takes no part in the gradient (section 4.3 of the paper). m is kept as its distance from |W|, where it
    starts: the gradient is that of m, but bfloat16 would round m itself to steps of 0.4 % and start beside the model that
    is to be tuned. Dropout acts on the low-rank part alone.
    """

    def __init__(self, base: nn.Linear, spec: AdapterSpec) -> None:
        super().__init__(base, spec)
        self.magnitude_offset = nn.Parameter(
            torch.empty(base.out_features, device=base.weight.device, dtype=torch.float32)
        )

    def forward(self, x: Tensor) -> Tensor:
        bias = cast("Tensor | None", self.bias)
        if not self.enabled:
            return F.linear(x, self.weight, bias)
        weight_norm, direction_norm = self._norms()
        scale = (weight_norm + self.magnitude_offset) / direction_norm
        y, low_rank = F.linear(x, self.weight), self.low_rank(x)
        # What the adapter adds, as one sum: a product with scale itself would be rounded like m.
        y = y + (low_rank + (y + low_rank) * (scale - 1).to(y.dtype))
        return y if bias is None else y + bias

    @torch.no_grad()
    def _norms(self) -> tuple[Tensor, Tensor]:
        """Norms of the rows of W and of V (float32 [out]); |V|^2 is multiplied out, so that V is never made."""
        a, b = self.lora_A.weight, self.scaling * self.lora_B.weight.float()
        weight_norm = torch.linalg.vector_norm(self.weight, dim=1, dtype=torch.float32)
        cross = ((self.weight @ a.t()).float() * b).sum(1)
        low_rank = ((b @ (a.float() @ a.float().t())) * b).sum(1)
        return weight_norm, (weight_norm.square() + 2 * cross + low_rank).sqrt()

    def merged_weight(self, gather: Callable[[Tensor], Tensor]) -> Tensor:
        direction = super().merged_weight(gather)
        scale = self._magnitude(gather) / torch.linalg.vector_norm(direction, dim=1)
        return scale[:, None] * direction

    def peft_tensors(self, gather: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return {**super().peft_tensors(gather), "lora_magnitude_vector": self._magnitude(gather)}

    def _magnitude(self, gather: Callable[[Tensor], Tensor]) -> Tensor:
        weight_norm = torch.linalg.vector_norm(gather(self.weight), dim=1, dtype=torch.float32)
        return weight_norm + gather(self.magnitude_offset)


def attach(model: nn.Module, blocks: nn.ModuleList, spec: AdapterSpec, dtype: torch.dtype) -> None:
    """Freezes a model that has no memory yet, lets `dtype` be the dtype of its weights, and adapts its blocks' linears."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    kind = {"lora": LoRALinear, "dora": DoRALinear}[spec.kind]
    for block in blocks:
        missing = set(spec.targets)
        for path, module in list(block.named_modules()):
            parent, _, name = path.rpartition(".")
            if name in spec.targets:
                assert type(module) is nn.Linear, f"{path} is a {type(module).__name__}"
                setattr(block.get_submodule(parent), name, kind(module, spec))
                missing.discard(name)
        assert not missing, f"no {missing} in a {type(block).__name__}"


def adapted_linears(model: nn.Module) -> dict[str, LoRALinear]:
    """The adapted layers by their path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoRALinear)}


def is_adapter_parameter(name: str) -> bool:
    """Whether a parameter, by its path, belongs to an adapter and not to the model that is adapted."""
    return name.endswith(_PARAMETERS)


@contextmanager
def adapters_disabled(model: nn.Module) -> Generator[None]:
    """The model that was adapted, as it was: to the bit, without dropout. For passes without gradients.

    Activations recomputed in a later backward would be computed with adapters again.
    """
    layers = adapted_linears(model).values()
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def fingerprint(parameters: Mapping[str, nn.Parameter], shard_group: dist.ProcessGroup | None) -> str:
    """A checksum of weights that does not depend on the number of ranks: of their bits, rounded to bfloat16.

    shard_group: the ranks among which the parameters are sharded (all of them call this); None where they are whole.
    """
    sums = torch.stack([_checksum(parameter.detach()) for parameter in parameters.values()])
    if shard_group is not None and dist.get_world_size(shard_group) > 1:
        dist.all_reduce(sums, group=shard_group)
    text = "\n".join(f"{name} {value}" for name, value in zip(parameters, sums.tolist(), strict=True))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _checksum(tensor: Tensor) -> Tensor:
    """Sum over the rows of (row number * sum of the row's bits), modulo 2^64: shards may be added in any order."""
    first = 0
    if isinstance(tensor, DTensor):
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        first = offset[0]
        tensor = tensor.to_local()
    bits = tensor.to(torch.bfloat16).view(torch.int16)
    rows = bits.flatten(1).sum(1, dtype=torch.int64) if bits.ndim > 1 else bits.to(torch.int64)
    return (rows * torch.arange(first + 1, first + 1 + len(rows), device=rows.device)).sum()
