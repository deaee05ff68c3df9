"""The images of the rig: tarballs of a few megabytes, made without a container builder or a registry.

The operator's, the DNS server's and the pause image hold one static program each. The Ray image holds empty
folders: containerd binds the machine's own /usr and this project's Python environment into every container
(nodes.py), so that the pods run exactly the packages that pyproject.toml pins.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.gotools.build import tool_path
from tests.rig import layout
from tests.rig.machine import RigError

_FOLDERS = (
    "bin",
    "dev",
    "etc",
    "lib",
    "lib64",
    "proc",
    "root",
    "run",
    "sbin",
    "sys",
    "tmp",
    "usr",
    "var",
    "workspace",
)
_ETC = {
    "etc/passwd": b"root:x:0:0:root:/root:/bin/bash\nnobody:x:65532:65532::/:/bin/false\n",
    "etc/group": b"root:x:0:\nnobody:x:65532:\n",
    "etc/nsswitch.conf": b"hosts: files dns\n",
}


@dataclass(frozen=True)
class Image:
    names: tuple[str, ...]
    files: dict[str, bytes]
    folders: tuple[str, ...] = ()
    config: dict[str, object] = field(default_factory=dict)


def bound_folders() -> list[str]:
    """The machine's folders that every container sees, read-only and under the same path."""
    if sys.prefix == sys.base_prefix:
        raise RigError(
            f"{sys.executable} is not the project's virtual environment: run `uv sync`, "
            "then `uv run python -m tests.rig up`"
        )
    ray = Path(sys.prefix, "bin", "ray")
    if not ray.exists():
        raise RigError(f"{ray} is missing: the rig's Ray pods run the project's environment. Run `uv sync`.")
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl"]
    # The interpreter's own home and, where a link leads there (uv's and pyenv's short names), the real one.
    python = {sys.prefix, sys.base_prefix, str(Path(sys.base_prefix).resolve())}
    outside = [path for path in sorted(python) if not path.startswith("/usr/")]
    return [path for path in [*system, *outside] if Path(path).exists()]


def build_images(target: Path) -> None:
    environment = [
        f"PATH={sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME=/root",
        "LANG=C.UTF-8",
        # What the AWS Ray Train image bakes in.
        "NCCL_DEBUG=INFO",
        "FI_PROVIDER=efa",
    ]
    # A shell script with the marker below stands for the real image's entrypoint: KubeRay's `command` must
    # bypass it.
    entrypoint = b'#!/bin/bash\ntouch /tmp/image-entrypoint-ran\nexec "$@"\n'
    ray = {**_ETC, "entrypoint.sh": entrypoint}
    ray_config = {
        "Entrypoint": ["/entrypoint.sh"],
        "Cmd": ["/bin/bash"],
        "Env": environment,
        "WorkingDir": "/workspace",
    }
    mount_points = tuple(_with_parents(path.strip("/") for path in bound_folders() if Path(path).is_dir()))
    images = [
        Image((layout.PAUSE_IMAGE,), _program("pause"), config={"Entrypoint": ["/pause"]}),
        Image((layout.DNS_IMAGE,), {**_program("coredns"), **_ETC}, config={"Entrypoint": ["/coredns"]}),
        Image(
            (layout.OPERATOR_IMAGE,),
            {"manager": tool_path("kuberay-operator").read_bytes(), **_ETC},
            config={"Entrypoint": ["/manager"], "User": "65532:65532"},
        ),
        Image((layout.RAY_IMAGE,), ray, (*_FOLDERS, *mount_points), ray_config),
        Image(
            (layout.RAY_IMAGE_REBUILT,), {**ray, "etc/rebuilt": b""}, (*_FOLDERS, *mount_points), ray_config
        ),
    ]
    partial = target.with_suffix(".partial")
    _write(partial, images)
    partial.replace(target)


def cache_key() -> str:
    """Changes with all that the images are made of."""
    parts = [
        Path(__file__).read_text(),
        *bound_folders(),
        *(str(tool_path(name)) for name in layout.POD_TOOLS),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _program(name: str) -> dict[str, bytes]:
    return {name: tool_path(name).read_bytes()}


def _with_parents(paths: Iterable[str]) -> list[str]:
    folders: dict[str, None] = {}
    for path in paths:
        parts = path.split("/")
        folders.update(dict.fromkeys("/".join(parts[:depth]) for depth in range(1, len(parts) + 1)))
    return list(folders)


def _write(target: Path, images: Iterable[Image]) -> None:
    """The archive format of `docker save`, which containerd imports."""
    manifest = []
    with tarfile.open(target, "w") as archive:
        for image in images:
            layer = _layer(image)
            digest = hashlib.sha256(layer).hexdigest()
            config = json.dumps(
                {
                    "architecture": "amd64",
                    "os": "linux",
                    "config": image.config,
                    "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
                }
            ).encode()
            config_name = f"{hashlib.sha256(config).hexdigest()}.json"
            _add(archive, f"{digest}/layer.tar", layer)
            _add(archive, config_name, config)
            manifest.append(
                {"Config": config_name, "RepoTags": list(image.names), "Layers": [f"{digest}/layer.tar"]}
            )
        _add(archive, "manifest.json", json.dumps(manifest).encode())


def _layer(image: Image) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for folder in dict.fromkeys((*image.folders, "tmp")):
            entry = tarfile.TarInfo(folder)
            entry.type = tarfile.DIRTYPE
            entry.mode = 0o1777 if folder == "tmp" else 0o755
            archive.addfile(entry)
        for name, data in image.files.items():
            _add(archive, name, data, 0o644 if name.startswith("etc/") else 0o755)
    return content.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    entry.mode = mode
    archive.addfile(entry, io.BytesIO(data))
