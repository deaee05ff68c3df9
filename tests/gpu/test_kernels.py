"""Each kernel against plain PyTorch in higher precision, on a CUDA device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def relative(found: Tensor, wanted: Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("tokens", [1000, 4096])
def test_swiglu_gives_the_gradients_of_float64(tokens: int) -> None:
    from training.kernels.swiglu import swiglu_linear

    gate, up = (
        torch.randn(tokens, 896, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
    )
    weight = torch.randn(256, 896, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
    found = swiglu_linear(gate, up, weight)
    found.backward(grad)
    exact = [x.detach().double().requires_grad_() for x in (gate, up, weight)]
    wanted = (F.silu(exact[0]) * exact[1]) @ exact[2].t()
    wanted.backward(grad.double())
    assert relative(found, wanted) < 1e-2
    for mine, theirs in zip((gate, up, weight), exact, strict=True):
        assert relative(mine.grad, theirs.grad) < 1e-2


@pytest.mark.parametrize("vocab", [151_936, 1000])
def test_the_loss_and_its_gradients_are_those_of_float64(vocab: int) -> None:
    from training.loss import linear_cross_entropy

    hidden = torch.randn(700, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocab, 64, device="cuda") * 0.1).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (700,), device="cuda")
    targets[::3] = -100
    loss = linear_cross_entropy(hidden, weight, targets, 256)
    (loss * 0.5).backward()
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    wanted = F.cross_entropy(exact_hidden @ exact_weight.t(), targets, ignore_index=-100, reduction="sum")
    (wanted * 0.5).backward()
    assert abs(float(loss) / float(wanted) - 1) < 1e-3
    assert relative(hidden.grad, exact_hidden.grad) < 1e-2
    assert relative(weight.grad, exact_weight.grad) < 1e-2


@pytest.mark.parametrize("vocab", [151_936, 1000])
def test_log_probabilities_of_documents_and_their_gradients_are_those_of_float64(vocab: int) -> None:
    from training.loss import linear_log_probs

    hidden = torch.randn(700, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocab, 64, device="cuda") * 0.1).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (700,), device="cuda")
    targets[::3] = -100
    borders = torch.tensor([0, 100, 450, 451, 700], device="cuda")
    factors = torch.randn(4, device="cuda")

    def summed(log_probs: Tensor) -> Tensor:
        return torch.segment_reduce(log_probs, "sum", offsets=borders, unsafe=True)

    found = summed(linear_log_probs(hidden, weight, targets, 256))
    (found * factors).sum().backward()
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    wanted = summed(
        -F.cross_entropy(exact_hidden @ exact_weight.t(), targets, ignore_index=-100, reduction="none")
    )
    (wanted * factors).sum().backward()
    assert relative(found, wanted) < 1e-3
    assert relative(hidden.grad, exact_hidden.grad) < 1e-2
    assert relative(weight.grad, exact_weight.grad) < 1e-2


@pytest.mark.parametrize("lengths", [[512] * 4, [100, 900, 48, 1000]])
@pytest.mark.parametrize("heads", [(12, 2), (4, 4)])
def test_packed_attention_is_attention_document_by_document(
    lengths: list[int], heads: tuple[int, int]
) -> None:
    from training.attention import packed_attention

    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    uniform = lengths[0] if len(set(lengths)) == 1 else None
    total = sum(lengths)
    inputs = [
        torch.randn(1, total, n, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    ]
    found, _ = packed_attention(
        torch.nn.Module(), *inputs, None, scaling=0.1, packed_cu_seqlens=borders, packed_max_seqlen=1024,
        packed_lengths=None, packed_uniform_length=uniform,
    )  # fmt: skip
    grad = torch.randn_like(found)
    found.backward(grad)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    outputs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.1, enable_gqa=True)
        for q, k, v in zip(*(x.split(lengths, 2) for x in exact), strict=True)
    ]
    wanted = torch.cat(outputs, 2).transpose(1, 2)
    wanted.backward(grad.double())
    assert relative(found, wanted) < 1e-2
    for mine, theirs in zip(inputs, exact, strict=True):
        assert relative(mine.grad, theirs.grad) < 1e-2


def test_fused_blocks_train_as_the_modules_of_hugging_face_do() -> None:
    """A model of two blocks with and without our kernels, same weights: same gradients within bf16."""
    import copy

    from transformers import AutoModelForCausalLM, Qwen2Config

    from training.attention import PackedLayout
    from training.kernels import qkv, swiglu

    config = Qwen2Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=512, tie_word_embeddings=True,
    )  # fmt: skip
    plain = AutoModelForCausalLM.from_config(
        config, attn_implementation="packed", dtype=torch.bfloat16
    ).cuda()
    for name, parameter in plain.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    fused = copy.deepcopy(plain)
    for block in fused.model.layers:
        assert swiglu.use(block.mlp)
        assert qkv.use(block.self_attn)
        block.forward = torch.compile(block.forward)
    lengths = [100, 412]
    borders = torch.tensor([0, 100, 512], dtype=torch.int32, device="cuda")
    layout = PackedLayout(borders, 512, None, None)
    ids = torch.randint(0, 512, (1, 512), device="cuda")
    positions = torch.cat([torch.arange(n, device="cuda") for n in lengths])[None]
    grads = []
    for model in (plain, fused, copy.deepcopy(plain).double()):
        hidden = model.model(
            input_ids=ids, position_ids=positions, use_cache=False,
            **(layout if model in (plain, fused) else PackedLayout(borders, 512, tuple(lengths), None)).as_kwargs(),
        ).last_hidden_state  # fmt: skip
        (hidden.double() * torch.linspace(-1, 1, 256, device="cuda")).sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, exact in grads[2].items():
        assert relative(grads[1][name], exact) < 1.5 * relative(grads[0][name], exact) + 1e-3, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_is_that_of_torch(dtype: torch.dtype) -> None:
    """With gradients of the masters' dtype, and with bf16 ones and a bf16 copy of the weights beside the masters."""
    from training.kernels import adamw_triton

    shape = (300, 1000)
    mine = [
        torch.randn(shape, device="cuda"),
        torch.randn(shape, device="cuda", dtype=dtype),
        torch.zeros(shape, device="cuda"),
    ]
    mine.append(torch.zeros(shape, device="cuda"))
    theirs = [tensor.float().clone() for tensor in mine]
    working = None if dtype == torch.float32 else mine[0].to(dtype)
    updates, scale = torch.zeros((), device="cuda"), torch.tensor(2.5, device="cuda")
    for not_finite in (0.0, 0.0, 1.0, 0.0):
        found_inf = torch.tensor(not_finite, device="cuda")
        updates += 1 - found_inf
        adamw_triton.step(
            *mine, working=working, num_updates=updates, grad_scale=scale, found_inf=found_inf, learning_rate=1e-2,
            betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
        )  # fmt: skip
        grad = theirs[1].clone()
        torch._fused_adamw_(
            [theirs[0]], [grad], [theirs[2]], [theirs[3]], [], [updates], amsgrad=False, lr=1e-2, beta1=0.9,
            beta2=0.95, weight_decay=0.1, eps=1e-8, maximize=False, grad_scale=scale, found_inf=found_inf,
        )  # fmt: skip
    for found, wanted in zip(mine, theirs, strict=True):
        assert torch.allclose(found.float(), wanted, rtol=1e-5, atol=1e-6)
    if working is not None:
        assert torch.equal(working, mine[0].to(dtype))


def test_float8_is_bf16_within_the_rounding_of_eight_bits() -> None:
    from training.kernels import float8

    def inputs() -> list[Tensor]:
        torch.manual_seed(0)
        shapes = ((512, 256), (640, 256), (640, 256), (256, 640))
        return [
            torch.randn(s, device="cuda", dtype=torch.bfloat16).mul_(0.1).requires_grad_() for s in shapes
        ]

    x, gate, up, down = mine = inputs()
    grad = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    found = torch.compile(float8._MLP.apply)(x, gate, up, down)
    found.backward(grad)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs()]
    wanted = (F.silu(exact[0] @ exact[1].t()) * (exact[0] @ exact[2].t())) @ exact[3].t()
    wanted.backward(grad.double())
    assert relative(found, wanted) < 0.08
    for tensor, reference in zip(mine, exact, strict=True):
        assert relative(tensor.grad, reference.grad) < 0.1


def test_float8_casts_fill_both_layouts() -> None:
    from training.kernels.float8 import E4M3, float8_cast

    x = torch.randn(1000, 208, device="cuda", dtype=torch.bfloat16)
    scale = torch.tensor(3.0, device="cuda")
    cast, turned = float8_cast(x, scale, True)
    wanted = (x.float() * 3.0).to(E4M3)
    assert torch.equal(cast.float(), wanted.float())
    assert torch.equal(turned.float(), wanted.t().float())
