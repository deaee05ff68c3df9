"""The plugin of these tests is as strict as the real provider: what it accepts, the real one knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulumi
import pulumi_aws as aws
import pytest

from tests.engine import inventory
from tests.engine.aws_plugin import schema, server
from tests.engine.aws_plugin.base import REGISTRY


@pytest.fixture
def run(engine: Any, account: str, tmp_path: Path) -> Callable[..., Any]:
    """Makes a stack of a program of a few resources, with the explicit provider that it is given."""
    from tests.engine.harness import Stack

    def make(resources: Callable[[pulumi.ResourceOptions], Any], **provider: Any) -> Any:
        def program() -> None:
            given = {"region": "us-west-2", **provider}
            resources(pulumi.ResourceOptions(provider=aws.Provider("aws", **given)))

        return Stack(engine, tmp_path / "stack", program)

    return make


def test_every_type_of_the_plugin_is_one_of_the_provider() -> None:
    assert server.VERSION == "7.51.1"
    for token, resource in REGISTRY.items():
        described = schema.resource(token)
        for path in (*resource.replace_on, *resource.defaults, resource.name_property):
            known = {*described.inputs.types, "expectedBucketOwner", None}
            assert (path.split(".")[0] if path else None) in known, f"{token} has no input {path}"


def test_property_that_the_type_does_not_have(run: Callable[..., Any]) -> None:
    failed = run(
        lambda opts: pulumi.CustomResource(
            "aws:ec2/vpc:Vpc", "v", {"cidrBlock": "10.0.0.0/16", "cidr": "x"}, opts
        )
    ).up()

    assert not failed.ok
    assert "property cidr value" in failed.errors
    assert "unknown property" in failed.errors


def test_nested_property_and_missing_property(run: Callable[..., Any]) -> None:
    failed = run(
        lambda opts: pulumi.CustomResource(
            "aws:eks/nodeGroup:NodeGroup",
            "g",
            {
                "clusterName": "c",
                "subnetIds": ["s"],
                "scalingConfig": {"desired": 1, "maxSize": 1, "minSize": 0},
            },
            opts,
        )
    ).up()

    assert "scalingConfig.desired" in failed.errors
    assert "missing required property" in failed.errors


def test_value_that_the_api_of_aws_does_not_take(run: Callable[..., Any]) -> None:
    """botocore's models judge each call."""
    failed = run(
        lambda opts: aws.ec2.Vpc("v", cidr_block="10.0.0.0/16", instance_tenancy=["default"], opts=opts)
    ).up()  # pyright: ignore[reportArgumentType]

    assert not failed.ok


def test_type_that_the_plugin_does_not_know_is_an_error(run: Callable[..., Any]) -> None:
    failed = run(lambda opts: aws.sqs.Queue("q", opts=opts)).up()

    assert "aws:sqs/queue:Queue" in failed.errors


def test_default_tags_and_own_tags(run: Callable[..., Any], account: str, engine: Any) -> None:
    stack = run(
        lambda opts: aws.ec2.Vpc("v", cidr_block="10.0.0.0/16", tags={"Name": "x"}, opts=opts),
        default_tags=aws.ProviderDefaultTagsArgs(tags={"project": "p", "Name": "default"}),
    )
    stack.up().require_ok()

    [vpc] = [one for one in stack.resources() if one["type"] == "aws:ec2/vpc:Vpc"]
    found = engine.session.client("ec2").describe_vpcs(VpcIds=[vpc["id"]])["Vpcs"][0]["Tags"]
    assert {one["Key"]: one["Value"] for one in found} == {"project": "p", "Name": "x"}
    assert vpc["outputs"]["tagsAll"] == {"project": "p", "Name": "x"}


def test_subnet_in_use_is_not_deleted(run: Callable[..., Any], engine: Any, account: str) -> None:
    """The emulator refuses what AWS refuses, or a destroy in a wrong order would pass."""

    def resources(opts: pulumi.ResourceOptions) -> None:
        vpc = aws.ec2.Vpc("v", cidr_block="10.0.0.0/16", opts=opts)
        aws.ec2.Subnet("s", vpc_id=vpc.id, cidr_block="10.0.0.0/24", opts=opts)

    stack = run(resources)
    stack.up().require_ok()
    [subnet] = [one["id"] for one in stack.resources() if one["type"] == "aws:ec2/subnet:Subnet"]
    ec2 = engine.session.client("ec2")
    ec2.create_network_interface(SubnetId=subnet)

    failed = stack.destroy()

    assert "DependencyViolation" in failed.errors
    assert subnet in inventory.contents(account)["ec2.subnets"]
