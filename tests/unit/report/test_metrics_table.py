"""metrics.jsonl read across restarts, and the columns of a chart."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from training.report.metrics_table import make_buckets, read_metrics
from training.report.scale import fit


def lines(*records: dict[str, Any]) -> list[str]:
    return [json.dumps(record) for record in records]


def run_of(attempt: int, steps: range, loss: float) -> list[dict[str, Any]]:
    return [{"step": step, "loss": loss + step / 100, "attempt": attempt} for step in steps]


def test_later_attempt_replaces_the_steps_it_repeats_and_those_after() -> None:
    table = read_metrics(lines(*run_of(0, range(1, 9), 5.0), *run_of(1, range(5, 7), 1.0)))
    assert table.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert table.column("loss").tolist() == [5.01, 5.02, 5.03, 5.04, 1.05, 1.06]
    assert [(one.attempt, one.step, one.repeated) for one in table.restarts] == [("1", 5, 4)]
    assert table.discarded == ((5, 5.05), (6, 5.06), (7, 5.07), (8, 5.08))


def test_evaluation_of_a_resumed_attempt_does_not_discard_the_step_it_stands_on() -> None:
    resumed = {"step": 4, "eval_loss": 2.0, "attempt": 1}
    table = read_metrics(lines(*run_of(0, range(1, 6), 5.0), resumed, *run_of(1, range(5, 7), 1.0)))
    assert table.column("loss").tolist()[3] == 5.04
    assert table.column("eval_loss").tolist()[3] == 2.0
    assert table.restarts[0].step == 5


def test_restart_without_any_repeated_step() -> None:
    table = read_metrics(lines(*run_of(0, range(1, 4), 5.0), *run_of(1, range(4, 6), 1.0)))
    assert [(one.step, one.repeated) for one in table.restarts] == [(4, 0)]


def test_nested_values_become_columns_and_other_types_are_ignored() -> None:
    table = read_metrics(
        lines({"step": 1, "seconds": {"data": 0.5, "note": "x"}, "ok": True, "name": "y", "loss": 1})
    )
    assert set(table.columns) == {"seconds.data", "loss"}
    assert table.seconds().tolist() == [0.5]


def test_lines_that_are_no_steps_are_counted() -> None:
    table = read_metrics(
        ['{"step": 1, "loss": 2}', "nonsense", "[1]", '{"loss": 1}', '{"step": true}', "", '{"step": "7"}']
    )
    assert len(table) == 1
    assert table.problems == (
        (
            "metrics.jsonl: 5 lines could not be read as a JSON object with a step and are left out "
            "(line 2, 3, 4, 5, 7)"
        ),
    )


def test_nothing_at_all() -> None:
    table = read_metrics([])
    assert len(table) == 0
    assert table.first("loss") is None
    assert not table.has("loss")


values = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=300)


@given(values, st.integers(1, 50))
def test_columns_hide_no_extreme(sample: list[float], max_columns: int) -> None:
    """Every finite value lies within its column's band, and the extremes of all are extremes of a band."""
    column = np.array(sample)
    buckets = make_buckets(np.arange(len(column), dtype=np.float64), max_columns)
    low, mean, high = buckets.envelope(column)
    assert len(low) <= max_columns
    assert len(low) == len(buckets.first) == len(buckets.last) == len(buckets.centre)
    assert buckets.last[-1] == len(column) - 1
    finite = column[np.isfinite(column)]
    if not len(finite):
        assert np.isnan(low).all()
        return
    assert np.nanmin(low) == finite.min()
    assert np.nanmax(high) == finite.max()
    there = np.isfinite(low)
    slack = 1e-9 * np.abs(finite).max()
    assert (low[there] <= mean[there] + slack).all()
    assert (mean[there] <= high[there] + slack).all()


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=50), st.booleans(), st.booleans())
def test_scale_holds_every_value_and_its_ticks_lie_on_it(
    sample: list[float], from_zero: bool, allow_log: bool
) -> None:
    scale = fit(np.array(sample), from_zero=from_zero, allow_log=allow_log)
    for value in sample:
        assert 0 <= scale.place(value) <= 1
    ticks = scale.ticks()
    assert len(ticks) <= 16
    assert all(-1e-6 <= tick.place <= 1 + 1e-6 for tick in ticks)
    labels = [tick.label for tick in ticks]
    assert len(set(labels)) == len(labels) or max(sample) / min(sample) < 1.01
