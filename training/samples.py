"""Answers of the exported model: loaded back as any user would load it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.export import FOLDER
from training.storage import Storage

NAME = "samples.json"


def answer_prompts(
    storage: Storage, prompts: Sequence[str], work_dir: Path, device: torch.device, max_new_tokens: int
) -> list[dict[str, str]]:
    """Loads `export/` with AutoModelForCausalLM, answers each prompt greedily and writes samples.json.

    Returns a list of {prompt, answer}.
    """
    folder = local_export(storage, work_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    model = model.to(device).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    samples = [
        {"prompt": prompt, "answer": _answer(model, tokenizer, prompt, device, max_new_tokens)}
        for prompt in prompts
    ]
    storage.write_text(NAME, json.dumps(samples, ensure_ascii=False, indent=1))
    return samples


def local_export(storage: Storage, work_dir: Path) -> Path:
    """The exported model as a folder of this machine."""
    if storage.local_path is not None:
        return storage.local_path / FOLDER
    for name in storage.list(FOLDER):
        if not (work_dir / name).is_file():
            storage.download(name, work_dir / name)
    return work_dir / FOLDER


@torch.no_grad()
def _answer(model: Any, tokenizer: Any, prompt: str, device: torch.device, max_new_tokens: int) -> str:
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(device)
    generated = model.generate(**encoded, max_new_tokens=max_new_tokens)
    new_tokens = generated[0, encoded["input_ids"].shape[1] :]
    return tokenizer.decode(new_tokens, skip_special_tokens=True).strip()
