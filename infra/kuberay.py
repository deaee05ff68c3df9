"""The KubeRay operator and, as a step of their own, its CRDs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pulumi
import pulumi_kubernetes as k8s

from infra.access import common_labels
from infra.crds import packaged_crds, read_crds
from infra.device_plugins import release, selector
from infra.settings import StackSettings
from infra.versions import KUBERAY_REPOSITORY
from infra.workload import ClusterTarget

OPERATOR_NAMESPACE = "kuberay-operator"


class KubeRay(pulumi.ComponentResource):
    """CRDs by server-side apply, then the operator on the system nodes.

    The CRDs are resources of this stack, so that an upgrade of KubeRay upgrades them: Helm does not.
    """

    ready: list[pulumi.Resource]

    def __init__(self, name: str, settings: StackSettings, target: ClusterTarget) -> None:
        super().__init__("efa:infra:KubeRay", name, None, target.component())
        crds = [
            k8s.apiextensions.CustomResource(
                f"{name}-{crd['metadata']['name']}",
                api_version=crd["apiVersion"],
                kind=crd["kind"],
                metadata=crd["metadata"],
                spec=crd["spec"],
                opts=target.child(self, target.ready),
            )
            for crd in _crds(settings)
        ]
        namespace = k8s.core.v1.Namespace(
            f"{name}-kuberay",
            metadata=k8s.meta.v1.ObjectMetaArgs(name=OPERATOR_NAMESPACE, labels=common_labels(settings)),
            opts=target.child(self, target.ready, pulumi.CustomTimeouts(delete="15m")),
        )
        chart, repository = _chart(settings)
        operator = release(
            self,
            target,
            f"{name}-kuberay-operator",
            chart=chart,
            version=settings.kuberay_version,
            repository=repository,
            namespace=OPERATOR_NAMESPACE,
            values=operator_values(settings),
            depends_on=[namespace, *crds],
        )
        self.ready = [operator]
        self.register_outputs({})


def operator_values(settings: StackSettings) -> dict[str, Any]:
    values: dict[str, Any] = {
        "nodeSelector": selector(settings.system_selector),
        # The chart's limit of 100m lets it fall behind the probes while it starts (measured: 85 s to lead).
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"cpu": "1", "memory": "512Mi"},
        },
    }
    if settings.kuberay_image:
        repository, _, tag = settings.kuberay_image.rpartition(":")
        values["image"] = {"repository": repository, "tag": tag, "pullPolicy": settings.image_pull_policy}
    return values


def _crds(settings: StackSettings) -> list[dict[str, Any]]:
    return read_crds(Path(_from_project(settings.kuberay_crds))) if settings.kuberay_crds else packaged_crds()


def _chart(settings: StackSettings) -> tuple[str, str | None]:
    """Chart and repository; a chart on disk has none."""
    chart = settings.kuberay_chart
    return (_from_project(chart), None) if "/" in chart else (chart, KUBERAY_REPOSITORY)


def _from_project(path: str) -> str:
    """A path of the settings: relative ones start at the project's folder, wherever Pulumi runs the program."""
    return str(Path(pulumi.runtime.get_root_directory() or ".") / Path(path).expanduser())
