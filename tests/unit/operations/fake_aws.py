"""AWS for the tests: moto answers what it knows, `answer` what it does not.

Answers go in after botocore has validated the request against the service's model, and are validated against it
themselves, as by botocore's Stubber, but in any order and from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import boto3
import botocore.session
import pytest
from botocore.validate import validate_parameters
from moto import mock_aws

# The models of the services are megabytes of JSON: read once, not once a session.
_MODELS = botocore.session.Session().get_component("data_loader")

Answer = Mapping[str, Any] | Exception | Callable[[dict[str, Any]], Any]


class AwsError(Exception):
    """An error of the service, with its code."""

    def __init__(self, code: str, message: str = "said the service") -> None:
        super().__init__(code)
        self.code, self.message = code, message


@dataclass
class FakeAws:
    """Sessions whose clients know the answers given to `answer`, and which calls were made."""

    answers: dict[str, Answer] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def answer(self, operation: str, answer: Answer) -> None:
        """`operation`: as in DescribeInstances. A callable gets the parameters of the call."""
        self.answers[operation] = answer

    def called(self, operation: str) -> list[dict[str, Any]]:
        return [parameters for name, parameters in self.calls if name == operation]

    def session(self) -> Any:
        core = botocore.session.Session()
        core.register_component("data_loader", _MODELS)
        session = boto3.Session("test", "test", region_name="us-west-2", botocore_session=core)
        session.events.register("provide-client-params", self._record)
        session.events.register("before-call", self._before_call)
        return session

    def _record(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        self.calls.append((model.name, dict(params)))

    def _before_call(self, model: Any, params: dict[str, Any], context: dict[str, Any], **_: Any) -> Any:
        answer = self.answers.get(model.name)
        if answer is None:
            return None
        if callable(answer):
            try:
                answer = answer(self.called(model.name)[-1])
            except AwsError as error:
                answer = error
        if isinstance(answer, AwsError):
            body = {"Error": {"Code": answer.code, "Message": answer.message}, "ResponseMetadata": {}}
            return SimpleNamespace(status_code=400), body
        if isinstance(answer, Exception):
            raise answer
        if model.output_shape is not None:
            validate_parameters(answer, model.output_shape)
        return SimpleNamespace(status_code=200), {**answer, "ResponseMetadata": {"HTTPStatusCode": 200}}


@contextmanager
def fake_aws() -> Iterator[FakeAws]:
    with pytest.MonkeyPatch.context() as patch, mock_aws():
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        yield FakeAws()


def quota(limits: Mapping[str, float]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """GetServiceQuota of an account with these limits by code; others were never raised."""

    def answer(parameters: dict[str, Any]) -> dict[str, Any]:
        code = parameters["QuotaCode"]
        if code not in limits:
            raise AwsError("NoSuchResourceException")
        return {"Quota": {"QuotaCode": code, "Value": limits[code]}}

    return answer
