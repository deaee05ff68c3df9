"""The dashboard that a stack deploys against the gauges that the workers have."""

from __future__ import annotations

import re
from pathlib import Path

from training.tracking.prometheus import GAUGES

DASHBOARD = Path("infra/dashboards/training.json").read_text()


def test_every_query_asks_for_a_gauge_that_exists() -> None:
    asked = set(re.findall(r"ray_(finetune_\w+)", DASHBOARD))
    assert asked <= set(GAUGES)
    assert {"finetune_loss", "finetune_tokens_per_second", "finetune_grad_norm", "finetune_step"} <= asked
