"""What every resource type of the test's aws plugin shares."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import boto3
from botocore.exceptions import ClientError

Values = dict[str, Any]

POLL_SECONDS = 0.01
POLL_LIMIT = 200


@dataclass
class Cloud:
    """One configured AWS provider: whose account, which region, which default tags."""

    session: boto3.Session
    endpoint: str
    region: str
    account: str = ""
    default_tags: Mapping[str, str] = field(default_factory=dict)
    clients: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, service: str) -> Any:
        """The boto3 client of a service: `cloud.ec2`, `cloud.eks`."""
        if service.startswith("_"):
            raise AttributeError(service)
        if service not in self.clients:
            self.clients[service] = self.session.client(
                service.replace("_", "-"), endpoint_url=self.endpoint, region_name=self.region
            )
        return self.clients[service]

    def arn(self, service: str, resource: str, *, region: bool = True) -> str:
        return f"arn:aws:{service}:{self.region if region else ''}:{self.account}:{resource}"


class FailedError(RuntimeError):
    """AWS accepted the call, and the resource then ended in a failed state."""


class Resource:
    """One resource type: the calls that the real provider makes for it.

    `create` makes the resource and returns its id. `finish` makes the further calls of a creation and waits; whatever
    fails there leaves the resource in the state as partly created, and the next update runs `finish` again, so it must
    do no harm when repeated. `read` returns the outputs, or None when the resource is gone.
    """

    token: ClassVar[str]
    replace_on: ClassVar[tuple[str, ...]] = ()
    """Inputs (dotted paths) whose change makes a new resource."""
    name_property: ClassVar[str | None] = None
    """The input that gets a generated name when the program gives none."""
    name_limit: ClassVar[int] = 255
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Inputs that the real provider fills in at check."""
    computed: ClassVar[tuple[str, ...]] = ()
    """Outputs that an update changes, so that a preview does not know them."""
    gone: ClassVar[tuple[str, ...]] = ()
    """Error codes that mean that the resource does not exist (any more)."""

    def replaced(self, old: Values, new: Values) -> list[str]:
        """The inputs whose change makes a new resource."""
        return [path for path in self.replace_on if at(old, path) != at(new, path)]

    def create(self, cloud: Cloud, inputs: Values) -> str:
        raise NotImplementedError

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        return

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values | None:
        raise NotImplementedError

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        """Changes what differs. Tags of taggable types are done by `retag`."""

    def retag(self, cloud: Cloud, id: str, state: Values, removed: list[str], added: dict[str, str]) -> None:
        raise NotImplementedError(f"{self.token} cannot change its tags")

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        raise NotImplementedError


REGISTRY: dict[str, Resource] = {}


def register(resource: type[Resource]) -> type[Resource]:
    REGISTRY[resource.token] = resource()
    return resource


def is_gone(error: ClientError, codes: Iterable[str]) -> bool:
    return error.response.get("Error", {}).get("Code") in set(codes)


def wait(describe: Callable[[], Any], done: Callable[[Any], bool], what: str) -> Any:
    """Polls as the real provider does, only faster."""
    for _ in range(POLL_LIMIT):
        found = describe()
        if done(found):
            return found
        time.sleep(POLL_SECONDS)
    raise FailedError(f"timeout while waiting for {what}")


def at(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return copy.deepcopy(found)


def upper(values: Any) -> Any:
    """A property object in the spelling of the EC2 API: deviceIndex -> DeviceIndex."""
    if isinstance(values, Mapping):
        return {key[0].upper() + key[1:]: upper(value) for key, value in values.items() if value is not None}
    if isinstance(values, list):
        return [upper(one) for one in values]
    return values


def pick(values: Mapping[str, Any], *names: str) -> Values:
    """The named entries that are there, in their own spelling."""
    return {name: values[name] for name in names if values.get(name) is not None}


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
