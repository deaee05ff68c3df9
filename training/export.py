"""Export: a folder that `AutoModelForCausalLM.from_pretrained` loads.

Parameters are gathered one at a time; the files are dealt out to the ranks, so that all of them write and upload.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from training.model import CausalLM, parameter_names
from training.parallel import World
from training.storage import Storage

FOLDER = "export"
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
            if path.suffix != ".safetensors":
                storage.upload(path, f"{FOLDER}/{path.name}")
    dist.barrier(group=world.control)
    if world.rank == 0:
        total = sum(parameter.numel() for parameter in parameter_names(model).values()) * dtype.itemsize
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        storage.write_text(f"{FOLDER}/model.safetensors.index.json", index_text)
    dist.barrier(group=world.control)


def _plan(model: CausalLM, dtype: torch.dtype) -> list[list[str]]:
    """Names of the parameters in each file, in the model's order."""
    files: list[list[str]] = [[]]
    size = 0
    for name, parameter in parameter_names(model).items():
        nbytes = parameter.numel() * dtype.itemsize
        if files[-1] and size + nbytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    return files


def _write_file(model: CausalLM, names: list[str], path: Path, dtype: torch.dtype, mine: bool) -> None:
    parameters = parameter_names(model)
    tensors: dict[str, Tensor] = {}
    for name in names:
        whole = _whole(parameters[name].detach())  # a collective: every rank takes part
        if mine:
            tensors[name] = whole.to(dtype=dtype, device="cpu").contiguous()
        del whole
    if mine:
        save_file(tensors, path, metadata={"format": "pt"})


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
