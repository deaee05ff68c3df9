"""Recorded graphs for the tests: each shape of a stack is recorded once."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from infra.recorder import Graph, Resource, record
from infra.settings import StackSettings, parse_settings, read_settings_file

REPOSITORY = Path(__file__).resolve().parents[2]
DEV_FILE = REPOSITORY / "Pulumi.dev.yaml"
LOCAL_FILE = REPOSITORY / "Pulumi.local.yaml"

# The smallest settings of an AWS stack without mistakes.
MINIMAL: dict[str, Any] = {"owner": "team", "publicCidrs": ["198.51.100.7/32"]}
# All that is optional, at once.
EVERYTHING: dict[str, Any] = {
    **MINIMAL,
    "expires": "2100-01-01T00:00:00+00:00",
    "natPerZone": True,
    "flowLogs": True,
    "secretsEncryption": True,
    "deletionProtection": True,
    "admins": ["arn:aws:iam::123456789012:role/platform/admin"],
    "users": ["arn:aws:iam::123456789012:user/researcher"],
    "fsx": True,
    "autoscaling": True,
    "gpuMinCount": 1,
    "runRetentionDays": 90,
    "budgetMonthlyUsd": 500,
    "budgetEmails": ["team@example.com"],
    "accountId": "123456789012",
    "localNvme": True,
}

LAUNCH_TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"
NODE_GROUP = "aws:eks/nodeGroup:NodeGroup"
RAY_CLUSTER = "kubernetes:ray.io/v1:RayCluster"
RELEASE = "kubernetes:helm.sh/v3:Release"
CRD = "kubernetes:apiextensions.k8s.io/v1:CustomResourceDefinition"


def settings(stack: str = "test", **values: Any) -> StackSettings:
    """An AWS stack with ``values`` (camelCase) on top of the minimal ones."""
    return parse_settings({**MINIMAL, **values}, stack)


def dev_settings() -> StackSettings:
    return read_settings_file(DEV_FILE)


def local_settings() -> StackSettings:
    return read_settings_file(LOCAL_FILE)


@functools.cache
def dev() -> Graph:
    return record(dev_settings())


@functools.cache
def local() -> Graph:
    return record(local_settings())


@functools.cache
def everything() -> Graph:
    return record(parse_settings(EVERYTHING, "full"))


def graph(**values: Any) -> Graph:
    """A graph with ``values``; the CRDs, most of the work of a recording, are left out."""
    return _graph(json.dumps({"kuberay": False, **values}, sort_keys=True))


@functools.cache
def _graph(values: str) -> Graph:
    return record(settings(**json.loads(values)))


def gpu_launch_template(recorded: Graph) -> Resource:
    return next(r for r in recorded.of_type(LAUNCH_TEMPLATE) if r.name.endswith("-gpu"))


def gpu_group(recorded: Graph) -> Resource:
    return next(r for r in recorded.of_type(NODE_GROUP) if r.name.endswith("-gpu"))


def system_group(recorded: Graph) -> Resource:
    return next(r for r in recorded.of_type(NODE_GROUP) if r.name.endswith("-system"))


def release(recorded: Graph, chart: str) -> Resource:
    return next(r for r in recorded.of_type(RELEASE) if r.inputs["name"] == chart)


def ray_cluster(recorded: Graph) -> Resource:
    (found,) = recorded.of_type(RAY_CLUSTER)
    return found
