"""Builds run folders that look like those of real runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

ATTEMPTS = ("5d0c1b7a", "9e42f6c8")
START = 1_796_115_600.0  # 2026-12-01 09:00 UTC

JOB = """\
name: qwen2.5-1.5b-sft
model:
  source: Qwen/Qwen2.5-1.5B
  revision: 8faed761d45a263340a0528343f099c05c9a4323
data:
  sources:
  - source: s3://efa-finetune-dev/data/instructions
  max_length: 4096
optimizer:
  name: adamw
  learning_rate: 2.0e-05
  max_grad_norm: 1.0
batch:
  tokens_per_gpu: 16384
  accumulation: 1
steps: 400
seed: 0
evaluation:
  every: 50
  prompts:
  - What does the with statement do?
runtime_env:
  env:
    TOKENIZERS_PARALLELISM: 'false'
    HF_HOME: /mnt/cache
"""


def metric_lines(
    steps: int,
    *,
    attempt: int = 0,
    first: int = 1,
    evaluate_every: int = 50,
    seed: int = 0,
    total: int | None = None,
) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl for steps first..steps; evaluated before the first update where first is 1."""
    random = np.random.default_rng(seed + attempt)
    total = total or steps
    lines: list[dict[str, Any]] = []
    if first == 1:
        nothing = {
            "tokens": 0,
            "supervised_tokens": 0,
            "learning_rate": 0.0,
            "tokens_per_second": 0.0,
            "seconds": {},
        }
        memory = {"memory": {"peak_gib": 11.2}}
        lines.append(
            {"step": 0, **nothing, **memory, "eval_loss": 2.413, "attempt": ATTEMPTS[attempt], "time": START}
        )
    for step in range(first, steps + 1):
        share = step / total
        speed = random.normal(27_400, 350) * (0.25 if step == first else 1)
        checkpoint = 1.9 if step % 100 == 0 else 0.0
        seconds = {
            "data": abs(random.normal(0.05, 0.02)),
            "forward": random.normal(1.21, 0.02) + (11 if step == first else 0),
            "backward": random.normal(2.62, 0.03),
            "optimizer": random.normal(0.31, 0.01),
            "checkpoint": checkpoint,
            "evaluation": 3.1 if step % evaluate_every == 0 else 0.0,
        }
        line: dict[str, Any] = {
            "step": step,
            "tokens": step * 131_072,
            "supervised_tokens": step * 80_000,
            "loss": 1.18 + 1.2 * math.exp(-6 * share) + random.normal(0, 0.035),
            "learning_rate": 2e-5
            * min(1.0, step / (0.05 * total))
            * (0.55 + 0.45 * math.cos(math.pi * share)),
            "grad_norm": 0.7 + 4 * math.exp(-14 * share) + abs(random.normal(0, 0.08)),
            "tokens_per_second": speed,
            "seconds": seconds,
            "memory": {"peak_gib": 17.9 + min(1.2, step / 60) + random.normal(0, 0.01)},
            "attempt": ATTEMPTS[attempt],
            "time": START + 4.4 * step + 90 * attempt,
        }
        if step % evaluate_every == 0 or step == total:
            line["eval_loss"] = 1.262 + 1.15 * math.exp(-6 * share)
        lines.append(line)
    return lines


def summary(**changes: Any) -> dict[str, Any]:
    return {
        "name": "qwen2.5-1.5b-sft",
        "status": "succeeded",
        "steps": 400,
        "tokens": 52_428_800,
        "first_loss": 2.381,
        "first_eval_loss": 2.413,
        "last_loss": 1.184,
        "eval_loss": 1.265,
        "eval_perplexity": 3.543,
        "tokens_per_second": 27_380.0,
        "tokens_per_second_per_gpu": 3422.5,
        "mfu": 0.342,
        "peak_memory_gib": 19.13,
        "wall_seconds": 2144.0,
        "restarts": 1,
        "resumed_from": None,
        "world_size": 8,
        "nodes": 2,
        "device": "NVIDIA L4",
        "transport": {"verdict": "efa", "reason": "All 8 ranks use Libfabric with the provider efa."},
        "cost_usd": 5.69,
        "checkpoint": f"step-00000400.{ATTEMPTS[1]}",
        "checkpoint_blocked_seconds": 7.6,
        "parameters": 1_543_714_304,
        "sharding": {
            "scheme": "hybrid",
            "reshard_after_forward": False,
            "checkpoint_every": 0,
            "reason": "2 nodes",
        },
        "versions": {
            "python": "3.13.2",
            "torch": "2.13.0+cu130",
            "ray": "2.58.0",
            "transformers": "5.13.0",
            "nccl": "2.29.7",
        },
        "data": DATA_REPORT,
        **changes,
    }


DATA_REPORT: dict[str, Any] = {
    "sources": [
        {
            "source": "s3://efa-finetune-dev/data/instructions",
            "revision": None,
            "format": "messages",
            "files": 4,
            "ignored_files": [],
            "rows_read": 48_210,
            "rows_used": 48_120,
            "rows_truncated": 31,
            "rejected": {"no answer": 71, "invalid UTF-8": 19},
            "examples": [
                {
                    "file": "part-00.jsonl",
                    "line": 812,
                    "reason": "no answer",
                    "detail": "the last message is the user's",
                },
                {
                    "file": "part-02.jsonl",
                    "line": 9,
                    "reason": "invalid UTF-8",
                    "detail": "byte 0xff at position 41",
                },
            ],
            "documents": 48_120,
            "tokens": 26_214_400,
            "supervised_tokens": 16_012_300,
        }
    ],
    "train_documents": 47_158,
    "train_tokens": 25_690_112,
    "train_supervised_tokens": 15_692_054,
    "validation_documents": 962,
    "validation_tokens": 524_288,
    "validation_supervised_tokens": 320_246,
    "packs_per_epoch": 1_571,
    "packing_efficiency": 0.9981,
    "fingerprint": "5b1f0c9a",
    "warnings": ["31 rows were cut to max_length 4096."],
}


def transport(verdict: str = "efa", **changes: Any) -> dict[str, Any]:
    hosts = ["ray-worker-gpu-7xk2p", "ray-worker-gpu-m9d4c"]
    return {
        "verdict": verdict,
        "reason": "All 8 ranks use Libfabric with the provider efa, 64 channels cross between the two nodes, "
        "and the counters of both nodes grew by what the collectives needed.",
        "attempt": ATTEMPTS[1],
        "required": "efa",
        "ranks": [
            {
                "rank": rank,
                "host": hosts[rank // 4],
                "pid": 301 + rank % 4,
                "local_rank": rank % 4,
                "provider": "efa",
                "network": "AWS Libfabric",
                "internode_channels": 8,
                "gpudirect": False,
                "evidence": [
                    {
                        "file": f"nccl/{ATTEMPTS[1]}/{hosts[rank // 4]}.{301 + rank % 4}.log",
                        "line": 41,
                        "text": "NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 1 nics)",
                    }
                ],
            }
            for rank in range(8)
        ],
        "nodes": [
            {
                "host": host,
                "tx_bytes": 2_611_340_000_000,
                "rx_bytes": 2_609_870_000_000,
                "expected_bytes": 2_468_000_000_000,
                "counters": {"tx_bytes": 2_611_340_000_000},
                "agrees": True,
                "note": "6 % above the need: headers and the processes' own traffic",
            }
            for host in hosts
        ],
        "diagnosis": [],
        **changes,
    }


SAMPLES = [
    {
        "prompt": "What does the with statement do?",
        "answer": "The with statement wraps the execution of a block with methods defined by a manager.\n\n"
        "It makes sure that the manager's __exit__ method runs when the block is left, also by an exception.",
    },
    {
        "prompt": "Write an unordered list in HTML.",
        "answer": "<ul>\n  <li>first</li>\n</ul>\n<script>alert(1)</script>",
    },
]


def write_json(folder: Path, name: str, value: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_lines(folder: Path, name: str, records: list[dict[str, Any]]) -> None:
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def restarted_run(folder: Path) -> Path:
    """Two nodes, 400 steps, a worker lost after step 237, resumed from step 200; every part is there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(JOB, encoding="utf-8")
    write_lines(
        folder,
        "metrics.jsonl",
        metric_lines(237, total=400) + metric_lines(400, attempt=1, first=201, total=400),
    )
    write_json(folder, "summary.json", summary())
    write_json(folder, "transport.json", transport())
    write_json(folder, "samples.json", SAMPLES)
    ranks = [
        {key: rank[key] for key in ("rank", "host", "pid", "local_rank")} for rank in transport()["ranks"]
    ]
    write_json(folder, f"nccl/{ATTEMPTS[1]}/ranks.json", [{**rank, "backend": "nccl"} for rank in ranks])
    write_json(
        folder,
        "prediction.json",
        {
            "memory_gib": {"masters": 3.1, "moments": 6.2, "gradients": 1.5, "activations": 8.0},
            "step_seconds": 4.05,
            "tokens_per_second": 29_800.0,
            "hours": 0.47,
            "cost_usd": 4.49,
            "limited_by": "compute",
        },
    )
    legs = (("efa", 0.238, 0.231, 0.243), ("tcp", 0.171, 0.162, 0.177))
    comparison: dict[str, Any] = {
        name: {
            "run": f"runs/{name}",
            "verdict": name,
            "reason": "",
            "num_steps": 40,
            "step_seconds": 1 / speed,
            "steps_per_second": speed,
            "steps_per_second_low": low,
            "steps_per_second_high": high,
            "tokens_per_gpu_per_step": 16_384,
            "tokens_per_second": speed * 131_072,
        }
        for name, speed, low, high in legs
    }
    comparison |= {"ratio": 1.39, "ratio_low": 1.31, "ratio_high": 1.5, "tokens_per_gpu_per_step": 16_384}
    comparison |= {"expected_ratio": None, "expectation": None, "problems": []}
    comparison["expectation_missing"] = "the run recorded no expected bytes"
    write_json(folder, "comparison.json", comparison)
    for index, (attempt, resumed_from) in enumerate(
        zip(ATTEMPTS, (None, f"step-00000200.{ATTEMPTS[0]}"), strict=True)
    ):
        record = {
            "attempt": attempt,
            "resumed_from": resumed_from,
            "step": 200 * index,
            "world_size": 8,
            "nodes": 2,
        }
        write_json(folder, f"attempts/{attempt}.json", {**record, "time": START + 1_200 * index})
    write_json(folder, f"attempts/{ATTEMPTS[1]}.result.json", {"attempt": ATTEMPTS[1], "steps": 400})
    lost = {"rank": 5, "host": "ray-worker-gpu-m9d4c", "type": "WorkerDied", "message": "killed (SIGKILL)"}
    peer = {
        "rank": 0,
        "host": "ray-worker-gpu-7xk2p",
        "type": "DistBackendError",
        "message": "connection closed by peer",
    }
    for failure, time in ((lost, 1_100.0), (peer, 1_101.0)):
        name = f"failures/{ATTEMPTS[0]}/rank-{failure['rank']}.json"
        write_json(folder, name, {**failure, "attempt": ATTEMPTS[0], "launch": "0c4e", "time": START + time})
    for step in (300, 400):
        name = f"checkpoints/step-{step:08d}.{ATTEMPTS[1]}"
        files = {f"__{rank}_0.distcp": 2_312_500_000 for rank in range(8)}
        marker = {"step": step, "attempt": ATTEMPTS[1], "world_size": 8, "eval_loss": 1.265, "files": files}
        write_json(folder, f"{name}/COMPLETE", marker)
    write_json(folder, f"checkpoints/step-00000237.{ATTEMPTS[0]}/written.3.json", {})
    (folder / "checkpoints" / "latest").write_text(f"step-00000400.{ATTEMPTS[1]}")
    (folder / "checkpoints" / "best").write_text(f"step-00000400.{ATTEMPTS[1]}")
    return folder
