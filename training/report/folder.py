"""Reads a run folder for the report. Every part is optional; what is missing or broken is named."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import yaml

from training.hangs import diagnose, hosts_of, read_reports
from training.redact import Redactor
from training.report.metrics_table import MetricsTable, read_metrics
from training.report.values import number, shown
from training.storage import Storage

_ATTEMPT = re.compile(r"attempts/[^/]+(?<!\.result)\.json")
_HANG = re.compile(r"hangs/(?P<attempt>[^/]+)/rank-\d+\.json")
_FAILURE = re.compile(r"failures/[^/]+/rank-\d+\.json")
_CHECKPOINT = re.compile(r"checkpoints/(?P<name>step-(?P<step>\d+)[^/]*)/")

_ABSENT = {
    "summary.json": "The run is still going on, or ended before it could write one.",
    "metrics.jsonl": "No step was recorded, so there are no charts.",
    "job.yaml": "The resolved job is not known.",
    "transport.json": "Which network carried the collectives has not been judged.",
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is there. `marker` is the content of its COMPLETE file, empty where there is none."""

    name: str
    step: int
    marker: Mapping[str, Any]
    roles: Sequence[str]
    """latest, best"""


@dataclass(frozen=True)
class RunFiles:
    """The content of a run folder, free of secrets. A part that is not there is empty."""

    uri: str
    job: Mapping[str, Any]
    job_text: str
    summary: Mapping[str, Any]
    metrics: MetricsTable
    transport: Mapping[str, Any]
    ranks: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    prediction: Mapping[str, Any]
    comparison: Mapping[str, Any]
    attempts: Sequence[Mapping[str, Any]]
    failures: Sequence[Mapping[str, Any]]
    hangs: Mapping[str, str]
    """By attempt that made no progress, who was waited for."""
    checkpoints: Sequence[Checkpoint]
    problems: Sequence[str]


class _Reader:
    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.problems: list[str] = []

    def text(self, name: str) -> str | None:
        try:
            return self.storage.read_text(name)
        except FileNotFoundError:
            if name in _ABSENT:
                self.problems.append(f"There is no {name}. {_ABSENT[name]}")
        except UnicodeDecodeError as error:
            self.problems.append(f"{name} is not UTF-8 (byte {error.start}); it is left out.")
        return None

    def json(self, name: str) -> Any:
        text = self.text(name)
        if text is None:
            return None
        try:
            return json.loads(text)
        except ValueError as error:
            self.problems.append(f"{name} is not valid JSON ({error}); it is left out.")
            return None

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.json(name)
        if value is None or isinstance(value, dict):
            return cast("dict[str, Any]", value or {})
        self.problems.append(f"{name} holds {_kind(value)} where an object is expected; it is left out.")
        return {}

    def mappings(self, name: str) -> list[dict[str, Any]]:
        value = self.json(name)
        if value is None:
            return []
        if isinstance(value, list) and all(isinstance(item, dict) for item in cast("list[Any]", value)):
            return cast("list[dict[str, Any]]", value)
        self.problems.append(
            f"{name} holds {_kind(value)} where a list of objects is expected; it is left out."
        )
        return []

    def yaml(self, name: str) -> dict[str, Any]:
        text = self.text(name)
        if text is None:
            return {}
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            self.problems.append(
                f"{name} is not valid YAML ({' '.join(str(error).split())}); it is left out."
            )
            return {}
        if isinstance(value, dict):
            return cast("dict[str, Any]", value)
        self.problems.append(f"{name} holds {_kind(value)} where keys are expected; it is left out.")
        return {}


def read_run(storage: Storage) -> RunFiles:
    """Reads what is there and removes secrets. Raises FileNotFoundError for a folder without any file."""
    names = storage.list()
    if not names:
        raise FileNotFoundError(f"{storage.uri}: no run folder (nothing there)")
    reader = _Reader(storage)
    job = reader.yaml("job.yaml")
    summary = reader.mapping("summary.json")
    metrics = read_metrics((reader.text("metrics.jsonl") or "").splitlines())
    transport = reader.mapping("transport.json")
    attempts = sorted(
        (reader.mapping(name) for name in names if _ATTEMPT.fullmatch(name)),
        key=lambda attempt: number(attempt, "time") or 0.0,
    )
    ranks_file = f"nccl/{shown(attempts[-1], 'attempt')}/ranks.json" if attempts else ""
    parts: dict[str, Any] = {
        "uri": storage.uri,
        "job": job,
        "summary": summary,
        "transport": transport,
        "ranks": reader.mappings(ranks_file) if ranks_file in names else [],
        "samples": reader.mappings("samples.json"),
        "prediction": reader.mapping("prediction.json"),
        "comparison": reader.mapping("comparison.json"),
        "attempts": attempts,
        "hangs": _hangs(reader, names),
        "failures": [reader.mapping(name) for name in names if _FAILURE.fullmatch(name)],
    }
    checkpoints = _checkpoints(reader, names)
    parts["problems"] = [*reader.problems, *metrics.problems]
    redactor = Redactor()
    redactor.learn(parts)
    cleaned = {name: redactor.clean(part) for name, part in parts.items()}
    return RunFiles(
        **cleaned,
        job_text=yaml.safe_dump(cleaned["job"], sort_keys=False, allow_unicode=True, width=100)
        if job
        else "",
        metrics=metrics,
        checkpoints=checkpoints,
    )


def _hangs(reader: _Reader, names: Sequence[str]) -> dict[str, str]:
    attempts = sorted({match["attempt"] for name in names if (match := _HANG.fullmatch(name))})
    found: dict[str, str] = {}
    for attempt in attempts:
        try:
            diagnosis = diagnose(read_reports(reader.storage, attempt), hosts_of(reader.storage, attempt))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            reader.problems.append(f"hangs/{attempt}/ cannot be understood ({error}); it is left out.")
            continue
        if diagnosis is not None:
            found[attempt] = diagnosis.message
    return found


def _checkpoints(reader: _Reader, names: Sequence[str]) -> list[Checkpoint]:
    folders = {match["name"]: int(match["step"]) for name in names if (match := _CHECKPOINT.match(name))}
    roles = {role: (reader.text(f"checkpoints/{role}") or "").strip() for role in ("latest", "best")}
    found: list[Checkpoint] = []
    for folder, step in folders.items():
        marker = f"checkpoints/{folder}/COMPLETE"
        content = reader.mapping(marker) if marker in names else {}
        found.append(
            Checkpoint(folder, step, content, [role for role, name in roles.items() if name == folder])
        )
    return sorted(found, key=lambda one: (one.step, one.name))


def _kind(value: Any) -> str:
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return kinds.get(type(value), "nothing")
