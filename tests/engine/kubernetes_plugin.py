"""An in-memory kubernetes plugin: keeps objects per cluster, and fails as the real one when the API is not reachable.

Whether the objects are right is the business of the tests on a real API server; here it matters in which order they
come and go, and that a destroy does not need the API.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import empty_pb2
from pulumi.runtime.proto import provider_pb2 as messages

from tests.engine.wire import UNKNOWN, Plugin, Values, decode, encode, fail, has_unknowns, name_of, type_of

VERSION = "4.34.2"


class Kubernetes(Plugin):
    """`reachable` says why the API of the configured cluster cannot be reached, or None when it can."""

    version = VERSION

    def __init__(self, reachable: Callable[[str], str | None]) -> None:
        self._reachable = reachable
        self._cluster = ""
        self.objects: dict[str, Values] = {}
        self.created: list[str] = []
        self.deleted: list[str] = []

    def DiffConfig(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        # Like the real provider: another identifier is another cluster, and so is a kubeconfig that is not known yet,
        # unless the identifier is known to be the same.
        old, new = decode(request.old_inputs), decode(request.news)
        changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        replaced = [key for key in changed if key == "clusterIdentifier" and old.get(key) and new.get(key)]
        replaced += [key for key in ("kubeconfig", "context", "cluster") if has_unknowns(new.get(key))]
        if new.get("clusterIdentifier") and new.get("clusterIdentifier") == old.get("clusterIdentifier"):
            replaced = []
        return messages.DiffResponse(
            changes=messages.DiffResponse.DIFF_SOME if changed else messages.DiffResponse.DIFF_NONE,
            diffs=changed,
            replaces=replaced,
        )

    def Configure(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        settings = decode(request.args)
        self._cluster = str(settings.get("clusterIdentifier") or settings.get("kubeconfig") or "")
        return messages.ConfigureResponse(supportsPreview=True)

    def Check(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        inputs = decode(request.news)
        if "Release" not in type_of(request.urn):
            metadata = inputs.setdefault("metadata", {})
            if isinstance(metadata, dict) and not metadata.get("name"):
                old = decode(request.olds).get("metadata") or {}
                suffix = hashlib.sha256(bytes(request.randomSeed)).hexdigest()[:8]
                metadata["name"] = old.get("name") or f"{name_of(request.urn)}-{suffix}"
        return messages.CheckResponse(inputs=encode(inputs))

    def Diff(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        old, new = decode(request.old_inputs), decode(request.news)
        changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        before, after = old.get("metadata") or {}, new.get("metadata") or {}
        moved = any(before.get(key) != after.get(key) for key in ("name", "namespace"))
        return messages.DiffResponse(
            changes=messages.DiffResponse.DIFF_SOME if changed else messages.DiffResponse.DIFF_NONE,
            diffs=changed,
            replaces=["metadata"] if moved else [],
            deleteBeforeReplace=moved,
        )

    def Create(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        inputs = decode(request.properties)
        if request.preview:
            return messages.CreateResponse(properties=encode({"status": UNKNOWN, **inputs}))
        self._require_cluster(context, "create", request.urn)
        metadata = inputs.get("metadata") or {}
        where = f"{metadata.get('namespace')}/" if metadata.get("namespace") else ""
        id = f"{where}{metadata.get('name') or inputs.get('name') or name_of(request.urn)}"
        self.objects[request.urn] = inputs
        self.created.append(request.urn)
        return messages.CreateResponse(id=id, properties=encode(self._state(inputs)))

    def Read(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._require_cluster(context, "read", request.urn)
        if request.urn not in self.objects:
            return messages.ReadResponse()
        state = self._state(self.objects[request.urn])
        return messages.ReadResponse(id=request.id, properties=encode(state), inputs=request.inputs)

    def Update(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        inputs = decode(request.news)
        if not request.preview:
            self._require_cluster(context, "update", request.urn)
            self.objects[request.urn] = inputs
        return messages.UpdateResponse(properties=encode(self._state(inputs)))

    def Delete(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._require_cluster(context, "delete", request.urn)
        self.objects.pop(request.urn, None)
        self.deleted.append(request.urn)
        return empty_pb2.Empty()

    def _state(self, inputs: Values) -> Values:
        return {"status": {}, **inputs}

    def _require_cluster(self, context: grpc.ServicerContext, verb: str, urn: str) -> None:
        reason = self._reachable(self._cluster)
        if reason is not None:
            fail(
                context,
                f"failed to {verb} {name_of(urn)}: configured Kubernetes cluster is unreachable: unable to load "
                f"schema information from the API server: {reason}",
            )
