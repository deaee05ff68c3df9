"""From nothing to the whole stack and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine import inventory
from tests.engine.conftest import BASE, EVERYTHING


@pytest.mark.parametrize("settings", [BASE, EVERYTHING], ids=["default", "everything"])
def test_up_again_changes_nothing_and_destroy_leaves_nothing(
    make_stack: Callable[..., Any], engine: Any, account: str, settings: dict[str, Any]
) -> None:
    engine.session.client("ec2", endpoint_url="http://aws.test").describe_vpcs()
    before = inventory.contents(account)
    stack = make_stack(settings, checkpoints=True)

    created = stack.up().require_ok()
    calls = len(engine.faults.calls)
    assert {step.op for step in created.steps} == {"create"}
    assert inventory.counts(account)["ec2.instances"] == 3

    again = stack.up().require_ok()
    assert again.changes == []
    # A run that changes nothing asks AWS for nothing but whose account it is.
    assert [call.operation for call in engine.faults.calls[calls:]] == ["GetCallerIdentity"]

    stack.destroy().require_ok()
    assert stack.resources() == []
    after = inventory.contents(account)
    after.pop("scheduler.schedule_groups", None)  # the default group of the account
    assert after == before


def test_refresh_finds_nothing_to_correct(make_stack: Callable[..., Any]) -> None:
    stack = make_stack(EVERYTHING)
    stack.up().require_ok()

    refreshed = stack.refresh().require_ok()

    assert [step for step in refreshed.changes if step.op != "refresh"] == []
    assert stack.up().require_ok().changes == []


def test_outputs_describe_the_stack(make_stack: Callable[..., Any]) -> None:
    from infra.outputs import StackOutputs

    stack = make_stack()
    stack.up().require_ok()

    outputs = StackOutputs.model_validate(stack.outputs()["training"])

    assert outputs.cluster_name == "efa-dev"
    assert outputs.num_workers == 2
    assert outputs.storage_uri.startswith("s3://efa-dev-runs-")
    assert outputs.kube.exec_command is not None


def test_what_somebody_changed_by_hand_comes_back(
    make_stack: Callable[..., Any], engine: Any, account: str
) -> None:
    stack = make_stack()
    stack.up().require_ok()
    group = next(r for r in stack.resources() if r["urn"].endswith("NodeGroup::efa-dev-gpu"))
    cluster, name = group["id"].split(":")
    engine.session.client("eks", endpoint_url="http://aws.test").update_nodegroup_config(
        clusterName=cluster, nodegroupName=name, scalingConfig={"minSize": 0, "maxSize": 2, "desiredSize": 0}
    )
    assert inventory.counts(account)["ec2.instances"] == 1

    changes = stack.up("--refresh").require_ok().changes

    assert [(step.op, step.name) for step in changes if step.op == "update"] == [("update", "efa-dev-gpu")]
    assert inventory.counts(account)["ec2.instances"] == 3
