"""A cluster without Kubernetes: a `kubectl` that keeps its objects in a JSON file and runs exec's commands
here, and Ray's job API on a local port. Faults of the exec stream are played from a list, one per call."""

from __future__ import annotations

import json
import stat
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from infra.outputs import KubeAccess, StackOutputs
from training.submit.kubectl import Kubectl

NAMESPACE = "training"
RAY_CLUSTER = "training"

_KUBECTL = f"""#!{sys.executable} -SE
import json, os, pathlib, subprocess, sys
root = pathlib.Path(os.environ["FAKE_CLUSTER"])
args = sys.argv[1:]
while args and args[0].startswith("--"):
    args = args[2:]
with (root / "calls.log").open("a") as calls:
    calls.write(json.dumps(args) + "\\n")

def fail(text):
    sys.stderr.write(text + "\\n")
    sys.exit(1)

def next_fault():
    path = root / "faults.json"
    faults = json.loads(path.read_text())
    fault = faults.pop(0) if faults else "none"
    path.write_text(json.dumps(faults))
    return fault

objects = json.loads((root / "objects.json").read_text())
if (root / "down").exists():
    fail("The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?")
if args[0] == "get":
    kind, rest = args[1], args[2:]
    if kind in objects.get("denied", []):
        fail(f'Error from server (Forbidden): {{kind}} is forbidden: User "x" cannot list resource')
    items = objects.get(kind, [])
    if rest[0] == "-o" or rest[0].startswith("--"):
        print(json.dumps({{"items": items}}))
    else:
        found = [item for item in items if item["metadata"]["name"] == rest[0]]
        if not found:
            fail(f'Error from server (NotFound): {{kind}} "{{rest[0]}}" not found')
        print(json.dumps(found[0]))
elif args[0] == "exec":
    command = args[args.index("--") + 1:]
    pod = [a for a in args[1:args.index("--")] if not a.startswith("-")][0]
    if pod not in [item["metadata"]["name"] for item in objects["pods"]]:
        fail(f'Error from server (NotFound): pods "{{pod}}" not found')
    fault = next_fault()
    if fault == "refused":
        fail("error: unable to upgrade connection: error dialing backend: EOF")
    if fault == "lost":
        sys.exit(0)
    if fault == "forbidden":
        fail('Error from server (Forbidden): pods "x" is forbidden: cannot create resource "pods/exec"')
    stdin = sys.stdin.buffer.read() if "-i" in args[:args.index("--")] else b""
    if fault == "half-sent":
        stdin = stdin[: len(stdin) // 2]
    env = dict(os.environ, PATH=f"{{root}}/bin:" + os.environ["PATH"], POD=pod)
    done = subprocess.run(command, input=stdin, capture_output=True, env=env)
    sys.stderr.buffer.write(done.stderr)
    out = done.stdout
    if fault == "half-answered":
        out = out[: len(out) // 2]
    if fault == "no-status":
        out = out[: out.rindex(b"\\n@exit")]
    sys.stdout.buffer.write(out)
    sys.exit(0 if fault != "none" else done.returncode)
else:
    fail(f"unknown command {{args[0]}}")
"""

_RAY = f"""#!{sys.executable} -SE
import json, os, sys, urllib.error, urllib.request
args = sys.argv[1:]
assert args[:2] == ["job", "submit"], args
split = args.index("--")
flags = dict(zip(args[2:split:1], args[3:split + 1]))
body = json.dumps({{
    "submission_id": flags["--submission-id"], "entrypoint": " ".join(args[split + 1:]),
    "runtime_env": json.loads(flags["--runtime-env-json"]), "metadata": json.loads(flags["--metadata-json"]),
    "working_dir": flags["--working-dir"],
}}).encode()
request = urllib.request.Request(os.environ["FAKE_RAY"] + "/api/jobs/", data=body, method="POST")
try:
    urllib.request.urlopen(request)
except urllib.error.HTTPError as error:
    print("RuntimeError: Request failed with status code", error.code, error.read().decode())
    sys.exit(1)
print("submitted")
"""


@dataclass
class FakeCluster:
    """A ready RayCluster with a head and workers, all commands of which run in `root`."""

    root: Path
    num_workers: int = 2
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    token: str | None = None

    def __post_init__(self) -> None:
        for folder in ("bin", "ray/session_latest/logs", "storage", "bundles"):
            (self.root / folder).mkdir(parents=True)
        _executable(self.root / "bin/kubectl", _KUBECTL)
        _executable(self.root / "bin/ray", _RAY)
        _executable(self.root / "bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        self.faults()
        self.objects = {
            "rayclusters.ray.io": [self._ray_cluster()],
            "pods": [pod("head-0", "head"), *(pod(f"worker-{i}", "worker") for i in range(self.num_workers))],
            "events": [],
            "nodes": [{"metadata": {"name": "gpu-1"}, "spec": {}}],
        }
        self.save()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def environment(self) -> dict[str, str]:
        return {
            "FAKE_CLUSTER": str(self.root),
            "FAKE_RAY": f"http://127.0.0.1:{self.port}",
            "RAY_TMPDIR": str(self.root / "ray"),
            "FINETUNE_KUBECTL": str(self.root / "bin/kubectl"),
        }

    @property
    def kubectl(self) -> Kubectl:
        return Kubectl((str(self.root / "bin/kubectl"),), NAMESPACE)

    def outputs(self, **changes: Any) -> StackOutputs:
        kubeconfig = self.root / "kubeconfig"
        kubeconfig.touch()
        values: dict[str, Any] = {
            "stack": "dev",
            "cluster_name": "fake",
            "kube": KubeAccess(kubeconfig_path=str(kubeconfig)),
            "namespace": NAMESPACE,
            "service_account": "training",
            "ray_cluster": RAY_CLUSTER,
            "ray_version": "2.58.0",
            "image": "ray:1",
            "num_workers": self.num_workers,
            "gpus_per_worker": 4,
            "efa_per_worker": 1,
            "worker_cpu": "8",
            "worker_memory": "32Gi",
            "storage_uri": str(self.root / "storage"),
            "required_transport": "any",
            "transport_env": {},
            "hourly_usd": 12.5,
        }
        return StackOutputs(**(values | changes))

    def save(self) -> None:
        (self.root / "objects.json").write_text(json.dumps(self.objects))

    def faults(self, *names: str) -> None:
        """What happens to the next exec calls; then none."""
        (self.root / "faults.json").write_text(json.dumps(names))

    def calls(self) -> list[list[str]]:
        path = self.root / "calls.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def say(self, submission_id: str, *lines: str, end: str = "\n") -> None:
        """Appends to a driver's log."""
        path = self.root / f"ray/session_latest/logs/job-driver-{submission_id}.log"
        with path.open("a") as log:
            log.write("".join(f"{line}{end}" for line in lines))

    def end(self, submission_id: str, status: str, **fields: Any) -> None:
        self.jobs[submission_id] |= {"status": status, "end_time": 2000, **fields}

    def replace_head(self) -> None:
        """As after the head pod was deleted: another pod, and a Ray that knows nothing."""
        self.jobs.clear()
        self.objects["pods"][0] = pod("head-1", "head")
        self.save()

    def _ray_cluster(self) -> dict[str, Any]:
        group = {"groupName": "gpu", "replicas": self.num_workers}
        return {"metadata": {"name": RAY_CLUSTER}, "spec": {"workerGroupSpecs": [group]}, "status": {}}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if cluster.token and self.headers["Authorization"] != f"Bearer {cluster.token}":
                    self.answer(401, "Unauthorized: Missing authentication token")
                elif self.path == "/api/jobs/":
                    self.answer(200, list(cluster.jobs.values()))
                elif self.path.startswith("/api/jobs/"):
                    job = cluster.jobs.get(self.path.rsplit("/", 1)[1])
                    self.answer(200 if job else 404, job or "does not exist")
                elif self.path.startswith("/nodes"):
                    gpu = {"name": "L4", "utilizationGpu": 93, "memoryUsed": 20480, "memoryTotal": 23034}
                    node = {"hostname": "worker-0", "mem": [10, 5, 50.0, 5], "gpus": [gpu]}
                    self.answer(200, {"data": {"summary": [node]}})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
                if self.path.endswith("/stop"):
                    cluster.end(self.path.split("/")[3], "STOPPED")
                    self.answer(200, {"stopped": True})
                elif body["submission_id"] in cluster.jobs:
                    self.answer(500, f"Job with submission_id {body['submission_id']} already exists")
                else:
                    started = 1000 + len(cluster.jobs)
                    cluster.jobs[body["submission_id"]] = {**body, "status": "RUNNING", "start_time": started}
                    self.answer(200, {})

            def answer(self, code: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


def pod(name: str, kind: str, *, ready: bool = True, gpus: int = 4, **status: Any) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": str(gpus), "vpc.amazonaws.com/efa": "1"} if kind == "worker" else {}
    return {
        "metadata": {"name": name, "uid": name, "labels": {"ray.io/node-type": kind}},
        "spec": {
            "nodeName": f"node-of-{name}",
            "containers": [{"name": "ray", "resources": {"limits": limits}}],
        },
        "status": {
            "phase": "Running" if ready else "Pending",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": str(ready)}],
            **status,
        },
    }


def _executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
