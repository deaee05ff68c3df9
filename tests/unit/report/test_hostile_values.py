"""The report is written at the end of every job: no content of a run folder may make it fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.unit.report import folders
from training.report import render_report
from training.storage import open_storage

PARTS = (
    "summary.json",
    "transport.json",
    "samples.json",
    "prediction.json",
    "comparison.json",
    "attempts/9e42f6c8.json",
    "nccl/9e42f6c8/ranks.json",
    "failures/5d0c1b7a/rank-5.json",
    "checkpoints/step-00000400.9e42f6c8/COMPLETE",
)
STRANGE: list[Any] = [
    None,
    True,
    -1,
    10**400,
    1e308,
    -0.0,
    float("nan"),
    float("inf"),
    "",
    "x",
    [],
    [None],
    {},
    {"a": []},
]

# A page takes tens of milliseconds: shrinking a failure would take minutes, and one value is small already.
QUICK = settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value[:2]):
            yield from places(item, (*path, index))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = folders.restarted_run(tmp_path_factory.mktemp("run"))
    folders.write_lines(folder, "metrics.jsonl", folders.metric_lines(8))
    return folder


@cache
def content(run: Path, part: str) -> Any:
    return json.loads((run / part).read_text())


@QUICK
@given(st.data())
def test_any_value_anywhere_is_survived(run: Path, data: st.DataObject) -> None:
    part = data.draw(st.sampled_from(PARTS))
    original = content(run, part)
    path = data.draw(st.sampled_from(list(places(original))))
    new = data.draw(st.sampled_from(STRANGE))
    try:
        (run / part).write_text(json.dumps(replaced(original, path, new)))
        assert render_report(open_storage(run)).endswith("</html>")
    finally:
        (run / part).write_text(json.dumps(original))


@QUICK
@given(st.data())
def test_any_metric_is_survived(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("run")
    lines: list[Any] = list(folders.metric_lines(6, evaluate_every=2))
    for _ in range(data.draw(st.integers(1, 4))):
        index = data.draw(st.integers(0, 6))
        path = data.draw(st.sampled_from(list(places(folders.metric_lines(6)[index]))))
        lines[index] = replaced(folders.metric_lines(6)[index], path, data.draw(st.sampled_from(STRANGE)))
    folders.write_lines(folder, "metrics.jsonl", lines)
    assert render_report(open_storage(folder)).endswith("</html>")
