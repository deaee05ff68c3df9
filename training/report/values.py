"""Typed access to JSON that came from a file: a value of another type counts as absent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast


def number(source: Mapping[str, Any], *path: str) -> float | None:
    """A finite number under a path of keys."""
    return as_number(_at(source, path))


def as_number(value: Any) -> float | None:
    """A finite number as float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond every float
        return None


def string(source: Mapping[str, Any], *path: str) -> str | None:
    """A text that is not empty."""
    value = _at(source, path)
    return value if isinstance(value, str) and value else None


def shown(source: Mapping[str, Any], *path: str) -> str | None:
    """A scalar as text."""
    value = _at(source, path)
    return str(value) if isinstance(value, (str, int, float)) and value != "" else None


def mapping(source: Mapping[str, Any], *path: str) -> dict[str, Any]:
    value = _at(source, path)
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def mappings(source: Mapping[str, Any], *path: str) -> list[dict[str, Any]]:
    """The objects of a list."""
    value = _at(source, path)
    items = cast("Sequence[Any]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]


def strings(source: Mapping[str, Any], *path: str) -> list[str]:
    value = _at(source, path)
    items = cast("Sequence[Any]", value) if isinstance(value, list) else []
    return [item for item in items if isinstance(item, str)]


def _at(source: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = source
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = cast("Mapping[str, Any]", value).get(key)
    return value
