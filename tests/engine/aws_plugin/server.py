"""The aws plugin of the tests: Pulumi's provider protocol on one side, boto3 on the other."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import botocore.session
import grpc
from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError
from google.protobuf import empty_pb2
from pulumi.runtime.proto import provider_pb2 as messages

from tests.engine.emulator import REGION
from tests.engine.faults import acting_for
from tests.engine.wire import (
    UNKNOWN,
    Plugin,
    decode,
    encode,
    fail,
    fail_initialization,
    has_unknowns,
    name_of,
    type_of,
)

from . import ec2, eks, iam, management, schema, storage
from .base import REGISTRY, Cloud, FailedError, Resource, Values, is_gone

VERSION = "7.51.1"
_MODULES = (ec2, eks, iam, management, storage)

# The names of the services in the error messages of the real provider (AWS SDK for Go).
_SERVICE_NAMES = {
    "ec2": "EC2",
    "eks": "EKS",
    "iam": "IAM",
    "s3": "S3",
    "kms": "KMS",
    "fsx": "FSx",
    "sts": "STS",
    "logs": "CloudWatch Logs",
    "scheduler": "Scheduler",
    "budgets": "Budgets",
}


class Aws(Plugin):
    """Serves all aws resources of a stack. `connect` makes the cloud of a configured provider."""

    version = VERSION

    def __init__(self, connect: Callable[[str], Cloud], *, has_credentials: Callable[[], bool]) -> None:
        self._connect = connect
        self._has_credentials = has_credentials
        self._cloud: Cloud | None = None
        self.on_cancel: Callable[[], None] = lambda: None
        self.deleted: list[str] = []
        """URNs in the order in which they were deleted."""

    # --- the provider itself -----------------------------------------------------------------------------------------

    def CheckConfig(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        given = decode(request.news)
        known = schema.provider().types
        failures = [
            messages.CheckFailure(
                property=name, reason=f"unknown provider setting; there are {', '.join(sorted(known))}"
            )
            for name in given
            if name not in known and name != "version"
        ]
        return messages.CheckResponse(inputs=request.news, failures=failures)

    def DiffConfig(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        changed = decode(request.old_inputs) != decode(request.news)
        return messages.DiffResponse(changes=_changes(changed))

    def Configure(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        acting_for.urn = ""
        settings = _settings(request)
        answer = messages.ConfigureResponse(supportsPreview=True)
        if has_unknowns(settings):
            return answer
        if not self._has_credentials() and not settings.get("accessKey"):
            fail(
                context,
                "No valid credential sources found. Please see https://registry.terraform.io/providers/hashicorp/aws "
                "for more information about providing credentials. NEW: You can use Pulumi ESC to set up dynamic "
                "credentials with AWS OIDC to ensure the correct and valid credentials are used.",
            )
        cloud = self._connect(settings.get("region") or REGION)
        cloud.default_tags = (settings.get("defaultTags") or {}).get("tags") or {}
        if not settings.get("skipRequestingAccountId"):
            try:
                cloud.account = cloud.sts.get_caller_identity()["Account"]
            except ClientError as error:
                fail(context, f"unable to validate AWS credentials. Details: {_describe(error)}")
            allowed = settings.get("allowedAccountIds")
            if allowed and cloud.account not in allowed:
                fail(context, f"AWS account ID not allowed: {cloud.account}")
        self._cloud = cloud
        return answer

    def Cancel(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.on_cancel()
        return empty_pb2.Empty()

    def Invoke(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        cloud = self._configured(context)
        known: dict[str, Values] = {
            "aws:index/getPartition:getPartition": {
                "id": "aws",
                "partition": "aws",
                "dnsSuffix": "amazonaws.com",
                "reverseDnsPrefix": "com.amazonaws",
                "region": cloud.region,
            },
            "aws:index/getRegion:getRegion": {
                "id": cloud.region,
                "name": cloud.region,
                "region": cloud.region,
            },
            "aws:index/getCallerIdentity:getCallerIdentity": {
                "id": cloud.account,
                "accountId": cloud.account,
                "arn": f"arn:aws:iam::{cloud.account}:root",
                "userId": cloud.account,
            },
        }
        if request.tok not in known:
            fail(context, f"the stack calls {request.tok}, which the plugin of these tests does not have")
        return messages.InvokeResponse(**{"return": encode(known[request.tok])})

    # --- resources ---------------------------------------------------------------------------------------------------

    def Check(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        resource = self._resource(request.urn, context)
        given = decode(request.news)
        described = schema.resource(resource.token)
        failures = [
            messages.CheckFailure(property=path, reason=reason)
            for path, reason in schema.problems(described.inputs, given)
        ]
        inputs = {key: value for key, value in given.items() if value is not None}
        defaulted = []
        for key, value in resource.defaults.items():
            if key not in inputs:
                inputs[key] = value
                defaulted.append(key)
        name = resource.name_property
        if name and name not in inputs and f"{name}Prefix" not in inputs:
            old = decode(request.olds)
            generated, reason = _generated_name(resource, name_of(request.urn), bytes(request.randomSeed))
            inputs[name] = old.get(name) if name in (old.get("__defaults") or []) else generated
            defaulted.append(name)
            if reason:
                failures.append(messages.CheckFailure(property=name, reason=reason))
        inputs["__defaults"] = sorted(defaulted)
        return messages.CheckResponse(inputs=encode(inputs), failures=failures)

    def Diff(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        resource = self._resource(request.urn, context)
        old, new, state = decode(request.old_inputs), decode(request.news), decode(request.olds)
        ignored = set(request.ignoreChanges)
        changed = sorted(
            key for key in {*old, *new} - {"__defaults"} - ignored if old.get(key) != new.get(key)
        )
        if self._takes_tags(resource) and "tags" not in changed:
            wanted = self._all_tags(new, context)
            if wanted != (state.get("tagsAll") or {}):
                changed.append("tagsAll")
        replaced = [path for path in resource.replaced(old, new) if path.split(".")[0] in changed]
        name = resource.name_property
        fixed_name = (
            bool(name) and name not in (new.get("__defaults") or []) and old.get(name) == new.get(name)
        )
        detailed = {
            path: messages.PropertyDiff(
                kind=messages.PropertyDiff.UPDATE_REPLACE
                if path in replaced
                else messages.PropertyDiff.UPDATE
            )
            for path in {*changed, *replaced}
        }
        return messages.DiffResponse(
            changes=_changes(bool(changed)),
            diffs=changed,
            replaces=[path.split(".")[0] for path in replaced],
            deleteBeforeReplace=bool(replaced) and fixed_name,
            detailedDiff=detailed,
            hasDetailedDiff=True,
        )

    def Create(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        acting_for.urn = request.urn
        resource = self._resource(request.urn, context)
        inputs = decode(request.properties)
        if request.preview:
            return messages.CreateResponse(properties=encode(self._planned(resource, inputs, {})))
        cloud = self._configured(context)
        inputs["tagsAll"] = self._all_tags(inputs, context)
        try:
            id = resource.create(cloud, inputs)
        except (ClientError, BotoCoreError, FailedError) as error:
            fail(context, f"creating {request.urn}: {_describe(error)}")
            raise
        state = self._finish(resource, cloud, request.urn, id, inputs, context)
        return messages.CreateResponse(id=id, properties=encode(state))

    def Read(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        acting_for.urn = request.urn
        resource = self._resource(request.urn, context)
        inputs = decode(request.inputs) or decode(request.properties)
        try:
            found = resource.read(self._configured(context), request.id, inputs)
        except ClientError as error:
            if is_gone(error, resource.gone):
                return messages.ReadResponse()
            fail(context, f"reading {request.urn}: {_describe(error)}")
            raise
        if found is None:
            return messages.ReadResponse()
        state = {**decode(request.properties), **found}
        refreshed = {
            key: _as_given(value, found[key]) if key in found else value for key, value in inputs.items()
        }
        return messages.ReadResponse(id=request.id, properties=encode(state), inputs=encode(refreshed))

    def Update(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        acting_for.urn = request.urn
        resource = self._resource(request.urn, context)
        new, state = decode(request.news), decode(request.olds)
        old = decode(request.old_inputs)
        if request.preview:
            return messages.UpdateResponse(properties=encode(self._planned(resource, new, state)))
        cloud = self._configured(context)
        new["tagsAll"] = self._all_tags(new, context)
        try:
            resource.update(cloud, request.id, old, new)
            if self._takes_tags(resource):
                self._retag(resource, cloud, request.id, {**new, **state}, new["tagsAll"])
        except (ClientError, BotoCoreError, FailedError) as error:
            fail(context, f"updating {request.urn}: {_describe(error)}")
        state = self._finish(resource, cloud, request.urn, request.id, new, context)
        return messages.UpdateResponse(properties=encode(state))

    def Delete(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        acting_for.urn = request.urn
        resource = self._resource(request.urn, context)
        state = {**decode(request.old_inputs), **decode(request.properties)}
        try:
            resource.delete(self._configured(context), request.id, state)
        except ClientError as error:
            if not is_gone(error, resource.gone):
                fail(context, f"deleting {request.urn}: {_describe(error)}")
        except (BotoCoreError, FailedError) as error:
            fail(context, f"deleting {request.urn}: {_describe(error)}")
        self.deleted.append(request.urn)
        return empty_pb2.Empty()

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _configured(self, context: grpc.ServicerContext) -> Cloud:
        if self._cloud is None:
            fail(context, "the provider is not configured")
        assert self._cloud is not None
        return self._cloud

    def _resource(self, urn: str, context: grpc.ServicerContext) -> Resource:
        token = type_of(urn)
        if token not in REGISTRY:
            fail(
                context,
                f"the stack has a {token}, which the plugin of these tests does not know: add it to {__package__}",
            )
        return REGISTRY[token]

    def _takes_tags(self, resource: Resource) -> bool:
        return "tagsAll" in schema.resource(resource.token).outputs

    def _all_tags(self, inputs: Values, context: grpc.ServicerContext) -> dict[str, str]:
        return {**self._configured(context).default_tags, **(inputs.get("tags") or {})}

    def _retag(
        self, resource: Resource, cloud: Cloud, id: str, state: Values, wanted: dict[str, str]
    ) -> None:
        present = state.get("tagsAll") or {}
        removed = sorted(key for key in present if key not in wanted)
        added = {key: value for key, value in wanted.items() if present.get(key) != value}
        if removed or added:
            if "arn" not in state and "arn" in schema.resource(resource.token).outputs:
                state = {**state, **(resource.read(cloud, id, state) or {})}
            resource.retag(cloud, id, state, removed, added)

    def _planned(self, resource: Resource, inputs: Values, state: Values) -> Values:
        """The outputs as far as a preview knows them."""
        planned = dict(state)
        for name in schema.resource(resource.token).outputs:
            if name in resource.computed or name not in planned:
                planned[name] = UNKNOWN
        for name, value in inputs.items():
            if name == "__defaults":
                continue
            both = isinstance(value, dict) and isinstance(state.get(name), dict)
            planned[name] = {**state[name], **value} if both and name not in ("tags", "labels") else value
        return planned

    def _finish(
        self,
        resource: Resource,
        cloud: Cloud,
        urn: str,
        id: str,
        inputs: Values,
        context: grpc.ServicerContext,
    ) -> Values:
        """The rest of a creation or an update, and the outputs."""
        given = {key: value for key, value in inputs.items() if key not in ("__defaults", "tagsAll")}
        tags = {"tagsAll": inputs["tagsAll"]} if self._takes_tags(resource) else {}
        try:
            resource.finish(cloud, id, inputs)
            found = resource.read(cloud, id, inputs)
        except (ClientError, BotoCoreError, FailedError) as error:
            message = f"creating {urn}: {_describe(error)}"
            fail_initialization(context, message, id, {**given, **tags}, inputs_of(inputs))
            raise
        if found is None:
            fail(context, f"creating {urn}: {id} was gone when it was read back")
        described = schema.resource(resource.token)
        region = {"region": cloud.region} if "region" in described.outputs else {}
        state = {**schema.empty_outputs(resource.token), **region, **given, **tags, **(found or {})}
        unknown = sorted(set(state) - set(described.outputs) - set(described.inputs.types))
        assert not unknown, f"{resource.token} has no output {unknown}"
        return {**state, "id": id}


def _as_given(given: Any, found: Any) -> Any:
    """What AWS has now, without what it adds to an object that the program gave only a part of."""
    if isinstance(given, dict) and isinstance(found, dict):
        return {key: _as_given(value, found.get(key)) for key, value in given.items()}
    return found


def inputs_of(inputs: Values) -> Values:
    return {key: value for key, value in inputs.items() if key != "tagsAll"}


def _generated_name(resource: Resource, name: str, seed: bytes) -> tuple[str, str]:
    suffix = hashlib.sha256(seed + name.encode()).hexdigest()[:7]
    generated = f"{'alias/' if resource.token.startswith('aws:kms/alias') else ''}{name}-{suffix}"
    if resource.token.startswith("aws:s3/bucket:"):
        generated = generated.lower()
    too_long = len(generated) > resource.name_limit
    return generated, f"'{generated}' is longer than maximum length {resource.name_limit}" if too_long else ""


def _settings(request: Any) -> Values:
    """Nested settings of a provider arrive as JSON in strings."""
    settings = {}
    for key, value in decode(request.args).items():
        if (isinstance(value, str) and value[:1] in "{[") or value in ("true", "false"):
            value = json.loads(value)
        settings[key] = value
    return settings


def _changes(any_change: bool) -> Any:
    return messages.DiffResponse.DIFF_SOME if any_change else messages.DiffResponse.DIFF_NONE


def _describe(error: Exception) -> str:
    """In the words of the real provider, so that what is learned from messages here holds there."""
    if isinstance(error, ParamValidationError):
        return f"AWS would refuse the parameters: {error}"
    if not isinstance(error, ClientError):
        return str(error)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
    request = error.response.get("ResponseMetadata", {}).get("RequestId", "")
    code, message = error.response["Error"]["Code"], error.response["Error"].get("Message", "")
    service = _SERVICE_NAMES.get(_service_of(error.operation_name), "AWS")
    return (
        f"operation error {service}: {error.operation_name}, https response error StatusCode: {status}, "
        f"RequestID: {request}, api error {code}: {message}"
    )


@functools.cache
def _service_of(operation: str) -> str:
    """The service that has an operation of this name, among those of the stack."""
    loader = botocore.session.get_session()
    return next(
        (name for name in _SERVICE_NAMES if operation in loader.get_service_model(name).operation_names), ""
    )
