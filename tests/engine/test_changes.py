"""What a change of the settings does to a stack that runs: in place, a replacement, or nothing.

Each row is applied to a living stack by the real engine; the plugin replaces where the AWS provider does. A row lists
all resources that may change; anything else that changes is a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.crds import read_crds
from infra.versions import KUBERAY_VERSION
from tests.engine import inventory
from tests.engine.conftest import BASE

GPU, SYSTEM = "aws:eks/nodeGroup:NodeGroup efa-dev-gpu", "aws:eks/nodeGroup:NodeGroup efa-dev-system"
GPU_TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate efa-dev-gpu"
PLACEMENT = "aws:ec2/placementGroup:PlacementGroup efa-dev-gpu"
CLUSTER = "aws:eks/cluster:Cluster efa-dev-eksCluster"
RAY = "kubernetes:ray.io/v1:RayCluster efa-dev-ray-cluster"
DIGEST = "sha256:" + "a" * 64
RESERVATION = "cr-0123456789abcdef0"
PROMETHEUS = {
    "kubernetes:core/v1:Namespace efa-dev-monitoring",
    "kubernetes:core/v1:ConfigMap efa-dev-dashboard",
    "kubernetes:helm.sh/v3:Release efa-dev-kube-prometheus-stack",
    "kubernetes:helm.sh/v3:Release efa-dev-dcgm-exporter",
    "kubernetes:networking.k8s.io/v1:NetworkPolicy efa-dev-metrics",
    "kubernetes:networking.k8s.io/v1:NetworkPolicy efa-dev-monitoring-internal",
    "kubernetes:rbac.authorization.k8s.io/v1:Role efa-dev-look",
    "kubernetes:rbac.authorization.k8s.io/v1:RoleBinding efa-dev-look",
}
CLOUDWATCH = {
    "aws:cloudwatch/logGroup:LogGroup efa-dev-container-insights",
    "aws:iam/role:Role efa-dev-cloudwatch",
    "aws:iam/rolePolicy:RolePolicy efa-dev-cloudwatch",
    "aws:eks/podIdentityAssociation:PodIdentityAssociation efa-dev-cloudwatch",
    "aws:eks/addon:Addon efa-dev-amazon-cloudwatch-observability",
}


@dataclass(frozen=True)
class Row:
    """A change and all that it does. `update`: in place; `replace`: the old goes, a new one comes."""

    change: dict[str, Any]
    update: set[str] = field(default_factory=set)
    replace: set[str] = field(default_factory=set)
    create: set[str] = field(default_factory=set)
    delete: set[str] = field(default_factory=set)
    before: dict[str, Any] = field(default_factory=dict)
    nodes: int = 3
    """Instances that run afterwards."""


ROWS = {
    "nothing": Row({}),
    "the default, spelled out": Row({"gpuCount": 2, "region": "us-west-2"}),
    "node count": Row({"gpuCount": 3}, update={GPU, RAY}, nodes=4),
    "fewer nodes": Row({"gpuCount": 1}, update={GPU, RAY}, nodes=2),
    "system node count": Row({"systemCount": 2}, update={SYSTEM}, nodes=4),
    "instance type": Row(
        {"gpuInstanceType": "g6.24xlarge"},
        update={RAY, "kubernetes:helm.sh/v3:Release efa-dev-efa-device-plugin"},
        replace={GPU},
    ),
    "AMI release": Row(
        {"amiRelease": "1.35.0-20260714"},
        before={"amiRelease": "1.35.0-20260601"},
        update={GPU, SYSTEM},
    ),
    "Kubernetes version": Row(
        {"kubernetesVersion": "1.35"},
        before={"kubernetesVersion": "1.34"},
        update={
            *(CLUSTER, GPU, SYSTEM),
            "aws:eks/addon:Addon efa-dev-kube-proxy",
            "aws:eks/addon:Addon efa-dev-coredns",
        },
    ),
    "image digest": Row({"imageDigest": DIGEST}, update={RAY}),
    "image tag": Row({"imageTag": "train-ml-cuda-v1.0.3"}, update={RAY}),
    "addresses of the public endpoint": Row({"publicCidrs": ["81.2.69.161/32"]}, update={CLUSTER}),
    "to a reservation": Row(
        {"purchase": "reservation", "reservationId": RESERVATION},
        update={GPU, GPU_TEMPLATE},
        delete={PLACEMENT},
    ),
    "back from a reservation": Row(
        {"purchase": "on-demand", "reservationId": None},
        before={"purchase": "reservation", "reservationId": RESERVATION},
        update={GPU, GPU_TEMPLATE},
        create={PLACEMENT},
    ),
    "to a capacity block": Row(
        {"purchase": "capacity-block", "reservationId": RESERVATION},
        update={GPU_TEMPLATE},
        replace={GPU},
        delete={PLACEMENT},
    ),
    "to spot": Row({"purchase": "spot"}, update={GPU_TEMPLATE}, replace={GPU}, delete={PLACEMENT}),
    "bigger disk": Row({"gpuDiskGib": 300}, update={GPU_TEMPLATE, GPU, RAY}),
    "flow logs": Row(
        {"flowLogs": True},
        create={
            "aws:iam/role:Role efa-dev-flow-logs",
            "aws:cloudwatch/logGroup:LogGroup efa-dev-flow-logs",
            "aws:iam/rolePolicy:RolePolicy efa-dev-flow-logs",
            "aws:ec2/flowLog:FlowLog efa-dev-flow-logs",
        },
    ),
    "secrets encryption": Row(
        {"secretsEncryption": True}, update={CLUSTER}, create={"aws:kms/key:Key efa-dev-secrets"}
    ),
    "watched by Prometheus": Row({"observability": "prometheus"}, create=PROMETHEUS),
    "no longer watched by Prometheus": Row(
        {"observability": "none"}, before={"observability": "prometheus"}, delete=PROMETHEUS
    ),
    "watched by CloudWatch": Row({"observability": "cloudwatch"}, create=CLOUDWATCH),
    "from CloudWatch to Prometheus": Row(
        {"observability": "prometheus"},
        before={"observability": "cloudwatch"},
        create=PROMETHEUS,
        delete=CLOUDWATCH,
    ),
    "deletion protection": Row({"deletionProtection": True}, update={CLUSTER}),
}


@pytest.mark.parametrize("name", ROWS)
def test_change_of_settings(make_stack: Callable[..., Any], account: str, name: str) -> None:
    row = ROWS[name]
    stack = make_stack({**BASE, **row.before})
    stack.up().require_ok()

    stack.write_config(**row.change)
    changed = stack.up().require_ok()

    assert _kinds(changed.changes) == {
        "create": row.create,
        "update": row.update,
        "replace": row.replace,
        "delete": row.delete,
    }
    assert inventory.counts(account)["ec2.instances"] == row.nodes
    assert stack.up().require_ok().changes == []


def test_expiry_reaches_every_tag_and_no_node(
    make_stack: Callable[..., Any], engine: Any, account: str
) -> None:
    """Moving the expiry must not replace nodes under a running job, although it is a tag on everything."""
    stack = make_stack({**BASE, "expires": "2099-12-01T00:00:00+00:00"})
    stack.up().require_ok()
    instances = inventory.contents(account)["ec2.instances"]
    versions = _template_versions(stack)

    stack.write_config(expires="2099-12-02T00:00:00+00:00")
    kinds = _kinds(stack.up().require_ok().changes)

    assert kinds["replace"] == kinds["create"] == kinds["delete"] == set()
    assert "aws:scheduler/schedule:Schedule efa-dev-expiry" in kinds["update"]
    assert "aws:ec2/vpc:Vpc efa-dev-vpc" in kinds["update"]
    assert inventory.contents(account)["ec2.instances"] == instances
    assert _template_versions(stack) == versions


def test_moving_to_another_zone_replaces_the_nodes_and_keeps_the_cluster(
    make_stack: Callable[..., Any], account: str
) -> None:
    stack = make_stack()
    stack.up().require_ok()

    stack.write_config(gpuZone="us-west-2b")
    kinds = _kinds(stack.up().require_ok().changes)

    assert {GPU, SYSTEM} <= kinds["replace"]
    assert CLUSTER not in kinds["replace"] | kinds["update"]
    assert inventory.counts(account)["ec2.nat_gateways"] == 1
    assert inventory.counts(account)["ec2.addresses"] == 1
    assert inventory.counts(account)["ec2.instances"] == 3


def test_one_more_zone_keeps_cluster_and_nodes(make_stack: Callable[..., Any], account: str) -> None:
    stack = make_stack()
    stack.up().require_ok()
    instances = inventory.contents(account)["ec2.instances"]

    stack.write_config(zones=["us-west-2a", "us-west-2b", "us-west-2c"])
    kinds = _kinds(stack.up().require_ok().changes)

    assert kinds["replace"] == kinds["delete"] == set()
    assert CLUSTER in kinds["update"]
    assert inventory.contents(account)["ec2.instances"] == instances


@pytest.mark.parametrize(
    ("setting", "deployed", "wanted"),
    [
        ("vpcCidr", "10.0.0.0/16", "10.1.0.0/16"),
        ("serviceCidr", "172.20.0.0/16", "172.21.0.0/16"),
        ("secretsEncryption", True, False),
        ("clusterName", "efa-dev", "other"),
    ],
)
def test_what_holds_for_life_is_refused_before_anything_is_touched(
    make_stack: Callable[..., Any], account: str, setting: str, deployed: Any, wanted: Any
) -> None:
    """AWS cannot do it on a cluster that runs: an update would fail half-way, with the nodes billing."""
    stack = make_stack({**BASE, "secretsEncryption": True})
    stack.up().require_ok()
    before = inventory.contents(account)

    stack.write_config(**{setting: wanted})
    for refused in (stack.preview(), stack.up()):
        assert not refused.ok
        assert f"{setting}: this stack was deployed with {_yaml(deployed)}" in refused.output
        assert f"and the settings now say {_yaml(wanted)}" in refused.output
        assert "Set the old value again in Pulumi.dev.yaml; or `pulumi destroy`" in refused.output
        assert "Traceback" not in refused.output

    assert inventory.contents(account) == before
    stack.write_config(**{setting: deployed})
    assert stack.up().require_ok().changes == []


@pytest.mark.parametrize(
    ("deployed", "wanted", "step"),
    [
        ("1.33", "1.35", "set 1.34, run pulumi up, then the next"),
        ("1.35", "1.34", "leave it"),
    ],
)
def test_kubernetes_jumps_no_version_and_never_goes_back(
    make_stack: Callable[..., Any], account: str, deployed: str, wanted: str, step: str
) -> None:
    stack = make_stack({**BASE, "kubernetesVersion": deployed})
    stack.up().require_ok()
    before = inventory.contents(account)

    stack.write_config(kubernetesVersion=wanted)
    for refused in (stack.preview(), stack.up()):
        assert not refused.ok
        assert f"EKS goes up by one minor version at a time and never back: {step}" in refused.output

    assert inventory.contents(account) == before


def test_the_node_image_goes_back_by_new_node_groups(make_stack: Callable[..., Any], account: str) -> None:
    """EKS refuses an earlier release for a node group that exists; nothing has changed then."""
    stack = make_stack({**BASE, "amiRelease": "1.35.0-20260714"})
    stack.up().require_ok()
    instances = inventory.contents(account)["ec2.instances"]

    stack.write_config(amiRelease="1.35.0-20260601")
    refused = stack.up()
    assert "1.35.0-20260601 is earlier than 1.35.0-20260714" in refused.errors
    assert inventory.contents(account)["ec2.instances"] == instances

    groups = [one["urn"] for one in stack.resources() if one["type"] == "aws:eks/nodeGroup:NodeGroup"]
    replaced = stack.up(*(word for urn in groups for word in ("--replace", urn))).require_ok()

    kinds = _kinds(replaced.changes)
    assert kinds["replace"] == {GPU, SYSTEM}
    assert CLUSTER not in kinds["update"]
    assert inventory.counts(account)["ec2.instances"] == 3
    assert stack.up().require_ok().changes == []


def test_kuberay_upgrades_its_crds_first_and_keeps_the_ray_cluster(
    make_stack: Callable[..., Any], small_crds: str, tmp_path: Path
) -> None:
    newer = tmp_path / "crds"
    newer.mkdir()
    for crd in read_crds(Path(small_crds)):
        for version in crd["spec"]["versions"]:
            version["schema"]["openAPIV3Schema"]["description"] = "of the next release"
        (newer / f"{crd['metadata']['name']}.yaml").write_text(yaml.safe_dump(crd))
    stack = make_stack()
    stack.up().require_ok()

    for version, folder in (("1.7.0", str(newer)), (KUBERAY_VERSION, small_crds)):  # there and back again
        stack.write_config(kuberayVersion=version, kuberayCrds=folder)
        changed = stack.up().require_ok().changes

        updated = [step.name for step in changed if step.op == "update"]
        assert updated[-1] == "efa-dev-kuberay-operator"
        assert len(updated[:-1]) == 4
        assert all(name.endswith(".ray.io") for name in updated[:-1])
        assert _kinds(changed)["replace"] == set()


def _kinds(steps: list[Any]) -> dict[str, set[str]]:
    """What happened to each resource, one word for each; components and providers are left out."""
    ops: dict[str, set[str]] = {}
    for step in steps:
        if step.type.startswith(("aws:", "kubernetes:")):
            ops.setdefault(f"{step.type} {step.name}", set()).add(step.op)
    kinds: dict[str, set[str]] = {"create": set(), "update": set(), "replace": set(), "delete": set()}
    for resource, done in ops.items():
        replaced = done & {"replace", "create-replacement", "delete-replaced"}
        kinds["replace" if replaced else next(iter(done))].add(resource)
    return kinds


def _template_versions(stack: Any) -> dict[str, int]:
    return {
        one["urn"]: one["outputs"]["latestVersion"]
        for one in stack.resources()
        if one["type"] == "aws:ec2/launchTemplate:LaunchTemplate"
    }


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
