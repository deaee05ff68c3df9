"""Watching a stack: Prometheus and Grafana in the cluster, or AWS's CloudWatch add-on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pulumi
import pulumi_aws as aws
import pulumi_kubernetes as k8s

from infra.access import common_labels
from infra.cluster import USERS_GROUP, Cluster
from infra.device_plugins import GPU_TOLERATION, release, selector
from infra.iam import document, pod_trust
from infra.settings import MONITORING_NAMESPACE, PROMETHEUS_DISK_GIB, StackSettings
from infra.versions import (
    ADDONS,
    DCGM_EXPORTER_REPOSITORY,
    DCGM_EXPORTER_VERSION,
    EFA_COUNTERS_IMAGE,
    KUBE_PROMETHEUS_STACK_REPOSITORY,
    KUBE_PROMETHEUS_STACK_VERSION,
)
from infra.workload import ClusterTarget

DASHBOARD = Path(__file__).parent / "dashboards" / "training.json"
EFA_COUNTERS = Path(__file__).parent / "efa_counters.sh"
DASHBOARD_COMMAND = (
    f"kubectl --namespace {MONITORING_NAMESPACE} port-forward svc/kube-prometheus-stack-grafana 3000:80"
)
SCRAPE_SECONDS = 15
TEXTFILES = "/run/textfiles"

# The fields that the DCGM exporter shows: its list is replaced, not added to. The PROF fields come from the
# GPU's profiling counters, which only one reader at a time can have.
DCGM_FIELDS = {
    "DCGM_FI_DEV_GPU_UTIL": ("gauge", "share of time in which a kernel ran, in percent"),
    "DCGM_FI_PROF_SM_ACTIVE": ("gauge", "share of cycles in which a multiprocessor had a warp"),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("gauge", "share of cycles in which the tensor cores worked"),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("gauge", "share of cycles in which the memory moved data"),
    "DCGM_FI_DEV_FB_USED": ("gauge", "memory used, in MiB"),
    "DCGM_FI_DEV_FB_FREE": ("gauge", "memory free, in MiB"),
    "DCGM_FI_DEV_POWER_USAGE": ("gauge", "power drawn, in W"),
    "DCGM_FI_DEV_GPU_TEMP": ("gauge", "temperature, in degrees Celsius"),
    "DCGM_FI_DEV_XID_ERRORS": ("gauge", "last XID error"),
    "DCGM_FI_PROF_PCIE_TX_BYTES": ("gauge", "bytes a second sent over PCIe"),
    "DCGM_FI_PROF_PCIE_RX_BYTES": ("gauge", "bytes a second received over PCIe"),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": ("gauge", "bytes a second sent over NVLink"),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": ("gauge", "bytes a second received over NVLink"),
}

CLOUDWATCH_ADDON = "amazon-cloudwatch-observability"
CLOUDWATCH_NAMESPACE = "amazon-cloudwatch"
CLOUDWATCH_SERVICE_ACCOUNT = "cloudwatch-agent"


class Prometheus(pulumi.ComponentResource):
    """kube-prometheus-stack on the system nodes, the DCGM exporter on the GPU nodes, and the dashboard.

    Nothing is reachable from outside of the namespace but by ``kubectl port-forward``, which Kubernetes
    authorizes; so Grafana shows its dashboards to whoever gets there and has no user, password or login.
    Series live as long as Prometheus' pod: a volume of its own would bill after a destroy.
    """

    def __init__(self, name: str, settings: StackSettings, target: ClusterTarget) -> None:
        super().__init__("efa:infra:Prometheus", name, None, target.component())
        self._name = name
        self._settings = settings
        self._target = target
        namespace = k8s.core.v1.Namespace(
            f"{name}-monitoring",
            metadata=k8s.meta.v1.ObjectMetaArgs(
                name=MONITORING_NAMESPACE,
                # The exporters read the host's /proc and /sys and the GPUs' profiling counters.
                labels={**common_labels(settings), "pod-security.kubernetes.io/enforce": "privileged"},
            ),
            opts=target.child(self, target.ready, pulumi.CustomTimeouts(delete="15m")),
        )
        closed = k8s.apiextensions.CustomResource(
            f"{name}-monitoring-internal",
            api_version="networking.k8s.io/v1",
            kind="NetworkPolicy",
            metadata=self._metadata("monitoring-internal"),
            spec={
                "podSelector": {},
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": {}}]}],
            },
            opts=target.child(self, [namespace]),
        )
        stack = release(
            self,
            target,
            f"{name}-kube-prometheus-stack",
            chart="kube-prometheus-stack",
            version=KUBE_PROMETHEUS_STACK_VERSION,
            repository=KUBE_PROMETHEUS_STACK_REPOSITORY,
            namespace=MONITORING_NAMESPACE,
            values=prometheus_values(settings),
            depends_on=[namespace, closed],
            # They belong to the chart, and nothing of this stack is of their kinds.
            skip_crds=False,
        )
        if settings.gpus:
            release(
                self,
                target,
                f"{name}-dcgm-exporter",
                chart="dcgm-exporter",
                version=DCGM_EXPORTER_VERSION,
                repository=DCGM_EXPORTER_REPOSITORY,
                namespace=MONITORING_NAMESPACE,
                values=dcgm_values(settings),
                # Its ServiceMonitor is of a kind that comes with the other chart.
                depends_on=[stack],
            )
        k8s.core.v1.ConfigMap(
            f"{name}-dashboard",
            metadata=k8s.meta.v1.ObjectMetaArgs(
                name="finetune-dashboard",
                namespace=MONITORING_NAMESPACE,
                labels={**common_labels(settings), "grafana_dashboard": "1"},
            ),
            data={DASHBOARD.name: DASHBOARD.read_text(encoding="utf-8")},
            opts=target.child(self, [namespace]),
        )
        self._let_users_look(namespace)
        self.register_outputs({})

    def _metadata(self, name: str) -> k8s.meta.v1.ObjectMetaArgs:
        return k8s.meta.v1.ObjectMetaArgs(
            name=name, namespace=MONITORING_NAMESPACE, labels=common_labels(self._settings)
        )

    def _let_users_look(self, namespace: pulumi.Resource) -> None:
        """``kubectl port-forward svc/...`` reads the service, finds a pod and opens a tunnel to it."""
        role = k8s.rbac.v1.Role(
            f"{self._name}-look",
            metadata=self._metadata("finetune-look"),
            rules=[
                k8s.rbac.v1.PolicyRuleArgs(
                    api_groups=[""], resources=["services", "pods"], verbs=["get", "list"]
                ),
                k8s.rbac.v1.PolicyRuleArgs(
                    api_groups=[""], resources=["pods/portforward"], verbs=["get", "create"]
                ),
            ],
            opts=self._target.child(self, [namespace]),
        )
        k8s.rbac.v1.RoleBinding(
            f"{self._name}-look",
            metadata=self._metadata("finetune-look"),
            role_ref=k8s.rbac.v1.RoleRefArgs(
                api_group="rbac.authorization.k8s.io", kind="Role", name="finetune-look"
            ),
            subjects=[
                k8s.rbac.v1.SubjectArgs(kind="Group", name=USERS_GROUP, api_group="rbac.authorization.k8s.io")
            ],
            opts=self._target.child(self, [namespace, role]),
        )


class CloudWatch(pulumi.ComponentResource):
    """The CloudWatch Observability add-on: metrics of nodes, pods, GPUs and EFA; no logs, no traces.

    The log group that carries the metrics exists before the agent, with a retention, and goes with the stack.
    The agent's role writes to this group alone.
    """

    def __init__(
        self,
        name: str,
        settings: StackSettings,
        cluster: Cluster,
        nodes: Sequence[pulumi.Resource],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("efa:infra:CloudWatch", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        group = aws.cloudwatch.LogGroup(
            f"{name}-container-insights",
            # The agent writes to exactly this name and would make a group without retention.
            name=f"/aws/containerinsights/{name}/performance",
            retention_in_days=settings.log_retention_days,
            opts=child,
        )
        role = aws.iam.Role(
            f"{name}-cloudwatch",
            assume_role_policy=pod_trust(settings.name, CLOUDWATCH_NAMESPACE, CLOUDWATCH_SERVICE_ACCOUNT),
            opts=child,
        )
        policy = aws.iam.RolePolicy(
            f"{name}-cloudwatch", role=role.name, policy=group.arn.apply(_may_report), opts=child
        )
        identity = aws.eks.PodIdentityAssociation(
            f"{name}-cloudwatch",
            cluster_name=cluster.name,
            namespace=CLOUDWATCH_NAMESPACE,
            service_account=CLOUDWATCH_SERVICE_ACCOUNT,
            role_arn=role.arn,
            opts=pulumi.ResourceOptions(parent=self, depends_on=[policy, cluster.control_plane]),
        )
        aws.eks.Addon(
            f"{name}-{CLOUDWATCH_ADDON}",
            cluster_name=cluster.name,
            addon_name=CLOUDWATCH_ADDON,
            addon_version=ADDONS[settings.kubernetes_version].cloudwatch_observability,
            configuration_values=json.dumps(cloudwatch_configuration(settings), sort_keys=True),
            resolve_conflicts_on_create="OVERWRITE",
            resolve_conflicts_on_update="OVERWRITE",
            # Credentials must be there before the first pod starts: pods do not ask a second time.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[identity, group, *nodes]),
        )
        self.register_outputs({})


def prometheus_values(settings: StackSettings) -> dict[str, Any]:
    """Values of kube-prometheus-stack: what a training job needs, without alerts and without what EKS hides."""
    on_system_nodes = {"nodeSelector": selector(settings.system_selector)}
    hidden = ("kubeControllerManager", "kubeScheduler", "kubeEtcd", "kubeProxy", "alertmanager")
    return {
        **{component: {"enabled": False} for component in hidden},
        "defaultRules": {"create": False},
        "prometheusOperator": {
            **on_system_nodes,
            "resources": _resources("50m", "128Mi", "256Mi"),
            "prometheusConfigReloader": {"resources": _resources("10m", "32Mi", "64Mi")},
            # Without webhooks no job has to make their certificates at each install.
            "admissionWebhooks": {"enabled": False},
            "tls": {"enabled": False},
        },
        "prometheus": {
            "prometheusSpec": {
                **on_system_nodes,
                "resources": _resources("100m", "1024Mi", "2048Mi"),
                "scrapeInterval": f"{SCRAPE_SECONDS}s",
                "retention": "15d",
                "retentionSize": f"{PROMETHEUS_DISK_GIB - 1}GB",
                "storageSpec": {"emptyDir": {"sizeLimit": f"{PROMETHEUS_DISK_GIB}Gi"}},
                # The DCGM exporter's monitor does not have this release's label.
                "serviceMonitorSelectorNilUsesHelmValues": False,
                "podMonitorSelectorNilUsesHelmValues": False,
            },
            "additionalPodMonitors": [ray_pod_monitor(settings)],
        },
        "kube-state-metrics": {**on_system_nodes, "resources": _resources("20m", "64Mi", "128Mi")},
        "prometheus-node-exporter": _node_exporter_values(),
        "grafana": _grafana_values(on_system_nodes),
    }


def ray_pod_monitor(settings: StackSettings) -> dict[str, Any]:
    """PodMonitor of head and workers, by the labels that KubeRay gives its pods."""
    return {
        "name": "ray",
        "namespaceSelector": {"matchNames": [settings.namespace]},
        "selector": {"matchLabels": {"ray.io/cluster": settings.ray_cluster, "ray.io/is-ray-node": "yes"}},
        "podMetricsEndpoints": [
            {
                "port": "metrics",
                "interval": f"{SCRAPE_SECONDS}s",
                "relabelings": [
                    {
                        "sourceLabels": ["__meta_kubernetes_pod_label_ray_io_node_type"],
                        "targetLabel": "node_type",
                    },
                    {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"},
                ],
            }
        ],
    }


def _node_exporter_values() -> dict[str, Any]:
    """node-exporter on every node, and beside it the reader of the EFA counters."""
    return {
        "resources": _resources("20m", "32Mi", "64Mi"),
        "extraArgs": [
            "--collector.filesystem.mount-points-exclude=^/(dev|proc|sys|run/.+|var/lib/(containerd|kubelet)/.+)($|/)",
            f"--collector.textfile.directory={TEXTFILES}",
        ],
        "sidecarVolumeMount": [{"name": "textfiles", "mountPath": TEXTFILES, "readOnly": False}],
        "sidecars": [
            {
                "name": "efa-counters",
                "image": EFA_COUNTERS_IMAGE,
                "command": ["/bin/sh", "-c", EFA_COUNTERS.read_text(encoding="utf-8"), "efa-counters"],
                "args": ["/host/sys/class/infiniband", f"{TEXTFILES}/efa.prom", str(SCRAPE_SECONDS)],
                "resources": _resources("10m", "16Mi", "32Mi"),
                "volumeMounts": [{"name": "sys", "mountPath": "/host/sys", "readOnly": True}],
            }
        ],
    }


def _grafana_values(on_system_nodes: dict[str, Any]) -> dict[str, Any]:
    """Grafana without users: readers are anonymous, there is no login and no administrator to log in as.

    So nothing may depend on a call to its administration: the data source is a file, and dashboards are
    found by looking at their folder.
    """
    return {
        **on_system_nodes,
        "resources": _resources("50m", "192Mi", "384Mi"),
        # They are drawn from the rules that are left out.
        "defaultDashboardsEnabled": False,
        "sidecar": {
            "resources": _resources("10m", "64Mi", "128Mi"),
            "dashboards": {"searchNamespace": MONITORING_NAMESPACE, "skipReload": True},
            "datasources": {"enabled": False},
        },
        "datasources": {
            "datasources.yaml": {
                "apiVersion": 1,
                "datasources": [
                    {
                        "name": "Prometheus",
                        "uid": "prometheus",
                        "type": "prometheus",
                        "access": "proxy",
                        "url": f"http://prometheus-operated.{MONITORING_NAMESPACE}:9090",
                        "isDefault": True,
                        "jsonData": {"timeInterval": f"{SCRAPE_SECONDS}s", "httpMethod": "POST"},
                    }
                ],
            }
        },
        "grafana.ini": {
            "analytics": {"reporting_enabled": False, "check_for_updates": False},
            "auth": {"disable_login_form": True},
            "auth.anonymous": {"enabled": True, "org_role": "Viewer"},
            "auth.basic": {"enabled": False},
            "security": {"disable_initial_admin_creation": True},
        },
    }


def dcgm_values(settings: StackSettings) -> dict[str, Any]:
    """Values of the DCGM exporter, on the GPU nodes only."""
    fields = "\n".join(f"{field}, {kind}, {text}." for field, (kind, text) in DCGM_FIELDS.items())
    return {
        "nodeSelector": selector(settings.gpu_selector),
        "tolerations": [GPU_TOLERATION],
        "resources": _resources("50m", "80Mi", "512Mi"),
        "serviceMonitor": {"interval": f"{SCRAPE_SECONDS}s"},
        "customMetrics": f"{fields}\n",
    }


def cloudwatch_configuration(settings: StackSettings) -> dict[str, Any]:
    """Configuration of the add-on: Container Insights by observation, nothing that ingests logs or traces."""
    return {
        "containerInsights": {"enabled": True},
        "otelContainerInsights": {"enabled": False},
        "containerLogs": {"enabled": False},
        "applicationSignals": {"enabled": False},
        "manager": {
            "nodeSelector": selector(settings.system_selector),
            # Otherwise it restarts pods to put its tracing into them.
            "applicationSignals": {"autoMonitor": {"monitorAllServices": False}},
        },
        "tolerations": [{"operator": "Exists"}],
    }


def _resources(cpu: str, memory: str, memory_limit: str) -> dict[str, dict[str, str]]:
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory_limit}}


def _may_report(log_group_arn: str) -> str:
    """Container Insights sends its metrics as events of this log group (embedded metric format), from which
    CloudWatch makes the series: nothing but the log group has to be written."""
    return document(
        [
            {
                "Sid": "Report",
                "Effect": "Allow",
                "Action": ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"],
                "Resource": [log_group_arn, f"{log_group_arn}:log-stream:*"],
            },
            {
                "Sid": "NamesOfVolumes",
                "Effect": "Allow",
                "Action": ["ec2:DescribeTags", "ec2:DescribeVolumes"],
                "Resource": "*",
            },
        ]
    )
