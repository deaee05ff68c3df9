"""Compiled Python files for the pods, which see the project's environment read-only.

Without them every process of Ray compiles torch and Ray anew, and Ray gives up on nodes that need more than
30 s to start (2026-12: three Ray pods were ready after 53 s with them, never without).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path


def compile_environment(marker: Path) -> None:
    """Does what is missing; `marker` remembers for which packages it was done."""
    packages = Path(sysconfig.get_path("purelib"))
    state = [sys.prefix, sys.version, *sorted(path.name for path in packages.glob("*.dist-info"))]
    key = hashlib.sha256("\n".join(state).encode()).hexdigest()
    if marker.exists() and marker.read_text() == key:
        return
    print(f"compiling the Python files in {packages} for the pods (once, about a minute)", file=sys.stderr)
    # Its status says nothing: some packages ship files for newer versions of Python.
    workers = str(len(os.sched_getaffinity(0)))
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "-j", workers, str(packages)], capture_output=True
    )
    marker.write_text(key)
