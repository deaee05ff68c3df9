"""Query, key and value by one matrix product instead of three.

With grouped heads the key and value products are narrow (256 of 2,048 columns in Qwen2.5-1.5B) and leave most of the
device idle, in forward and twice in backward. The weights stay separate parameters with their Hugging Face names; they
are laid side by side for the product, which costs far less than it saves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from training.attention import packed_attention

# Attention classes whose forward is: project, rotate, attend, project.
SUPPORTED = (Qwen2Attention, LlamaAttention, MistralAttention)


class FusedQKVAttention(nn.Module):
    """The forward of a Hugging Face attention. Never constructed: `use` turns such a module into one."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    head_dim: int
    scaling: float

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        weight = torch.cat([layer.weight for layer in layers])
        bias = None if self.q_proj.bias is None else torch.cat([layer.bias for layer in layers])  # pyright: ignore[reportUnnecessaryComparison]
        heads = self.product(hidden_states, weight, bias).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        num_heads, num_kv_heads = (layer.weight.shape[0] // self.head_dim for layer in layers[:2])
        query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        # A copy, or backward would keep the whole product for the sake of its last columns: 1.7 GiB per 16,384 tokens.
        value = value.transpose(1, 2).contiguous().transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        kwargs["sliding_window"] = getattr(self, "sliding_window", None)
        output, _ = packed_attention(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.product(output.flatten(2), self.o_proj.weight, self.o_proj.bias), None

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A linear layer."""
        return F.linear(x, weight, bias)


def use(attention: nn.Module, fused: type[FusedQKVAttention] = FusedQKVAttention) -> bool:
    """Lets an attention of a supported class with plain linear layers run fused; False where it is something else."""
    layers = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    if type(attention) not in SUPPORTED or any(type(layer) is not nn.Linear for layer in layers):
        return False
    attention.__class__ = fused
    return True
