"""Taking a stack down: in the right order, without the cluster's API, in the right account only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from operations.audit import AuditScope, audit
from operations.explain import explain_output
from tests.engine import inventory
from tests.engine.conftest import BASE, EVERYTHING
from tests.engine.emulator import REGION, new_account
from tests.engine.faults import Kind
from tests.engine.wire import name_of, type_of

NETWORK = (
    "aws:ec2/vpc:",
    "aws:ec2/subnet:",
    "aws:ec2/natGateway:",
    "aws:ec2/internetGateway:",
    "aws:ec2/routeTable",
)
BILLS = (
    *("ec2.instances", "ec2.volumes", "ec2.nat_gateways", "ec2.addresses", "eks.clusters", "eks.nodegroups"),
    *("fsx.file_systems", "kms.keys", "s3.buckets", "logs.log_groups", "ec2.network_interfaces"),
)


def test_gpu_nodes_go_before_the_network_and_add_ons_that_nodes_need_after_them(
    make_stack: Callable[..., Any], engine: Any, account: str
) -> None:
    stack = make_stack(EVERYTHING)
    stack.up().require_ok()

    stack.destroy().require_ok()

    order = [f"{type_of(urn)} {name_of(urn)}" for urn in engine.aws.deleted]
    gpu = order.index("aws:eks/nodeGroup:NodeGroup efa-dev-gpu")
    assert all(order.index(one) > gpu for one in order if one.startswith(NETWORK))
    # The VPC CNI has to outlive the nodes, or their secondary interfaces are left behind.
    cni = order.index("aws:eks/addon:Addon efa-dev-vpc-cni")
    groups = [order.index(one) for one in order if one.startswith("aws:eks/nodeGroup:")]
    assert cni > max(groups)
    # EKS writes logs until the cluster is gone.
    cluster = order.index("aws:eks/cluster:Cluster efa-dev-eksCluster")
    assert order.index("aws:cloudwatch/logGroup:LogGroup efa-dev-control-plane") > cluster
    assert not set(BILLS) & set(inventory.contents(account))


@pytest.mark.timeout(300)
def test_destroy_needs_no_cluster_api(make_stack: Callable[..., Any], engine: Any, account: str) -> None:
    stack = make_stack()
    stack.up().require_ok()
    assert engine.kubernetes.created
    engine.unreachable = 'Get "https://efa-dev.eks.test/openapi/v2": dial tcp 10.0.0.1:443: i/o timeout'

    destroyed = stack.destroy(timeout=240).require_ok()

    # In-cluster objects go with the cluster: the engine takes them out of the state without a call to the API.
    assert engine.kubernetes.deleted == []
    assert {step.op for step in destroyed.steps if step.type.startswith("kubernetes:")} == {"delete"}
    assert stack.resources() == []
    assert not set(BILLS) & set(inventory.contents(account))


def test_update_with_an_unreachable_api_says_so(make_stack: Callable[..., Any], engine: Any) -> None:
    stack = make_stack()
    stack.up().require_ok()
    engine.unreachable = "dial tcp 10.0.0.1:443: i/o timeout"

    stack.write_config(gpuCount=3)
    failed = stack.up()

    assert not failed.ok
    [explained] = [
        one for one in explain_output(failed.log.read_text()) if one.urn.endswith("efa-dev-ray-cluster")
    ]
    assert "cannot be reached" in explained.why
    assert "publicCidrs" in explained.fix


def test_destroy_refuses_credentials_of_another_account(
    make_stack: Callable[..., Any], engine: Any, account: str
) -> None:
    """Otherwise every delete finds nothing there, the state empties, and the resources go on billing."""
    stack = make_stack({**BASE, "accountId": account})
    stack.up().require_ok()
    resources, before = len(stack.resources()), inventory.contents(account)

    engine.identity.account = new_account()
    refused = stack.destroy()

    assert not refused.ok
    assert engine.aws.deleted == []
    assert len(stack.resources()) == resources
    assert inventory.contents(account) == before
    [explained] = explain_output(refused.log.read_text())[:1]
    assert f"belong to account {engine.identity.account}" in explained.why

    engine.identity.account = account
    stack.destroy().require_ok()
    assert stack.resources() == []


@pytest.mark.parametrize(
    "operation", ["DeleteNodegroup", "DeleteCluster", "DeleteNatGateway", "DeleteBucket", "DeleteVpc"]
)
def test_destroy_after_a_destroy_that_failed(
    make_stack: Callable[..., Any], engine: Any, account: str, operation: str
) -> None:
    stack = make_stack({**BASE, "forceDestroy": True})
    stack.up().require_ok()
    engine.faults.fail(lambda call: call.operation == operation, Kind.THROTTLED)
    assert not stack.destroy().ok
    assert engine.faults.fired is not None

    stack.destroy().require_ok()

    assert stack.resources() == []
    assert not set(BILLS) & set(inventory.contents(account))
    report = audit(engine.emulator.session(engine.identity), AuditScope("dev", "efa-dev", REGION))
    assert report.clean, report.render()


def test_bucket_with_data_is_kept_unless_the_stack_says_so(
    make_stack: Callable[..., Any], engine: Any, account: str
) -> None:
    stack = make_stack()
    stack.up().require_ok()
    [bucket] = inventory.contents(account)["s3.buckets"]
    s3 = engine.session.client("s3")
    s3.put_object(Bucket=bucket, Key="runs/a/checkpoint", Body=b"x")

    refused = stack.destroy()

    assert not refused.ok
    explained = [one for one in explain_output(refused.log.read_text()) if one.code == "BucketNotEmpty"]
    assert "forceDestroy" in explained[0].fix
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 1
    # Everything that bills by the hour is gone all the same.
    assert "ec2.instances" not in inventory.contents(account)
    assert "ec2.nat_gateways" not in inventory.contents(account)


def test_interfaces_that_the_vpc_cni_left_behind(
    make_stack: Callable[..., Any], engine: Any, account: str
) -> None:
    """A destroy stops at the subnet; the audit names the interface, and after its command the destroy ends."""
    stack = make_stack()
    stack.up().require_ok()
    subnet = next(
        r["id"] for r in stack.resources() if r["urn"].endswith("Subnet::efa-dev-private-us-west-2a")
    )
    ec2 = engine.emulator.session(engine.identity).client("ec2")
    made = ec2.create_network_interface(SubnetId=subnet, Description="aws-K8S-i-0123")

    refused = stack.destroy()

    assert not refused.ok
    explained = [one for one in explain_output(refused.log.read_text()) if one.code == "DependencyViolation"]
    assert "finetune audit" in explained[0].fix
    report = audit(engine.emulator.session(engine.identity), AuditScope("dev", "efa-dev", REGION))
    [found] = [one for one in report.leftovers if one.kind == "network interface"]
    assert found.id == made["NetworkInterface"]["NetworkInterfaceId"]

    ec2.delete_network_interface(NetworkInterfaceId=found.id)
    stack.destroy().require_ok()
    assert stack.resources() == []
