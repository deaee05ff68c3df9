"""The plain PyTorch paths beside the kernels, which every device but CUDA takes, against autograd's own gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from training.kernels import float8
from training.kernels.swiglu import swiglu_linear


def relative(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    assert found is not None
    assert wanted is not None
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_swiglu_linear_has_the_gradients_of_autograd() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((2, 5, 12), (2, 5, 12), (7, 12))]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    grad = torch.randn(2, 5, 7)
    swiglu_linear(*inputs).backward(grad)
    ((F.silu(exact[0]) * exact[1]) @ exact[2].t()).backward(grad.double())
    for mine, theirs in zip(inputs, exact, strict=True):
        assert relative(mine.grad, theirs.grad) < 1e-5


def test_float8_mlp_is_near_the_exact_one() -> None:
    torch.manual_seed(0)
    shapes = ((32, 16), (48, 16), (48, 16), (16, 48))
    inputs = [torch.randn(*shape).bfloat16().requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    grad = torch.randn(32, 16).bfloat16()
    float8._MLP.apply(*inputs).backward(grad)  # pyright: ignore
    ((F.silu(exact[0] @ exact[1].t()) * (exact[0] @ exact[2].t())) @ exact[3].t()).backward(grad.double())
    for mine, theirs in zip(inputs, exact, strict=True):
        assert relative(mine.grad, theirs.grad) < 0.1


def test_float8_linear_takes_a_batch_and_a_bias() -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(2, 16, 32).bfloat16(),
        torch.randn(48, 32).bfloat16(),
        torch.randn(48).bfloat16(),
    )
    assert (
        relative(float8.linear(x, weight, bias), F.linear(x.double(), weight.double(), bias.double())) < 0.06
    )
