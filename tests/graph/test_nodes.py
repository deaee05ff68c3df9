"""The contract of the GPU nodes: EFA interfaces, taints, zone and purchase, for every type of the catalog."""

from __future__ import annotations

from typing import Any

import pytest

from infra.instances import DAEMONS_CPU_MILLIS, DAEMONS_MEMORY_MIB, INSTANCES, InstanceType
from infra.recorder import Graph
from tests.graph import graphs

PURCHASES = ("on-demand", "reservation", "capacity-block", "spot")
RESERVATION = "cr-0123456789abcdef0"


def _graph(instance: InstanceType, purchase: str, **values: Any) -> Graph:
    by_id = purchase in ("reservation", "capacity-block")
    return graphs.graph(
        gpuInstanceType=instance.name,
        purchase=purchase,
        reservationId=RESERVATION if by_id else None,
        requireEfa=bool(instance.efa),
        **values,
    )


def _cases() -> list[tuple[InstanceType, str]]:
    """Every type as it is usually bought, and every purchase with a type of one and one of 32 cards."""
    cases = [(i, "capacity-block" if i.capacity_block_only else "on-demand") for i in INSTANCES.values()]
    return cases + [(INSTANCES[name], p) for name in ("g6.12xlarge", "p5.48xlarge") for p in PURCHASES[1:]]


@pytest.mark.parametrize(
    ("instance", "purchase"), _cases(), ids=[f"{instance.name}-{purchase}" for instance, purchase in _cases()]
)
def test_any_type_works_by_changing_one_setting(instance: InstanceType, purchase: str) -> None:
    graph = _graph(instance, purchase)
    template = graphs.gpu_launch_template(graph).inputs
    group = graphs.gpu_group(graph).inputs

    interfaces = template["networkInterfaces"]
    assert [i.get("interfaceType") for i in interfaces] == (
        [interface.kind for interface in instance.efa_interfaces] or [None]
    )
    assert [i["networkCardIndex"] for i in interfaces] == list(range(max(1, instance.efa)))
    assert [i["deviceIndex"] for i in interfaces] == [0] + [1] * (max(1, instance.efa) - 1)
    assert all(i["securityGroups"] == ["sg-cluster", "efa-test-efa-id"] for i in interfaces)
    assert "vpcSecurityGroupIds" not in template
    assert "imageId" not in template

    worker = graphs.ray_cluster(graph).inputs["spec"]["workerGroupSpecs"][0]
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == str(instance.gpus)
    assert limits.get("vpc.amazonaws.com/efa") == (str(instance.efa) if instance.efa else None)
    assert worker["rayStartParams"]["num-gpus"] == str(instance.gpus)

    _assert_purchase(purchase, instance, graph, template, group)


def _assert_purchase(purchase: str, instance: InstanceType, graph: Graph, template: Any, group: Any) -> None:
    placement = template.get("placement")
    target = template.get("capacityReservationSpecification", {}).get("capacityReservationTarget")
    assert bool(placement) == (purchase == "on-demand"), "a forced group loses reserved capacity"
    assert bool(graph.of_type("aws:ec2/placementGroup:PlacementGroup")) == (purchase == "on-demand")
    by_id = purchase in ("reservation", "capacity-block")
    assert target == ({"capacityReservationId": RESERVATION} if by_id else None)
    market = template.get("instanceMarketOptions")
    assert market == ({"marketType": "capacity-block"} if purchase == "capacity-block" else None)
    assert group["capacityType"] == {"spot": "SPOT", "capacity-block": "CAPACITY_BLOCK"}.get(
        purchase, "ON_DEMAND"
    )
    in_template = template.get("instanceType") == instance.name
    in_group = group.get("instanceTypes") == [instance.name]
    assert in_template != in_group, "the instance type stands in exactly one place"
    assert in_template == (purchase == "capacity-block")


@pytest.mark.parametrize("instance", INSTANCES.values(), ids=list(INSTANCES))
def test_the_worker_of_the_catalog_fits_its_node(instance: InstanceType) -> None:
    assert instance.worker_cpu * 1000 + DAEMONS_CPU_MILLIS <= instance.allocatable_cpu_millis
    used = instance.worker_memory_gib * 1024 + DAEMONS_MEMORY_MIB + instance.huge_pages_mib
    assert used <= instance.allocatable_memory_mib
    assert instance.worker_memory_gib >= instance.memory_gib * 0.7


def test_allocatable_sizes_are_those_that_nodes_report() -> None:
    """Measured on EKS nodes by Karpenter: g6.12xlarge 47810m and 178933Mi."""
    node = INSTANCES["g6.12xlarge"]
    assert (node.allocatable_cpu_millis, node.allocatable_memory_mib) == (47810, 178933)
    shape = graphs.settings().system_shape
    assert (shape.allocatable_cpu_millis, shape.allocatable_memory_mib) == (3920, 14162)


def test_the_catalog_has_all_families_that_are_promised() -> None:
    families = {instance.family for instance in INSTANCES.values()}
    assert {"g5", "g6", "g6e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200"} <= families


@pytest.mark.parametrize(
    ("name", "interfaces"),
    [
        ("g6.12xlarge", 1),
        ("g6e.24xlarge", 2),
        ("g6e.48xlarge", 4),
        ("p4d.24xlarge", 4),
        ("p5.48xlarge", 32),
        ("p5en.48xlarge", 16),
        ("p6-b200.48xlarge", 8),
    ],
)
def test_efa_interfaces_of_known_types(name: str, interfaces: int) -> None:
    assert INSTANCES[name].efa == interfaces


def test_gpu_nodes_are_tainted_in_one_zone_and_repaired() -> None:
    group = graphs.gpu_group(graphs.dev()).inputs
    assert group["taints"] == [{"key": "nvidia.com/gpu", "value": "present", "effect": "NO_SCHEDULE"}]
    assert group["labels"] == {"role": "gpu", "nvidia.com/gpu.present": "true"}
    assert group["subnetIds"] == ["efa-dev-private-us-west-2a-id"]
    assert group["amiType"] == "AL2023_x86_64_NVIDIA"
    assert group["nodeRepairConfig"] == {"enabled": True}
    assert group["scalingConfig"] == {"minSize": 0, "maxSize": 2, "desiredSize": 2}
    assert group["updateConfig"] == {"maxUnavailable": 1, "updateStrategy": "MINIMAL"}


def test_both_plugins_tolerate_the_taint_and_know_the_type() -> None:
    graph = graphs.dev()
    for chart in ("nvidia-device-plugin", "aws-efa-k8s-device-plugin"):
        values = graphs.release(graph, chart).inputs["values"]
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in values[
            "tolerations"
        ]
        assert values["nodeSelector"] == {"role": "gpu"}
    values = graphs.release(graph, "aws-efa-k8s-device-plugin").inputs["values"]
    assert values["supportedInstanceLabels"]["values"] == ["g6.12xlarge"]


def test_nodes_without_efa_get_no_efa_plugin() -> None:
    graph = graphs.graph(gpuInstanceType="g6.xlarge", requireEfa=False)
    assert [r.inputs["name"] for r in graph.of_type(graphs.RELEASE)] == ["nvidia-device-plugin"]


def test_the_security_group_of_efa_names_itself_both_ways() -> None:
    graph = graphs.dev()
    for type_ in (
        "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule",
        "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule",
    ):
        (rule,) = graph.of_type(type_)
        assert rule.inputs["ipProtocol"] == "-1"
        assert rule.inputs["securityGroupId"] == rule.inputs["referencedSecurityGroupId"] == "efa-dev-efa-id"


def test_moving_the_expiry_changes_no_launch_template() -> None:
    sooner = graphs.graph(expires="2099-01-01T00:00:00+00:00")
    later = graphs.graph(expires="2100-01-01T00:00:00+00:00")
    for name in ("efa-test-gpu", "efa-test-system"):
        assert (
            sooner.named(graphs.LAUNCH_TEMPLATE, name).inputs
            == later.named(graphs.LAUNCH_TEMPLATE, name).inputs
        )
    (provider,) = later.of_type("pulumi:providers:aws")
    assert "2100-01-01" in str(provider.inputs["defaultTags"])


def test_local_disks_are_a_setting() -> None:
    import base64

    assert "userData" not in graphs.gpu_launch_template(graphs.dev()).inputs
    data = base64.b64decode(graphs.gpu_launch_template(graphs.everything()).inputs["userData"]).decode()
    assert "strategy: RAID0" in data
    assert data.startswith("MIME-Version: 1.0")


def test_autoscaling_starts_from_the_least_and_leaves_the_number_to_the_autoscaler() -> None:
    graph = graphs.everything()
    group = graphs.gpu_group(graph)
    assert group.inputs["scalingConfig"] == {"minSize": 1, "maxSize": 2, "desiredSize": 1}
    assert group.ignore_changes == ("scalingConfig.desiredSize",)
    assert group.inputs["tags"]["k8s.io/cluster-autoscaler/efa-full"] == "owned"
    worker = graphs.ray_cluster(graph).inputs["spec"]["workerGroupSpecs"][0]
    assert (worker["minReplicas"], worker["maxReplicas"]) == (1, 2)
    assert graphs.ray_cluster(graph).inputs["spec"]["enableInTreeAutoscaling"] is True
    assert graphs.release(graph, "cluster-autoscaler").inputs["values"]["autoDiscovery"] == {
        "clusterName": "efa-full"
    }
