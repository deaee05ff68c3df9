"""One control group of the machine for all of the rig, so that its pods can be weighed and removed
together.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from tests.rig.layout import Layout
from tests.rig.machine import RigError
from tests.rig.processes import run

_ROOT = Path("/sys/fs/cgroup")

_NEW_CGROUP_NAMESPACE = 0x02000000  # CLONE_NEWCGROUP

# All pods together would else weigh as much as one other process of the machine: beside a busy test run Ray
# then never starts within its 30 s (2026-12, load 25). The names are of version 1 and of version 2.
_WEIGHTS = {"cpu.shares": "32768", "cpu.weight": "3200"}


def enter_cgroups(layout: Layout) -> None:
    """Moves this process into the group, and makes the group the root of what it and its children see."""
    groups = [_make_group(hierarchy, layout.cgroup) for hierarchy in _hierarchies()]
    for group in groups:
        (group / "cgroup.procs").write_text("0")
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_CGROUP_NAMESPACE) != 0:
        raise RigError(f"no cgroup namespace: {os.strerror(ctypes.get_errno())}")
    for group in groups:
        if (group / "cgroup.subtree_control").exists():
            _share_out(group)
        run("mount", "--bind", group, group.parent)


def _make_group(hierarchy: Path, name: str) -> Path:
    group = hierarchy / name
    group.mkdir(exist_ok=True)
    for inherited in ("cpuset.cpus", "cpuset.mems"):
        if (group / inherited).exists() and (hierarchy / inherited).exists():
            (group / inherited).write_text((hierarchy / inherited).read_text())
    for setting, weight in _WEIGHTS.items():
        if (group / setting).exists():
            (group / setting).write_text(weight)
    return group


def _share_out(group: Path) -> None:
    """Version 2 shares out controllers only in a group that holds no process itself."""
    (group / "supervisor").mkdir(exist_ok=True)
    (group / "supervisor" / "cgroup.procs").write_text("0")
    controllers = (group / "cgroup.controllers").read_text().split()
    (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))


def remove_cgroups(layout: Layout, seconds: float = 10) -> None:
    """Groups outlive their processes; a group is removed by removing its folders, the innermost first."""
    deadline = time.monotonic() + seconds
    for hierarchy in _hierarchies():
        top = hierarchy / layout.cgroup
        for folder in sorted((path for path in [top, *top.rglob("*")] if path.is_dir()), reverse=True):
            while True:
                try:
                    folder.rmdir()
                    break
                except OSError:  # Its last process is on its way out.
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)


def has_cgroups(layout: Layout) -> bool:
    return any((hierarchy / layout.cgroup).exists() for hierarchy in _hierarchies())


def _hierarchies() -> list[Path]:
    """One in version 2, one for each controller in version 1."""
    if (_ROOT / "cgroup.controllers").exists():
        return [_ROOT]
    return [path for path in _ROOT.iterdir() if path.is_dir() and not path.is_symlink()]
