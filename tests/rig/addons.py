"""What runs in the cluster before anything is deployed: DNS, with the names and labels it has on EKS."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from tests.gotools.build import tool_path
from tests.rig.layout import DNS_IMAGE, DNS_SERVICE, NODES, Layout
from tests.rig.machine import RigError, tail_file
from tests.rig.processes import run


def kubectl(layout: Layout, *arguments: str, stdin: str | None = None, seconds: float = 60) -> str:
    return run(
        tool_path("kubectl"), f"--kubeconfig={layout.kubeconfig}", *arguments, stdin=stdin, seconds=seconds
    )


def await_nodes(layout: Layout, seconds: float = 60) -> None:
    """Every node has joined and is ready; only then the GPU nodes get their devices, which the kubelet then
    keeps.
    """

    def ready() -> bool:
        nodes = json.loads(kubectl(layout, "get", "nodes", "-o", "json"))["items"]
        return len(nodes) == len(NODES) and all(_condition(node, "Ready") for node in nodes)

    logs = "\n".join(tail_file(layout.logs / node.name / "kubelet.log", 8) for node in NODES)
    _poll(ready, "not all nodes are ready", seconds, lambda: logs)
    for node in NODES:
        if node.devices:
            patch = [
                {"op": "add", "path": f"/status/capacity/{name.replace('/', '~1')}", "value": str(count)}
                for name, count in node.devices.items()
            ]
            kubectl(
                layout,
                "patch",
                "node",
                node.name,
                "--subresource=status",
                "--type=json",
                "-p",
                json.dumps(patch),
            )


def await_devices(layout: Layout, seconds: float = 30) -> None:
    expected = {node.name: {name: str(count) for name, count in node.devices.items()} for node in NODES}

    def advertised() -> bool:
        nodes = json.loads(kubectl(layout, "get", "nodes", "-o", "json"))["items"]
        found = {node["metadata"]["name"]: node["status"]["allocatable"] for node in nodes}
        return all(expected[name].items() <= found[name].items() for name in expected)

    _poll(
        advertised,
        "the GPU nodes do not advertise their devices",
        seconds,
        lambda: "see `kubectl describe node`",
    )


def install_dns(layout: Layout) -> None:
    kubectl(
        layout,
        "apply",
        "--server-side",
        "-f",
        "-",
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": _dns()}),
    )


def await_dns(layout: Layout, seconds: float = 60) -> None:
    def available() -> bool:
        deployment = json.loads(
            kubectl(layout, "-n", "kube-system", "get", "deployment", "coredns", "-o", "json")
        )
        return deployment.get("status", {}).get("availableReplicas", 0) == 1

    def diagnosis() -> str:
        pods = kubectl(layout, "-n", "kube-system", "describe", "pods", "-l", "k8s-app=kube-dns")
        return "\n".join(pods.splitlines()[-15:])

    _poll(available, "the DNS server does not become available", seconds, diagnosis)


def _condition(resource: dict[str, dict[str, list[dict[str, str]]]], name: str) -> bool:
    conditions = resource["status"].get("conditions", [])
    return any(condition["type"] == name and condition["status"] == "True" for condition in conditions)


def _poll(ready: Callable[[], bool], complaint: str, seconds: float, diagnosis: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise RigError(f"{complaint} after {seconds:.0f} s; {diagnosis()}")
        time.sleep(0.25)


def _dns() -> list[dict[str, object]]:
    labels = {"k8s-app": "kube-dns"}
    name = {"name": "coredns", "namespace": "kube-system", "labels": labels}
    corefile = """.:53 {
    errors
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
    }
    cache 5
    loop
}
"""
    container = {
        "name": "coredns",
        "image": DNS_IMAGE,
        "args": ["-conf", "/etc/coredns/Corefile"],
        "ports": [{"containerPort": 53, "protocol": "UDP"}, {"containerPort": 53, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
    }
    pod = {
        "serviceAccountName": "coredns",
        "dnsPolicy": "Default",
        "nodeSelector": {"role": "system"},
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
    }
    readable = [
        {
            "apiGroups": [""],
            "resources": ["endpoints", "services", "pods", "namespaces"],
            "verbs": ["list", "watch"],
        },
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    rbac = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": name},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "system:coredns"},
            "rules": readable,
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "system:coredns"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "system:coredns"},
            "subjects": [{"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"}],
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": name, "data": {"Corefile": corefile}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": name,
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": labels},
            "spec": {
                "clusterIP": DNS_SERVICE,
                "selector": labels,
                "ports": [
                    {"name": "dns", "port": 53, "protocol": "UDP"},
                    {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
                ],
            },
        },
    ]
