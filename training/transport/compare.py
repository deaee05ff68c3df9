"""Two runs of the same job, one over EFA and one over TCP."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class ComparisonReport(BaseModel):
    model_config = ConfigDict(frozen=True)


def compare(run_a: Path, run_b: Path) -> ComparisonReport:
    """Compare two run folders: ``run_a`` over EFA, ``run_b`` over TCP."""
    raise NotImplementedError
