"""Packages that one job adds to the unmodified image; runs inside the head pod.

They are installed beside the job's code, in its working directory, which Ray carries to every node, also to one that
joins later. Ray's own `pip` would copy the image's whole environment on each node where that is a virtual one
(many GB: a head of 4 GiB scratch space was evicted for it, measured 2026-12). Only what the image lacks is installed; a
requirement that would replace one of the image's own packages is refused, since it would come first on every rank.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Ray takes working directories up to 500 MiB.
MAX_BYTES = 400 * 2**20

_OPTIONS = [
    *("--disable-pip-version-check", "--no-cache-dir", "--no-input", "--quiet"),
    *("--retries", "1", "--timeout", "15"),
]


class PackageError(Exception):
    """Packages cannot be added; the text holds pip's own words or the conflict."""


def install(requirements: Sequence[str], folder: Path) -> dict[str, str]:
    """Installs what the image lacks into `folder`, and returns names and versions. Raises PackageError."""
    missing = resolve(requirements)
    if missing:
        links = [f"{name} @ {url}" for name, (_, url) in missing.items()]
        _pip(["install", "--no-deps", "--target", str(folder), *_OPTIONS, *links])
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > MAX_BYTES:
        raise PackageError(
            f"with these packages the job's working directory has {size / 2**20:.0f} MiB; "
            f"{MAX_BYTES / 2**20:.0f} are allowed"
        )
    return {name: found for name, (found, _) in missing.items()}


def resolve(requirements: Sequence[str]) -> dict[str, tuple[str, str]]:
    """What has to be installed beside this environment: name -> (version, URL)."""
    with tempfile.TemporaryDirectory() as work:
        report = Path(work) / "report.json"
        _pip(["install", "--dry-run", "--report", str(report), *_OPTIONS, *requirements])
        resolved: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    missing = {i["metadata"]["name"]: (i["metadata"]["version"], i["download_info"]["url"]) for i in resolved}
    replaced = [
        f"{name} {has} by {wants[0]}"
        for name, wants in missing.items()
        if (has := _present(name)) is not None
    ]
    if replaced:
        raise PackageError(
            f"they would replace packages of the image ({', '.join(replaced)}): "
            "choose versions that go with the image's"
        )
    return missing


def _present(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _pip(arguments: list[str]) -> None:
    done = subprocess.run([*_command(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        own = [line.strip() for line in done.stderr.splitlines() if re.match(r"\s*(ERROR|error):", line)]
        raise PackageError("\n".join(own) or done.stderr.strip()[-1500:] or f"pip exited {done.returncode}")


def _command() -> list[str]:
    """pip of this environment, or the one that virtualenv, which Ray depends on, brings along."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    from virtualenv.seed.wheels.embed import get_embed_wheel

    wheel = get_embed_wheel("pip", ".".join(platform.python_version_tuple()[:2]))
    if wheel is None:
        raise PackageError("this image has neither pip nor a virtualenv that brings it")
    return [sys.executable, f"{wheel.path}/pip"]
