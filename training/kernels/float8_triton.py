"""Triton kernels of float8.py: casts that write both layouts in one pass. Imported on CUDA alone."""
# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from training.kernels.float8 import E4M3, LARGEST, SCALE_STRIDE

ROWS, COLUMNS = 128, 64


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: N803
    """Offsets of a tile in a matrix and in its transpose, and what of it is inside."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return row[:, None] * columns + column[None, :], column[:, None] * rows + row[None, :], inside


@triton.jit
def _store_transposed(out, turned, values, inside):
    tl.store(out + turned, tl.trans(values), mask=tl.trans(inside))


@triton.jit
def _cast(x, scale, out, out_t, rows, columns, TURN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: N803
    straight, turned, inside = _tile(rows, columns, ROWS, COLUMNS)
    values = tl.load(x + straight, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    cast = values.to(tl.float8e4nv)
    tl.store(out + straight, cast, mask=inside)
    if TURN:
        _store_transposed(out_t, turned, cast, inside)


def cast(x: Tensor, scale: Tensor, turn: bool) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=E4M3, device=x.device)
    out_t = torch.empty((columns, rows) if turn else (0, 0), dtype=E4M3, device=x.device)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    _cast[grid](x, scale, out, out_t, rows, columns, TURN=turn, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8)
    return out, out_t


@triton.jit
def _gradients(grad, gate, up, offsets, inside):
    g = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + offsets, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    return d * u * (sigmoid + silu * (1 - sigmoid)), d * silu, silu * u


@triton.jit
def _largest(grad, gate, up, largest, numel, STRIDE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Few programs that each take many blocks: one atomic operation a block would be the bottleneck."""
    highest_gate = tl.zeros([BLOCK], dtype=tl.float32)
    highest_up = tl.zeros([BLOCK], dtype=tl.float32)
    highest_product = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        grad_gate, grad_up, product = _gradients(grad, gate, up, offsets, offsets < numel)
        highest_gate = tl.maximum(highest_gate, tl.abs(grad_gate))
        highest_up = tl.maximum(highest_up, tl.abs(grad_up))
        highest_product = tl.maximum(highest_product, tl.abs(product))
    tl.atomic_max(largest, tl.max(highest_gate))
    tl.atomic_max(largest + STRIDE, tl.max(highest_up))
    tl.atomic_max(largest + 2 * STRIDE, tl.max(highest_product))


@triton.jit
def _swiglu(
    grad, gate, up, scales, grad_gate, grad_gate_t, grad_up, grad_up_t, product_t, rows, columns,
    STRIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    straight, turned, inside = _tile(rows, columns, ROWS, COLUMNS)
    d_gate, d_up, product = _gradients(grad, gate, up, straight, inside)
    cast_gate = (d_gate / tl.load(scales)).to(tl.float8e4nv)
    cast_up = (d_up / tl.load(scales + STRIDE)).to(tl.float8e4nv)
    cast_product = (product / tl.load(scales + 2 * STRIDE)).to(tl.float8e4nv)
    tl.store(grad_gate + straight, cast_gate, mask=inside)
    tl.store(grad_up + straight, cast_up, mask=inside)
    _store_transposed(grad_gate_t, turned, cast_gate, inside)
    _store_transposed(grad_up_t, turned, cast_up, inside)
    _store_transposed(product_t, turned, cast_product, inside)


def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    rows, columns = gate.shape
    largest = torch.zeros(3, SCALE_STRIDE, dtype=torch.float32, device=gate.device)
    assert gate.numel() < 2**31
    programs = 8 * torch.cuda.get_device_properties(gate.device).multi_processor_count
    _largest[(programs,)](grad, gate, up, largest, gate.numel(), STRIDE=SCALE_STRIDE, BLOCK=2048, num_warps=8)
    scales = largest.clamp_(min=1e-12).div_(LARGEST)
    straight = [torch.empty(rows, columns, dtype=E4M3, device=gate.device) for _ in range(2)]
    turned = [torch.empty(columns, rows, dtype=E4M3, device=gate.device) for _ in range(3)]
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    _swiglu[grid](
        grad, gate, up, scales, straight[0], turned[0], straight[1], turned[1], turned[2], rows, columns,
        STRIDE=SCALE_STRIDE, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8,
    )  # fmt: skip
    return straight[0], turned[0], straight[1], turned[1], turned[2], scales
