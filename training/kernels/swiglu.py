"""SwiGLU and the linear layer behind it, with a backward pass that reads and writes each activation once.

The product `silu(gate) * up` is not kept for backward: the kernel that makes the gradients of gate and up makes it
again, from values it has read anyway. That saves `intermediate_size` bf16 numbers per token and layer, and one pass
over three such tensors against what the compiler generates.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kernels import operation


def _plain(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sigmoid = torch.sigmoid(gate.float())
    silu = gate.float() * sigmoid
    grad_gate = grad.float() * up.float() * (sigmoid + silu * (1 - sigmoid))
    grad_up = grad.float() * silu
    product = silu.to(gate.dtype) * up
    return grad_gate.to(gate.dtype), grad_up.to(gate.dtype), product


def _cuda(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from training.kernels import swiglu_triton

    return swiglu_triton.launch(grad, gate, up)


def _shapes(_: Tensor, gate: Tensor, __: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(gate)


swiglu_backward = operation(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor, Tensor)",
    plain=_plain, cuda=_cuda, shapes=_shapes,
)  # fmt: skip
"""(gradient of gate, gradient of up, silu(gate) * up) from the gradient of that product; all of one shape."""


class _SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return (F.silu(gate) * up) @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (grad,) = grad_outputs
        gate, up, weight = ctx.saved_tensors
        grad_gate, grad_up, product = swiglu_backward(grad @ weight, gate, up)
        if not ctx.needs_input_grad[2]:
            return grad_gate, grad_up, None
        return grad_gate, grad_up, grad.flatten(0, -2).t() @ product.flatten(0, -2)


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """`linear(silu(gate) * up, weight)`: gate, up [..., intermediate], weight [hidden, intermediate] -> [..., hidden]."""
    return _SwiGLULinear.apply(gate, up, weight)  # pyright: ignore[reportReturnType]


class SwiGLUMLP(nn.Module):
    """The forward of a Hugging Face gated MLP, fused. Never constructed: `use` turns such a module into one."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        return swiglu_linear(self.gate_proj(x), self.up_proj(x), self.down_proj.weight)


def use(mlp: nn.Module, fused: type[nn.Module] = SwiGLUMLP) -> bool:
    """Lets a gated MLP with SiLU and plain linear layers run fused; False where it is something else.

    The class is changed, not the instance: compiled blocks then share one graph.
    """
    layers = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    plain = all(type(layer) is nn.Linear and layer.bias is None for layer in layers)  # pyright: ignore[reportUnnecessaryComparison]
    activation = getattr(mlp, "act_fn", None)
    if not plain or type(activation).__name__ not in ("SiLU", "SiLUActivation"):
        return False
    mlp.__class__ = fused
    return True
