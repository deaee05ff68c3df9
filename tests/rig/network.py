"""The rig's network: one bridge, and a network namespace for each node with a cable to the bridge.

All of it is made inside the rig's own network namespace, except the machine's end of one cable
(cluster.py). When the last process of the rig is gone the kernel removes everything, that cable included.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.rig.layout import NODES, Layout
from tests.rig.machine import RigError
from tests.rig.processes import run

BRIDGE = "nodes"


def make_network(layout: Layout) -> None:
    Path("/run/netns").mkdir(parents=True, exist_ok=True)
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{layout.control_plane_address}/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    _plug_in_machine()
    for node in NODES:
        _make_node_network(layout, node.name, layout.node_address(node))
        run("ip", "route", "add", node.pod_range, "via", layout.node_address(node))
    for node in NODES:
        for peer in NODES:
            if peer is not node:
                run("ip", "-n", node.name, "route", "add", peer.pod_range, "via", layout.node_address(peer))


def _make_node_network(layout: Layout, name: str, address: str) -> None:
    run("ip", "netns", "add", name)
    run("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
    run("ip", "link", "set", f"to-{name}", "master", BRIDGE, "up")
    inside = ("ip", "-n", name)
    run(*inside, "link", "set", "lo", "up")
    run(*inside, "addr", "add", f"{address}/24", "dev", "eth0")
    run(*inside, "link", "set", "eth0", "up")
    run(*inside, "route", "add", "default", "via", layout.control_plane_address)
    run("nsenter", f"--net=/run/netns/{name}", "sysctl", "-qw", "net.ipv4.ip_forward=1")


def _plug_in_machine(seconds: float = 20) -> None:
    """The cable is made by the machine's side, as soon as this namespace exists."""
    deadline = time.monotonic() + seconds
    while subprocess.run(["ip", "link", "show", "machine"], capture_output=True).returncode != 0:
        if time.monotonic() > deadline:
            raise RigError(f"nobody connected the rig to the machine within {seconds:.0f} s")
        time.sleep(0.02)
    run("ip", "link", "set", "machine", "master", BRIDGE, "up")
