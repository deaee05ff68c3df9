"""Runs that are cut off: by the user, by a kill, by a plugin that dies, by a call that never returns.

docs/recovery.md ("Interrupted") tells the way back that these tests walk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from operations.audit import AuditScope, audit
from operations.explain import explain_output
from tests.engine import inventory
from tests.engine.emulator import REGION, environment
from tests.engine.faults import Call, Kind, on

SCOPE = AuditScope(stack="dev", cluster="efa-dev", region=REGION)


def _nothing_else_moves(stack: Any) -> bool:
    """Only node groups are being made: a kill now loses track of nothing else."""
    before = stack.state()
    time.sleep(2.0)
    after = stack.state()
    pending = [one["resource"]["urn"] for one in after.get("pending_operations") or []]
    return before == after and bool(pending) and all("NodeGroup" in urn for urn in pending)


def _until(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.05)


def _assert_complete_then_destroy(stack: Any, account: str) -> None:
    """The stack is whole, without anything twice, and goes without a trace."""
    assert stack.up().require_ok().changes == []
    counts = inventory.counts(account)
    assert (counts["eks.clusters"], counts["eks.nodegroups"], counts["ec2.nat_gateways"]) == (1, 2, 1)
    stack.destroy().require_ok()
    assert stack.resources() == []
    assert set(inventory.contents(account)) <= {
        *(
            "ec2.internet_gateways",
            "ec2.network_acls",
            "ec2.route_tables",
            "ec2.security_groups",
            "ec2.subnets",
        ),
        *("ec2.vpcs", "scheduler.schedule_groups"),
    }
    assert inventory.counts(account)["ec2.vpcs"] == 1  # the default VPC of the account


def test_interrupt_while_a_node_group_is_being_made(
    make_stack: Callable[..., Any], engine: Any, account: str
) -> None:
    """Ctrl-C once: the engine cancels the plugin, keeps what there is, and gives the lock back."""
    stack = make_stack(checkpoints=True)
    engine.faults.hang(on("eks", "DescribeNodegroup"))
    running = stack.start("up", "--yes", "--skip-preview")
    _until(lambda: engine.faults.fired is not None, "the node group")
    running.interrupt()
    stopped = running.wait()
    assert not stopped.ok

    stack.up().require_ok()

    _assert_complete_then_destroy(stack, account)


def test_engine_killed_leaves_a_lock_and_says_how_to_go_on(
    make_stack: Callable[..., Any], engine: Any, account: str
) -> None:
    """kill -9, a lost laptop: lock -> cancel -> refresh -> up."""
    stack = make_stack(checkpoints=True)
    engine.faults.hang(on("eks", "CreateNodegroup"))
    running = stack.start("up", "--yes", "--skip-preview")
    _until(lambda: engine.faults.fired is not None, "the node group")
    _until(lambda: _nothing_else_moves(stack), "everything that does not wait for the node group")
    running.kill()
    running.wait()
    engine.faults.released.set()

    blocked = stack.up()
    assert not blocked.ok
    [explained] = explain_output(blocked.output)
    assert "pulumi cancel" in explained.fix

    stack.cancel().require_ok()
    pending = [one["resource"]["urn"] for one in stack.state().get("pending_operations") or []]
    assert any("NodeGroup" in urn for urn in pending)
    stack.refresh("--clear-pending-creates").require_ok()
    assert not stack.state().get("pending_operations")
    stack.up().require_ok()

    _assert_complete_then_destroy(stack, account)


def test_created_unseen_is_found_by_the_audit(
    make_stack: Callable[..., Any], engine: Any, account: str
) -> None:
    """AWS made the NAT gateway, but the answer was lost with the engine: nothing in the state, 0.045 USD an hour."""
    stack = make_stack(checkpoints=True)

    def answer_lost(call: Call) -> None:
        client = engine.emulator.session(engine.identity).client("ec2")
        address = client.describe_addresses()["Addresses"][0]
        subnets = client.describe_subnets(Filters=[{"Name": "tag:Name", "Values": ["*public-us-west-2a"]}])[
            "Subnets"
        ]
        tags = [{"Key": "project", "Value": "efa-finetune"}, {"Key": "stack", "Value": "dev"}]
        client.create_nat_gateway(
            SubnetId=subnets[0]["SubnetId"],
            AllocationId=address["AllocationId"],
            TagSpecifications=[{"ResourceType": "natgateway", "Tags": tags}],
        )
        running.kill()
        engine.faults.released.wait(30)

    engine.faults.order(on("ec2", "CreateNatGateway"), answer_lost)
    running = stack.start("up", "--yes", "--skip-preview")
    running.wait()
    engine.faults.released.set()
    stack.cancel().require_ok()
    stack.refresh("--clear-pending-creates").require_ok()

    blocked = stack.up()
    assert "Resource.AlreadyAssociated" in blocked.errors

    from operations.audit import managed_ids

    report = audit(engine.emulator.session(engine.identity), SCOPE, managed=managed_ids(stack.state()))
    [found] = [one for one in report.leftovers if one.kind == "NAT gateway"]
    assert found.hourly_usd == pytest.approx(0.045)
    assert found.id in found.command
    engine.session.client("ec2").delete_nat_gateway(NatGatewayId=found.id)

    stack.up().require_ok()
    _assert_complete_then_destroy(stack, account)


def test_plugin_dies_in_the_middle(make_stack: Callable[..., Any], engine: Any, account: str) -> None:
    """Here the engine starts the plugin itself, as a process, and the process is gone in the middle of a call."""
    with environment(engine.emulator.endpoint(), account) as aws:
        stack = make_stack(
            checkpoints=True, own_plugins=("aws",), environment={**aws, "DIE_AT": "CreateLaunchTemplate"}
        )
        failed = stack.up("--parallel=1")
        assert not failed.ok
        reported = explain_output(failed.log.read_text())
        assert any("process died" in one.why for one in reported), failed.errors

        stack.environment.pop("DIE_AT")
        stack.up().require_ok()

        _assert_complete_then_destroy(stack, account)


def test_interrupted_destroy_goes_on(make_stack: Callable[..., Any], engine: Any, account: str) -> None:
    stack = make_stack(checkpoints=True)
    stack.up().require_ok()
    engine.faults.hang(on("eks", "DeleteCluster"))
    running = stack.start("destroy", "--yes", "--skip-preview")
    _until(lambda: engine.faults.fired is not None, "the deletion of the cluster")
    running.interrupt()
    assert not running.wait().ok

    stack.destroy().require_ok()

    assert stack.resources() == []
    assert "eks.clusters" not in inventory.contents(account)


def test_no_capacity_for_the_gpu_nodes(make_stack: Callable[..., Any], engine: Any, account: str) -> None:
    """EKS takes the order and fails later: the report says where to look, and a second up after that completes."""
    from tests.engine import additions

    stack = make_stack()
    additions.set_capacity(account, "g6.12xlarge", available=False)
    failed = stack.up()
    assert not failed.ok
    [explained] = [one for one in explain_output(failed.log.read_text()) if one.urn.endswith("::efa-dev-gpu")]
    assert explained.resource == "aws:eks/nodeGroup:NodeGroup efa-dev-gpu"
    assert "AWS has no g6.12xlarge free" in explained.why
    assert "finetune zones" in explained.fix
    assert "reservation" in explained.fix

    # As docs/recovery.md says: the group that AWS calls CREATE_FAILED does not heal, so it is replaced.
    assert not stack.up().ok
    additions.set_capacity(account, "g6.12xlarge", available=True)
    stack.run_cli("state", "taint", explained.urn, "--yes").require_ok()
    stack.up().require_ok()

    assert inventory.counts(account)["ec2.instances"] == 3
    _assert_complete_then_destroy(stack, account)


def test_expired_credentials_in_the_middle(make_stack: Callable[..., Any], engine: Any, account: str) -> None:
    """From one call on every call is refused, as when a session ends; with a new session `up` goes on."""
    stack = make_stack()
    engine.faults.fail(on("eks", "CreateNodegroup"), Kind.EXPIRED, from_then_on=True)
    failed = stack.up()
    engine.faults.reset()
    assert not failed.ok
    explained = explain_output(failed.log.read_text())
    assert any("ran out" in one.why and "sign in again" in one.fix for one in explained)

    stack.up().require_ok()
    _assert_complete_then_destroy(stack, account)
