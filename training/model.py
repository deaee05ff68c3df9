"""The model: built on the meta device, sharded, then filled shard by shard.

No rank ever holds a full copy: weights stream from safetensors straight into the local shards, and random weights
are made one parameter at a time from a seed that does not depend on the number of ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # pyright: ignore[reportPrivateUsage]
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from training import attention
from training.adapters import is_adapter_parameter
from training.data.batch import Batch
from training.errors import UsageError
from training.job import ArchitectureSpec
from training.loss import linear_cross_entropy, linear_log_probs

FAMILIES: dict[str, Any] = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "gemma": GemmaConfig,
}


class CausalLM(nn.Module):
    """A Hugging Face causal language model whose forward ends in the loss: the FSDP root.

    The loss is computed in here because here the output weight, which FSDP shards, is gathered.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        with torch.device("meta"):
            self.hf = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention.NAME, dtype=torch.float32
            )
        self.config = config
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        self.keeps_gathered = False
        """Set by parallel.shard: gathered weights stay in the place of the sharded masters from step to step."""

    def forward(
        self, batch: Batch, layout: attention.PackedLayout, document_log_probs: bool = False
    ) -> Tensor:
        """Summed loss over the supervised tokens of one micro-batch (float32 scalar).

        With document_log_probs the log-probability of the supervised tokens of each document instead (float32
        [documents], those of the padding with them).
        """
        hidden = self.hidden_states(batch, layout)
        if document_log_probs:
            log_probs = linear_log_probs(hidden, self.hf.lm_head.weight, batch.labels)
            return torch.segment_reduce(log_probs, "sum", offsets=batch.cu_seqlens.long(), unsafe=True)
        return linear_cross_entropy(hidden, self.hf.lm_head.weight, batch.labels)

    def hidden_states(self, batch: Batch, layout: attention.PackedLayout) -> Tensor:
        """[tokens, hidden_size] before the output layer."""
        output = self.hf.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            **layout.as_kwargs(),
        )
        return output.last_hidden_state[0]

    @property
    def blocks(self) -> nn.ModuleList:
        return self.hf.model.layers

    def materialize(self, device: torch.device) -> None:
        """Allocates the parameters (of this rank's shards, once sharded), their values still undefined."""
        self.to_empty(device=device)
        if self.tied:  # of an unsharded model, to_empty makes two parameters out of the shared one
            self.hf.lm_head.weight = self.hf.model.embed_tokens.weight

    def assert_tied(self) -> None:
        """The embedding and the output layer must stay one parameter: a lost tie lets them drift apart silently."""
        if self.tied and self.hf.lm_head.weight is not self.hf.model.embed_tokens.weight:
            raise RuntimeError(
                "the tie between embedding and lm_head was lost: they would train as two parameters"
            )


def config_of(architecture: ArchitectureSpec, vocab_size: int, eos_token_id: int, pad_token_id: int) -> Any:
    """The Hugging Face configuration of an architecture with random weights."""
    return FAMILIES[architecture.family](
        vocab_size=vocab_size,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        num_key_value_heads=architecture.num_kv_heads,
        head_dim=architecture.hidden_size // architecture.num_heads,
        max_position_embeddings=architecture.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": architecture.rope_theta},
        tie_word_embeddings=architecture.tie_embeddings,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )


def config_from_folder(folder: Path) -> Any:
    """The configuration of a downloaded model. Raises UsageError for a family that is not supported."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: no Hugging Face model configuration could be read: {error}") from None
    if config.model_type not in FAMILIES:
        raise UsageError(
            f"{folder}: model type {config.model_type!r} is not supported; supported: {', '.join(FAMILIES)}. "
            "Models that bring their own code are refused (trust_remote_code is off)."
        )
    return config


def parameter_names(model: CausalLM) -> dict[str, nn.Parameter]:
    """Parameters by their Hugging Face name, each once: a tied lm_head goes by the embedding's name."""
    return dict(model.hf.named_parameters())


def base_parameters(model: CausalLM) -> dict[str, nn.Parameter]:
    """Parameters that a weight file of the model holds: all but those of adapters."""
    return {name: p for name, p in parameter_names(model).items() if not is_adapter_parameter(name)}


def load_weights(model: CausalLM, folder: Path, report: Callable[[str], None] | None = None) -> None:
    """Streams safetensors into the local shards of a model that `to_empty` has just allocated.

    Only the rows of the own shard are read. Raises UsageError for missing, surplus or wrongly shaped weights.
    """
    files = _tensor_files(folder)
    parameters = base_parameters(model)
    missing = sorted(parameters.keys() - files.keys())
    surplus = sorted(
        name for name in files.keys() - parameters.keys() if not (model.tied and name == "lm_head.weight")
    )
    surplus = [
        name for name in surplus if not name.endswith("rotary_emb.inv_freq")
    ]  # a buffer that old exports hold
    if missing or surplus:
        raise UsageError(
            f"{folder}: the weights do not fit the configuration:"
            + (f" missing {_some(missing)};" if missing else "")
            + (f" not part of the model {_some(surplus)};" if surplus else "")
            + " is config.json from another model?"
        )
    by_file: dict[Path, list[str]] = {}
    for name in parameters:
        by_file.setdefault(files[name], []).append(name)
    for path, names in by_file.items():
        if report is not None:
            report(f"reading {path.name}")
        with safe_open(path, framework="pt") as file:
            for name in names:
                source = file.get_slice(name)
                shape, wanted = tuple(source.get_shape()), tuple(parameters[name].shape)
                if shape != wanted:
                    raise UsageError(
                        f"{path}: {name} has shape {list(shape)}, the configuration says {list(wanted)}"
                    )
                _fill(parameters[name], lambda rows, source=source: source[rows])
    _finish(model)


def init_weights(model: CausalLM, seed: int) -> None:
    """Random weights as Hugging Face initializes these families: normal with initializer_range, norms one, biases zero.

    Each parameter has its own seed, made of `seed` and its name: the same weights for every number of ranks.
    """
    std = float(model.config.initializer_range)
    for name, parameter in base_parameters(model).items():
        shape = tuple(parameter.shape)
        if parameter.ndim >= 2:
            generator = torch.Generator().manual_seed(_seed_of(seed, name))
            whole = torch.empty(shape).normal_(0.0, std, generator=generator)
        elif name.endswith("bias"):
            whole = torch.zeros(shape)
        else:  # Gemma's norms multiply by (1 + weight)
            whole = torch.zeros(shape) if model.config.model_type == "gemma" else torch.ones(shape)
        _fill(parameter, lambda rows, whole=whole: whole[rows])
    _finish(model)


def init_adapters(model: CausalLM, seed: int) -> None:
    """A uniform in +-1/sqrt(in_features) as in LoRA's published code, all else zero: the model starts as it was.

    As with `init_weights`, the values do not depend on the number of ranks.
    """
    for name, parameter in parameter_names(model).items():
        if not is_adapter_parameter(name):
            continue
        whole = torch.zeros(tuple(parameter.shape))
        if name.endswith("lora_A.weight"):
            generator = torch.Generator().manual_seed(_seed_of(seed, name))
            bound = whole.shape[1] ** -0.5
            whole.uniform_(-bound, bound, generator=generator)
        _fill(parameter, lambda rows, whole=whole: whole[rows])


def _finish(model: CausalLM) -> None:
    recompute_buffers(model)
    model.assert_tied()


def recompute_buffers(model: CausalLM) -> None:
    """Buffers that no weight file holds (rotary frequencies) are garbage after `to_empty`: compute them again."""
    for name, module in model.hf.named_modules():
        own = [buffer for buffer, _ in module.named_buffers(recurse=False)]
        if not own:
            continue
        if own == ["embed_scale"]:  # Gemma multiplies its embeddings
            cast("Tensor", module.embed_scale).fill_(cast("float", module.scalar_embed_scale))
            continue
        if "inv_freq" not in own:
            raise UsageError(
                f"{name or 'the model'} has buffers that cannot be computed again: {', '.join(own)}"
            )
        fresh = type(module)(model.config)
        for buffer in own:
            cast("Tensor", getattr(module, buffer)).copy_(cast("Tensor", getattr(fresh, buffer)))


def _fill(parameter: nn.Parameter, rows_of: Callable[[slice], Tensor]) -> None:
    """Copies the own rows of a parameter that is sharded in its first dimension (or not at all)."""
    with torch.no_grad():
        if not isinstance(parameter.data, DTensor):
            parameter.copy_(rows_of(slice(None)))
            return
        shard = parameter.data
        shape, offset = compute_local_shape_and_global_offset(
            shard.shape, shard.device_mesh, shard.placements
        )
        local = shard.to_local()
        if local.numel():
            assert tuple(shape[1:]) == tuple(shard.shape[1:]), "only the first dimension is sharded"
            local.copy_(rows_of(slice(offset[0], offset[0] + shape[0])))


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which safetensors file holds which tensor. Other weight formats can run code when they are read, and are refused."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = cast("dict[str, str]", json.loads(index.read_text())["weight_map"])
        return {name: folder / file for name, file in weight_map.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        raise UsageError(
            f"{folder}: no .safetensors file"
            + (f" (found {', '.join(others)}: pickled weights are refused)" if others else "")
        )
    found: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            found.update(dict.fromkeys(cast("Iterator[str]", file.keys()), path))
    return found


def _seed_of(seed: int, name: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") % 2**63


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def num_parameters(model: CausalLM, trainable_only: bool = False) -> int:
    """All parameters, a tied embedding once; or those of them that are trained."""
    return sum(
        math.prod(parameter.shape)
        for parameter in parameter_names(model).values()
        if parameter.requires_grad or not trainable_only
    )
