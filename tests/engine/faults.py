"""Trouble on order: what happens at the n-th call to AWS."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from botocore.exceptions import ClientError


class Kind(enum.Enum):
    """Why AWS refuses a call."""

    THROTTLED = "throttled"
    NO_CAPACITY = "no capacity"
    QUOTA = "quota"
    DENIED = "denied"
    EXPIRED = "expired"


# The same refusal has another code in each service.
_CODES: dict[Kind, dict[str, str]] = {
    Kind.THROTTLED: {
        "ec2": "RequestLimitExceeded",
        "s3": "SlowDown",
        "iam": "Throttling",
        "": "ThrottlingException",
    },
    Kind.NO_CAPACITY: {"": "InsufficientInstanceCapacity"},
    Kind.QUOTA: {"ec2": "VcpuLimitExceeded", "eks": "ResourceLimitExceededException", "": "LimitExceeded"},
    Kind.DENIED: {
        "ec2": "UnauthorizedOperation",
        "iam": "AccessDenied",
        "s3": "AccessDenied",
        "": "AccessDeniedException",
    },
    Kind.EXPIRED: {"ec2": "RequestExpired", "s3": "ExpiredToken", "": "ExpiredTokenException"},
}
# EC2 names each quota after what it limits.
_QUOTAS = {
    "CreateVpc": "VpcLimitExceeded",
    "AllocateAddress": "AddressLimitExceeded",
    "CreateNatGateway": "NatGatewayLimitExceeded",
    "CreateSecurityGroup": "SecurityGroupLimitExceeded",
}
_MESSAGES = {
    Kind.THROTTLED: "Request limit exceeded.",
    Kind.NO_CAPACITY: "We currently do not have sufficient g6.12xlarge capacity in the zone that you requested.",
    Kind.QUOTA: "You have requested more than your current limit allows.",
    Kind.DENIED: "User: arn:aws:iam::111122223333:user/dev is not authorized to perform this operation",
    Kind.EXPIRED: "The security token included in the request is expired",
}


def error(kind: Kind, service: str, operation: str) -> ClientError:
    codes = _CODES[kind]
    code = codes.get(service, codes[""])
    if kind is Kind.QUOTA:
        code = _QUOTAS.get(operation, code)
    return ClientError(
        {
            "Error": {"Code": code, "Message": _MESSAGES[kind]},
            "ResponseMetadata": {"HTTPStatusCode": 400, "RequestId": "00000000-0000-0000-0000-000000000000"},
        },
        operation,
    )


acting_for = threading.local()
"""`acting_for.urn`: the resource whose request this thread serves."""


@dataclass(frozen=True, order=True)
class Call:
    """One call of a run: the `occurrence`-th one (from 0) of this operation for this resource."""

    urn: str
    service: str
    operation: str
    occurrence: int = 0

    def __str__(self) -> str:
        return f"{self.service}:{self.operation}[{self.occurrence}] for {self.urn.split('::')[-1]}"


Act = Callable[[Call], None]


@dataclass
class Faults:
    """Keeps the calls of a run in their order, and does at one of them what was ordered.

    A call is named by resource, operation and occurrence: resources that do not depend on each other come in any order,
    so a number alone would mean another call in each run.
    """

    calls: list[Call] = field(default_factory=list)
    fired: Call | None = None
    refused: list[Call] = field(default_factory=list)
    """The calls of `refuse_each` that came."""
    released: threading.Event = field(default_factory=threading.Event)
    """Set when the engine cancels the plugin, and at the end of each test: calls that hang then fail."""
    _matches: Callable[[Call], bool] | None = None
    _act: Act | None = None
    _from_then_on: bool = False
    _each: dict[Call, Kind] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self) -> None:
        self._matches, self._act, self.fired = None, None, None
        self._each = {}
        self.calls, self.refused = [], []
        self.released = threading.Event()

    def fail(self, matches: Call | Callable[[Call], bool], kind: Kind, *, from_then_on: bool = False) -> None:
        """The first call that matches is refused, and with `from_then_on` all calls after it."""

        def refuse(call: Call) -> None:
            raise error(kind, call.service, call.operation)

        self.order(matches, refuse)
        self._from_then_on = from_then_on

    def refuse_each(self, kinds: Mapping[Call, Kind]) -> None:
        """Each of these calls is refused when it comes, for its own reason."""
        self._each, self.refused = dict(kinds), []

    def hang(self, matches: Call | Callable[[Call], bool]) -> None:
        """The first call that matches gets no answer until the engine cancels the plugin, or the test ends."""
        released = self.released

        def hang(call: Call) -> None:
            released.wait()
            raise error(Kind.THROTTLED, call.service, call.operation)

        self.order(matches, hang)

    def order(self, matches: Call | Callable[[Call], bool], act: Act) -> None:
        self._matches = matches.__eq__ if isinstance(matches, Call) else matches
        self._act, self.fired, self._from_then_on = act, None, False

    def __call__(self, model: Any, **_: Any) -> None:
        """Registered with botocore as `before-call`."""
        urn, service, operation = getattr(acting_for, "urn", ""), model.service_model.service_name, model.name
        with self._lock:
            same = sum(
                (one.urn, one.service, one.operation) == (urn, service, operation) for one in self.calls
            )
            call = Call(urn, service, operation, same)
            self.calls.append(call)
            hit = self.fired is None and self._matches is not None and self._matches(call) is True
            if hit:
                self.fired = call
            hit = hit or (self._from_then_on and self.fired is not None)
            kind = self._each.get(call)
            if kind is not None:
                self.refused.append(call)
        if kind is not None:
            raise error(kind, service, operation)
        if hit:
            assert self._act is not None
            self._act(call)


def on(service: str, operation: str) -> Callable[[Call], bool]:
    """Any call of this operation."""
    return lambda call: (call.service, call.operation) == (service, operation)
