"""The rig as its users see it: start it, stop it, ask how it is, and use it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gotools.build import cache_folder, data_path, ensure, tool_path
from tests.rig import images, machine
from tests.rig.bytecode import compile_environment
from tests.rig.cgroups import remove_cgroups
from tests.rig.layout import REPOSITORY, S3_BUCKET, TOOLS, Layout, layout_from_environment
from tests.rig.machine import RigError, child_of, describe_process, end_process, process_identity, tail_file
from tests.rig.processes import run


@dataclass(frozen=True)
class Status:
    phase: str
    """stopped, starting, ready or failed"""
    text: str = ""


class Rig:
    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = layout or layout_from_environment()

    # -- start and stop

    def up(self) -> None:
        """Brings up a fresh cluster; does nothing where this rig runs and is ready."""
        reason = machine.unsupported()
        if reason:
            raise RigError(reason)
        started = time.monotonic()
        machine.install_packages()
        ensure(TOOLS)
        with self._lock():
            if self.status().phase == "ready":
                _say(f"the rig is running already: {self.layout.kubeconfig}")
                return
            self._clear()
            self._check_network()
            self._prepare()
            self._start_supervisor()
            self._await_ready()
        _say(f"ready in {time.monotonic() - started:.1f} s: export KUBECONFIG={self.layout.kubeconfig}")

    def down(self) -> None:
        """Ends all that belongs to this rig, in whatever condition it is, and removes its state; logs are
        kept.
        """
        if not self.layout.state.exists():
            return
        started = time.monotonic()
        with self._lock():
            self._clear()
        _say(f"stopped in {time.monotonic() - started:.1f} s")

    def status(self) -> Status:
        runs = bool(_supervisors(self.layout))
        try:
            written = json.loads(self.layout.status_file.read_text())
        except FileNotFoundError:
            return Status("starting" if runs else "stopped")
        if not runs and written["phase"] != "failed":
            return Status("failed", f"the rig's supervisor is gone; {tail_file(self.layout.supervisor_log)}")
        return Status(written["phase"], written["text"])

    # -- use

    def environment(self) -> dict[str, str]:
        """What a program on this machine needs to use the cluster and its object store."""
        tools = {str(tool_path(name).parent) for name in ("kubectl", "pulumi")}
        return {
            **os.environ,
            "PATH": os.pathsep.join([*sorted(tools), os.environ["PATH"]]),
            "KUBECONFIG": str(self.layout.kubeconfig),
            **self.storage_environment(),
        }

    def storage_environment(self) -> dict[str, str]:
        """The same inside and outside pods."""
        return {
            "AWS_ENDPOINT_URL_S3": self.layout.s3_url,
            "AWS_ACCESS_KEY_ID": "rig",
            "AWS_SECRET_ACCESS_KEY": "rig-secret",
            "AWS_REGION": "us-west-2",
            "AWS_DEFAULT_REGION": "us-west-2",
        }

    @property
    def storage_uri(self) -> str:
        return f"s3://{S3_BUCKET}"

    def kubectl(self, *arguments: str, stdin: str | None = None, seconds: float = 60) -> str:
        return run(
            tool_path("kubectl"),
            f"--kubeconfig={self.layout.kubeconfig}",
            *arguments,
            stdin=stdin,
            seconds=seconds,
        )

    def get(self, *arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    # -- parts of start and stop

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        self.layout.state.mkdir(parents=True, exist_ok=True)
        with (self.layout.state / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                _say(f"waiting for {file.read().strip()}, which starts or stops the rig")
                fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(0)
            file.write(f"process {os.getpid()}")
            file.flush()
            yield

    def _end_supervisor(self) -> None:
        for supervisor in _supervisors(self.layout):
            end_process(supervisor)
        _unplug(self.layout)

    def _clear(self) -> None:
        self._end_supervisor()
        remove_cgroups(self.layout)
        for path in self.layout.state.iterdir():
            if path.name not in {"lock", "log", "images.tar", "images.key"}:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _check_network(self) -> None:
        ours = ipaddress.ip_network(f"{self.layout.network}.0/24")
        for link in json.loads(run("ip", "-j", "addr", "show")):
            for address in link.get("addr_info", []):
                if address["family"] != "inet":
                    continue
                theirs = ipaddress.ip_network(f"{address['local']}/{address['prefixlen']}", strict=False)
                if ours.overlaps(theirs):
                    raise RigError(
                        f"the rig's network {ours} is in use: interface {link['ifname']} has {theirs}"
                        f"{_owner_of(link['ifname'])}. Stop its owner, or choose another network with "
                        "FINETUNE_RIG_NETWORK (three numbers, for example 10.98.0)."
                    )

    def _prepare(self) -> None:
        shutil.rmtree(self.layout.logs, ignore_errors=True)
        self.layout.logs.mkdir()
        chart = self.layout.chart
        shutil.copytree(Path(__file__).parent / "charts" / "kuberay-operator", chart)
        # The permissions of exactly the operator that runs, as its own source declares them.
        (chart / "files").mkdir()
        shutil.copy(data_path("kuberay", "rbac") / "role.yaml", chart / "files")
        shutil.copytree(data_path("kuberay", "crds"), self.layout.state / "crds")
        compile_environment(cache_folder() / "environment.compiled")
        key = images.cache_key()
        key_file = self.layout.state / "images.key"
        if not (self.layout.images.exists() and key_file.exists() and key_file.read_text() == key):
            images.build_images(self.layout.images)
            key_file.write_text(key)

    def _start_supervisor(self) -> None:
        command = [
            *("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--net"),
            *(sys.executable, "-m", "tests.rig.supervisor", str(self.layout.state), self.layout.network),
        ]
        with self.layout.supervisor_log.open("ab") as log:
            outer = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 10
        while (pid := child_of(outer.pid)) is None or not _has_own_network(pid):
            if outer.poll() is not None or time.monotonic() > deadline:
                raise RigError(
                    "the kernel does not let the rig have namespaces of its own (`unshare` failed); "
                    + tail_file(self.layout.supervisor_log)
                )
            time.sleep(0.01)
        self._plug_in(pid)

    def _plug_in(self, pid: int) -> None:
        """The cable between this machine and the bridge of the rig's nodes."""
        link = self.layout.link
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "machine", "netns", str(pid))
        run("ip", "addr", "add", f"{self.layout.machine_address}/24", "dev", link)
        run("ip", "link", "set", link, "up")

    def _await_ready(self, seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        said = ""
        while (status := self.status()).phase != "ready":
            if status.phase == "failed" or time.monotonic() > deadline:
                problem = (
                    status.text
                    if status.phase == "failed"
                    else f"still at '{status.text}' after {seconds:.0f} s"
                )
                self._end_supervisor()
                remove_cgroups(self.layout)
                raise RigError(f"the rig did not start: {problem}\nAll logs: {self.layout.logs}")
            if status.text != said:
                said = status.text
                _say(f"starting: {said}")
            time.sleep(0.1)


def _has_own_network(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    except FileNotFoundError:
        return False


def _unplug(layout: Layout) -> None:
    # The kernel does it too, but up to half a minute after the last process of the network namespace.
    link = Path(f"/sys/class/net/{layout.link}")
    if link.exists():
        done = subprocess.run(["ip", "link", "delete", layout.link], capture_output=True, text=True)
        if done.returncode != 0 and link.exists():
            raise RigError(f"cannot delete the interface {layout.link}: {done.stderr.strip()}")


def _owner_of(link: str) -> str:
    """Which rig an interface belongs to, where it is one's."""
    for pid, layout in _all_supervisors():
        if layout.link == link:
            return f", of another rig: {describe_process(pid)}, state folder {layout.state}"
    return ""


def _supervisors(layout: Layout) -> list[str]:
    """The processes that keep this rig alive: its process 1, and `unshare` that made its namespaces."""
    identities = [process_identity(pid) for pid, found in _all_supervisors() if found.state == layout.state]
    return [identity for identity in identities if identity]


def _all_supervisors() -> list[tuple[int, Layout]]:
    # Found by their command line, not by a file: whoever wrote one may have been killed just before.
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            state, network = words[words.index("tests.rig.supervisor") + 1 :][:2]
            found.append((int(process.name), Layout(Path(state), network)))
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
