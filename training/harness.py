"""lm-evaluation-harness on the exported model: `evaluation.harness` of a job file, at the end and on one rank."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch

from training.errors import UsageError
from training.job import HarnessSpec, JobSpec
from training.optional import OptionalPackage, missing_packages
from training.samples import local_export
from training.storage import Storage

NAME = "evaluation.json"
PACKAGE = OptionalPackage(
    key="evaluation.harness",
    module="lm_eval",
    requirement="lm-eval==0.4.13",  # tried 2026-12
    distributions=("lm-eval",),
)


def packages_of(job: JobSpec) -> list[OptionalPackage]:
    return [PACKAGE] if job.evaluation.harness is not None else []


def check_harness(job: JobSpec) -> None:
    """Raises UsageError, before training, for a package that is missing and for tasks that the harness does not have."""
    spec = job.evaluation.harness
    if spec is None:
        return
    if problems := missing_packages([PACKAGE]):
        raise UsageError("\n".join(problems))
    manager: Any = importlib.import_module("lm_eval.tasks").TaskManager()
    unknown = [task for task in spec.tasks if not manager.match_tasks([task])]
    if unknown:
        raise UsageError(
            f"evaluation.harness.tasks: {', '.join(unknown)}: lm-evaluation-harness has no such task. "
            "`lm_eval ls tasks` lists them"
        )


def run_harness(spec: HarnessSpec, storage: Storage, work_dir: Path, device: torch.device) -> dict[str, Any]:
    """Evaluates `export/` and writes evaluation.json: the settings and, by task, each metric.

    A harness that fails (a data set out of reach, too little memory) costs the run nothing: the file then has `error`.
    """
    document: dict[str, Any] = {"harness": spec.model_dump(mode="json", exclude_none=True)}
    try:
        document["tasks"] = _evaluate(spec, local_export(storage, work_dir), device)
    except Exception as error:  # tasks bring code of their own and data from the hub
        document["error"] = f"{type(error).__name__}: {error}"
    storage.write_text(NAME, json.dumps(document, indent=1))
    return document


def _evaluate(spec: HarnessSpec, folder: Path, device: torch.device) -> dict[str, dict[str, float]]:
    found: Any = importlib.import_module("lm_eval").simple_evaluate(
        model="hf",
        model_args={
            "pretrained": str(folder),
            "dtype": "bfloat16" if device.type == "cuda" else "float32",
            "trust_remote_code": False,
        },
        tasks=list(spec.tasks),
        num_fewshot=spec.num_fewshot,
        limit=spec.limit,
        batch_size=spec.batch_size,
        device=str(device),
        apply_chat_template=spec.apply_chat_template,
        log_samples=False,
    )
    return {
        task: {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
        for task, metrics in found["results"].items()
    }
