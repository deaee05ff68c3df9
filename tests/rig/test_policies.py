"""The network policies of the stack, enforced: what a job needs passes, everything else does not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.rig import layout
from tests.rig.deployment import Deployment

GCS_PORT = 6379
_CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
    print("passes")
except OSError:  # The engine of the rig refuses, others drop.
    print("blocked")
"""


@pytest.fixture
def stranger(stack: Deployment) -> Iterator[str]:
    """A pod of somebody else, in another namespace."""
    name = "stranger"
    container = {"name": name, "image": layout.RAY_IMAGE, "command": ["sleep", "600"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [container]}}
    stack.rig.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    stack.rig.kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=60s", seconds=90)
    yield name
    stack.rig.kubectl("delete", "pod", name, "--grace-period=0", "--force")


def test_workers_reach_the_head_and_the_store(stack: Deployment) -> None:
    head = stack.pods()[stack.head_pod()]["status"]["podIP"]
    rig = stack.rig.layout
    for worker in _workers(stack):
        assert _connect(stack, worker, head, GCS_PORT) == "passes"
        assert _connect(stack, worker, rig.control_plane_address, layout.S3_PORT) == "passes"


def test_workers_reach_nothing_else(stack: Deployment) -> None:
    worker = _workers(stack)[0]
    address = stack.rig.layout.control_plane_address
    assert _connect(stack, worker, address, layout.API_PORT, seconds=4) == "blocked"


def test_strangers_do_not_reach_the_head(stack: Deployment, stranger: str) -> None:
    head = stack.pods()[stack.head_pod()]["status"]["podIP"]
    rig = stack.rig.layout
    assert _connect(stack, stranger, rig.control_plane_address, layout.S3_PORT, "default") == "passes"
    assert _connect(stack, stranger, head, GCS_PORT, "default", seconds=4) == "blocked"


def _workers(stack: Deployment) -> list[str]:
    pods = stack.pods()
    return [n for n, pod in pods.items() if pod["metadata"]["labels"]["ray.io/node-type"] == "worker"]


def _connect(
    stack: Deployment, pod: str, host: str, port: int, namespace: str = "", seconds: float = 20
) -> str:
    command = ("exec", pod, "--", "python", "-c", _CONNECT, host, str(port), str(seconds))
    return stack.rig.kubectl("--namespace", namespace or stack.namespace, *command).strip()
