"""Where everything of the rig is: its folders, addresses, nodes, images and versions."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from tests.gotools.build import KUBERAY_VERSION, KUBERNETES_VERSION

REPOSITORY = Path(__file__).resolve().parents[2]

CONTROL_PLANE_TOOLS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE_TOOLS = ("kubelet", "kube-proxy", "kube-router", "ptp", "host-local", "loopback", "portmap")
POD_TOOLS = ("pause", "coredns", "kuberay-operator")
TOOLS = (*CONTROL_PLANE_TOOLS, *NODE_TOOLS, *POD_TOOLS)

RAY_VERSION = "2.58.0"
RAY_IMAGE = f"rig.local/ray-train:{RAY_VERSION}"
RAY_IMAGE_REBUILT = f"rig.local/ray-train:{RAY_VERSION}-rebuilt"
OPERATOR_IMAGE = f"quay.io/kuberay/operator:v{KUBERAY_VERSION}"
PAUSE_IMAGE = "rig.local/pause:1"
DNS_IMAGE = "rig.local/coredns:1"

SERVICE_RANGE = "10.96.0.0/16"
DNS_SERVICE = "10.96.0.10"
POD_RANGE = "10.244.0.0/16"

# Where the rig's own processes find the state folder.
INSIDE = Path("/run/rig")

S3_BUCKET = "finetune"
S3_PORT = 9000
API_PORT = 6443

__all__ = ["KUBERAY_VERSION", "KUBERNETES_VERSION"]


@dataclass(frozen=True)
class Node:
    name: str
    number: int
    labels: dict[str, str]
    taints: tuple[str, ...] = ()
    devices: dict[str, int] = field(default_factory=dict)

    @property
    def pod_range(self) -> str:
        return f"10.244.{self.number}.0/24"

    @property
    def pod_gateway(self) -> str:
        return f"10.244.{self.number}.1"


# As the node groups of the AWS layer make them: two g6.12xlarge of 4 GPUs and one EFA interface beside a
# system node.
_ZONE = {"topology.kubernetes.io/region": "us-west-2", "topology.kubernetes.io/zone": "us-west-2a"}
_GPU_LABELS = {
    "role": "gpu",
    "nvidia.com/gpu.present": "true",
    "node.kubernetes.io/instance-type": "g6.12xlarge",
}
_GPU_DEVICES = {"nvidia.com/gpu": 4, "vpc.amazonaws.com/efa": 1}
_GPU_TAINTS = ("nvidia.com/gpu=present:NoSchedule",)

NODES = (
    Node("system-1", 1, {"role": "system", "node.kubernetes.io/instance-type": "m6i.large", **_ZONE}),
    Node("gpu-1", 2, {**_GPU_LABELS, **_ZONE}, _GPU_TAINTS, _GPU_DEVICES),
    Node("gpu-2", 3, {**_GPU_LABELS, **_ZONE}, _GPU_TAINTS, _GPU_DEVICES),
)


@dataclass(frozen=True)
class Layout:
    state: Path
    network: str
    """The first three numbers of the network between the rig's nodes and the machine."""

    @property
    def control_plane_address(self) -> str:
        return f"{self.network}.1"

    @property
    def machine_address(self) -> str:
        return f"{self.network}.254"

    def node_address(self, node: Node) -> str:
        return f"{self.network}.{10 + node.number}"

    @property
    def link(self) -> str:
        """The machine's end of the cable into the rig; interface names have at most 15 characters."""
        return "rig-" + hashlib.sha256(str(self.state).encode()).hexdigest()[:8]

    @property
    def api_url(self) -> str:
        return f"https://{self.control_plane_address}:{API_PORT}"

    @property
    def s3_url(self) -> str:
        return f"http://{self.control_plane_address}:{S3_PORT}"

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    @property
    def chart(self) -> Path:
        return self.state / "charts" / "kuberay-operator"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def logs(self) -> Path:
        return self.state / "log"

    @property
    def supervisor_log(self) -> Path:
        return self.logs / "supervisor.log"

    @property
    def status_file(self) -> Path:
        return self.state / "status.json"

    @property
    def images(self) -> Path:
        return self.state / "images.tar"

    def node_folder(self, node: Node) -> Path:
        """As the rig's own processes see it: names of sockets have to be short, state folders may not be."""
        return INSIDE / "nodes" / node.name

    @property
    def cgroup(self) -> str:
        return f"efa-finetune-{self.link}"


def layout_from_environment() -> Layout:
    own = os.environ.get("FINETUNE_RIG_STATE")
    if own:
        state = Path(own)
    else:
        state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "efa-finetune" / "rig"
    return Layout(state.expanduser().resolve(), os.environ.get("FINETUNE_RIG_NETWORK", "10.99.0"))
