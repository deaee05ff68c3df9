"""Records what the program would register, without cloud, engine or credentials, in about a second.

``record`` runs the program against Pulumi's mock monitor and keeps each request: type, inputs, options,
dependencies. The price of a settings file, the report for a pull request without credentials and the tests
read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pulumi
from google.protobuf import json_format
from pulumi.runtime import mocks
from pulumi.runtime.proto import resource_pb2
from pulumi.runtime.settings import Settings, configure
from pulumi.runtime.stack import run_in_stack

from infra.fixed import READ_OUTPUTS

if TYPE_CHECKING:
    from infra.settings import StackSettings

ACCOUNT = "123456789012"
RESOURCE_REFERENCE = {"4dabf18193072939515e22adb298388d": "5cf8f73096256a8f31e491e813e4eb8e"}
EKS_COMPONENT = "eks:index:Cluster"
CRD = "kubernetes:apiextensions.k8s.io/v1:CustomResourceDefinition"


@dataclass(frozen=True)
class Resource:
    """One registered resource. Its inputs have the provider's own property names; references are URNs."""

    type: str
    name: str
    urn: str
    custom: bool
    remote: bool
    parent: str
    provider: str
    dependencies: frozenset[str]
    property_dependencies: Mapping[str, frozenset[str]]
    deleted_with: str
    protect: bool
    delete_before_replace: bool
    ignore_changes: tuple[str, ...]
    timeouts: Mapping[str, str]
    raw_inputs: Any

    @cached_property
    def inputs(self) -> Mapping[str, Any]:
        """The inputs, translated when somebody looks: the CRDs alone have 70,000 values."""
        return self.raw_inputs if isinstance(self.raw_inputs, dict) else _message(self.raw_inputs)


@dataclass(frozen=True)
class Graph:
    """All resources in the order of their registration, and the stack's outputs."""

    resources: tuple[Resource, ...]
    outputs: Mapping[str, Any]
    by_urn: Mapping[str, Resource] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_urn", {resource.urn: resource for resource in self.resources})

    def of_type(self, type_: str) -> list[Resource]:
        return [resource for resource in self.resources if resource.type == type_]

    def named(self, type_: str, name: str) -> Resource:
        """The one resource of this type and name.

        Raises:
            LookupError: there is none, with the names that exist.
        """
        for resource in self.of_type(type_):
            if resource.name == name:
                return resource
        known = ", ".join(resource.name for resource in self.of_type(type_)) or "none"
        raise LookupError(f"no {type_} named {name}; there are: {known}")

    def depends_on(self, resource: Resource, other: Resource) -> bool:
        """Whether ``resource`` needs ``other``, directly or through others, as the engine sees it."""
        return other.urn in self._needs(resource.urn)

    def _needs(self, urn: str) -> set[str]:
        needed: set[str] = set()
        waiting = [urn]
        while waiting:
            resource = self.by_urn.get(waiting.pop())
            if resource is None:
                continue
            direct = set(resource.dependencies) | {resource.parent, _provider_urn(resource.provider)}
            direct |= {child for urn_ in direct for child in self._children_of_component(urn_, resource)}
            new = {dependency for dependency in direct if dependency} - needed
            needed |= new
            waiting += new
        return needed

    def _children_of_component(self, urn: str, dependent: Resource) -> Iterator[str]:
        """A dependency on a remote component is one on everything in it."""
        component = self.by_urn.get(urn)
        if component is None or not component.remote or urn == dependent.parent:
            return
        for resource in self.resources:
            if resource.parent == urn:
                yield resource.urn


def _provider_urn(reference: str) -> str:
    return reference.rpartition("::")[0]


def record(settings: StackSettings, *, preview: bool = False) -> Graph:
    """The graph of a stack.

    Raises:
        Exception: whatever the program raises.
    """
    from infra.program import deploy

    return record_program(lambda: deploy(settings, None), settings.stack, preview=preview)


def record_program(
    program: Callable[[], None],
    stack: str,
    *,
    config: Mapping[str, str] | None = None,
    preview: bool = False,
) -> Graph:
    """The graph of any program. It runs in a thread of its own: Pulumi's state belongs to the context of a
    run, and this may be called while another program is running."""
    monitor = _Recorder(preview)
    failure: list[BaseException] = []

    def run() -> None:
        from infra.settings import PROJECT

        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            configure(
                Settings(
                    project=PROJECT,
                    stack=stack,
                    monitor=monitor,
                    engine=mocks.MockEngine(None),
                    dry_run=preview,
                    organization="organization",
                    root_directory=str(Path.cwd()),
                )
            )
            pulumi.runtime.set_all_config(dict(config or {}))
            loop.run_until_complete(run_in_stack(program))
        except BaseException as error:
            failure.append(error)
        finally:
            with contextlib.suppress(RuntimeError):
                loop.close()

    thread = threading.Thread(target=run, name="record")
    with _no_collections():
        thread.start()
        thread.join()
    if failure:
        raise failure[0]
    return Graph(tuple(monitor.recorded), monitor.outputs)


@contextlib.contextmanager
def _no_collections() -> Generator[None]:
    """Importing the providers' packages makes hundreds of thousands of objects that stay: walking through them again
    and again was a quarter of the time (2.1 to 1.6 s, 2026-12)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Answers(mocks.Mocks):
    """What AWS would compute: ids, ARNs and endpoints that look like the real ones."""

    def call(self, args: mocks.MockCallArgs) -> Any:
        if args.token == READ_OUTPUTS:
            return {"outputs": {}}  # a stack that has never been deployed
        raise RuntimeError(
            f"the program calls {args.token} while it runs; a preview would need credentials for it"
        )

    def new_resource(self, args: mocks.MockResourceArgs) -> tuple[str | None, dict[str, Any]]:
        identifier = f"{args.name}-id"
        state = {**args.inputs, **_computed(args)}
        return identifier, state


def _computed(args: mocks.MockResourceArgs) -> dict[str, Any]:
    name = args.inputs.get("name") or args.name
    service = args.typ.partition(":")[2].partition("/")[0]
    arn = f"arn:aws:{service}:us-west-2:{ACCOUNT}:{args.name}"
    match args.typ:
        case "aws:s3/bucket:Bucket":
            bucket = f"{args.name}-0123456"
            return {"arn": f"arn:aws:s3:::{bucket}", "bucket": bucket}
        case "aws:ec2/launchTemplate:LaunchTemplate":
            return {"latestVersion": 1, "arn": arn}
        case "aws:eks/nodeGroup:NodeGroup":
            group = f"{args.name}-0123456"
            cluster = args.inputs.get("clusterName", "cluster")
            return {
                "nodeGroupName": group,
                "arn": f"arn:aws:eks:us-west-2:{ACCOUNT}:nodegroup/{cluster}/{group}/uuid",
            }
        case "aws:fsx/lustreFileSystem:LustreFileSystem":
            return {"dnsName": "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com", "mountName": "abcdefgh"}
        case "aws:iam/role:Role":
            return {"arn": f"arn:aws:iam::{ACCOUNT}:role/{args.name}", "name": name}
        case "aws:eks/cluster:Cluster":
            return {
                "name": name,
                "arn": f"arn:aws:eks:us-west-2:{ACCOUNT}:cluster/{name}",
                "endpoint": f"https://0123456789ABCDEF.gr7.us-west-2.eks.amazonaws.com/{name}",
                "certificateAuthority": {"data": "Q0E="},
                "vpcConfig": {"clusterSecurityGroupId": "sg-cluster"},
            }
        case _:
            return {"arn": arn} if args.typ.startswith("aws:") else {}


class _Recorder(mocks.MockMonitor):
    """Keeps every registration, and constructs the cluster inside the EKS component as its plugin would."""

    def __init__(self, preview: bool) -> None:
        super().__init__(_Answers())
        self.recorded: list[Resource] = []
        self.outputs: dict[str, Any] = {}
        self._preview = preview
        self._lock = threading.Lock()

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802 name of the RPC
        if request.type == CRD:
            # Nothing reads what a CRD becomes, and the mock monitor copies its whole schema three times.
            urn = self.make_urn(request.parent, request.type, request.name)
            response = resource_pb2.RegisterResourceResponse(urn=urn, id=f"{request.name}-id")
        else:
            response = super().RegisterResource(request)
        if request.type == "pulumi:pulumi:Stack":
            return response
        with self._lock:
            self.recorded.append(_resource(request, response.urn))
        if request.type == EKS_COMPONENT:
            self._construct_cluster(request, response)
        return response

    def RegisterResourceOutputs(self, request: Any) -> Any:  # noqa: N802 name of the RPC
        if "::pulumi:pulumi:Stack::" in request.urn:
            self.outputs = _message(request.outputs)
        return super().RegisterResourceOutputs(request)

    def _construct_cluster(self, request: Any, response: Any) -> None:
        inputs = _message(request.object)
        name = f"{request.name}-eksCluster"
        urn = self.make_urn(response.urn, "aws:eks/cluster:Cluster", name)
        arguments = mocks.MockResourceArgs(
            "aws:eks/cluster:Cluster",
            name,
            {
                "name": inputs["name"],
                "version": inputs.get("version"),
                "vpcConfig": {
                    key: inputs[key]
                    for key in ("endpointPrivateAccess", "endpointPublicAccess", "publicAccessCidrs")
                    if key in inputs
                },
            },
        )
        state = {**arguments.inputs, **_computed(arguments)}
        self.resources[urn] = mocks.MockMonitor.ResourceRegistration(urn, inputs["name"], state)
        reference = {**RESOURCE_REFERENCE, "urn": urn, "id": inputs["name"]}
        response.object.update({"eksCluster": reference})
        with self._lock:
            self.recorded.append(
                Resource(
                    type="aws:eks/cluster:Cluster",
                    name=name,
                    urn=urn,
                    custom=True,
                    remote=False,
                    parent=response.urn,
                    provider=dict(request.providers).get("aws", ""),
                    dependencies=frozenset(request.dependencies),
                    property_dependencies={},
                    deleted_with="",
                    protect=False,
                    delete_before_replace=False,
                    ignore_changes=(),
                    timeouts={},
                    raw_inputs=arguments.inputs,
                )
            )


def _resource(request: Any, urn: str) -> Resource:
    timeouts = request.customTimeouts
    return Resource(
        type=request.type,
        name=request.name,
        urn=urn,
        custom=request.custom,
        remote=request.remote,
        parent=request.parent,
        provider=request.provider or dict(request.providers).get("aws", ""),
        dependencies=frozenset(request.dependencies),
        property_dependencies={
            key: frozenset(value.urns) for key, value in request.propertyDependencies.items()
        },
        deleted_with=request.deletedWith,
        protect=request.protect,
        delete_before_replace=request.deleteBeforeReplace,
        ignore_changes=tuple(request.ignoreChanges),
        timeouts={key: value for key in ("create", "update", "delete") if (value := getattr(timeouts, key))},
        raw_inputs=request.object,
    )


def _message(message: Any) -> Any:
    return _plain(json_format.MessageToDict(message))


def _plain(value: Any) -> Any:
    """Protobuf's floats as integers where they are whole, and no resource references but their URN."""
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value)
        if RESOURCE_REFERENCE.keys() <= value.keys():
            return value["urn"] if "urn" in value else json.dumps(value, sort_keys=True)
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
