"""Namespace of the jobs: who may enter it, which pods may talk, and with which identity they run."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any

import pulumi
import pulumi_kubernetes as k8s

from infra.cluster import USERS_GROUP
from infra.settings import MONITORING_NAMESPACE, StackSettings, storage_endpoint
from infra.workload import ClusterTarget

POD_IDENTITY_ADDRESS = "169.254.170.23/32"
INSTANCE_METADATA_ADDRESS = "169.254.169.254/32"
PROMETHEUS_PODS = {"app.kubernetes.io/name": "prometheus"}
# KubeRay's default for metrics-export-port; head and workers name it "metrics".
RAY_METRICS_PORT = 8080


class Access(pulumi.ComponentResource):
    """Namespace, service account, role of the people who submit, and default-deny network policies.

    Network policies see IP traffic only: EFA bypasses the kernel, its border is the security group.
    """

    namespace: pulumi.Input[str]
    ready: list[pulumi.Resource]

    def __init__(self, name: str, settings: StackSettings, target: ClusterTarget) -> None:
        super().__init__("efa:infra:Access", name, None, target.component())
        self._name = name
        self._settings = settings
        self._target = target
        self.ready = []
        if settings.create_namespace:
            namespace = k8s.core.v1.Namespace(
                f"{name}-namespace",
                metadata=k8s.meta.v1.ObjectMetaArgs(
                    name=settings.namespace, labels=namespace_labels(settings)
                ),
                opts=target.child(self, target.ready, pulumi.CustomTimeouts(delete="15m")),
            )
            self.ready.append(namespace)
        self.ready.append(self._create_service_account())
        self._create_submit_role()
        if settings.network_policies:
            self.ready += self._create_network_policies()
        self.register_outputs({})

    def _metadata(self, name: str) -> k8s.meta.v1.ObjectMetaArgs:
        return k8s.meta.v1.ObjectMetaArgs(
            name=name, namespace=self._settings.namespace, labels=common_labels(self._settings)
        )

    def _create_service_account(self) -> pulumi.Resource:
        return k8s.core.v1.ServiceAccount(
            f"{self._name}-service-account",
            metadata=self._metadata(self._settings.service_account),
            # Ray pods do not call the Kubernetes API, unless Ray's autoscaler does.
            automount_service_account_token=self._settings.autoscaling,
            opts=self._target.child(self, self.ready),
        )

    def _create_submit_role(self) -> None:
        """Submitting a job is a few exec calls into the head pod."""
        role = k8s.rbac.v1.Role(
            f"{self._name}-submit",
            metadata=self._metadata("finetune-submit"),
            rules=[
                _allow("", ["pods", "pods/log", "events"], ["get", "list", "watch"]),
                # Since Kubernetes 1.35 exec needs create; kubectl sends a GET first.
                _allow("", ["pods/exec"], ["get", "create"]),
                _allow("ray.io", ["rayclusters"], ["get", "list", "watch"]),
            ],
            opts=self._target.child(self, self.ready),
        )
        k8s.rbac.v1.RoleBinding(
            f"{self._name}-submit",
            metadata=self._metadata("finetune-submit"),
            role_ref=k8s.rbac.v1.RoleRefArgs(
                api_group="rbac.authorization.k8s.io", kind="Role", name="finetune-submit"
            ),
            subjects=[
                k8s.rbac.v1.SubjectArgs(kind="Group", name=USERS_GROUP, api_group="rbac.authorization.k8s.io")
            ],
            opts=self._target.child(self, [*self.ready, role]),
        )

    def _create_network_policies(self) -> list[pulumi.Resource]:
        namespace = list(self.ready)
        return [
            k8s.apiextensions.CustomResource(
                f"{self._name}-{policy}",
                api_version="networking.k8s.io/v1",
                kind="NetworkPolicy",
                metadata=self._metadata(policy),
                spec=spec,
                opts=self._target.child(self, namespace),
            )
            for policy, spec in network_policies(self._settings).items()
        ]


def _allow(group: str, resources: Sequence[str], verbs: Sequence[str]) -> k8s.rbac.v1.PolicyRuleArgs:
    return k8s.rbac.v1.PolicyRuleArgs(api_groups=[group], resources=list(resources), verbs=list(verbs))


def common_labels(settings: StackSettings) -> dict[str, str]:
    return {
        "app.kubernetes.io/part-of": "efa-finetune",
        "app.kubernetes.io/managed-by": "pulumi",
        "efa-finetune/stack": settings.stack,
    }


def namespace_labels(settings: StackSettings) -> dict[str, str]:
    """Baseline pod security: no privileged pod, no host network, no host path."""
    return {
        **common_labels(settings),
        "pod-security.kubernetes.io/enforce": "baseline",
        "pod-security.kubernetes.io/warn": "baseline",
    }


def network_policies(settings: StackSettings) -> dict[str, dict[str, Any]]:
    """Default deny, and what a training job needs: its own Ray pods, DNS, HTTPS outside, its credentials,
    its store; where Prometheus watches, its scrapes.

    The instance metadata service stays closed. Probes come from the node itself, which policies do not cover.
    """
    ray_pods = {"matchLabels": {"ray.io/cluster": settings.ray_cluster}}
    policies: dict[str, dict[str, Any]] = {
        "default-deny": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
        "ray-internal": {
            "podSelector": ray_pods,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": ray_pods}]}],
            "egress": [{"to": [{"podSelector": ray_pods}]}],
        },
        "dns": {
            "podSelector": ray_pods,
            "policyTypes": ["Egress"],
            "egress": [{"ports": [_port(53, "UDP"), _port(53)]}],
        },
        "https": {
            "podSelector": ray_pods,
            "policyTypes": ["Egress"],
            "egress": [
                {
                    "to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": [INSTANCE_METADATA_ADDRESS]}}],
                    "ports": [_port(443)],
                }
            ],
        },
    }
    if settings.on_aws:
        policies["pod-identity"] = {
            "podSelector": ray_pods,
            "policyTypes": ["Egress"],
            "egress": [{"to": [{"ipBlock": {"cidr": POD_IDENTITY_ADDRESS}}], "ports": [_port(80)]}],
        }
    if settings.observability == "prometheus":
        policies["metrics"] = {
            "podSelector": ray_pods,
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [
                        {
                            "namespaceSelector": {
                                "matchLabels": {"kubernetes.io/metadata.name": MONITORING_NAMESPACE}
                            },
                            "podSelector": {"matchLabels": PROMETHEUS_PODS},
                        }
                    ],
                    "ports": [_port(RAY_METRICS_PORT)],
                }
            ],
        }
    endpoint = storage_endpoint(settings)
    if endpoint:
        host, port = endpoint
        peers = [{"ipBlock": {"cidr": f"{host}/32"}}] if _is_address(host) else []
        policies["storage"] = {
            "podSelector": ray_pods,
            "policyTypes": ["Egress"],
            "egress": [{**({"to": peers} if peers else {}), "ports": [_port(port)]}],
        }
    return policies


def _port(number: int, protocol: str = "TCP") -> dict[str, Any]:
    return {"port": number, "protocol": protocol}


def _is_address(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True
