"""etcd, the API server, the controller manager, the scheduler, and the object store that stands for S3."""

from __future__ import annotations

import base64
import secrets
import sys
import urllib.request
from pathlib import Path

from tests.gotools.build import tool_path
from tests.rig.layout import API_PORT, S3_BUCKET, S3_PORT, SERVICE_RANGE, Layout
from tests.rig.processes import Component, answers, run, start, wait_until

_ETCD = "http://127.0.0.1:2379"


def start_object_store(layout: Layout) -> Component:
    server = Path(sys.prefix, "bin", "moto_server")
    return start(
        "object store",
        [server, "-H", layout.control_plane_address, "-p", str(S3_PORT)],
        layout.logs / "object-store.log",
        environment={"MOTO_S3_ALLOW_CROSSACCOUNT_ACCESS": "true"},
    )


def await_object_store(layout: Layout, store: Component) -> None:
    wait_until(lambda: answers(f"{layout.s3_url}/moto-api/"), "answering", store)
    bucket = urllib.request.Request(f"{layout.s3_url}/{S3_BUCKET}", method="PUT")
    with urllib.request.urlopen(bucket, timeout=10):
        pass


def start_api_server(layout: Layout) -> list[Component]:
    token = secrets.token_hex(16)
    layout.pki.mkdir(mode=0o700, parents=True)
    (layout.pki / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    run("openssl", "genrsa", "-out", layout.pki / "service-accounts.key", "2048")

    etcd = start(
        "etcd",
        [tool_path("etcd"), "--data-dir", layout.state / "etcd", "--unsafe-no-fsync", "--log-level", "warn"],
        layout.logs / "etcd.log",
    )
    wait_until(lambda: answers(f"{_ETCD}/readyz"), "ready", etcd)
    server = start(
        "kube-apiserver",
        [
            tool_path("kube-apiserver"),
            f"--etcd-servers={_ETCD}",
            f"--secure-port={API_PORT}",
            f"--advertise-address={layout.control_plane_address}",
            f"--cert-dir={layout.pki}",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={layout.pki / 'service-accounts.key'}",
            f"--service-account-signing-key-file={layout.pki / 'service-accounts.key'}",
            f"--token-auth-file={layout.pki / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
        ],
        layout.logs / "kube-apiserver.log",
    )
    authority = layout.pki / "apiserver.crt"
    wait_until(
        lambda: authority.exists() and answers(f"{layout.api_url}/readyz", authority=authority, token=token),
        "ready",
        server,
    )
    _write_kubeconfig(layout, authority.read_bytes(), token)
    return [etcd, server]


def start_controllers(layout: Layout) -> list[Component]:
    return [
        start(
            "kube-controller-manager",
            [
                tool_path("kube-controller-manager"),
                f"--kubeconfig={layout.kubeconfig}",
                "--leader-elect=false",
                "--use-service-account-credentials=true",
                f"--service-account-private-key-file={layout.pki / 'service-accounts.key'}",
                f"--root-ca-file={layout.pki / 'apiserver.crt'}",
            ],
            layout.logs / "kube-controller-manager.log",
        ),
        start(
            "kube-scheduler",
            [tool_path("kube-scheduler"), f"--kubeconfig={layout.kubeconfig}", "--leader-elect=false"],
            layout.logs / "kube-scheduler.log",
        ),
    ]


def _write_kubeconfig(layout: Layout, authority: bytes, token: str) -> None:
    layout.kubeconfig.touch(mode=0o600)
    layout.kubeconfig.write_text(
        f"""apiVersion: v1
kind: Config
current-context: rig
contexts: [{{name: rig, context: {{cluster: rig, user: admin}}}}]
users: [{{name: admin, user: {{token: {token}}}}}]
clusters:
- name: rig
  cluster:
    server: {layout.api_url}
    certificate-authority-data: {base64.b64encode(authority).decode()}
"""
    )
