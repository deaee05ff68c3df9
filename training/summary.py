"""The end of a job: summary.json, transport.json and report.html, whatever the end was."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from training.errors import ExitStatus, UsageError
from training.evidence import FOLDER as EVIDENCE_FOLDER
from training.evidence import merge_counters
from training.job import JobSpec
from training.report.text import perplexity
from training.storage import Storage
from training.tracking.trackers import tracked_runs
from training.transport.verdict import Require, TransportReport, exit_status, judge

NAME = "summary.json"


def conclude(
    job: JobSpec,
    storage: Storage,
    outcome: dict[str, Any],
    *,
    earlier: frozenset[str],
    started: float,
    target: dict[str, Any] | None,
) -> dict[str, Any]:
    """Judges the transport, writes the three files and returns the summary.

    outcome: status, exit_status and error of the launch. earlier: `attempt_names` before it started: these belong to
    other launches of the same run. started: seconds since the epoch. target: the stack's outputs, where there is a
    stack.
    """
    from training.report import write_report

    attempts = _attempts(storage, earlier)
    result = _last_result(storage, attempts)
    transport = _judge(job, storage, attempts, result, target)
    status = ExitStatus(outcome["exit_status"])
    if status == ExitStatus.SUCCEEDED and transport is not None:
        status = ExitStatus(exit_status(transport, transport.required))
    wall_seconds = time.time() - started
    summary = {
        "name": job.name,
        "status": outcome["status"],
        "exit_status": int(status),
        "steps": result.get("steps", _last_step(storage)),
        "tokens": result.get("tokens", 0),
        "first_loss": result.get("first_loss"),
        "last_loss": result.get("last_loss"),
        "first_eval_loss": result.get("first_eval_loss"),
        "eval_loss": result.get("eval_loss"),
        "measures": result.get("measures"),
        "eval_perplexity": _perplexity(job, result.get("eval_loss")),
        "exported": result.get("exported"),
        "best_checkpoint": _best_checkpoint(storage),
        "tokens_per_second": result.get("tokens_per_second"),
        "tokens_per_second_per_gpu": result.get("tokens_per_second_per_gpu"),
        "mfu": result.get("mfu"),
        "mfu_reason": result.get("mfu_reason"),
        "peak_memory_gib": result.get("peak_memory_gib"),
        "wall_seconds": round(wall_seconds, 1),
        "restarts": max(len(attempts) - 1, 0),
        "resumed_from": attempts[0]["resumed_from"] if attempts else None,
        "world_size": attempts[-1]["world_size"] if attempts else None,
        "nodes": attempts[-1]["nodes"] if attempts else None,
        "device": result.get("device"),
        "parameters": result.get("parameters"),
        "trainable_parameters": result.get("trainable_parameters"),
        "sharding": result.get("sharding"),
        "transport": {"verdict": transport.verdict, "reason": transport.reason}
        if transport is not None
        else {"verdict": "unknown", "reason": "no attempt started"},
        "cost_usd": _cost(target, wall_seconds),
        "checkpoint": result.get("checkpoint") or _latest_checkpoint(storage),
        "checkpoint_blocked_seconds": result.get("checkpoint_blocked_seconds"),
        "run": storage.uri,
        "evaluation": json.loads(storage.read_text("evaluation.json"))
        if storage.exists("evaluation.json")
        else None,
        "tracking": {name: run.__dict__ for name, run in tracked_runs(storage).items()},
        "data": result.get("data"),
        "error": outcome["error"],
        "excluded_nodes": outcome.get("excluded_nodes", []),
        "versions": result.get("versions", {}) | _ray_version(),
    }
    storage.write_text(NAME, json.dumps(summary, indent=1))
    prediction = (target or {}).get("prediction")
    if prediction is not None:
        storage.write_text("prediction.json", json.dumps(prediction))
    write_report(storage)
    return summary


def attempt_names(storage: Storage) -> frozenset[str]:
    """Names of the attempt records of a run folder, of every launch."""
    return frozenset(name for name in storage.list("attempts") if not name.endswith(".result.json"))


def _attempts(storage: Storage, earlier: frozenset[str]) -> list[dict[str, Any]]:
    """The attempts of this launch, in order."""
    attempts = [json.loads(storage.read_text(name)) for name in attempt_names(storage) - earlier]
    return sorted(attempts, key=lambda attempt: cast("float", attempt["time"]))


def _last_result(storage: Storage, attempts: list[dict[str, Any]]) -> dict[str, Any]:
    if not attempts:
        return {}
    name = f"attempts/{attempts[-1]['attempt']}.result.json"
    return json.loads(storage.read_text(name)) if storage.exists(name) else {}


def _judge(
    job: JobSpec,
    storage: Storage,
    attempts: list[dict[str, Any]],
    result: dict[str, Any],
    target: dict[str, Any] | None,
) -> TransportReport | None:
    """The verdict on the last attempt, the one the result came from."""
    if not attempts:
        return None
    attempt = str(attempts[-1]["attempt"])
    required = cast("Require", job.transport.require or (target or {}).get("required_transport") or "any")
    with tempfile.TemporaryDirectory() as folder:
        merge_counters(storage, attempt, result.get("expected_bytes", {}), Path(folder))
    report = _judge_attempt(storage, attempt, required, bool((target or {}).get("gpudirect", False)))
    storage.write_text("transport.json", report.model_dump_json(indent=1))
    return report


def judge_last_attempt(storage: Storage, require: Require | None = None) -> TransportReport:
    """Judges a run folder again. What was required stands in its transport.json, unless `require` says otherwise.

    Raises UsageError where the folder holds no evidence.
    """
    attempts = sorted({name.split("/")[1] for name in storage.list(EVIDENCE_FOLDER) if name.count("/") == 2})
    if not attempts:
        raise UsageError(f"{storage.uri}: no {EVIDENCE_FOLDER}/<attempt>/ is there: nothing to judge")
    before = json.loads(storage.read_text("transport.json")) if storage.exists("transport.json") else {}
    required = cast("Require", require or before.get("required") or "any")
    return _judge_attempt(storage, attempts[-1], required, bool(before.get("gpudirect_required", False)))


def _judge_attempt(storage: Storage, attempt: str, required: Require, gpudirect: bool) -> TransportReport:
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / attempt
        local.mkdir()
        for name in storage.list(f"{EVIDENCE_FOLDER}/{attempt}"):
            storage.download(name, local / Path(name).name)
        return judge(local, require=required, gpudirect_required=gpudirect)


def _last_step(storage: Storage) -> int:
    if not storage.exists("metrics.jsonl"):
        return 0
    lines = storage.read_text("metrics.jsonl").splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _latest_checkpoint(storage: Storage) -> str | None:
    from training.checkpoint import LATEST

    return storage.read_text(LATEST) if storage.exists(LATEST) else None


def _perplexity(job: JobSpec, eval_loss: float | None) -> float | None:
    """A preference objective's loss is per pair: no perplexity follows from it."""
    return None if job.objective.kind == "dpo" else perplexity(eval_loss)


def _best_checkpoint(storage: Storage) -> dict[str, Any] | None:
    from training.checkpoint import best_checkpoint

    best = best_checkpoint(storage)
    return None if best is None else {"name": best.name, "step": best.step, "eval_loss": best.eval_loss}


def _cost(target: dict[str, Any] | None, seconds: float) -> float | None:
    """The job's share of the stack's price: the whole stack for as long as the job took."""
    hourly = (target or {}).get("hourly_usd")
    return None if hourly is None else round(float(hourly) * seconds / 3600, 4)


def _ray_version() -> dict[str, str]:
    from importlib.metadata import version

    return {"ray": version("ray")}
