"""Linear layers of the blocks in float8 (e4m3): operands are scaled per tensor by their own largest value.

Weights, activations and gradients are rounded to 8 bits for the product alone; masters, sums and all else stay as they
are, and the output layer stays bf16. Every operand is cast once in each of the two layouts that cuBLAS asks for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kernels import operation
from training.kernels.qkv import FusedQKVAttention
from training.kernels.swiglu import swiglu_backward

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
# cuBLAS reads a scale as one number but wants its address on a multiple of 256 bytes.
SCALE_STRIDE = 64


def _plain_cast(x: Tensor, scale: Tensor, turn: bool) -> tuple[Tensor, Tensor]:
    cast = (x.float() * scale).to(E4M3)
    return cast, cast.t().contiguous() if turn else cast.new_empty(0, 0)


def _cuda_cast(x: Tensor, scale: Tensor, turn: bool) -> tuple[Tensor, Tensor]:
    from training.kernels import float8_triton

    return float8_triton.cast(x, scale, turn)


def _cast_shapes(x: Tensor, _: Tensor, turn: bool) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    turned = x.new_empty((columns, rows) if turn else (0, 0), dtype=E4M3)
    return x.new_empty(rows, columns, dtype=E4M3), turned


float8_cast = operation(
    "float8_cast(Tensor x, Tensor scale, bool turn) -> (Tensor, Tensor)",
    plain=_plain_cast, cuda=_cuda_cast, shapes=_cast_shapes,
)  # fmt: skip
"""x [rows, columns] times a scalar, in float8: as it is, and (empty without turn) transposed [columns, rows]."""

_Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _plain_swiglu(grad: Tensor, gate: Tensor, up: Tensor) -> _Six:
    scales = torch.zeros(3, SCALE_STRIDE, device=gate.device)
    parts: list[Tensor] = []
    for index, tensor in enumerate(swiglu_backward(grad, gate, up)):
        scale = _scale(tensor)
        scales[index, 0] = scale.reciprocal()
        parts += float8_cast(tensor, scale, True)
    grad_gate, grad_gate_t, grad_up, grad_up_t, _, product_t = parts
    return grad_gate, grad_gate_t, grad_up, grad_up_t, product_t, scales


def _cuda_swiglu(grad: Tensor, gate: Tensor, up: Tensor) -> _Six:
    from training.kernels import float8_triton

    return float8_triton.swiglu_backward(grad, gate, up)


def _swiglu_shapes(_: Tensor, gate: Tensor, __: Tensor) -> _Six:
    rows, columns = gate.shape
    straight = [gate.new_empty(rows, columns, dtype=E4M3) for _ in range(2)]
    turned = [gate.new_empty(columns, rows, dtype=E4M3) for _ in range(3)]
    scales = gate.new_empty(3, SCALE_STRIDE, dtype=torch.float32)
    return straight[0], turned[0], straight[1], turned[1], turned[2], scales


swiglu_backward_float8 = operation(
    "swiglu_backward_float8(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    plain=_plain_swiglu, cuda=_cuda_swiglu, shapes=_swiglu_shapes,
)  # fmt: skip
"""The gradients of gate and up, each in both layouts, and silu(gate) * up transposed, all in float8.

grad, gate, up [rows, columns]. The last result holds what each of the three must be multiplied with, at [0, 0], [1, 0]
and [2, 0].
"""


def _scale(x: Tensor) -> Tensor:
    """What the largest value of x must be multiplied with to become the largest of float8."""
    return LARGEST / x.abs().amax().float().clamp(min=1e-12)


def _cast(x: Tensor, turn: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(x in float8, transposed, what to multiply it with)."""
    scale = _scale(x)
    return *float8_cast(x, scale, turn), scale.reciprocal()


def _plain_product(left: Tensor, right_t: Tensor, left_scale: Tensor, right_scale: Tensor, _: bool) -> Tensor:
    return ((left.float() * left_scale) @ (right_t.float() * right_scale).t()).bfloat16()


def _cuda_product(
    left: Tensor, right_t: Tensor, left_scale: Tensor, right_scale: Tensor, fast: bool
) -> Tensor:
    return torch._scaled_mm(  # pyright: ignore[reportPrivateUsage]
        left, right_t.t(), left_scale, right_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _product_shape(left: Tensor, right_t: Tensor, _: Tensor, __: Tensor, ___: bool) -> Tensor:
    return left.new_empty(left.shape[0], right_t.shape[0], dtype=torch.bfloat16)


_product = operation(
    "float8_product(Tensor left, Tensor right_t, Tensor left_scale, Tensor right_scale, bool fast) -> Tensor",
    plain=_plain_product, cuda=_cuda_product, shapes=_product_shape,
)  # fmt: skip
"""left [m, k] @ right_t [n, k].T in bf16. fast: sums in fewer bits, good enough for activations.

An operation of its own, because the compiler's handling of _scaled_mm refuses a scale that is part of a tensor.
"""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x8t, x_scale = _cast(x)
        w8, w8t, w_scale = _cast(weight)
        ctx.save_for_backward(x8t, x_scale, w8t, w_scale)
        return _product(x8, w8, x_scale, w_scale, True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        x8t, x_scale, w8t, w_scale = ctx.saved_tensors
        grad, grad_t, grad_scale = _cast(grad_outputs[0])
        return _product(grad, w8t, grad_scale, w_scale, False), _product(
            grad_t, x8t, grad_scale, x_scale, False
        )


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        x8, x8t, x_scale = _cast(x)
        gate8, gate8t, gate_scale = _cast(gate)
        up8, up8t, up_scale = _cast(up)
        down8, down8t, down_scale = _cast(down)
        gated = _product(x8, gate8, x_scale, gate_scale, True)
        upped = _product(x8, up8, x_scale, up_scale, True)
        product, _, product_scale = _cast(F.silu(gated) * upped, turn=False)
        ctx.save_for_backward(
            x8t, x_scale, gated, upped, gate8t, gate_scale, up8t, up_scale, down8t, down_scale
        )
        return _product(product, down8, product_scale, down_scale, True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x8t, x_scale, gated, upped, gate8t, gate_scale, up8t, up_scale, down8t, down_scale = ctx.saved_tensors
        grad, grad_t, grad_scale = _cast(grad_outputs[0])
        grad_product = _product(grad, down8t, grad_scale, down_scale, False)
        g, g_t, u, u_t, product_t, scales = swiglu_backward_float8(grad_product, gated, upped)
        g_scale, u_scale, product_scale = scales[0, 0], scales[1, 0], scales[2, 0]
        grad_x = _product(g, gate8t, g_scale, gate_scale, False) + _product(u, up8t, u_scale, up_scale, False)
        return (
            grad_x,
            _product(g_t, x8t, g_scale, x_scale, False),
            _product(u_t, x8t, u_scale, x_scale, False),
            _product(grad_t, product_t, grad_scale, product_scale, False),
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer in float8: x [..., in], weight [out, in] -> [..., out]; rows of x and both sizes multiples of 16."""
    flat: Tensor = _Linear.apply(x.flatten(0, -2), weight)  # pyright: ignore[reportAssignmentType]
    y = flat.unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


class Float8MLP(nn.Module):
    """The forward of a Hugging Face gated MLP, fused and in float8."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _MLP.apply(  # pyright: ignore[reportAssignmentType]
            x.flatten(0, -2), self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        )
        return y.unflatten(0, x.shape[:-1])


class Float8Attention(FusedQKVAttention):
    """The forward of a Hugging Face attention with its linear layers in float8."""

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)
