"""The program: settings, AWS layer or an existing cluster, workload layer, outputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pulumi
import pulumi_aws as aws
import pulumi_kubernetes as k8s

from infra.access import Access
from infra.autoscaler import Autoscaler
from infra.cluster import Cluster
from infra.cost import CostReport, UnknownPriceError, price
from infra.device_plugins import DevicePlugins
from infra.fixed import OUTPUT_NAME as FIXED_SETTINGS
from infra.fixed import fixed_settings, once_unchanged
from infra.guardrails import Guardrails
from infra.kuberay import KubeRay
from infra.network import Network
from infra.node_groups import GpuNodes, NodeRole, SystemNodes
from infra.observability import DASHBOARD_COMMAND, CloudWatch, Prometheus
from infra.outputs import OUTPUT_NAME, KubeAccess, StackOutputs
from infra.ray_cluster import RayCluster, transport_environment
from infra.settings import SettingsError, SettingsSource, StackSettings, load_settings, undeployable
from infra.shared_volume import SharedVolume
from infra.storage import LustreMount, Storage
from infra.workload import ClusterTarget


@dataclass(frozen=True)
class Platform:
    """The cluster a workload goes to, whoever made it."""

    target: ClusterTarget
    access: pulumi.Output[dict[str, Any]]
    storage_uri: pulumi.Output[str]
    lustre: LustreMount | None = None
    cluster: Cluster | None = None
    gpu_nodes: GpuNodes | None = None


def program() -> None:
    """The Pulumi program of this project; ``__main__`` runs it, and so does the Automation API."""
    settings = _checked_settings()
    for warning in settings.warnings:
        pulumi.log.warn(warning)
    deploy(settings, _price(settings))


def _checked_settings() -> StackSettings:
    """The stack's settings; mistakes end the run with their list and without a traceback."""
    try:
        settings = load_settings()
        refused = [] if pulumi.runtime.is_dry_run() else undeployable(settings)
        if refused:
            raise SettingsError(refused, SettingsSource(settings.stack))
    except SettingsError as error:
        raise pulumi.RunError(str(error)) from error
    return settings


def deploy(settings: StackSettings, cost: CostReport | None) -> None:
    """Registers all resources and outputs of a stack."""
    platform = create_aws(settings) if settings.on_aws else use_existing(settings)
    create_workload(settings, platform)
    export_outputs(settings, platform, cost)


def create_aws(settings: StackSettings) -> Platform:
    """VPC, control plane, nodes, storage and guardrails."""
    name = settings.name
    provider = aws.Provider(
        f"{name}-aws",
        region=once_unchanged(settings),
        # A destroy with the credentials of another account would empty the state while the resources go on
        # billing.
        allowed_account_ids=[settings.account_id] if settings.account_id else None,  # none: a preview
        default_tags=aws.ProviderDefaultTagsArgs(tags=settings.tags),
    )
    on_aws = pulumi.ResourceOptions(providers={"aws": provider})
    network = Network(name, settings, on_aws)
    cluster = Cluster(name, settings, network, provider, on_aws)
    storage = Storage(name, settings, cluster, network, on_aws)
    role = NodeRole(name, on_aws)
    system_nodes = SystemNodes(name, settings, cluster, network, role, on_aws)
    gpu_nodes = GpuNodes(name, settings, cluster, network, role, on_aws)
    coredns = cluster.create_coredns([system_nodes.group])
    Guardrails(name, settings, gpu_nodes, on_aws)
    if settings.observability == "cloudwatch":
        CloudWatch(name, settings, cluster, [system_nodes.group], on_aws)
    target = ClusterTarget(
        provider=cluster.kubernetes,
        deleted_with=cluster.control_plane,
        ready=(system_nodes.group, coredns, storage.pod_identity),
    )
    return Platform(target, cluster.access, storage.uri, storage.lustre, cluster, gpu_nodes)


def use_existing(settings: StackSettings) -> Platform:
    """A cluster that somebody else made, reached by a kubeconfig of the user."""
    assert settings.kubeconfig is not None
    assert settings.storage_uri is not None
    kubeconfig = str(Path(settings.kubeconfig).expanduser())
    provider = k8s.Provider(
        f"{settings.name}-kubernetes",
        # The path, not the content: a kubeconfig may hold a token, and inputs are stored in the state.
        kubeconfig=kubeconfig,
        context=settings.kube_context,
        enable_server_side_apply=True,
        cluster_identifier=settings.kube_context or kubeconfig,
    )
    access = KubeAccess(kubeconfig_path=kubeconfig, context=settings.kube_context).model_dump(mode="json")
    return Platform(
        ClusterTarget(provider=provider),
        pulumi.Output.from_input(access),
        pulumi.Output.from_input(settings.storage_uri),
    )


def create_workload(settings: StackSettings, platform: Platform) -> None:
    """Namespace, device plugins, operator and RayCluster, in the order in which they need each other."""
    name, target = settings.name, platform.target
    access = Access(name, settings, target)
    needed: list[pulumi.Resource] = list(access.ready)
    if platform.gpu_nodes:
        needed.append(platform.gpu_nodes.group)
    if settings.device_plugins:
        needed += DevicePlugins(name, settings, target).ready
    if settings.kuberay:
        needed += KubeRay(name, settings, target).ready
    if platform.cluster and settings.autoscaling:
        needed += Autoscaler(name, settings, platform.cluster, target).ready
    if platform.lustre:
        needed += SharedVolume(name, settings, target, platform.lustre, access.ready).ready
    RayCluster(name, settings, target, needed)
    if settings.observability == "prometheus":
        Prometheus(name, settings, target)


def export_outputs(settings: StackSettings, platform: Platform, cost: CostReport | None) -> None:
    """``training`` for the CLI, the rest for people."""
    training = pulumi.Output.all(access=platform.access, uri=platform.storage_uri).apply(
        lambda known: stack_outputs(settings, known["access"], known["uri"], cost).model_dump(mode="json")
    )
    pulumi.export(OUTPUT_NAME, training)
    if settings.on_aws:
        pulumi.export(FIXED_SETTINGS, fixed_settings(settings))
    pulumi.export("cluster_name", settings.name)
    pulumi.export("storage_uri", platform.storage_uri)
    pulumi.export("kubectl", kubectl_hint(settings))
    if settings.observability == "prometheus":
        pulumi.export("dashboard", DASHBOARD_COMMAND)
    if platform.gpu_nodes:
        pulumi.export("gpu_node_group", platform.gpu_nodes.group.node_group_name)
    if cost:
        pulumi.export("hourly_cost_usd", round(cost.hourly_usd, 4))
        pulumi.export("hourly_cost_parts", {line.name: round(line.hourly_usd, 4) for line in cost.lines})
        pulumi.export("prices_of", f"{cost.region}, {cost.table_date}")


def stack_outputs(
    settings: StackSettings, access: dict[str, Any], storage_uri: str, cost: CostReport | None
) -> StackOutputs:
    return StackOutputs(
        stack=settings.stack,
        cluster_name=settings.name,
        region=settings.region if settings.on_aws else None,
        kube=KubeAccess.model_validate(access),
        namespace=settings.namespace,
        service_account=settings.service_account,
        ray_cluster=settings.ray_cluster,
        ray_version=settings.ray_version,
        image=settings.image_reference,
        image_digest=settings.image_digest,
        num_workers=settings.gpu_count,
        gpus_per_worker=settings.gpus,
        efa_per_worker=settings.efa,
        instance_type=settings.gpu_instance_type if settings.on_aws else None,
        worker_cpu=f"{settings.worker_cpu_millis}m",
        worker_memory=f"{settings.worker_memory_mib}Mi",
        storage_uri=storage_uri,
        storage_endpoint_url=settings.storage_endpoint_url,
        required_transport=settings.required_transport,
        transport_env=transport_environment(settings),
        hourly_usd=cost.hourly_usd if cost else None,
        expires=settings.expires.isoformat() if settings.expires else None,
        gpudirect=settings.instance.gpudirect and settings.efa > 0,
    )


def kubectl_hint(settings: StackSettings) -> str:
    """The command that makes kubectl reach the cluster."""
    if settings.on_aws:
        return f"aws eks update-kubeconfig --name {settings.name} --region {settings.region}"
    context = f" --context {settings.kube_context}" if settings.kube_context else ""
    return f"kubectl --kubeconfig {settings.kubeconfig}{context} get pods --namespace {settings.namespace}"


def _price(settings: StackSettings) -> CostReport | None:
    """The price of the stack, None with a warning where a price is not known."""
    if not settings.on_aws:
        return None
    try:
        return price(settings)
    except UnknownPriceError as error:
        pulumi.log.warn(str(error))
        return None
