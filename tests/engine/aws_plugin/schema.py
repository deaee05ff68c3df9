"""What the real AWS resource types look like, read from the classes of the installed pulumi_aws.

The engine's property names, which of them are required, and which outputs AWS always fills are all in the annotations
that Pulumi generates from the real provider's schema, so nothing here is kept by hand.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi._types as pulumi_types
import pulumi_aws

UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
"""What the engine sends, during a preview, in place of a value that only exists after the update."""


class UnknownTypeError(LookupError):
    """A type token that pulumi_aws does not have."""


@dataclass(frozen=True)
class Properties:
    """The properties of an object: name -> type, and which must be given."""

    types: Mapping[str, Any]
    required: frozenset[str]


@dataclass(frozen=True)
class ResourceSchema:
    token: str
    inputs: Properties
    outputs: tuple[str, ...]
    always_filled: frozenset[str]
    """The outputs that the SDK does not declare optional."""


@functools.cache
def _modules() -> Mapping[str, tuple[str, str]]:
    source = inspect.getsource(pulumi_aws)
    listed = re.search(r'resource_modules="""(.*?)"""', source, re.S)
    assert listed is not None
    return {
        token: (module["fqn"], name)
        for module in json.loads(listed[1])
        for token, name in module["classes"].items()
    }


@functools.cache
def resource(token: str) -> ResourceSchema:
    if token not in _modules():
        raise UnknownTypeError(f"pulumi_aws has no resource type {token}")
    package, name = _modules()[token]
    resource_class = getattr(importlib.import_module(package), name)
    module = importlib.import_module(resource_class.__module__)
    outputs = {}
    for attribute in vars(resource_class).values():
        if isinstance(attribute, property) and attribute.fget is not None:
            annotation = typing.get_type_hints(attribute.fget, vars(module)).get("return")
            outputs[attribute.fget._pulumi_name] = annotation
    return ResourceSchema(
        token,
        _properties(_arguments(module, name)),
        tuple(outputs),
        frozenset(key for key, annotation in outputs.items() if not _is_optional(annotation)),
    )


def _arguments(module: types.ModuleType, name: str) -> type:
    """The class of the inputs, which is called InitArgs where a nested property has the usual name already."""
    for candidate in (f"{name}InitArgs", f"{name}Args"):
        found = vars(module).get(candidate)
        if found is not None and found.__module__ == module.__name__:
            return found
    raise UnknownTypeError(f"no class of inputs for {name} in {module.__name__}")


@functools.cache
def provider() -> Properties:
    """The settings of the provider itself."""
    return _properties(pulumi_aws.provider.ProviderArgs)


@functools.cache
def empty_outputs(token: str) -> Mapping[str, Any]:
    """Empty values for the outputs that are always there: what the real provider says where AWS says nothing."""
    package, name = _modules()[token]
    declared = pulumi_types.resource_types(getattr(importlib.import_module(package), name))
    return {key: _empty(declared[key]) for key in resource(token).always_filled}


def _empty(kind: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin is not None:
        return {} if issubclass(origin, Mapping) else []
    return {str: "", bool: False, int: 0, float: 0}.get(kind, {})


def _is_optional(annotation: Any) -> bool:
    inner = typing.get_args(annotation)[0] if typing.get_origin(annotation) is pulumi.Output else annotation
    return type(None) in typing.get_args(inner)


@functools.cache
def _properties(arguments: type) -> Properties:
    names = pulumi_types.input_type_py_to_pulumi_names(arguments)
    parameters = inspect.signature(arguments.__init__).parameters
    return Properties(
        dict(pulumi_types.input_type_types(arguments)),
        frozenset(names[key] for key in names if parameters[key].default is inspect.Parameter.empty),
    )


def problems(properties: Properties, given: Mapping[str, Any], path: str = "") -> list[tuple[str, str]]:
    """(property path, reason) for each property that the real type does not have, lacks, or that is of a wrong kind."""
    found = [
        (f"{path}{name}", f"unknown property; the real type has {', '.join(sorted(properties.types))}")
        for name in given
        if name not in properties.types
    ]
    found += [
        (f"{path}{name}", "missing required property")
        for name in sorted(properties.required)
        if given.get(name) is None
    ]
    for name, value in given.items():
        if name in properties.types:
            found += _value_problems(properties.types[name], value, f"{path}{name}")
    return found


def _value_problems(kind: Any, value: Any, path: str) -> list[tuple[str, str]]:
    kind = _plain(kind)
    if value is None or value == UNKNOWN:
        return []
    origin = typing.get_origin(kind)
    if isinstance(kind, type) and pulumi_types.is_input_type(kind):
        if not isinstance(value, Mapping):
            return [(path, f"expected an object, found {type(value).__name__}")]
        return problems(_properties(kind), value, f"{path}.")
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return [(path, f"expected a map, found {type(value).__name__}")]
        return []
    if origin is not None and issubclass(origin, Sequence):
        if not isinstance(value, list):
            return [(path, f"expected a list, found {type(value).__name__}")]
        inner = typing.get_args(kind)[0]
        return [one for n, item in enumerate(value) for one in _value_problems(inner, item, f"{path}[{n}]")]
    if kind in (str, int, float, bool) and isinstance(value, (list, Mapping)):
        return [(path, f"expected {kind.__name__}, found {type(value).__name__}")]
    return []


def _plain(kind: Any) -> Any:
    """Without the Awaitable, Output and None alternatives of an input."""
    if isinstance(kind, type) or typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    for one in typing.get_args(kind):
        origin = typing.get_origin(one)
        if (
            one is type(None)
            or origin is pulumi.Output
            or (origin is not None and origin.__name__ == "Awaitable")
        ):
            continue
        if isinstance(one, type) and issubclass(one, dict) and one is not dict:
            continue  # the TypedDict alternative of an Args class
        return _plain(one)
    return kind
