"""The rig's first process: process 1 of a process namespace of its own, with own mounts and an own network.

It starts everything and then watches. Whenever and however it ends, the kernel ends all other processes of
the namespace with it, containers included, and with the last of them go the mounts, the bridge and the
network namespaces. That is why there is no stop order to keep and nothing to clean up after a crash.

Started by cluster.py as `python -m tests.rig.supervisor STATE NETWORK`; nothing else should.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from tests.rig import addons, control_plane, nodes
from tests.rig.cgroups import enter_cgroups
from tests.rig.layout import INSIDE, NODES, Layout
from tests.rig.machine import RigError, tail_file
from tests.rig.network import make_network
from tests.rig.processes import Component, run


class Supervisor:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.components: list[Component] = []

    def start(self) -> None:
        layout = self.layout
        self.report("starting", "own mounts and network")
        _make_private_mounts(layout)
        enter_cgroups(layout)
        make_network(layout)

        self.report("starting", "API server")
        store = control_plane.start_object_store(layout)
        runtimes = [nodes.start_container_runtime(layout, node) for node in NODES]
        self.components += [store, *runtimes, *control_plane.start_api_server(layout)]

        self.report("starting", "nodes")
        self.components += control_plane.start_controllers(layout)
        imports = []
        for node, runtime in zip(NODES, runtimes, strict=True):
            nodes.await_container_runtime(layout, node, runtime)
            imports.append(nodes.start_image_import(layout, node))
        for node, images in zip(NODES, imports, strict=True):
            _await_end(images)
            self.components += nodes.start_kubelet(layout, node)
        addons.install_dns(layout)
        addons.await_nodes(layout)

        self.report("starting", "devices, network policies, DNS, object store")
        self.components += [nodes.start_policy_engine(layout, node) for node in NODES]
        addons.await_devices(layout)
        addons.await_dns(layout)
        control_plane.await_object_store(layout, store)
        self.report("ready", "")

    def watch(self) -> None:
        """Buries what ends in the namespace; a component that ends makes the rig a failed one."""
        running = {component.process.pid: component for component in self.components}
        while True:
            try:
                pid, status = os.wait()
            except ChildProcessError:
                raise RigError("no component is left") from None
            if pid in running:
                component = running[pid]
                code = os.waitstatus_to_exitcode(status)
                raise RigError(f"{component.name} ended with status {code}; {tail_file(component.log)}")

    def report(self, phase: str, text: str) -> None:
        print(time.strftime("%H:%M:%S"), phase, text, file=sys.stderr, flush=True)
        partial = self.layout.status_file.with_suffix(".partial")
        components = [{"name": item.name, "log": str(item.log)} for item in self.components]
        partial.write_text(json.dumps({"phase": phase, "text": text, "components": components}))
        partial.replace(self.layout.status_file)


def _make_private_mounts(layout: Layout) -> None:
    """Folders with names that the programs have built in become the rig's own."""
    run("mount", "--make-rshared", "/")
    run("mount", "-t", "tmpfs", "rig", "/run")
    INSIDE.mkdir()
    run("mount", "--bind", layout.state, INSIDE)
    (layout.state / "var-log").mkdir()
    run("mount", "--bind", layout.state / "var-log", "/var/log")
    _cover_var_lib("rig")
    if layout.state.is_relative_to("/var/lib"):
        run("mount", "--bind", INSIDE, layout.state)


def _cover_var_lib(name: str) -> None:
    """What is written to /var/lib goes to a layer of the rig's own: the network plugins keep notes there."""
    layers = Path("/run/var-lib", name)
    for layer in ("upper", "work"):
        (layers / layer).mkdir(parents=True)
    options = f"lowerdir=/var/lib,upperdir={layers}/upper,workdir={layers}/work"
    run("mount", "-t", "overlay", "overlay", "-o", options, "/var/lib")


def _await_end(component: Component) -> None:
    code = component.process.wait(timeout=120)
    if code != 0:
        raise RigError(f"{component.name} failed with status {code}; {tail_file(component.log)}")


def main(state: str, network: str) -> int:
    # Process 1 ignores signals that it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    supervisor = Supervisor(Layout(Path(state), network))
    try:
        supervisor.start()
        supervisor.watch()
    except RigError as error:
        supervisor.report("failed", str(error))
    except Exception:
        supervisor.report("failed", traceback.format_exc())
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
