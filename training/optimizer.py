"""AdamW over the local shards, with gradient clipping and the non-finite check folded into the fused kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.job import OptimizerSpec


class ShardedAdamW:
    """Decoupled AdamW (arXiv:1711.05101) on float32 masters, each rank on its own shard.

    Moments are DTensors laid out like their parameter, so DCP saves and reshards them. `step` takes the gradient norm:
    the kernel divides by max(1, norm / max_grad_norm), and leaves everything untouched where the norm is not finite.

    model: its parameters are sharded now. Where it holds gathered weights in their place after a backward (see
    CausalLM.keeps_gathered), gradients are taken from these and they are updated along with the masters.
    """

    def __init__(self, model: nn.Module, spec: OptimizerSpec) -> None:
        self.spec = spec
        self.parameters = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        if not self.parameters:
            raise ValueError("no parameter requires a gradient")
        self._owners = {name: _owner(model, name) for name in self.parameters}
        self.exp_avg = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        device = _local(next(iter(self.parameters.values()))).device
        self.num_updates = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def step(self, learning_rate: float, grad_norm: Tensor) -> None:
        """One update. grad_norm: scalar, the norm of the whole gradient (see `gradient_norm`)."""
        working = self.working_weights()
        grad_scale = (grad_norm / self.spec.max_grad_norm).clamp(min=1.0).float()
        found_inf = (~torch.isfinite(grad_norm)).float()
        self.num_updates += 1 - found_inf
        # Norms and biases are not decayed: decay would pull them to zero for no gain.
        matrices = [name for name, parameter in self.parameters.items() if parameter.ndim >= 2]
        vectors = [name for name, parameter in self.parameters.items() if parameter.ndim < 2]
        for names, weight_decay in ((matrices, self.spec.weight_decay), (vectors, 0.0)):
            # A small parameter may leave some ranks without a row of it.
            names = [name for name in names if _has_gradient(working[name])]
            if self.num_updates.is_cuda:
                names = self._step_large(names, working, learning_rate, weight_decay, grad_scale, found_inf)
            if not names:
                continue
            masters = [_local(self.parameters[name]) for name in names]
            torch._fused_adamw_(  # pyright: ignore[reportPrivateUsage]
                masters,
                [_local(working[name].grad).float() for name in names],
                [_local(self.exp_avg[name]) for name in names],
                [_local(self.exp_avg_sq[name]) for name in names],
                [],
                [self.num_updates] * len(names),
                amsgrad=False,
                lr=learning_rate,
                beta1=self.spec.betas[0],
                beta2=self.spec.betas[1],
                weight_decay=weight_decay,
                eps=self.spec.eps,
                maximize=False,
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
            kept = [name for name in names if working[name] is not self.parameters[name]]
            if kept:
                torch._foreach_copy_(  # pyright: ignore[reportPrivateUsage]
                    [working[name] for name in kept], [_local(self.parameters[name]) for name in kept]
                )

    def _step_large(
        self,
        names: list[str],
        working: dict[str, nn.Parameter],
        learning_rate: float,
        weight_decay: float,
        grad_scale: Tensor,
        found_inf: Tensor,
    ) -> list[str]:
        """Updates the large tensors by our own kernel; returns the names that are left."""
        from training.kernels import adamw_triton

        left: list[str] = []
        for name in names:
            master = self.parameters[name]
            if _local(master).numel() < adamw_triton.SMALLEST:
                left.append(name)
                continue
            adamw_triton.step(
                _local(master),
                _local(working[name].grad),
                _local(self.exp_avg[name]),
                _local(self.exp_avg_sq[name]),
                working=None if working[name] is master else working[name],
                num_updates=self.num_updates,
                grad_scale=grad_scale,
                found_inf=found_inf,
                learning_rate=learning_rate,
                betas=self.spec.betas,
                eps=self.spec.eps,
                weight_decay=weight_decay,
            )
        return left

    def working_weights(self) -> dict[str, nn.Parameter]:
        """What the model computes with and backward leaves gradients on: the masters' shards, or gathered weights."""
        return {name: getattr(module, key) for name, (module, key) in self._owners.items()}

    def zero_grad(self) -> None:
        for parameter in self.working_weights().values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Moments by parameter name and the number of updates: what a checkpoint holds."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "num_updates": self.num_updates}


def gradient_norm(parameters: Iterable[nn.Parameter], shard_group: dist.ProcessGroup | None) -> Tensor:
    """Euclidean norm of the whole gradient: one all-reduce of one number over the ranks that hold different shards.

    shard_group: the ranks among which parameters are sharded; None where this rank holds them whole.
    """
    grads = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not grads:
        raise RuntimeError("no parameter has a gradient: was backward called?")
    norms = torch._foreach_norm(grads, dtype=torch.float32)  # pyright: ignore[reportPrivateUsage]
    square = torch.stack(norms).square().sum()
    if shard_group is not None and dist.get_world_size(shard_group) > 1:
        dist.all_reduce(square, group=shard_group)
    return square.sqrt()


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and _local(parameter.grad).numel() > 0


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    # Not to_local(): it is a function of autograd, and 2,000 calls a step cost the host 30 ms (2026-12).
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # pyright: ignore[reportPrivateUsage]
