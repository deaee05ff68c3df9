"""Reads a run folder for the report. Every part is optional; what is missing or broken is named."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import yaml

from training.report.metrics_table import MetricsTable, read_metrics
from training.report.redact import Redactor
from training.storage import Storage

_CHECKPOINT_FOLDER = re.compile(r"checkpoints/(?P<name>step-(?P<step>\d+)[^/]*)/(?P<rest>.+)")

_ABSENT = {
    "summary.json": "The run is still going on, or ended before it could write one.",
    "metrics.jsonl": "No step was recorded, so there are no charts.",
    "job.yaml": "The resolved job is not known.",
    "transport.json": "Which network carried the collectives has not been judged.",
}


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: `state` is kept, incomplete or removed; `record` is its line of checkpoints.jsonl."""

    name: str
    step: int
    state: str
    record: Mapping[str, Any]


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

    def lines(self, name: str) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        for number, line in enumerate((self.text(name) or "").splitlines(), start=1):
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                records.append(cast("dict[str, Any]", value))
            elif line.strip():
                self.problems.append(f"{name}: line {number} is not a JSON object; it is left out.")
        return records

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
    ranks = reader.mappings(_newest_ranks(names) or "ranks.json")
    attempts = [reader.mapping(name) for name in sorted(_attempt_files(names), key=_natural)]
    checkpoints = _checkpoints(names, reader.lines("checkpoints.jsonl"))
    parts: dict[str, Any] = {
        "uri": storage.uri,
        "job": job,
        "summary": summary,
        "transport": transport,
        "ranks": ranks,
        "samples": reader.mappings("samples.json"),
        "prediction": reader.mapping("prediction.json"),
        "comparison": reader.mapping("comparison.json"),
        "attempts": attempts,
        "problems": [*reader.problems, *metrics.problems],
    }
    redactor = Redactor()
    redactor.learn(parts)
    cleaned = {name: redactor.clean(part) for name, part in parts.items()}
    return RunFiles(
        **cleaned,
        job_text=yaml.safe_dump(cleaned["job"], sort_keys=False, allow_unicode=True, width=100)
        if job
        else "",
        metrics=metrics,
        checkpoints=[
            Checkpoint(redactor.text(one.name), one.step, one.state, redactor.clean(one.record))
            for one in checkpoints
        ],
    )


def _newest_ranks(names: Sequence[str]) -> str | None:
    found = [name for name in names if re.fullmatch(r"nccl/[^/]+/ranks\.json", name)]
    return max(found, key=_natural, default=None)


def _attempt_files(names: Sequence[str]) -> list[str]:
    return [name for name in names if re.fullmatch(r"attempts/[^/]+\.json", name)]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts attempt 10 after attempt 9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _checkpoints(names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[Checkpoint]:
    """Those of checkpoints.jsonl with what became of them, and those that only the folder knows."""
    steps: dict[str, int] = {}
    complete: set[str] = set()
    for name in names:
        match = _CHECKPOINT_FOLDER.fullmatch(name)
        if match:
            steps[match["name"]] = int(match["step"])
            if match["rest"] == "COMPLETE":
                complete.add(match["name"])
    found: dict[str, Checkpoint] = {}
    for record in records:
        name = (
            str(record.get("name") or record.get("path") or record.get("checkpoint") or "")
            .rstrip("/")
            .rpartition("/")[2]
        )
        step = record.get("step")
        if not name or not isinstance(step, int):
            continue
        state = "kept" if name in complete else "incomplete" if name in steps else "removed"
        found[name] = Checkpoint(name, step, state, record)
    for name, step in steps.items():
        if name not in found:
            found[name] = Checkpoint(name, step, "kept" if name in complete else "incomplete", {})
    return sorted(found.values(), key=lambda one: (one.step, one.name))


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
