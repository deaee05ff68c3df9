"""The config block of Pulumi.yaml, as the settings describe it."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.alias_generators import to_camel

from infra.settings import PROJECT, StackSettings

HEADER = f"""\
name: {PROJECT}
description: A GPU cluster with EFA for fine-tuning with FSDP, from the VPC to the RayCluster
runtime:
  name: python
  options:
    toolchain: uv
    virtualenv: .venv
main: infra/

# The settings of a stack. Types, defaults and descriptions are those of infra/settings.py, which checks the values
# and their combinations; a test keeps the two alike. An empty text means: not set.
"""


def render() -> str:
    config = {
        to_camel(name): _declaration(field.annotation, field.default, field.description or "")
        for name, field in StackSettings.model_fields.items()
        if name != "stack"
    }
    return HEADER + yaml.safe_dump({"config": config}, sort_keys=False, width=120, allow_unicode=True)


def _declaration(annotation: Any, default: Any, description: str) -> dict[str, Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
    if get_origin(annotation) is tuple:
        return {
            "type": "array",
            "items": {"type": "string"},
            "description": description,
            "default": list(default),
        }
    if annotation is bool:
        return {"type": "boolean", "description": description, "default": default}
    if annotation is int or (get_origin(annotation) is Literal and isinstance(get_args(annotation)[0], int)):
        return {"type": "integer", "description": description, "default": default}
    # Pulumi has no type for fractions, and none for what may be missing.
    text = "" if default is None else f"{default:g}" if isinstance(default, float) else str(default)
    return {"type": "string", "description": description, "default": text}
