"""What this project is built from: packages locked by hash, under licences that allow it, without known holes."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import Distribution, distributions, version
from pathlib import Path
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOCK: dict[str, Any] = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))

# Licences that let anybody use, change and pass on, with no condition on the code that imports them (MPL-2.0 binds its
# own files only), as packages spell them.
ALLOWED = {
    *(
        "MIT",
        "MIT License",
        "MIT-0",
        "MIT-CMU",
        "ISC",
        "ISC License (ISCL)",
        "Zlib",
        "Unlicense",
        "0BSD",
        "CC0-1.0",
    ),
    *("Apache-2.0", "Apache 2.0", "Apache 2.0 License", "Apache Software License", "Apache License 2.0"),
    *("Apache-2.0 WITH LLVM-exception", "BSL-1.0", "DFSG approved", "CNRI-Python"),
    *("BSD", "BSD License", "BSD-2-Clause", "BSD-3-Clause", "3-Clause BSD License"),
    *("PSF-2.0", "Python-2.0", "Python Software Foundation License"),
    *("MPL-2.0", "Mozilla Public License 2.0 (MPL 2.0)"),
}
# CUDA libraries that come with torch: NVIDIA's own licence allows to use and to redistribute them with an application.
NVIDIA = re.compile(r"nvidia-.+|cuda-.+")
# Accepted after a look, each with its reason.
ACCEPTED_HOLES = {
    # Ray's job API runs what it is sent: its dashboard listens on 127.0.0.1 of the head only, behind network policies
    # and Ray's token (docs/security.md). Ray's authors call it a property and have no fixed version.
    "CVE-2023-48022": "ray",
}
ADVISORIES = "api.osv.dev"


def licences(distribution: Distribution) -> list[str]:
    """Licences by the best of the three fields in which packages state them."""
    metadata = distribution.metadata
    expression = metadata.get("License-Expression")
    if expression:
        return _split(expression)
    classifiers = [
        entry.rpartition("::")[2].strip()
        for entry in metadata.get_all("Classifier") or []
        if entry.startswith("License :: ") and entry != "License :: OSI Approved"
    ]
    if classifiers:
        return classifiers
    return _split((metadata.get("License") or "none stated").splitlines()[0])


def _split(expression: str) -> list[str]:
    return [part.strip("() ") for part in re.split(r" AND | OR ", expression)]


def test_licences_of_all_installed_packages() -> None:
    listed = {one.metadata["Name"]: licences(one) for one in distributions() if one.metadata["Name"]}
    refused = {
        name: found
        for name, found in listed.items()
        if not NVIDIA.fullmatch(name) and not ALLOWED.issuperset(found)
    }

    assert len(listed) > 50, "the packages of the lock file are installed"
    assert refused == {}


def test_every_package_is_locked_by_hash() -> None:
    registries: set[str] = set()
    for package in LOCK["package"]:
        source = package["source"]
        if "editable" in source or "virtual" in source:
            assert package["name"] == "efa-finetune"
            continue
        registries.add(source["registry"])
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        assert files, package["name"]
        assert all(file["hash"].startswith("sha256:") for file in files), package["name"]
    assert len(registries) == 1, "one registry: no package can be taken from another under the same name"


def holes(report: Path, *service: str) -> list[str]:
    """Known holes of the installed packages, less the accepted ones, by the database of ``service``."""
    ignored = [word for hole in ACCEPTED_HOLES for word in ("--ignore-vuln", hole)]
    command = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "-s", "osv", *service]
    done = subprocess.run(
        [*command, "--format", "json", "--output", str(report), *ignored],
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.is_file(), done.stderr
    return [
        f"{package['name']} {package['version']}: {hole['id']}, fixed in {', '.join(hole['fix_versions']) or 'none'}"
        for package in json.loads(report.read_text())["dependencies"]
        for hole in package.get("vulns", [])
    ]


@pytest.mark.slow
def test_known_holes(tmp_path: Path) -> None:
    try:
        socket.create_connection((ADVISORIES, 443), timeout=10).close()
    except OSError as error:
        pytest.skip(
            f"the advisory database {ADVISORIES} cannot be reached from here ({error}): nothing is known of holes"
        )
    assert holes(tmp_path / "audit.json") == []


class _Advisories(BaseHTTPRequestHandler):
    """A database that knows of one hole in Jinja2 and of the accepted one in Ray."""

    known: ClassVar[dict[str, str]] = {"jinja2": "PYSEC-0000-1", "ray": "CVE-2023-48022"}

    def do_POST(self) -> None:
        package = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["package"]
        hole = self.known.get(package["name"])
        events = [{"introduced": "0"}, {"fixed": "99.0"}]
        affected = [{"package": package, "ranges": [{"type": "ECOSYSTEM", "events": events}]}]
        answer = {"vulns": [{"id": hole, "summary": "a hole", "affected": affected}]} if hole else {}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.slow
def test_a_hole_is_found_and_an_accepted_one_is_not(tmp_path: Path) -> None:
    """Where the database cannot be reached, this is what stands for it: a finding fails the audit."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Advisories)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        found = holes(tmp_path / "audit.json", "--osv-url", f"http://127.0.0.1:{server.server_port}/")
    finally:
        server.shutdown()
        server.server_close()
    assert found == [f"jinja2 {version('jinja2')}: PYSEC-0000-1, fixed in 99.0"]


def test_accepted_holes_are_of_packages_that_are_used() -> None:
    locked = {package["name"] for package in LOCK["package"]}
    assert set(ACCEPTED_HOLES.values()) <= locked
