"""What the lines of `bench.gpu.scaling` come to: judgements, a table, a plot."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SCALING_GOAL = 0.95
PREDICTION_GOAL = 0.15
STALL_GOAL = 0.03
# Largest relative difference of a step's loss. In float32 only the order of sums differs. In bf16, on falling losses, a
# sum in another order may round to another bf16 number (2^-8); float8 rounds more coarsely. 2026-12-01: set before any
# measurement on several GPUs.
TOLERANCE = {"float32": 1e-4, "bf16": 5e-3, "float8": 1e-2}


def write_report(folders: Sequence[Path], out: Path) -> str:
    """Judges the lines of one or more calls; writes gpu-scaling.json, .md and .svg. Returns the table.

    Raises FileNotFoundError for a folder without results.jsonl.
    """
    rows = [
        json.loads(line) for folder in folders for line in (folder / "results.jsonl").read_text().splitlines()
    ]
    environment = next((row for row in rows if row["kind"] == "environment"), {})
    document = {
        "date": max((row["date"] for row in rows if row["kind"] == "call"),
                    default=datetime.datetime.now(datetime.UTC).date().isoformat()),
        "device": environment.get("device"), "versions": environment.get("versions"),
        "command": "python -m bench.gpu.scaling", "conclusions": conclusions(rows),
        "rows": [row for row in rows if row["kind"] != "environment"],
    }  # fmt: skip
    text = table(document)
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu-scaling.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "gpu-scaling.md").write_text(text)
    (out / "gpu-scaling.svg").write_text(plot(document))
    return text


def conclusions(rows: list[Row]) -> list[Row]:
    return [
        *_weak_scaling(rows),
        *_predictions(rows),
        *_resumes(rows),
        *_stalls(rows),
        *_equalities(rows),
        *_verdicts(rows),
    ]


def _weak_scaling(rows: list[Row]) -> Iterable[Row]:
    """Tokens/s per GPU against those of one GPU."""
    alone = _last(rows, "scaling", link="direct", world_size=1)
    if alone is None:
        return
    for row in _unique(rows, "scaling", "link", "world_size", "scheme"):
        if row["world_size"] > 1 and row["link"] == "direct":
            ratio = row["tokens_per_second_per_gpu"] / alone["tokens_per_second_per_gpu"]
            yield _conclusion(row, "weak scaling", row["scheme"], ratio, SCALING_GOAL, ratio >= SCALING_GOAL)


def _predictions(rows: list[Row]) -> Iterable[Row]:
    """Predicted step time against the measured one, where the plan knows how fast the device computes."""
    for row in _unique(rows, "scaling", "link", "world_size", "scheme"):
        if not row.get("predicted_parts_ms", {}).get("compute"):
            continue
        error = row["predicted_step_ms"] / row["step_ms"] - 1
        yield _conclusion(
            row, "step time of the plan", row["scheme"], error, PREDICTION_GOAL, abs(error) <= PREDICTION_GOAL
        )


def _resumes(rows: list[Row]) -> Iterable[Row]:
    """Losses after a resume against those of the run that went on. The one that forgot its moments must differ."""
    saved = _last(rows, "save")
    if saved is None:
        return
    limit = _tolerance(rows)
    for row in _unique(rows, "resume", "world_size", "moments"):
        difference = largest_difference(saved["losses"], row["losses"])
        what = f"saved on {saved['world_size']}" + (
            "" if row["moments"] else ", moments forgotten (must differ)"
        )
        yield _conclusion(row, "resume", what, difference, limit, (difference <= limit) == row["moments"])


def _stalls(rows: list[Row]) -> Iterable[Row]:
    row = _last(rows, "save")
    if row is not None:
        share = row["share_of_50_steps"]
        yield _conclusion(row, "checkpoint's share of 50 steps", "", share, STALL_GOAL, share <= STALL_GOAL)


def _equalities(rows: list[Row]) -> Iterable[Row]:
    """Losses on two ranks against those on one; hybrid sharding against the plain variant of one rank."""
    for row in _unique(rows, "equality", "world_size", "variant"):
        name = row["variant"]
        alone = _last(rows, "equality", world_size=1, variant=name.partition(",")[0])
        if row["world_size"] == 1 or alone is None:
            continue
        limit = TOLERANCE["float8"] if name == "float8" else _tolerance(rows)
        difference = largest_difference(alone["losses"], row["losses"])
        yield _conclusion(row, "equality with one rank", name, difference, limit, difference <= limit)


def _verdicts(rows: list[Row]) -> Iterable[Row]:
    for row in _unique(rows, "verdict", "link", "world_size"):
        what = f"{row['verdict']}, {row['socket_channels']} socket channels"
        yield _conclusion(row, "transport verdict", what, None, None, row["right"])


def _conclusion(row: Row, name: str, what: str, value: float | None, goal: float | None, met: bool) -> Row:
    return {"name": name, "link": row["link"], "world_size": row["world_size"], "what": what, "value": value,
            "goal": goal, "met": met}  # fmt: skip


def largest_difference(expected: Sequence[float], found: Sequence[float]) -> float:
    """Largest relative difference of losses, step by step. Raises ValueError where the steps are not the same."""
    if len(expected) != len(found) or not expected:
        raise ValueError(
            f"{len(expected)} losses were expected, {len(found)} found: not the same steps were made"
        )
    return max(abs(b - a) / abs(a) for a, b in zip(expected, found, strict=True))


def _tolerance(rows: list[Row]) -> float:
    device = next((row["device"] for row in rows if row["kind"] == "environment"), "CPU")
    return TOLERANCE["float32" if device.startswith("CPU") else "bf16"]


def _unique(rows: list[Row], kind: str, *keys: str) -> list[Row]:
    """The last line of each combination of keys, in order of the keys."""
    found = {tuple(row[key] for key in keys): row for row in rows if row["kind"] == kind}
    return [found[key] for key in sorted(found)]


def _last(rows: list[Row], kind: str, **values: Any) -> Row | None:
    matching = [
        row for row in rows if row["kind"] == kind and all(row[key] == value for key, value in values.items())
    ]
    return matching[-1] if matching else None


# The table


def table(document: Row) -> str:
    rows: list[Row] = document["rows"]
    parts = [f"{document['date']}, {document['device']}, {document['versions']}\n"]
    parts += _markdown(
        ("link", "GPUs", "sharding", "tokens/s/GPU", "step ms (low to high)", "plan ms", "communication ms", "of it exposed"),
        [
            (row["link"], row["world_size"], row["scheme"], f"{row['tokens_per_second_per_gpu']:,.0f}",
             f"{row['step_ms']:,.1f} ({row['step_ms_low']:,.1f} to {row['step_ms_high']:,.1f})",
             _number(row.get("predicted_step_ms")), _number(row.get("communication_ms")), _number(row.get("exposed_ms")))
            for row in _unique(rows, "scaling", "link", "world_size", "scheme")
        ],
    )  # fmt: skip
    parts += _markdown(
        ("link", "GPUs", "over all ranks, GB/s", "in a half", "between the halves"),
        [
            (
                row["link"],
                row["world_size"],
                *(_number(row[key]) for key in ("everywhere", "in_node", "across")),
            )
            for row in _unique(rows, "link", "link", "world_size")
        ],
    )
    parts += _markdown(
        ("checkpoint", "GPUs", "seconds", ""),
        [("blocked", row["world_size"], _number(row["blocked_s"]),
          f"lost {row['lost_s']:.2f} s, written in {row['written_s']:.1f} s, {row['gib']:.2f} GiB")
         for row in _unique(rows, "save", "world_size")]
        + [("loaded", row["world_size"], _number(row["load_s"]), "")
           for row in _unique(rows, "resume", "world_size", "moments") if row["moments"]],
    )  # fmt: skip
    parts += _markdown(
        ("judgement", "link", "GPUs", "", "value", "goal", "met"),
        [(c["name"], c["link"], c["world_size"], c["what"], _share(c["value"]), _share(c["goal"]), ("**no**", "yes")[c["met"]])
         for c in document["conclusions"]],
    )  # fmt: skip
    undone = [row for row in rows if row["kind"] in ("not run", "failed")]
    parts += [
        f"- {row['kind']}: {row['world_size']} {row['link']} {row.get('what', '')}: {_ends(row['reason'])}"
        for row in undone
    ]
    return "\n".join(parts) + "\n"


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[object]]) -> list[str]:
    if not lines:
        return []
    cells = [heads, ["---"] * len(heads), *lines]
    return [*("| " + " | ".join(str(cell) for cell in line) + " |" for line in cells), ""]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value * 100:.3g} %"


def _ends(text: str) -> str:
    """First and last line: who failed, and of what."""
    lines = text.strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


# The plot

TONES = {"full": "#c2410c", "hybrid": "#0f766e"}
LEFT, TOP, WIDTH, HEIGHT = 60, 40, 420, 220


def plot(document: Row) -> str:
    """Tokens/s per GPU against the number of GPUs over the direct links, with the spread of the steps (SVG)."""
    rows = [
        row for row in _unique(document["rows"], "scaling", "scheme", "world_size") if row["link"] == "direct"
    ]
    alone = [row for row in rows if row["world_size"] == 1]
    sizes = sorted({row["world_size"] for row in rows})
    highest = max((_rates(row)[2] for row in rows), default=1.0) * 1.1

    def x(size: int) -> float:
        return LEFT + WIDTH * (sizes.index(size) + 0.5) / len(sizes)

    def y(rate: float) -> float:
        return TOP + HEIGHT * (1 - rate / highest)

    title = f"tokens/s per GPU, {document['device']}, {document['date']} (bars: fastest and slowest step)"
    parts = [f'<text x="{LEFT}" y="20" font-size="12">{escape(title)}</text>']
    for share in range(5):
        rate = highest * share / 4
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y(rate):.1f}" y2="{y(rate):.1f}" stroke="#e2e8f0"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:,.0f}</text>')
    parts += [
        f'<text x="{x(s):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{s} GPUs</text>' for s in sizes
    ]
    for place, (scheme, tone) in enumerate(TONES.items()):
        ours = alone + [row for row in rows if row["scheme"] == scheme and row["world_size"] > 1]
        line = " ".join(f"{x(row['world_size']):.1f},{y(_rates(row)[1]):.1f}" for row in ours)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{tone}" stroke-width="2"/>')
        for row in ours:
            low, _, high = _rates(row)
            at = f"{x(row['world_size']):.1f}"
            parts.append(f'<line x1="{at}" x2="{at}" y1="{y(low):.1f}" y2="{y(high):.1f}" stroke="{tone}"/>')
        parts.append(
            f'<text x="{LEFT + WIDTH + 8}" y="{TOP + 16 * place + 12}" fill="{tone}">{scheme}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 80} {TOP + HEIGHT + 30}" '
        f'font-family="sans-serif" font-size="11">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _rates(row: Row) -> tuple[float, float, float]:
    """Slowest, median and fastest, tokens/s per GPU."""
    tokens = row["tokens_per_second_per_gpu"] * row["step_ms"]
    return tokens / row["step_ms_high"], tokens / row["step_ms"], tokens / row["step_ms_low"]
