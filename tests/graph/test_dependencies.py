"""What needs what, what goes with what, and the order in which a destroy runs."""

from __future__ import annotations

import pytest

from infra.recorder import Graph, Resource
from tests.graph import graphs


def destroy_order(graph: Graph) -> list[str]:
    """URNs in an order in which the engine may delete them: each before what it needs."""
    order: list[str] = []
    done: set[str] = set()

    def visit(resource: Resource) -> None:
        if resource.urn in done:
            return
        done.add(resource.urn)
        for other in graph.resources:
            if graph.depends_on(other, resource):
                visit(other)
        order.append(resource.urn)

    for resource in graph.resources:
        visit(resource)
    return order


def _addon(graph: Graph, name: str) -> Resource:
    return next(r for r in graph.of_type("aws:eks/addon:Addon") if r.inputs["addonName"] == name)


def _chain(graph: Graph) -> list[tuple[str, Resource]]:
    """The order of decisions/002, from the first to the last."""
    (control_plane,) = graph.of_type("eks:index:Cluster")
    (provider,) = graph.of_type("pulumi:providers:kubernetes")
    return [
        ("log group", graph.named("aws:cloudwatch/logGroup:LogGroup", "efa-dev-control-plane")),
        ("control plane", control_plane),
        ("system nodes", graphs.system_group(graph)),
        ("coredns", _addon(graph, "coredns")),
        ("nvidia plugin", graphs.release(graph, "nvidia-device-plugin")),
        ("raycluster", graphs.ray_cluster(graph)),
        ("kubernetes provider", provider),
    ]


def test_each_step_needs_the_one_before() -> None:
    graph = graphs.dev()
    *chain, (_, provider) = _chain(graph)
    for (earlier_name, earlier), (later_name, later) in zip(chain, chain[1:], strict=False):
        assert graph.depends_on(later, earlier), f"{later_name} does not wait for {earlier_name}"
    assert graph.depends_on(provider, chain[1][1]), "access entries come with the control plane"


@pytest.mark.parametrize(
    "needed", ["gpu nodes", "efa plugin", "operator", "pod identity", "policy", "service account"]
)
def test_the_ray_cluster_waits_for(needed: str) -> None:
    graph = graphs.dev()
    resource = {
        "gpu nodes": graphs.gpu_group(graph),
        "efa plugin": graphs.release(graph, "aws-efa-k8s-device-plugin"),
        "operator": graphs.release(graph, "kuberay-operator"),
        "pod identity": graph.named("aws:eks/podIdentityAssociation:PodIdentityAssociation", "efa-dev-job"),
        "policy": graph.named("kubernetes:networking.k8s.io/v1:NetworkPolicy", "efa-dev-default-deny"),
        "service account": graph.named("kubernetes:core/v1:ServiceAccount", "efa-dev-service-account"),
    }[needed]
    assert graph.depends_on(graphs.ray_cluster(graph), resource)


def test_nodes_wait_for_their_policies_their_route_and_the_rules_of_efa() -> None:
    graph = graphs.dev()
    for group in (graphs.system_group(graph), graphs.gpu_group(graph)):
        for attachment in graph.of_type("aws:iam/rolePolicyAttachment:RolePolicyAttachment"):
            assert graph.depends_on(group, attachment), attachment.name
        for gateway in graph.of_type("aws:ec2/natGateway:NatGateway"):
            assert graph.depends_on(group, gateway)
        for route in graph.of_type("aws:ec2/routeTableAssociation:RouteTableAssociation"):
            assert graph.depends_on(group, route)
    for rule in (
        *graph.of_type("aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"),
        *graph.of_type("aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule"),
    ):
        assert graph.depends_on(graphs.gpu_group(graph), rule)


def test_the_crds_are_there_before_the_operator() -> None:
    graph = graphs.dev()
    crds = graph.of_type(graphs.CRD)
    assert {crd.inputs["metadata"]["name"] for crd in crds} == {
        "rayclusters.ray.io",
        "raycronjobs.ray.io",
        "rayjobs.ray.io",
        "rayservices.ray.io",
    }
    operator = graphs.release(graph, "kuberay-operator")
    assert operator.inputs["skipCrds"] is True
    assert all(graph.depends_on(operator, crd) for crd in crds)


def test_coredns_waits_for_system_nodes_and_not_for_gpu_nodes() -> None:
    graph = graphs.dev()
    coredns = _addon(graph, "coredns")
    assert graph.depends_on(coredns, graphs.system_group(graph))
    assert not graph.depends_on(coredns, graphs.gpu_group(graph))


@pytest.mark.parametrize("recorded", [graphs.dev, graphs.everything], ids=["dev", "everything"])
def test_everything_in_the_cluster_goes_with_the_cluster(recorded: object) -> None:
    graph: Graph = recorded()  # type: ignore[operator]
    (control_plane,) = graph.of_type("eks:index:Cluster")
    inside = [r for r in graph.resources if r.type.startswith("kubernetes:")]
    assert len(inside) > 15
    assert {r.name: r.deleted_with for r in inside if r.deleted_with != control_plane.urn} == {}
    outside = [r for r in graph.resources if r.type.startswith("aws:")]
    assert {r.name for r in outside if r.deleted_with} == set(), "what bills must really be deleted"


def test_a_cluster_of_somebody_else_outlives_the_stack() -> None:
    assert {r.deleted_with for r in graphs.local().resources} == {""}


@pytest.mark.parametrize(
    "recorded", [graphs.dev, graphs.local, graphs.everything], ids=["dev", "local", "everything"]
)
def test_no_resource_uses_a_default_provider(recorded: object) -> None:
    graph: Graph = recorded()  # type: ignore[operator]
    for resource in graph.resources:
        if resource.custom and not resource.type.startswith("pulumi:"):
            package = resource.type.partition(":")[0]
            provider = graph.by_urn[resource.provider.rpartition("::")[0]]
            assert provider.type == f"pulumi:providers:{package}", resource.name


def test_one_aws_provider_and_one_for_kubernetes() -> None:
    providers = [r.type for r in graphs.everything().resources if r.type.startswith("pulumi:providers")]
    assert sorted(providers) == ["pulumi:providers:aws", "pulumi:providers:kubernetes"]
    assert [r.type for r in graphs.local().resources if r.type.startswith("pulumi:providers")] == [
        "pulumi:providers:kubernetes"
    ]


def test_destroy_deletes_nodes_before_the_cluster_and_the_network() -> None:
    graph = graphs.everything()
    order = destroy_order(graph)
    position = {urn: index for index, urn in enumerate(order)}

    def before(first: Resource, second: Resource) -> bool:
        return position[first.urn] < position[second.urn]

    (control_plane,) = graph.of_type("aws:eks/cluster:Cluster")
    (vpc,) = graph.of_type("aws:ec2/vpc:Vpc")
    security_group = graph.named("aws:ec2/securityGroup:SecurityGroup", "efa-full-efa")
    for group in (graphs.gpu_group(graph), graphs.system_group(graph)):
        assert before(group, control_plane)
        assert all(before(group, subnet) for subnet in graph.of_type("aws:ec2/subnet:Subnet"))
        assert all(before(group, gateway) for gateway in graph.of_type("aws:ec2/natGateway:NatGateway"))
    assert before(graphs.gpu_group(graph), security_group)
    assert before(control_plane, graph.named("aws:cloudwatch/logGroup:LogGroup", "efa-full-control-plane"))
    assert before(control_plane, vpc)
    for gateway in graph.of_type("aws:ec2/natGateway:NatGateway"):
        assert before(gateway, graph.of_type("aws:ec2/internetGateway:InternetGateway")[0])
    schedule = graph.of_type("aws:scheduler/schedule:Schedule")[0]
    assert before(schedule, graphs.gpu_group(graph))
    file_system = graph.of_type("aws:fsx/lustreFileSystem:LustreFileSystem")[0]
    assert before(file_system, vpc)


def test_destroy_of_a_local_stack_removes_the_ray_cluster_before_its_operator() -> None:
    graph = graphs.local()
    order = destroy_order(graph)
    operator = graphs.release(graph, "kuberay-operator")
    assert order.index(graphs.ray_cluster(graph).urn) < order.index(operator.urn)
    assert all(order.index(operator.urn) < order.index(crd.urn) for crd in graph.of_type(graphs.CRD))


def test_a_gpu_group_is_never_doubled() -> None:
    assert graphs.gpu_group(graphs.dev()).delete_before_replace


def test_slow_resources_have_time_and_no_more() -> None:
    graph = graphs.dev()
    assert graphs.ray_cluster(graph).timeouts == {"create": "45m", "update": "45m", "delete": "15m"}
    assert graphs.gpu_group(graph).timeouts == {"create": "40m", "update": "90m", "delete": "40m"}
    assert graph.named("aws:ec2/securityGroup:SecurityGroup", "efa-dev-efa").timeouts == {"delete": "30m"}
