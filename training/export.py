"""Export: a folder that `AutoModelForCausalLM.from_pretrained` loads, and an adapter as `peft` loads it.

Adapters are merged into the weights of the first; the second holds them alone. Parameters are gathered one at a time;
the files are dealt out to the ranks, so that all of them write and upload.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from training.adapters import adapted_linears
from training.job import JobSpec
from training.model import CausalLM, base_parameters
from training.parallel import World
from training.storage import Storage

FOLDER = "export"
ADAPTER_FOLDER = f"{FOLDER}/adapter"
FILE_BYTES = 2 * 2**30


def export(
    model: CausalLM, tokenizer: Any, storage: Storage, world: World, work_dir: Path, dtype: torch.dtype
) -> None:
    """Writes `export/` of the run folder: safetensors in `dtype`, configuration, tokenizer, generation configuration.

    Every rank calls it. An export is complete when its index (model.safetensors.index.json), written last, stands.
    """
    local = (storage.local_path or work_dir) / FOLDER
    local.mkdir(parents=True, exist_ok=True)
    plan = _plan(model, dtype)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(plan):
        file = f"model-{index + 1:05d}-of-{len(plan):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        _write_file(model, names, local / file, dtype, mine=index % world.size == world.rank)
        if index % world.size == world.rank:
            storage.upload(local / file, f"{FOLDER}/{file}")
    if world.rank == 0:
        _write_texts(model, tokenizer, local, dtype)
        for path in sorted(local.iterdir()):
            if path.is_file() and path.suffix != ".safetensors":
                storage.upload(path, f"{FOLDER}/{path.name}")
    dist.barrier(group=world.control)
    if world.rank == 0:
        total = sum(parameter.numel() for parameter in base_parameters(model).values()) * dtype.itemsize
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        storage.write_text(f"{FOLDER}/model.safetensors.index.json", index_text)
    dist.barrier(group=world.control)


def _plan(model: CausalLM, dtype: torch.dtype) -> list[list[str]]:
    """Names of the parameters in each file, in the model's order."""
    files: list[list[str]] = [[]]
    size = 0
    for name, parameter in base_parameters(model).items():
        nbytes = parameter.numel() * dtype.itemsize
        if files[-1] and size + nbytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    return files


def _write_file(model: CausalLM, names: list[str], path: Path, dtype: torch.dtype, mine: bool) -> None:
    weights = _weights(model)
    tensors: dict[str, Tensor] = {}
    for name in names:
        whole = weights[name]()  # a collective: every rank takes part
        if mine:
            tensors[name] = whole.to(dtype=dtype, device="cpu").contiguous()
        del whole
    if mine:
        save_file(tensors, path, metadata={"format": "pt"})


def _weights(model: CausalLM) -> dict[str, Callable[[], Tensor]]:
    """How to get each whole tensor of the plain model."""
    weights = {name: partial(_whole, parameter) for name, parameter in base_parameters(model).items()}
    for path, layer in adapted_linears(model.hf).items():
        weights[f"{path}.weight"] = partial(layer.merged_weight, _whole)
    return weights


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def export_adapter(
    model: CausalLM,
    job: JobSpec,
    revision: str | None,
    tokenizer: Any,
    storage: Storage,
    world: World,
    work_dir: Path,
) -> None:
    """Writes `export/adapter/` of the run folder: the adapters in peft's format, float32, and the tokenizer.

    revision: the commit of the hub repository that the job's model is from. Every rank calls it; rank 0 writes.
    """
    tensors: dict[str, Tensor] = {}
    for path, layer in adapted_linears(model.hf).items():
        for name, tensor in layer.peft_tensors(_whole).items():  # a collective
            tensors[f"base_model.model.{path}.{name}"] = tensor.cpu().contiguous()
    if world.rank == 0:
        # Merged weights of an earlier end of this run must not lie beside a newer adapter.
        storage.delete(FOLDER)
        local = (storage.local_path or work_dir) / ADAPTER_FOLDER
        local.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(local)
        config = json.dumps(_peft_config(job, revision), indent=1)
        (local / "adapter_config.json").write_text(config)
        save_file(tensors, local / "adapter_model.safetensors", metadata={"format": "pt"})
        for path in sorted(local.iterdir()):
            storage.upload(path, f"{ADAPTER_FOLDER}/{path.name}")
    dist.barrier(group=world.control)


def _peft_config(job: JobSpec, revision: str | None) -> dict[str, Any]:
    adapter, source = job.adapter, job.model.source
    assert adapter is not None
    if source is not None and Path(source).is_dir():
        source = str(Path(source).resolve())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "revision": revision,
        "r": adapter.rank,
        "lora_alpha": adapter.resolved_alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": list(adapter.targets),
        "use_dora": adapter.kind == "dora",
        "bias": "none",
        "inference_mode": True,
    }


def _write_texts(model: CausalLM, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model.hf).__name__]
    config.dtype = dtype
    # The loop's attention is a registration of this package: a reader of the export chooses its own.
    config._attn_implementation = None
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # A base model's own end of text is not how a chat turn ends: without the turn's end, generation never stops.
    ends = sorted(
        {token for token in (config.eos_token_id, tokenizer.eos_token_id) if isinstance(token, int)}
    )
    GenerationConfig(
        eos_token_id=ends, pad_token_id=tokenizer.pad_token_id, do_sample=False, use_cache=True
    ).save_pretrained(folder)
