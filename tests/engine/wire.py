"""The plugin side of Pulumi's provider protocol, as far as the plugins of these tests share it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent import futures
from typing import Any

import grpc
from google.protobuf import any_pb2, empty_pb2, struct_pb2
from pulumi.runtime.proto import plugin_pb2, provider_pb2, provider_pb2_grpc, status_pb2

Values = dict[str, Any]

_SIGNATURE = "4dabf18193072939515e22adb298388d"
_SECRET = "1b47061264138c4ac30d75fd1eb44270"
_OUTPUT = "d0e6a833031e9bbcd3f4e8bde6ca49a4"
UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
_LIMIT = 400 * 1024 * 1024

OPTIONS = [("grpc.max_receive_message_length", _LIMIT), ("grpc.max_send_message_length", _LIMIT)]


def decode(struct: struct_pb2.Struct) -> Values:
    """A property map of the engine as plain Python: whole numbers are int, secrets and outputs are their values."""
    return {key: _decode(value) for key, value in struct.fields.items()}


def _decode(value: struct_pb2.Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        fields = decode(value.struct_value)
        if fields.get(_SIGNATURE) == _SECRET:
            return fields.get("value")
        if fields.get(_SIGNATURE) == _OUTPUT:
            return fields.get("value", UNKNOWN)
        return fields
    if kind == "list_value":
        return [_decode(one) for one in value.list_value.values]
    if kind == "number_value":
        return int(value.number_value) if value.number_value.is_integer() else value.number_value
    return getattr(value, kind) if kind not in (None, "null_value") else None


def encode(values: Mapping[str, Any]) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    for key, value in values.items():
        _encode(value, struct.fields[key])
    return struct


def _encode(value: Any, target: struct_pb2.Value) -> None:
    if value is None:
        target.null_value = struct_pb2.NULL_VALUE
    elif isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, (int, float)):
        target.number_value = value
    elif isinstance(value, str):
        target.string_value = value
    elif isinstance(value, Mapping):
        target.struct_value.SetInParent()
        for key, inner in value.items():
            _encode(inner, target.struct_value.fields[key])
    else:
        target.list_value.SetInParent()
        for inner in value:
            _encode(inner, target.list_value.values.add())


def has_unknowns(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(has_unknowns(one) for one in value.values())
    if isinstance(value, list):
        return any(has_unknowns(one) for one in value)
    return value == UNKNOWN


def type_of(urn: str) -> str:
    return urn.split("::")[2].split("$")[-1]


def name_of(urn: str) -> str:
    return urn.split("::")[-1]


def fail(
    context: grpc.ServicerContext, message: str, code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
) -> None:
    """Ends the request with an error that the engine shows beside the resource."""
    context.abort(code, message)


def fail_initialization(
    context: grpc.ServicerContext,
    message: str,
    id: str,
    properties: Mapping[str, Any],
    inputs: Mapping[str, Any],
) -> None:
    """The resource exists, and something went wrong after: the engine keeps it and updates it next time."""
    detail = any_pb2.Any()
    detail.Pack(
        provider_pb2.ErrorResourceInitFailed(
            id=id, properties=encode(properties), reasons=[message], inputs=encode(inputs)
        ),
        type_url_prefix="type.googleapis.com",
    )
    code = grpc.StatusCode.UNKNOWN
    status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, message)


class Plugin(provider_pb2_grpc.ResourceProviderServicer):
    """What a plugin answers the engine about itself, where it has nothing of its own to say."""

    version: str

    def Handshake(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return provider_pb2.ProviderHandshakeResponse()

    def Attach(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return empty_pb2.Empty()

    def GetPluginInfo(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return plugin_pb2.PluginInfo(version=self.version)

    def CheckConfig(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return provider_pb2.CheckResponse(inputs=request.news)

    def Cancel(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return empty_pb2.Empty()


class Served:
    """A plugin that listens on loopback until it is stopped."""

    def __init__(self, servicer: provider_pb2_grpc.ResourceProviderServicer) -> None:
        self.servicer = servicer
        self._server: grpc.Server | None = None
        self.port = 0
        self.start()

    def start(self) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(32), options=OPTIONS)
        provider_pb2_grpc.add_ResourceProviderServicer_to_server(self.servicer, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def kill(self) -> None:
        """Every connection breaks at once, as when the process of a plugin dies."""
        assert self._server is not None
        self._server.stop(grace=None)

    def wait(self) -> None:
        assert self._server is not None
        self._server.wait_for_termination()
