"""Fused operations for CUDA. Each has a plain PyTorch path beside it, which every other device takes.

What each one gains on an H200 stands in docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("finetune", "FRAGMENT")


def operation(
    schema: str, *, plain: Callable[..., Any], cuda: Callable[..., Any], shapes: Callable[..., Any]
) -> Any:
    """Registers an operation that compiled graphs hold as one node.

    plain, cuda: its implementations; shapes: empty results, for tracing. At this level and not by
    torch.library.custom_op, whose wrappers cost the host 50 us a call: 40 ms of a float8 step (H200, 2026-12).
    """
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, plain, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"finetune::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.finetune, name).default
