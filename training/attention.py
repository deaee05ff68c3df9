"""Causal attention over a packed row: no token sees another document, and no mask is ever built.

Registered with transformers under the name `packed`, so that every Hugging Face model class uses it. The documents'
borders reach it as keyword arguments of the model's forward (`PackedLayout.as_kwargs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from transformers import AttentionInterface

from training.data.batch import Batch

NAME = "packed"

# cu_seqlens grows to a multiple of this many borders, so that compiled blocks see few shapes (2026-12).
BORDERS_STEP = 128

# torch 2.11 takes grouped heads as they are, and has no argument to say so.
VARLEN_ASKS_FOR_GQA = TorchVersion(torch.__version__) >= "2.12"


@dataclass(frozen=True)
class PackedLayout:
    """Where the documents of a row of T tokens lie.

    cu_seqlens      int32 [D + 1] borders from 0 to T; documents of no length may stand at the end
    max_seqlen      no document is longer
    lengths         the documents' lengths on the host, for the CPU path; None on CUDA
    uniform_length  the length of every document where all are equal, else None
    """

    cu_seqlens: Tensor
    max_seqlen: int
    lengths: tuple[int, ...] | None
    uniform_length: int | None

    def as_kwargs(self) -> dict[str, Any]:
        return {
            "packed_cu_seqlens": self.cu_seqlens,
            "packed_max_seqlen": self.max_seqlen,
            "packed_lengths": self.lengths,
            "packed_uniform_length": self.uniform_length,
        }


def layout_of(batch: Batch, max_length: int, device: torch.device) -> PackedLayout:
    """The layout of a batch whose tensors are still on the host. max_length: longest document of the job."""
    borders = batch.cu_seqlens.tolist()
    lengths = [after - before for before, after in zip(borders, borders[1:], strict=False)]
    uniform = lengths[0] if len(set(lengths)) == 1 else None
    if device.type != "cuda":
        return PackedLayout(batch.cu_seqlens, batch.max_seqlen, tuple(lengths), uniform)
    if uniform is None:
        borders = _cut_long(borders, max_length)
        borders += [borders[-1]] * (-len(borders) % BORDERS_STEP)
    cu_seqlens = torch.tensor(borders, dtype=torch.int32).pin_memory().to(device, non_blocking=True)
    return PackedLayout(cu_seqlens, max_length, None, uniform)


def _cut_long(borders: list[int], max_length: int) -> list[int]:
    """The padding at the end of a row may be longer than any document: cut, so that one max_seqlen holds for all."""
    cut = [0]
    for border in borders[1:]:
        while border - cut[-1] > max_length:
            cut.append(cut[-1] + max_length)
        cut.append(border)
    return cut


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packed_cu_seqlens: Tensor,
    packed_max_seqlen: int,
    packed_lengths: tuple[int, ...] | None,
    packed_uniform_length: int | None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, channels], key and value [1, kv_heads, T, channels] -> [1, T, heads, channels]."""
    assert attention_mask is None, module
    assert dropout == 0.0, module
    if softcap is not None:
        raise NotImplementedError("attention with a soft cap (Gemma 2) is not supported")
    if packed_uniform_length is not None and (
        sliding_window is None or packed_uniform_length <= sliding_window
    ):
        return _uniform(query, key, value, packed_uniform_length, scaling), None
    if packed_lengths is not None:
        return _by_document(query, key, value, packed_lengths, scaling, sliding_window), None
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    out = _varlen()(query, key, value, packed_cu_seqlens, packed_max_seqlen, scaling, window)
    return out[None], None


def _uniform(query: Tensor, key: Tensor, value: Tensor, length: int, scaling: float) -> Tensor:
    """All documents of one length are a batch: the plain kernel (cuDNN on Hopper, by torch's own choice) is the fastest."""

    def rows(x: Tensor) -> Tensor:  # [1, heads, T, channels] -> [documents, heads, length, channels]
        return x[0].unflatten(1, (-1, length)).transpose(0, 1)

    gqa = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        rows(query), rows(key), rows(value), is_causal=True, scale=scaling, enable_gqa=gqa
    )
    return out.transpose(1, 2).flatten(0, 1)[None]


def _by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[int, ...],
    scaling: float,
    sliding_window: int | None,
) -> Tensor:
    """One call per document: exact, and on a CPU faster than any mask over the whole row."""
    gqa = query.shape[1] != key.shape[1]
    outputs: list[Tensor] = []
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    for q, k, v in parts:
        length = q.shape[2]
        if sliding_window is not None and length > sliding_window:
            distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
            mask = (distance >= 0) & (distance < sliding_window)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=gqa)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2)


Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, tuple[int, int]], Tensor]


def _varlen() -> Varlen:
    """The variable-length kernel of this machine: flash-attn where it is installed (the image), else torch's own."""
    try:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
    except ImportError:
        return _torch_varlen

    def flash(
        q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, scale: float, window: tuple[int, int]
    ) -> Tensor:
        return flash_attn_varlen_func(
            q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1),
            borders, borders, longest, longest, softmax_scale=scale, causal=True, window_size=window,
            # Its backward adds up in the order in which blocks finish, unless told otherwise; torch's own asks torch.
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip

    return flash


def _torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, scale: float, window: tuple[int, int]
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    gqa: dict[str, Any] = {"enable_gqa": True} if VARLEN_ASKS_FOR_GQA and q.shape[1] != k.shape[1] else {}
    return varlen_attn(
        q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1),
        borders, borders, longest, longest, scale=scale, window_size=window, **gqa,
    )  # fmt: skip  # pyright: ignore[reportReturnType]


AttentionInterface.register(NAME, packed_attention)
