"""A preview needs as little as the engine allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from operations.explain import explain_output
from tests.engine import inventory
from tests.engine.conftest import BASE


def test_preview_of_a_new_stack_asks_aws_only_whose_account_it_is(
    make_stack: Callable[..., Any], engine: Any, account: str
) -> None:
    previewed = make_stack().preview().require_ok()

    assert {step.op for step in previewed.steps} == {"create"}
    assert {call.operation for call in engine.faults.calls} == {"GetCallerIdentity"}
    assert inventory.contents(account) == {}


def test_preview_without_credentials_says_so_in_one_line(make_stack: Callable[..., Any], engine: Any) -> None:
    """The real provider refuses to be configured without any; Pulumi has no way around it."""
    engine.identity.account = None

    refused = make_stack().preview()

    assert not refused.ok
    [explained] = explain_output(refused.log.read_text())
    assert explained.why == "there are no AWS credentials"
    assert "aws sts get-caller-identity" in explained.fix


def test_preview_of_the_example_addresses_works_and_up_refuses(make_stack: Callable[..., Any]) -> None:
    stack = make_stack({**BASE, "publicCidrs": ["203.0.113.10/32"]})

    stack.preview().require_ok()
    refused = stack.up()

    assert not refused.ok
    assert "203.0.113.10/32" in refused.errors


def test_mistakes_in_the_settings_come_before_any_call(make_stack: Callable[..., Any], engine: Any) -> None:
    refused = make_stack({**BASE, "gpuZone": "us-west-2z", "gpuCount": 0}).preview()

    assert not refused.ok
    assert "gpuZone" in refused.errors
    assert "gpuCount" in refused.errors
    assert engine.faults.calls == []
