"""Small jobs and batches for the tests of the training function."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import yaml

from training.data.batch import IGNORE, Batch
from training.job import JobSpec, job_from_yaml

VOCAB = 97


def tiny_architecture(**changes: Any) -> dict[str, Any]:
    return {
        "family": "qwen2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        **changes,
    }


def tiny_job(**changes: Any) -> JobSpec:
    """A job that trains in seconds: a two-block model on the Python language reference, cut short."""
    document: dict[str, Any] = {
        "name": "tiny",
        "model": {"architecture": tiny_architecture(), "tokenizer": "train"},
        "data": {"source": "python-docs", "max_length": 128, "limit": 200, "validation": {"count": 10}},
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"warmup_steps": 2},
        "batch": {"tokens_per_gpu": 256},
        "steps": 6,
        "checkpoint": {"every": 3, "async": True},
        "evaluation": {"every": 3, "max_batches": 2},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            document.setdefault(section, {})[name] = value
        else:
            document[section] = value
    return job_from_yaml(yaml.safe_dump(document))


def ragged_batch(seed: int, tokens: int, num_documents: int, supervised: float = 0.6) -> Batch:
    """A packed row of random documents of uneven length, some of their tokens supervised."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, tokens), num_documents - 1))
    borders = [0, *cuts, tokens]
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, VOCAB, (tokens,), generator=generator)
    labels = torch.full((tokens,), IGNORE)
    positions = torch.zeros(tokens, dtype=torch.int64)
    for start, end in zip(borders, borders[1:], strict=False):
        positions[start:end] = torch.arange(end - start)
        labels[start : end - 1] = input_ids[start + 1 : end]
    keep = torch.rand(tokens, generator=generator) < supervised
    labels[~keep] = IGNORE
    lengths = [end - start for start, end in zip(borders, borders[1:], strict=False)]
    return Batch(
        input_ids=input_ids,
        labels=labels,
        position_ids=positions,
        cu_seqlens=torch.tensor(borders, dtype=torch.int32),
        max_seqlen=max(lengths),
        num_supervised=int((labels != IGNORE).sum()),
        num_tokens=tokens,
        num_documents=num_documents,
    )


def split_documents(batch: Batch) -> list[Batch]:
    """The documents of a packed row, each as a batch of its own."""
    borders = batch.cu_seqlens.tolist()
    documents: list[Batch] = []
    for start, end in zip(borders, borders[1:], strict=False):
        labels = batch.labels[start:end]
        documents.append(
            Batch(
                input_ids=batch.input_ids[start:end],
                labels=labels,
                position_ids=torch.arange(end - start),
                cu_seqlens=torch.tensor([0, end - start], dtype=torch.int32),
                max_seqlen=end - start,
                num_supervised=int((labels != IGNORE).sum()),
                num_tokens=end - start,
                num_documents=1,
            )
        )
    return documents


def read_losses(run: Path) -> dict[int, float]:
    """Loss by step of a run folder's metrics.jsonl."""
    import json

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
