"""What the command line shows, as a terminal, a pipe and a program get it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from rich.console import Console

from tests.unit.report import folders
from training.console import Output, ProgressLine, cost_table, summary_table, to_json
from training.errors import ExitStatus, UsageError


def shown(renderable: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pipe() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=False, width=80, highlight=False, soft_wrap=True), stream


def test_plain_progress_prints_first_evaluated_last_and_one_every_ten_seconds() -> None:
    console, stream = pipe()
    clock = Clock()
    with ProgressLine(console, clock=clock) as progress:
        for step in range(1, 41):
            clock.now += 1.0
            progress.update(
                step=step,
                steps=40,
                loss=5 - step / 10,
                eval_loss=4.2 if step == 15 else None,
                tokens_per_second=12_345.0,
                seconds_left=40.0 - step,
            )
    lines = stream.getvalue().splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, 11, 15, 25, 35, 40]
    assert lines[0] == "step  1/40  loss 4.900  12.3k tokens/s  0:39 left"
    assert lines[-1] == "step 40/40  loss 1.000  held-out 4.200  12.3k tokens/s  0:00 left"


def test_plain_progress_prints_where_it_stopped() -> None:
    console, stream = pipe()
    with ProgressLine(console, clock=Clock()) as progress:
        progress.update(step=1, steps=40, loss=5.0)
        progress.update(step=2, steps=40, loss=4.0)
    assert stream.getvalue().splitlines() == ["step  1/40  loss 5.000", "step  2/40  loss 4.000"]


def test_terminal_draws_one_line_in_place() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    with ProgressLine(console, plain=False) as progress:
        progress.update(
            step=3, steps=40, loss=5.0, tokens_per_second=900.0, seconds_left=3905.0, memory_gib=18.2
        )
        progress.note("checkpoint of step 3 written [step-00000003.0]")
    drawn = stream.getvalue()
    assert "checkpoint of step 3 written [step-00000003.0]" in drawn
    assert "step  3/40" in drawn
    assert "loss 5.000  900 tokens/s  18.2 GiB  1:05:05 left" in drawn


def test_events_of_the_loop_become_lines() -> None:
    console, stream = pipe()
    progress_event = {
        "event": "progress",
        "step": 1,
        "steps": 9,
        "loss": 2.0,
        "eval_loss": 3.0,
        "seconds_left": 8,
    }
    events: list[dict[str, Any]] = [
        {"event": "attempt", "attempt": "a", "resumed_from": None, "world_size": 2, "nodes": 1, "steps": 9},
        {"event": "evaluation", "step": 0, "eval_loss": 3.0},
        progress_event,
        {"event": "checkpoint", "name": "step-00000004.a", "step": 4, "bytes": 2**21, "seconds": 1.5},
        {"event": "failure", "rank": 1, "host": "worker-1", "error": "RuntimeError: [boom]"},
        {
            "event": "attempt",
            "attempt": "b",
            "resumed_from": "step-00000004.a",
            "world_size": 16,
            "nodes": 2,
            "steps": 9,
        },
        {"event": "hang", "rank": 1, "message": "rank 1 on worker-1 made no progress for 600 s"},
        {"event": "excluded", "host": "worker-1", "node_id": "ab12", "reasons": ["CUDA error", "CUDA error"]},
        {"event": "samples", "samples": []},
        {"event": "novelty", "what": "x"},
    ]
    with ProgressLine(console, clock=Clock()) as progress:
        for event in events:
            progress.event(event)
    assert stream.getvalue().splitlines() == [
        "training starts: 2 ranks, 9 steps",
        "step 0: held-out loss 3.000, perplexity 20.1",
        "step 1/9  loss 2.000  held-out 3.000  0:08 left",
        "checkpoint step-00000004.a: 2.00 MiB in 1.50 s",
        "rank 1 on worker-1 failed: RuntimeError: [boom]",
        "training resumes from checkpoint step-00000004.a: 16 ranks on 2 nodes, 9 steps",
        "hang: rank 1 on worker-1 made no progress for 600 s",
        "worker-1 is left out from now on (Ray node ab12): CUDA error",
        "novelty: what x",
    ]


def test_narrow_terminal_drops_figures_rather_than_cutting_them() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=40, color_system=None)
    with ProgressLine(console, plain=False) as progress:
        progress.update(step=3, steps=40, loss=5.0, eval_loss=6.0, tokens_per_second=900.0, seconds_left=65.0)
    assert "step  3/40 loss 5.000  1:05 left" in stream.getvalue()
    assert "…" not in stream.getvalue()


def test_no_color_means_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert ProgressLine(Console(file=io.StringIO(), force_terminal=True)).plain


def test_summary_table_has_what_matters() -> None:
    table = shown(summary_table(folders.summary(first_eval_loss=2.413), report="runs/x/report.html"))
    for line in (
        "qwen2.5-1.5b-sft succeeded",
        "loss           2.381 → 1.184  (−50 %)",
        "held-out loss  2.413 → 1.265  (−48 %)",
        "perplexity     3.54",
        "speed          27.4k tokens/s, 3,422 per rank, 34.2 % of the peak FLOP/s",
        "ranks          8 on 2 nodes, NVIDIA L4",
        "price          $5.69",
        "transport      efa: All 8 ranks use Libfabric with the provider efa.",
        "report         runs/x/report.html",
    ):
        assert line in table


def test_summary_table_of_a_failed_run_names_the_rank() -> None:
    error = {"rank": 5, "host": "worker-1", "message": "CUDA out of memory"}
    table = shown(summary_table({"name": "x", "status": "failed", "error": error, "mfu": None}))
    assert "x failed" in table
    assert "error  rank 5 (worker-1): CUDA out of memory" in table
    assert "speed" not in table


def test_summary_table_names_what_was_exported_and_left_out() -> None:
    summary = {
        "name": "x",
        "status": "succeeded",
        "checkpoint": "step-00000009.a",
        "exported": {"checkpoint": "step-00000006.a", "eval_loss": 1.5},
        "excluded_nodes": [{"node_id": "ab12", "host": "worker-1", "reasons": ["CUDA error", "CUDA error"]}],
    }
    table = shown(summary_table(summary))
    assert "exported    step-00000006.a, the best one: held-out loss 1.500" in table
    assert "left out    worker-1: CUDA error" in table
    last = {**summary, "exported": {"checkpoint": "step-00000009.a", "eval_loss": 1.5}}
    assert "exported" not in shown(summary_table(last))


def test_cost_table_sums_and_names_what_bills_by_use() -> None:
    lines = [
        {"name": "NAT gateway (nat)", "quantity": 1, "unit_usd": 0.045, "hourly_usd": 0.045},
        {"name": "g6.12xlarge (gpu)", "quantity": 2, "unit_usd": 4.6016, "hourly_usd": 9.2032},
    ]
    cost = {"hourly_usd": 9.2482, "lines": lines, "region": "us-west-2", "table_date": "2026-07-20"}
    rows = shown(cost_table({**cost, "by_use": ["S3 requests", "traffic"]})).splitlines()
    assert rows[0].startswith("Prices of us-west-2, 2026-07-20")
    assert rows[2].split() == ["g6.12xlarge", "(gpu)", "2", "4.6016", "9.2032"]
    assert any(row.split() == ["per", "hour", "9.25"] for row in rows)
    assert any(row.split() == ["per", "month", "of", "730", "hours", "6,751.19"] for row in rows)
    assert "Besides, by use: S3 requests; traffic" in rows[-1]


def test_markup_of_the_run_is_text() -> None:
    assert "[red]x[/red]" in shown(
        summary_table({"name": "[red]x[/red]", "status": "failed", "error": "[/oops]"})
    )


def test_json_of_what_json_cannot_say() -> None:
    class Model(BaseModel):
        path: Path

    value = {
        "nan": float("nan"),
        "infinite": [float("inf")],
        "status": ExitStatus.USAGE,
        "model": Model(path=Path("a")),
    }
    assert json.loads(to_json(value)) == {
        "nan": None,
        "infinite": [None],
        "status": 2,
        "model": {"path": "a"},
    }


PROGRAM = """
import subprocess
from training.console import Output
from training.errors import UsageError
with Output(json_mode=True) as output:
    print("a library's chatter")
    subprocess.run(["echo", "a child's chatter"])
    with output.progress() as progress:
        progress.update(step=1, steps=1, loss=2.0)
    {action}
print("after")
"""


def run_program(action: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(action=action)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)


def test_json_mode_keeps_stdout_to_one_object() -> None:
    done = run_program('output.result({"status": "succeeded", "loss": float("nan")})')
    assert json.loads(done.stdout.removesuffix("after\n")) == {"status": "succeeded", "loss": None}
    assert done.stdout.count("\n") == 2
    for chatter in ("a library's chatter", "a child's chatter", "step 1/1  loss 2.000"):
        assert chatter in done.stderr


def test_json_mode_gives_an_error_as_the_object() -> None:
    done = run_program('output.error(UsageError("job.yaml:3: unknown key lr"))')
    assert json.loads(done.stdout.removesuffix("after\n")) == {
        "status": "usage",
        "exit_status": 2,
        "reason": "job.yaml:3: unknown key lr",
    }
    assert "error: job.yaml:3: unknown key lr" in done.stderr


def test_error_after_a_result_adds_no_second_object() -> None:
    done = run_program('output.result({"status": "failed"}); output.error(UsageError("no"))')
    assert json.loads(done.stdout.removesuffix("after\n")) == {"status": "failed"}


def test_error_goes_to_stderr_unbroken(capsys: pytest.CaptureFixture[str]) -> None:
    message = "job.yaml:3: " + "a long line " * 30 + "[not markup]"
    with Output() as output:
        assert output.error(UsageError(message)) is ExitStatus.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.replace("\n", "") == f"error: {message}"


def test_result_for_people_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with Output() as output:
        output.note("[preparing]")
        output.result({"hourly_usd": 9.55}, "9.55 USD an hour")
    captured = capsys.readouterr()
    assert captured.out == "9.55 USD an hour\n"
    assert captured.err == "[preparing]\n"


def test_result_without_a_view_is_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    with Output() as output:
        output.result({"hourly_usd": 9.55})
    assert json.loads(capsys.readouterr().out) == {"hourly_usd": 9.55}


def test_preference_pairs_are_told_in_order() -> None:
    console, stream = pipe()
    with ProgressLine(console, clock=Clock()) as progress:
        progress.event(
            {"event": "evaluation", "step": 10, "eval_loss": 0.51234, "eval_reward_accuracy": 0.9375}
        )
        progress.event({"event": "progress", "step": 10, "steps": 20, "loss": 0.4, "reward_accuracy": 0.75})
    assert stream.getvalue().splitlines() == [
        "step 10: held-out loss 0.512, 93.8 % of its pairs in order",
        "step 10/20  loss 0.400  75 % in order",
    ]
    measures = {"reward_accuracy": 0.75, "eval_reward_accuracy": 0.9375}
    table = shown(summary_table(folders.summary(measures=measures)))
    assert "pairs in order  75.0 % training, 93.8 % held out" in table
    assert "pairs in order" not in shown(summary_table(folders.summary()))
