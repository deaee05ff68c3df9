"""AdamW in one pass over a tensor. Imported on CUDA alone; optimizer.py holds the plain PyTorch path.

torch's fused kernel writes the scaled gradient back and reaches 3.3 TB/s on an H200; this one does neither.
"""
# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
# Smaller tensors stay with torch's kernel, which takes many of them in one launch.
SMALLEST = 1 << 16


@triton.jit
def _step(
    parameter, grad, exp_avg, exp_avg_sq, working, num_updates, grad_scale, found_inf, numel,
    learning_rate, beta1, beta2, eps, weight_decay, WORKING: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    if tl.load(found_inf) != 0.0:
        return
    updates = tl.load(num_updates)
    correction1 = 1.0 - tl.exp(updates * tl.log(beta1))
    correction2 = 1.0 - tl.exp(updates * tl.log(beta2))
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    p = tl.load(parameter + offsets, mask=inside)
    g = tl.load(grad + offsets, mask=inside).to(tl.float32) / tl.load(grad_scale)
    m = tl.load(exp_avg + offsets, mask=inside)
    v = tl.load(exp_avg_sq + offsets, mask=inside)
    p -= learning_rate * weight_decay * p
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    p -= learning_rate / correction1 * m / (tl.sqrt(v) / tl.sqrt(correction2) + eps)
    tl.store(parameter + offsets, p, mask=inside)
    if WORKING:
        tl.store(working + offsets, p.to(working.dtype.element_ty), mask=inside)
    tl.store(exp_avg + offsets, m, mask=inside)
    tl.store(exp_avg_sq + offsets, v, mask=inside)


def step(
    parameter: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, working: Tensor | None,
    num_updates: Tensor, grad_scale: Tensor, found_inf: Tensor, learning_rate: float, betas: tuple[float, float],
    eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """One update in place; contiguous tensors of one shape, float32 but for the gradient and `working`, which may be of
    any dtype. working: takes the updated parameter, rounded. num_updates counts this one.
    """
    _step[(triton.cdiv(parameter.numel(), BLOCK),)](
        parameter, grad, exp_avg, exp_avg_sq, parameter if working is None else working, num_updates, grad_scale,
        found_inf, parameter.numel(), learning_rate, betas[0], betas[1], eps, weight_decay,
        WORKING=working is not None, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
