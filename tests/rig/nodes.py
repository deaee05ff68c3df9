"""A node: a network namespace with its own containerd, kubelet, kube-proxy and network policy engine."""

from __future__ import annotations

import json
import resource
from pathlib import Path

from tests.gotools.build import tool_path
from tests.rig.images import bound_folders
from tests.rig.layout import DNS_SERVICE, PAUSE_IMAGE, POD_RANGE, SERVICE_RANGE, Layout, Node
from tests.rig.processes import Component, answers, run, start, wait_until

_POLICY_ENGINE_PORT = 20244


def start_container_runtime(layout: Layout, node: Node) -> Component:
    folder = layout.node_folder(node)
    for name in ("cni", "cni-bin", "kubelet", "pod-logs"):
        (folder / name).mkdir(parents=True)
    for plugin in ("ptp", "host-local", "loopback", "portmap"):
        (folder / "cni-bin" / plugin).symlink_to(tool_path(plugin))
    (folder / "cni" / "10-rig.conflist").write_text(json.dumps(_pod_network(folder, node)))
    (folder / "container.json").write_text(json.dumps(_container_spec()))
    (folder / "containerd.toml").write_text(_containerd_settings(folder))
    return start(
        f"{node.name} containerd",
        ["containerd", "--config", folder / "containerd.toml"],
        layout.logs / node.name / "containerd.log",
        network=node.name,
    )


def await_container_runtime(layout: Layout, node: Node, runtime: Component) -> None:
    socket = layout.node_folder(node) / "containerd.sock"

    def ready() -> bool:
        return socket.exists() and "cri" in run("ctr", "-a", socket, "plugins", "ls", "-q")

    wait_until(ready, "ready", runtime)


def start_image_import(layout: Layout, node: Node) -> Component:
    socket = layout.node_folder(node) / "containerd.sock"
    return start(
        f"{node.name} image import",
        ["ctr", "-a", socket, "-n", "k8s.io", "images", "import", layout.images],
        layout.logs / node.name / "images.log",
    )


def start_kubelet(layout: Layout, node: Node) -> list[Component]:
    folder = layout.node_folder(node)
    address = layout.node_address(node)
    (folder / "kubelet.json").write_text(json.dumps(_kubelet_settings(layout, folder, node)))
    labels = ",".join(f"{name}={value}" for name, value in node.labels.items())
    kubelet = start(
        f"{node.name} kubelet",
        [
            *_own_var_lib(node),
            tool_path("kubelet"),
            f"--config={folder / 'kubelet.json'}",
            f"--kubeconfig={layout.kubeconfig}",
            f"--hostname-override={node.name}",
            f"--node-ip={address}",
            f"--root-dir={folder / 'kubelet'}",
            f"--cert-dir={folder / 'pki'}",
            f"--node-labels={labels}",
        ],
        layout.logs / node.name / "kubelet.log",
        network=node.name,
    )
    proxy = start(
        f"{node.name} kube-proxy",
        [
            tool_path("kube-proxy"),
            f"--kubeconfig={layout.kubeconfig}",
            f"--hostname-override={node.name}",
            "--proxy-mode=iptables",
            f"--cluster-cidr={POD_RANGE}",
            # These are the whole machine's, and not to be set from inside a network namespace.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        ],
        layout.logs / node.name / "kube-proxy.log",
        network=node.name,
    )
    return [kubelet, proxy]


def start_policy_engine(layout: Layout, node: Node) -> Component:
    """Turns network policies into iptables rules; asks for its node, which therefore must have joined."""
    engine = start(
        f"{node.name} kube-router",
        [
            tool_path("kube-router"),
            f"--kubeconfig={layout.kubeconfig}",
            f"--hostname-override={node.name}",
            "--run-firewall=true",
            "--run-router=false",
            "--run-service-proxy=false",
            "--run-loadbalancer=false",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            f"--health-port={_POLICY_ENGINE_PORT}",
            "--metrics-port=0",
        ],
        layout.logs / node.name / "kube-router.log",
        network=node.name,
        environment={"NODE_NAME": node.name},
    )
    url = f"http://{layout.node_address(node)}:{_POLICY_ENGINE_PORT}/healthz"
    wait_until(lambda: answers(url), "healthy", engine)
    return engine


def _own_var_lib(node: Node) -> list[str]:
    """A prefix for a command that gives it a /var/lib of its own, and nothing else.

    Every kubelet listens on the same socket below /var/lib/kubelet/device-plugins, whatever its settings say.
    All other mounts stay shared, because containerd has to see the volumes that the kubelet mounts.
    """
    script = f"""
        layers=/run/var-lib/{node.name}
        mkdir -p $layers/upper $layers/work
        mount --make-private "$(findmnt --noheadings --output TARGET --target /var/lib)"
        mount --make-private /
        mount -t overlay overlay -o lowerdir=/var/lib,upperdir=$layers/upper,workdir=$layers/work /var/lib
        exec "$@"
    """
    return ["unshare", "--mount", "--propagation", "unchanged", "sh", "-e", "-c", script, "sh"]


def _pod_network(folder: Path, node: Node) -> dict[str, object]:
    # Point-to-point rather than a bridge: every packet is routed, so that Services and network policies see
    # it.
    return {
        "cniVersion": "1.0.0",
        "name": "rig",
        "plugins": [
            {
                "type": "ptp",
                "ipam": {
                    "type": "host-local",
                    "dataDir": str(folder / "addresses"),
                    "ranges": [[{"subnet": node.pod_range}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _container_spec() -> dict[str, object]:
    """containerd's default, with the machine's folders bound into every container."""
    spec = json.loads(run("ctr", "oci", "spec"))
    spec["mounts"] += [
        {"destination": path, "type": "bind", "source": path, "options": ["rbind", "ro"]}
        for path in bound_folders()
    ]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    spec["process"]["rlimits"] = [{"type": "RLIMIT_NOFILE", "soft": files, "hard": files}]
    return spec


def _containerd_settings(folder: Path) -> str:
    return f"""version = 2
root = "{folder}/containerd"
state = "/run/containerd-{folder.name}"
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # Without CAP_SYS_RESOURCE (a container, some VMs) every pod fails otherwise: "can't get final child's PID
  # from pipe".
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{folder}/container.json"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{folder}/cni-bin"
    conf_dir = "{folder}/cni"
"""


def _kubelet_settings(layout: Layout, folder: Path, node: Node) -> dict[str, object]:
    resolver = folder / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.1\n")
    taints = [taint.replace("=", ":").split(":") for taint in node.taints]
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": layout.node_address(node),
        "healthzPort": 0,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
        "clusterDNS": [DNS_SERVICE],
        "clusterDomain": "cluster.local",
        "resolvConf": str(resolver),
        "podLogsDir": str(folder / "pod-logs"),
        "volumePluginDir": str(folder / "volume-plugins"),
        "registerWithTaints": [
            {"key": key, "value": value, "effect": effect} for key, value, effect in taints
        ],
        # Three nodes share this machine's disk: none of them may evict pods or collect images because
        # others filled it.
        "evictionHard": {"memory.available": "200Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "5s",
        "syncFrequency": "10s",
    }
