"""The Triton kernel of swiglu.swiglu_backward. Imported on CUDA alone."""
# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _backward(grad, gate, up, grad_gate, grad_up, product, numel, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    g = tl.load(gate + offsets, mask=inside).to(tl.float32)
    u = tl.load(up + offsets, mask=inside).to(tl.float32)
    d = tl.load(grad + offsets, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    tl.store(
        grad_gate + offsets,
        (d * u * (sigmoid + silu * (1 - sigmoid))).to(grad_gate.dtype.element_ty),
        mask=inside,
    )
    tl.store(grad_up + offsets, (d * silu).to(grad_up.dtype.element_ty), mask=inside)
    # Rounded as forward rounds: first silu, then the product.
    rounded = silu.to(product.dtype.element_ty).to(tl.float32)
    tl.store(product + offsets, (rounded * u).to(product.dtype.element_ty), mask=inside)


def launch(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up, product = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(gate)
    grid = (triton.cdiv(gate.numel(), BLOCK),)
    _backward[grid](grad, gate, up, grad_gate, grad_up, product, gate.numel(), BLOCK=BLOCK, num_warps=8)
    return grad_gate, grad_up, product
