"""The rig itself: what it offers, that it comes up after anything, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import boto3
import pytest

from tests.rig import layout as names
from tests.rig.cgroups import has_cgroups
from tests.rig.cluster import Rig
from tests.rig.layout import Layout
from tests.rig.machine import RigError
from tests.rig.processes import run


def test_nodes_are_as_on_aws(rig: Rig) -> None:
    found = {node["metadata"]["name"]: node for node in rig.get("nodes")["items"]}
    assert set(found) == {"system-1", "gpu-1", "gpu-2"}
    for name in ("gpu-1", "gpu-2"):
        node = found[name]
        assert node["metadata"]["labels"]["role"] == "gpu"
        assert node["spec"]["taints"] == [
            {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
        ]
        assert node["status"]["allocatable"]["nvidia.com/gpu"] == "4"
        assert node["status"]["allocatable"]["vpc.amazonaws.com/efa"] == "1"
    assert found["system-1"]["metadata"]["labels"]["role"] == "system"
    assert "taints" not in found["system-1"]["spec"]


def test_the_kubelet_keeps_the_devices(rig: Rig) -> None:
    time.sleep(12)  # Two reports of the kubelet, which sends its own idea of the node every 5 s.
    assert rig.get("node", "gpu-2")["status"]["capacity"]["nvidia.com/gpu"] == "4"


def test_pods_run_the_projects_environment_and_reach_each_other(rig: Rig) -> None:
    rig.kubectl(
        "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": _web_server()})
    )
    try:
        rig.kubectl("wait", "pod", "web", "client", "--for=condition=Ready", "--timeout=60s", seconds=90)
        assert names.RAY_VERSION in rig.kubectl("exec", "client", "--", "ray", "--version")
        # By name, through the Service's address, to a pod on another node.
        page = (
            "import urllib.request as u; print(u.urlopen('http://web.default.svc:8000', timeout=20).status)"
        )
        assert rig.kubectl("exec", "client", "--", "python", "-c", page).strip() == "200"
        objects = (
            f"import urllib.request as u; print(u.urlopen('{rig.layout.s3_url}/finetune', timeout=20).status)"
        )
        assert rig.kubectl("exec", "client", "--", "python", "-c", objects).strip() == "200"
    finally:
        rig.kubectl(
            "delete", "pod/web", "pod/client", "service/web", "--grace-period=1", "--ignore-not-found"
        )


def test_object_store_keeps_what_is_put_into_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rig.storage_environment().items():
        monkeypatch.setenv(name, value)
    store = boto3.client("s3")
    store.put_object(Bucket=names.S3_BUCKET, Key="harness/a", Body=b"x" * 1000)
    assert len(store.get_object(Bucket=names.S3_BUCKET, Key="harness/a")["Body"].read()) == 1000
    store.delete_object(Bucket=names.S3_BUCKET, Key="harness/a")


def test_stop_leaves_nothing(spare: Rig) -> None:
    before = _top_folders()
    spare.up()
    spare.up()  # The second one finds it running.
    assert spare.status().phase == "ready"
    spare.down()
    assert spare.status().phase == "stopped"
    assert _remains(spare.layout) == []
    assert _top_folders() - before == set()
    spare.down()  # Stopping what is stopped is no error.


def test_a_starter_that_is_killed_leaves_no_obstacle(spare: Rig) -> None:
    command = "from tests.rig.cluster import *; from pathlib import Path; import sys\n"
    command += "Rig(Layout(Path(sys.argv[1]), sys.argv[2])).up()"
    starter = subprocess.Popen(
        [os.sys.executable, "-c", command, str(spare.layout.state), spare.layout.network],
        cwd=names.REPOSITORY,
        stderr=subprocess.DEVNULL,
    )
    try:
        _until(lambda: bool(_pids(spare.layout, "etcd")), seconds=120)
    finally:
        starter.kill()
        starter.wait()
    spare.up()
    assert len(spare.get("nodes")["items"]) == 3


def test_start_after_kill_9(spare: Rig) -> None:
    spare.up()
    os.kill(_pids(spare.layout, "tests.rig.supervisor")[0], signal.SIGKILL)
    _until(lambda: spare.status().phase == "failed")
    _until(lambda: not _remains(spare.layout, but=("link", "cgroup", "file")))
    spare.up()
    assert len(spare.get("nodes")["items"]) == 3


def test_a_component_that_dies_is_named_and_replaced_by_the_next_start(spare: Rig) -> None:
    spare.up()
    os.kill(_pids(spare.layout, "kube-scheduler")[0], signal.SIGKILL)
    _until(lambda: spare.status().phase == "failed")
    text = spare.status().text
    assert "kube-scheduler ended with status -9" in text
    assert str(spare.layout.logs / "kube-scheduler.log") in text
    spare.up()
    assert spare.status().phase == "ready"


def test_an_address_in_use_is_an_error_that_names_the_owner(spare: Rig) -> None:
    spare.down()
    run("ip", "link", "add", "harness0", "type", "bridge")
    try:
        run("ip", "addr", "add", f"{spare.layout.network}.7/24", "dev", "harness0")
        with pytest.raises(
            RigError, match=r"10\.98\.77\.0/24 is in use: interface harness0.*FINETUNE_RIG_NETWORK"
        ):
            spare.up()
    finally:
        run("ip", "link", "delete", "harness0")


def test_a_second_rig_on_the_same_network_is_told_of_the_first(rig: Rig, tmp_path: Path) -> None:
    other = Rig(Layout(tmp_path, rig.layout.network))
    with pytest.raises(RigError, match=rf"of another rig: process \d+ .*state folder {rig.layout.state}"):
        other.up()


def _pids(layout: Layout, word: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(layout.state) in command and word in command:
            found.append(int(process.name))
    return sorted(found)


def _remains(layout: Layout, but: tuple[str, ...] = ()) -> list[str]:
    """All that a rig could leave behind on the machine."""
    kept = {"lock", "log", "images.tar", "images.key"}
    remains = {
        "process": [str(pid) for pid in _pids(layout, "")],
        "mount": [
            line for line in Path("/proc/mounts").read_text().splitlines() if str(layout.state) in line
        ],
        "link": [name for name in (layout.link, "nodes") if Path(f"/sys/class/net/{name}").exists()],
        "namespace": [str(path) for path in Path("/run/netns").glob("*") if path.name in _node_names()],
        "cgroup": [layout.cgroup] if has_cgroups(layout) else [],
        "file": [path.name for path in layout.state.iterdir() if path.name not in kept],
    }
    return [f"{kind} {what}" for kind, items in remains.items() if kind not in but for what in items]


def _top_folders() -> set[Path]:
    """Where programs of a node write if nobody stops them."""
    places = ("/var/lib", "/var/log", "/run", "/opt", "/etc", "/usr/libexec", "/sys/fs/cgroup")
    return {path for place in places if Path(place).exists() for path in Path(place).iterdir()}


def _node_names() -> set[str]:
    return {node.name for node in names.NODES}


def _until(holds, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "did not come to hold in time"
        time.sleep(0.1)


def _web_server() -> list[dict[str, object]]:
    toleration = [{"key": "nvidia.com/gpu", "operator": "Exists"}]

    def pod(name: str, node: str, command: list[str]) -> dict[str, object]:
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": node},
                "tolerations": toleration,
                "containers": [{"name": name, "image": names.RAY_IMAGE, "command": command}],
            },
        }

    service = {"selector": {"app": "web"}, "ports": [{"port": 8000}]}
    return [
        pod("web", "gpu-1", ["python", "-m", "http.server", "8000"]),
        pod("client", "gpu-2", ["sleep", "600"]),
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": service},
    ]
