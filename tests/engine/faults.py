"""Trouble on order: what happens at the n-th call to AWS."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
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
    Kind.NO_CAPACITY: "We currently do not have sufficient g6.12xlarge capacity in the Availability Zone you requested.",
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


@dataclass
class Faults:
    """Counts the calls and does at number `at` (from 1) what was ordered; `calls` keeps service and operation of each."""

    at: int | None = None
    act: Callable[[str, str], None] | None = None
    matching: tuple[str, str] | None = None
    """With a service and an operation, only those calls are counted."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    fired: tuple[str, str] | None = None
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> None:
        self.at, self.act, self.matching, self.fired, self._count = None, None, None, None, 0
        self.calls.clear()
        self.released = threading.Event()

    def fail(self, at: int, kind: Kind, *, matching: tuple[str, str] | None = None) -> None:
        def refuse(service: str, operation: str) -> None:
            raise error(kind, service, operation)

        self.order(at, refuse, matching=matching)

    def hang(self, at: int, *, matching: tuple[str, str] | None = None) -> None:
        """The call gets no answer until the engine cancels the plugin, or the test ends."""
        released = self.released

        def hang(service: str, operation: str) -> None:
            released.wait()
            raise error(Kind.THROTTLED, service, operation)

        self.order(at, hang, matching=matching)

    def order(
        self, at: int, act: Callable[[str, str], None], *, matching: tuple[str, str] | None = None
    ) -> None:
        self.at, self.act, self.matching, self.fired, self._count = at, act, matching, None, 0

    def __call__(self, model: Any, **_: Any) -> None:
        """Registered with botocore as `before-call`."""
        call = (model.service_model.service_name, model.name)
        with self._lock:
            self.calls.append(call)
            if self.matching is not None and call != self.matching:
                return
            self._count += 1
            hit = self._count == self.at and self.act is not None
            if hit:
                self.fired = call
        if hit:
            assert self.act is not None
            self.act(*call)
