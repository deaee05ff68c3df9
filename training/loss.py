"""Linear layer and cross entropy in one operation, in chunks, so that the logits of all tokens are never held.

The gradients of the cross entropy are made in the forward pass (they are the only thing that needs the logits), so
backward only scales them. Log-probabilities, whose gradients depend on what is made of them, make the logits of each
chunk a second time in backward. Called inside the forward of the FSDP root, where the output weight is gathered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100

# Tokens per chunk. 4,096 x 151,936 logits in bf16 are 1.2 GiB; smaller chunks cost 12-15 ms per 16,384 tokens on an
# H200 (measured 2026-12-01), larger ones gain nothing.
CHUNK_TOKENS = 4096


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        # The sum over chunks is kept in float32: in bf16 the contributions of rare tokens would round away.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            losses, grad_logits = _chunk(hidden[rows] @ weight.t(), targets[rows])
            total += losses.sum()
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.t(), hidden[rows])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad_output,) = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else _scaled(grad_hidden, grad_output, grad_hidden.dtype),
            None if grad_weight is None else _scaled(grad_weight, grad_output, ctx.weight_dtype),
            None,
            None,
        )


class _ChunkedLinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        log_probs = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            losses, _ = _chunk(hidden[rows] @ weight.t(), targets[rows])
            log_probs[rows] = -losses
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk_tokens = chunk_tokens
        return log_probs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad_output,) = grad_outputs
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            _, grad_logits = _chunk(hidden[rows] @ weight.t(), targets[rows])
            grad_logits *= -grad_output[rows, None].to(grad_logits.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.t(), hidden[rows])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (float32) += left @ right; on CUDA in the matrix product itself, which saves a pass over `total`."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """tensor * factor in another dtype, in one pass."""
    # Not torch's own product of mixed dtypes on CUDA: it reaches a third of the memory's speed (H200, 2026-12).
    if tensor.is_cuda:
        from training.kernels.cross_entropy_triton import scaled

        return scaled(tensor, factor, dtype)
    return torch.mul(tensor, factor, out=torch.empty_like(tensor, dtype=dtype))


def _chunk(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each token of a chunk (float32 [tokens], 0 where the target is -100) and the gradient of their sum with
    respect to the logits (dtype of the logits).

    On CUDA the gradient takes the place of the logits.
    """
    if logits.is_cuda:
        from training.kernels.cross_entropy_triton import chunk_in_place

        return chunk_in_place(logits, targets, IGNORE)
    return _plain_chunk(logits, targets)


def _plain_chunk(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    supervised = targets != IGNORE
    safe_targets = targets.masked_fill(~supervised, 0)
    logits32 = logits.float()
    log_normalizer = torch.logsumexp(logits32, dim=-1)
    target_logits = logits32.gather(-1, safe_targets[:, None]).squeeze(-1)
    losses = (log_normalizer - target_logits) * supervised
    probabilities = torch.exp(logits32 - log_normalizer[:, None])
    probabilities.scatter_add_(
        -1, safe_targets[:, None], probabilities.new_full((), -1.0).expand_as(safe_targets[:, None])
    )
    probabilities *= supervised[:, None]
    return losses, probabilities.to(logits.dtype)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Summed cross entropy of `hidden @ weight.T` against `targets`, over the tokens whose target is not -100.

    hidden [tokens, hidden_size] · weight [vocab, hidden_size] · targets [tokens] int64. Returns a float32 scalar.
    """
    if not torch.is_grad_enabled():  # an evaluation needs no gradients, which are made in the forward
        hidden, weight = hidden.detach(), weight.detach()
    return _ChunkedLinearCrossEntropy.apply(hidden, weight, targets, chunk_tokens)  # pyright: ignore[reportReturnType]


def linear_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Log-probability of each target under `softmax(hidden @ weight.T)`, 0 where the target is -100.

    hidden [tokens, hidden_size] · weight [vocab, hidden_size] · targets [tokens] int64. Returns float32 [tokens].
    """
    return _ChunkedLinearLogProbs.apply(hidden, weight, targets, chunk_tokens)  # pyright: ignore[reportReturnType]


def reference_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same by plain PyTorch with all logits held: what tests compare with."""
    logits = (hidden @ weight.t()).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
