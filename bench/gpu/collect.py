"""Adds the JSON lines of device runs to the committed results: `python -m bench.gpu.collect OUT_FOLDER...`."""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"

# What a kernel's name contains -> the row of the account it belongs to; the first match counts.
GROUPS = {
    "_rows": "loss", "_scale": "loss", "FusedOptimizer": "optimizer", "_step": "optimizer", "LpNorm": "gradient norm",
    "nvjet": "matrix products", "splitKreduce": "matrix products", "sdpa": "attention", "fmha": "attention",
    "cudnn::fusion": "attention", "pytorch_flash": "attention", "_largest": "float8 scales and casts",
    "amax": "float8 scales and casts", "_cast": "float8 scales and casts", "_swiglu": "SwiGLU", "_backward": "SwiGLU",
    "mul_silu": "SwiGLU", "chunk_cat": "FSDP copies", "bfloat16_copy": "FSDP copies", "Memcpy": "FSDP copies",
    "pow": "norms and residuals", "view_add": "norms and residuals", "neg_": "rotary embedding",
}  # fmt: skip


def account(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of a step by group."""
    total: dict[str, float] = {}
    for row in kernels:
        group = next((group for part, group in GROUPS.items() if part in row["kernel"]), "other")
        total[group] = total.get(group, 0.0) + row["ms"]
    return {group: round(ms, 2) for group, ms in sorted(total.items(), key=lambda item: -item[1])}


def main(folders: list[str]) -> None:
    results = RESULTS / "gpu-h200.json"
    runs: list[dict[str, Any]] = json.loads(results.read_text())["runs"] if results.exists() else []
    for folder in map(Path, folders):
        lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
        kernels = {
            path.stem.removeprefix("kernels-"): {"groups_ms": account(json.loads(path.read_text())),
                                                 "kernels": json.loads(path.read_text())[:60]}
            for path in sorted(folder.glob("kernels-*.json"))
        }  # fmt: skip
        environment = next((line for line in lines if line["kind"] in ("environment", "versions")), {})
        runs.append({
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "environment": {key: value for key, value in environment.items() if key != "kind"},
            "rows": [line for line in lines if line["kind"] not in ("environment", "versions", "kernels")],
            "kernels": kernels,
        })  # fmt: skip
    command = "python -m bench.gpu.{ablation,peers,lengths,memory,checkpoint,convergence}"
    results.write_text(json.dumps({"command": command, "runs": runs}, indent=1))


def peers_table(rows: list[dict[str, Any]]) -> list[tuple[str, list[float]]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["kind"] == "peer" and "tokens_per_second" in row:
            found.setdefault(row["name"], []).append(row["tokens_per_second"])
    return sorted(found.items(), key=lambda item: statistics.median(item[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
