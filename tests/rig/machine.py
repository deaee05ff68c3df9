"""What the rig needs of the machine that it runs on, and the little that it asks the kernel about
processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

# Program -> Debian package.
PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "ipset": "ipset",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "findmnt": "util-linux",
}


class RigError(RuntimeError):
    """The rig cannot do what was asked; the message says what, why, and what to do."""


def unsupported() -> str | None:
    """Why this machine cannot run the rig, or None."""
    if sys.platform != "linux":
        return f"the rig needs Linux (its nodes are Linux namespaces), this is {sys.platform}"
    if os.geteuid() != 0:
        return "the rig needs root: it makes network namespaces and runs containerd"
    if os.uname().machine != "x86_64":
        return f"the rig's images are built for x86_64, this is {os.uname().machine}"
    return None


def install_packages() -> None:
    os.environ["PATH"] = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
    absent = sorted({package for program, package in PACKAGES.items() if not shutil.which(program)})
    if not absent:
        return
    if not shutil.which("apt-get"):
        raise RigError(
            f"the rig needs {', '.join(absent)}, and this machine has no apt-get to install them with"
        )
    print(f"installing {', '.join(absent)} with apt-get", file=sys.stderr, flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *absent]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise RigError(
                f"`{' '.join(command)}` failed with status {done.returncode}:\n"
                + tail(done.stdout + done.stderr)
            )


def process_identity(pid: int) -> str | None:
    """A name that no later process with the same number has; None where there is no such process, or only
    its corpse.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, started = fields[0], fields[19]
    return None if state in "ZX" else f"{pid} {started}"


def describe_process(pid: int) -> str:
    try:
        command = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
    except (FileNotFoundError, ProcessLookupError):
        command = ""
    return f"process {pid} ({command[:160] or 'gone'})"


def child_of(pid: int) -> int | None:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return None
    return int(children[0]) if children else None


def end_process(identity: str, seconds: float = 20) -> None:
    """Kills the process, if it is still the one meant, and waits until the kernel has cleared it away."""
    pid = int(identity.split()[0])
    if process_identity(pid) != identity:
        return
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + seconds
    while process_identity(pid) == identity:
        if time.monotonic() > deadline:
            raise RigError(f"{describe_process(pid)} is still there {seconds:.0f} s after it was killed")
        time.sleep(0.05)


def tail(text: str, lines: int = 25) -> str:
    return "\n".join(text.splitlines()[-lines:])


def tail_file(path: Path, lines: int = 25) -> str:
    """The end of a log, with the line that says which log it is."""
    if not path.exists():
        return f"log: {path} (not written)"
    return f"log: {path}, its end:\n" + tail(path.read_text(errors="replace"), lines)
