"""The plot of docs/performance.md: `uv run --with matplotlib python -m bench.gpu.plot`."""

from __future__ import annotations

import json

import matplotlib.pyplot as plt

from bench.gpu.collect import RESULTS, peers_table

RUN = -1  # the last run with the peers


def main() -> None:
    rows = json.loads((RESULTS / "gpu-h200.json").read_text())["runs"][RUN]["rows"]
    table = peers_table(rows)
    figure, axes = plt.subplots(figsize=(9, 4.2))
    for place, (name, values) in enumerate(table):
        middle = sorted(values)[len(values) // 2]
        axes.barh(place, middle, color="#c2410c" if name == "ours" else "#94a3b8")
        axes.plot(values, [place] * len(values), "k|", markersize=9)
        axes.text(middle + 1100, place, f"{middle:,.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(table)), [name for name, _ in table], fontsize=8)
    axes.set_xlabel(
        "tokens/s, Qwen2.5-1.5B shape, 8 x 2048 tokens, one H200, 2026-12-01\n(marks: medians of 9 steps)"
    )
    axes.set_xlim(0, 60_000)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(RESULTS / "gpu-peers.svg", bbox_inches="tight")


if __name__ == "__main__":
    main()
