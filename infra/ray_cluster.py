"""The RayCluster: one worker per GPU node, a head without GPUs, and the transport environment."""

from __future__ import annotations

import json

import pulumi
import pulumi_kubernetes as k8s

from infra import raycluster_spec as ray
from infra.access import common_labels
from infra.device_plugins import GPU_TOLERATION, selector
from infra.settings import AUTOSCALER_CPU_MILLIS, AUTOSCALER_MEMORY_MIB, StackSettings
from infra.storage import FSX_MOUNT_PATH
from infra.workload import ClusterTarget

WORKER_GROUP = "workers"
FSX_CLAIM = "fsx"
# Ray's object store takes 30 % of the memory, NCCL and the loader's workers share the rest of /dev/shm.
SHM_SHARE = 0.4
NCCL_LOG_FOLDER = "/tmp/nccl"  # noqa: S108


class RayCluster(pulumi.ComponentResource):
    """The RayCluster resource, awaited until head and all workers are ready."""

    resource: k8s.apiextensions.CustomResource

    def __init__(
        self,
        name: str,
        settings: StackSettings,
        target: ClusterTarget,
        depends_on: list[pulumi.Resource],
    ) -> None:
        super().__init__("efa:infra:RayCluster", name, None, target.component())
        spec = ray_cluster_spec(settings).manifest()
        rejected = ray.violations(settings.ray_cluster, spec)
        if rejected:
            raise ValueError(
                "KubeRay would reject this RayCluster, with an event only:\n  - " + "\n  - ".join(rejected)
            )
        self.resource = k8s.apiextensions.CustomResource(
            f"{name}-ray-cluster",
            api_version="ray.io/v1",
            kind="RayCluster",
            metadata=k8s.meta.v1.ObjectMetaArgs(
                name=settings.ray_cluster,
                namespace=settings.namespace,
                labels=common_labels(settings),
                annotations={"pulumi.com/waitFor": json.dumps(ready_conditions(settings))},
            ),
            spec=spec,
            # 45 minutes: the image has about 10 GB and comes through one NAT gateway.
            opts=target.child(
                self,
                [*target.ready, *depends_on],
                pulumi.CustomTimeouts(create="45m", update="45m", delete="15m"),
            ),
        )
        self.register_outputs({})


def ready_conditions(settings: StackSettings) -> list[str]:
    """What ``pulumi up`` waits for. RayClusterProvisioned stays true once it was, so the head counts as
    well."""
    conditions = ["condition=RayClusterProvisioned", "condition=HeadPodReady"]
    if not settings.autoscaling:
        conditions.append(f"jsonpath={{.status.readyWorkerReplicas}}={settings.gpu_count}")
    return conditions


def ray_cluster_spec(settings: StackSettings) -> ray.RayClusterSpec:
    """The spec of the stack's RayCluster; the same on AWS and on an existing cluster but for names and
    sizes."""
    return ray.RayClusterSpec(
        ray_version=settings.ray_version,
        head_group_spec=ray.HeadGroup(
            # 127.0.0.1: the dashboard's job API is reached by exec into this pod only. No CPUs and no GPUs:
            # the job's driver runs here, its tasks do not.
            ray_start_params={"num-cpus": "0", "num-gpus": "0", "dashboard-host": "127.0.0.1"},
            template=_head_template(settings),
        ),
        worker_group_specs=(
            ray.WorkerGroup(
                group_name=WORKER_GROUP,
                replicas=settings.gpu_min_count if settings.autoscaling else settings.gpu_count,
                min_replicas=settings.gpu_min_count if settings.autoscaling else settings.gpu_count,
                max_replicas=settings.gpu_count,
                ray_start_params={"num-gpus": str(settings.gpus)},
                template=_worker_template(settings),
            ),
        ),
        auth_options=ray.AuthOptions(mode="token"),
        # Without it KubeRay ignores a new image or environment until somebody deletes the pods.
        upgrade_strategy=ray.UpgradeStrategy(type="Recreate"),
        enable_in_tree_autoscaling=True if settings.autoscaling else None,
        autoscaler_options=_autoscaler() if settings.autoscaling else None,
    )


def transport_environment(settings: StackSettings) -> dict[str, str]:
    """The environment that decides how NCCL talks between nodes.

    ``NCCL_NET=Libfabric`` makes NCCL fail where it would fall back to TCP sockets silently. The debug file
    is a default: each attempt of a job sets its own folder.
    """
    common = {
        # The interface of a pod on EKS; pod-id-link0 beside it leads nowhere.
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": f"{NCCL_LOG_FOLDER}/%h.%p.log",
    }
    if settings.efa == 0:
        # The image sets FI_PROVIDER=efa.
        return {**common, "FI_PROVIDER": "tcp", "NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}
    environment = {**common, "FI_PROVIDER": "efa", "NCCL_NET": "Libfabric", "NCCL_NET_PLUGIN": "ofi"}
    if settings.instance.interconnect.kind == "pcie":
        # About twice the bandwidth between GPUs without NVLink (EFA cheatsheet of awsome-distributed-ai).
        environment["NCCL_SHM_USE_CUDA_MEMCPY"] = "1"
        # These nodes reserve no huge pages, and a data loader that forks fails with them.
        environment["FI_EFA_USE_HUGE_PAGE"] = "0"
    return environment


def common_environment(settings: StackSettings) -> tuple[ray.EnvVar, ...]:
    """What head and workers both need."""
    plain = {
        # The AWS image reports its use otherwise.
        "OPT_OUT_TRACKING": "true",
        # Ray drops lines that several workers print alike: those of NCCL and of every rank's errors.
        "RAY_DEDUP_LOGS": "0",
        # 60 s by default, after which Ray Train starts over without end; cold imports of torch take longer.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
        # Models and data sets go to the sized volume, not to the container's layer.
        "HF_HOME": "/tmp/ray/huggingface",  # noqa: S108
    }
    if settings.on_aws:
        plain |= {"AWS_REGION": settings.region, "AWS_DEFAULT_REGION": settings.region}
    if settings.storage_endpoint_url:
        plain["AWS_ENDPOINT_URL"] = settings.storage_endpoint_url
        plain["AWS_DEFAULT_REGION"] = settings.region
    return (
        *(ray.EnvVar(name=name, value=value) for name, value in plain.items()),
        *(
            ray.EnvVar(name=key, value_from=ray.EnvSource(secret_key_ref=ray.SecretKey(name=name, key=key)))
            for key, name in settings.secret_variables.items()
        ),
    )


def _head_template(settings: StackSettings) -> ray.PodTemplate:
    size = {
        "cpu": _cpu(settings.head_cpu_millis),
        "memory": f"{settings.head_memory_mib}Mi",
        "ephemeral-storage": f"{settings.head_scratch_gib}Gi",
    }
    return _template(
        settings,
        container=ray.Container(
            name="ray-head",
            image=settings.image_reference,
            image_pull_policy=settings.image_pull_policy,
            env=(
                # The image's CUDA libraries look for a driver that this node does not have.
                ray.EnvVar(name="NVIDIA_VISIBLE_DEVICES", value="void"),
                *common_environment(settings),
            ),
            resources=ray.Resources(requests=size, limits=size),
            # The dashboard's port is not named, so the head service does not publish it.
            ports=(ray.Port(name="gcs-server", container_port=6379),),
            volume_mounts=_mounts(settings),
            lifecycle=_stop_ray(),
            security_context=ray.SecurityContext(allow_privilege_escalation=False),
        ),
        selector_label=settings.system_selector,
        memory_mib=settings.head_memory_mib,
        scratch_gib=settings.head_scratch_gib,
        grace_seconds=60,
    )


def _worker_template(settings: StackSettings) -> ray.PodTemplate:
    size = {
        "cpu": _cpu(settings.worker_cpu_millis),
        "memory": f"{settings.worker_memory_mib}Mi",
        "ephemeral-storage": f"{settings.worker_scratch}Gi",
    }
    if settings.gpus:
        size["nvidia.com/gpu"] = str(settings.gpus)
    if settings.efa:
        size["vpc.amazonaws.com/efa"] = str(settings.efa)
    transport = [
        ray.EnvVar(name=name, value=value) for name, value in transport_environment(settings).items()
    ]
    return _template(
        settings,
        container=ray.Container(
            name="ray-worker",
            image=settings.image_reference,
            image_pull_policy=settings.image_pull_policy,
            env=(*transport, *common_environment(settings)),
            resources=ray.Resources(requests=size, limits=size),
            volume_mounts=(*_mounts(settings), ray.VolumeMount(name="nccl-logs", mount_path=NCCL_LOG_FOLDER)),
            lifecycle=_stop_ray(),
            security_context=ray.SecurityContext(allow_privilege_escalation=False),
        ),
        selector_label=settings.gpu_selector,
        memory_mib=settings.worker_memory_mib,
        scratch_gib=settings.worker_scratch,
        # Time to finish the write of a checkpoint.
        grace_seconds=120,
        worker=True,
    )


def _template(
    settings: StackSettings,
    *,
    container: ray.Container,
    selector_label: str,
    memory_mib: int,
    scratch_gib: int,
    grace_seconds: int,
    worker: bool = False,
) -> ray.PodTemplate:
    volumes = [
        ray.Volume(
            name="shm", empty_dir=ray.EmptyDir(medium="Memory", size_limit=f"{int(memory_mib * SHM_SHARE)}Mi")
        ),
        ray.Volume(name="ray", empty_dir=ray.EmptyDir(size_limit=f"{scratch_gib}Gi")),
    ]
    if worker:
        volumes.append(ray.Volume(name="nccl-logs", empty_dir=ray.EmptyDir(size_limit="1Gi")))
    if settings.fsx:
        volumes.append(ray.Volume(name="fsx", persistent_volume_claim=ray.ClaimSource(claim_name=FSX_CLAIM)))
    return ray.PodTemplate(
        metadata=ray.PodMetadata(labels=common_labels(settings)),
        spec=ray.PodSpec(
            containers=(container,),
            volumes=tuple(volumes),
            node_selector=selector(selector_label),
            service_account_name=settings.service_account,
            automount_service_account_token=settings.autoscaling and not worker,
            termination_grace_period_seconds=grace_seconds,
            tolerations=(ray.Toleration.model_validate(GPU_TOLERATION),) if worker else None,
            affinity=_one_per_node(settings) if worker else None,
        ),
    )


def _mounts(settings: StackSettings) -> tuple[ray.VolumeMount, ...]:
    mounts = [
        ray.VolumeMount(name="shm", mount_path="/dev/shm"),  # noqa: S108
        ray.VolumeMount(name="ray", mount_path="/tmp/ray"),  # noqa: S108
    ]
    if settings.fsx:
        mounts.append(ray.VolumeMount(name="fsx", mount_path=FSX_MOUNT_PATH))
    return tuple(mounts)


def _one_per_node(settings: StackSettings) -> ray.Affinity:
    labels = {"ray.io/cluster": settings.ray_cluster, "ray.io/group": WORKER_GROUP}
    term = ray.PodAffinityTerm(
        label_selector=ray.LabelSelector(match_labels=labels), topology_key="kubernetes.io/hostname"
    )
    return ray.Affinity(pod_anti_affinity=ray.PodAntiAffinity(required=(term,)))


def _stop_ray() -> ray.Lifecycle:
    return ray.Lifecycle(pre_stop=ray.Handler(exec=ray.Exec(command=("/bin/sh", "-c", "ray stop"))))


def _autoscaler() -> ray.AutoscalerOptions:
    size = {"cpu": _cpu(AUTOSCALER_CPU_MILLIS), "memory": f"{AUTOSCALER_MEMORY_MIB}Mi"}
    return ray.AutoscalerOptions(
        version="v2", idle_timeout_seconds=300, resources=ray.Resources(requests=size, limits=size)
    )


def _cpu(millis: int) -> str:
    """``2`` or ``500m``: the form in which Kubernetes gives it back."""
    return str(millis // 1000) if millis % 1000 == 0 else f"{millis}m"
