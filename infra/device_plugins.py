"""The device plugins that make GPUs and EFA interfaces schedulable. The AMI has the drivers, not these."""

from __future__ import annotations

from typing import Any

import pulumi
import pulumi_kubernetes as k8s

from infra.node_groups import GPU_TAINT_KEY
from infra.settings import StackSettings
from infra.versions import (
    EFA_DEVICE_PLUGIN_VERSION,
    EKS_CHARTS_REPOSITORY,
    NVIDIA_DEVICE_PLUGIN_REPOSITORY,
    NVIDIA_DEVICE_PLUGIN_VERSION,
)
from infra.workload import ClusterTarget

GPU_TOLERATION = {"key": GPU_TAINT_KEY, "operator": "Exists", "effect": "NoSchedule"}


class DevicePlugins(pulumi.ComponentResource):
    """NVIDIA device plugin, and the EFA device plugin where nodes have EFA, on the GPU nodes only."""

    ready: list[pulumi.Resource]

    def __init__(self, name: str, settings: StackSettings, target: ClusterTarget) -> None:
        super().__init__("efa:infra:DevicePlugins", name, None, target.component())
        self.ready = [
            release(
                self,
                target,
                f"{name}-nvidia-device-plugin",
                chart="nvidia-device-plugin",
                version=NVIDIA_DEVICE_PLUGIN_VERSION,
                repository=NVIDIA_DEVICE_PLUGIN_REPOSITORY,
                namespace="kube-system",
                values=nvidia_values(settings),
            )
        ]
        if settings.efa:
            self.ready.append(
                release(
                    self,
                    target,
                    f"{name}-efa-device-plugin",
                    chart="aws-efa-k8s-device-plugin",
                    version=EFA_DEVICE_PLUGIN_VERSION,
                    repository=EKS_CHARTS_REPOSITORY,
                    namespace="kube-system",
                    values=efa_values(settings),
                )
            )
        self.register_outputs({})


def nvidia_values(settings: StackSettings) -> dict[str, Any]:
    return {"nodeSelector": selector(settings.gpu_selector), "tolerations": [GPU_TOLERATION]}


def efa_values(settings: StackSettings) -> dict[str, Any]:
    """The chart tolerates no taint, and its DaemonSet wants zero pods, silently, for a type it does not
    list."""
    return {
        "nodeSelector": selector(settings.gpu_selector),
        "tolerations": [
            GPU_TOLERATION,
            {"key": "aws.amazon.com/efa", "operator": "Exists", "effect": "NoSchedule"},
        ],
        "supportedInstanceLabels": {
            "keys": ["node.kubernetes.io/instance-type"],
            "values": [settings.gpu_instance_type],
        },
    }


def selector(label: str) -> dict[str, str]:
    key, _, value = label.partition("=")
    return {key: value}


def release(
    parent: pulumi.Resource,
    target: ClusterTarget,
    name: str,
    *,
    chart: str,
    version: str,
    repository: str | None,
    namespace: str,
    values: dict[str, Any],
    depends_on: list[pulumi.Resource] | None = None,
    skip_crds: bool = True,
) -> k8s.helm.v3.Release:
    """A Helm release that is rolled back when it fails, so that the next update does not find it half
    installed.

    Without a repository ``chart`` is a folder on disk. CRDs are skipped where they have a step of their own:
    Helm installs them once and never upgrades them.
    """
    return k8s.helm.v3.Release(
        name,
        name=chart.rstrip("/").rpartition("/")[2],
        chart=chart,
        version=version if repository else None,
        repository_opts=k8s.helm.v3.RepositoryOptsArgs(repo=repository) if repository else None,
        namespace=namespace,
        values=values,
        skip_crds=skip_crds,
        atomic=True,
        cleanup_on_fail=True,
        timeout=600,
        opts=target.child(parent, [*target.ready, *(depends_on or [])]),
    )
