"""The real Pulumi engine, driven in a few seconds per run.

The engine is the CLI that tests/gotools builds. The program runs in this process through the same language server that
Pulumi's Automation API uses for inline programs, and the plugins are served from this process too, so nothing is
imported twice: one `up` of the whole stack costs seconds, which makes it possible to try every point of failure. The
Automation API itself is not used for the runs, because it calls the CLI four times for each of them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from pulumi.automation._server import LanguageServer
from pulumi.runtime.proto import language_pb2_grpc

from tests.engine import eks_plugin, kubernetes_plugin
from tests.engine.aws_plugin import server as aws_plugin
from tests.engine.aws_plugin.base import Cloud
from tests.engine.emulator import Emulator, Identity, new_account
from tests.engine.faults import Faults
from tests.engine.wire import OPTIONS, Served, name_of, type_of
from tests.gotools import build

PROJECT = "efa-finetune"
PASSPHRASE = "test"
TIMEOUT_SECONDS = 180
_ONE_CHECKPOINT = {"PULUMI_SKIP_CHECKPOINTS": "true", "PULUMI_EXPERIMENTAL": "true"}
_PLUGIN_MAIN = Path(__file__).parent / "plugin_main.py"


@dataclass(frozen=True)
class Step:
    """One thing that the engine did, or planned, for one resource."""

    op: str
    urn: str
    keys: tuple[str, ...] = ()
    """The inputs whose change is the reason."""

    @property
    def type(self) -> str:
        return type_of(self.urn)

    @property
    def name(self) -> str:
        return name_of(self.urn)


@dataclass
class Result:
    """What one run of the engine did and said."""

    code: int
    steps: list[Step]
    failed: list[Step]
    diagnostics: list[dict[str, Any]]
    output: str
    seconds: float
    log: Path

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def errors(self) -> str:
        return "\n".join(one["message"].strip() for one in self.diagnostics if one["severity"] == "error")

    @property
    def changes(self) -> list[Step]:
        """Steps that change something."""
        return [step for step in self.steps if step.op not in ("same", "read", "refresh")]

    def require_ok(self) -> Result:
        assert self.ok, f"the engine ended with status {self.code}\n{self.errors}\n{self.output[-6000:]}"
        return self


class Running:
    """A run of the engine that has not ended."""

    def __init__(self, process: subprocess.Popen[str], log: Path, cleanup: Callable[[], None]) -> None:
        self.process = process
        self._log = log
        self._cleanup = cleanup
        self._started = time.monotonic()
        self._output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._output.extend(self.process.stdout)

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout: float = TIMEOUT_SECONDS) -> Result:
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
            self._output.append(f"\nkilled by the test after {timeout} s\n")
        finally:
            self._reader.join(10)
            self._cleanup()
        seconds = time.monotonic() - self._started
        return Result(code, *_events(self._log), "".join(self._output), seconds, self._log)


def _events(log: Path) -> tuple[list[Step], list[Step], list[dict[str, Any]]]:
    steps, failed, diagnostics = [], [], []
    lines = log.read_text().splitlines() if log.exists() else []
    for line in lines:
        event = json.loads(line)
        if "resourcePreEvent" in event:
            steps.append(_step(event["resourcePreEvent"]["metadata"]))
        elif "resOpFailedEvent" in event:
            failed.append(_step(event["resOpFailedEvent"]["metadata"]))
        elif "diagnosticEvent" in event:
            diagnostics.append(event["diagnosticEvent"])
    return steps, failed, diagnostics


def _step(metadata: Mapping[str, Any]) -> Step:
    return Step(metadata["op"], metadata["urn"], tuple(metadata.get("diffs") or metadata.get("keys") or ()))


class Engine:
    """The engine and the plugins of one test process. `identity` says whose credentials the plugins have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pulumi = build.ensure(["pulumi"])["pulumi"]
        self.identity = Identity(None)
        self.emulator = Emulator()
        self.faults = Faults()
        self.session = self.emulator.session(self.identity, before_call=self.faults)
        self._clients: dict[str, Any] = {}
        self.aws = aws_plugin.Aws(self._connect, has_credentials=lambda: self.identity.account is not None)
        self.aws.on_cancel = lambda: self.faults.released.set()
        self.unreachable: str | None = None
        self.kubernetes = kubernetes_plugin.Kubernetes(self._why_unreachable)
        self.served = {
            "aws": Served(self.aws),
            "eks": Served(eks_plugin.Eks()),
            "kubernetes": Served(self.kubernetes),
        }
        # A run that fails ends while the program still talks to the engine; its complaints say nothing new.
        logging.getLogger("grpc").setLevel(logging.CRITICAL)
        self.home = folder / "home"
        _place_plugins(self.home)

    def _connect(self, region: str) -> Cloud:
        # Botocore takes a tenth of a second to make a client: they outlive the runs, the identity behind them changes.
        return Cloud(self.session, "http://aws.test", region, clients=self._clients)

    def _why_unreachable(self, cluster: str) -> str | None:
        if self.unreachable:
            return self.unreachable
        # One line of truth for "is there a cluster": the emulated EKS.
        name = cluster.rsplit("/", 1)[-1]
        from ministack.services import eks

        there = any(key[0] == self.identity.account and key[2] == name for key in eks._clusters._data)
        return (
            None
            if there
            else f"Get https://{name}.eks.test/api: dial tcp: lookup {name}.eks.test: no such host"
        )

    def stop(self) -> None:
        for one in self.served.values():
            one.kill()

    @contextlib.contextmanager
    def fresh_account(self) -> Iterator[str]:
        """An account in which nothing exists, no faults ordered, nothing recorded."""
        account = new_account()
        self.identity.account = account
        self.unreachable = None
        self.faults.reset()
        for recorded in (self.aws.deleted, self.kubernetes.deleted, self.kubernetes.created):
            recorded.clear()
        self.kubernetes.objects.clear()
        try:
            yield account
        finally:
            self.faults.released.set()


def _place_plugins(home: Path) -> None:
    """Executables in Pulumi's plugin folder under their exact versions, so that the engine never tries a download."""
    for name, version in (
        ("aws", aws_plugin.VERSION),
        ("eks", eks_plugin.VERSION),
        ("kubernetes", kubernetes_plugin.VERSION),
    ):
        target = home / "plugins" / f"resource-{name}-v{version}" / f"pulumi-resource-{name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{_PLUGIN_MAIN}" {name} "$@"\n')
        target.chmod(0o755)


@dataclass
class Stack:
    """One stack in a state backend of its own."""

    engine: Engine
    folder: Path
    program: Callable[[], None]
    name: str = "dev"
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    checkpoints: bool = False
    """Whether the engine writes its state around each step, as it does for users, and not once at its end, which is half
    of its work. A run that is cut off needs it."""
    own_plugins: tuple[str, ...] = ()
    """Plugins that the engine starts as processes of their own, instead of using the ones in this process."""

    def __post_init__(self) -> None:
        (self.folder / "project").mkdir(parents=True, exist_ok=True)
        (self.folder / "project" / "Pulumi.yaml").write_text(f"name: {PROJECT}\nruntime: python\n")
        template = self.engine.folder / "empty-backend"
        if not template.exists():
            # Made once: `stack init` derives a key from the passphrase, which takes a second.
            staging = self.engine.folder / "staging-backend"
            staging.mkdir(exist_ok=True)
            self._cli(["stack", "init", "organization/efa-finetune/dev"], backend=staging).require_ok()
            (self.engine.folder / "stack.yaml").write_text(
                (self.folder / "project" / "Pulumi.dev.yaml").read_text()
            )
            staging.rename(template)
        shutil.copytree(template, self.backend, dirs_exist_ok=True)
        self.write_config()

    @property
    def backend(self) -> Path:
        return self.folder / "backend"

    @property
    def settings_file(self) -> Path:
        return self.folder / "project" / f"Pulumi.{self.name}.yaml"

    def write_config(self, **changes: Any) -> None:
        """Sets settings (camelCase keys) as `pulumi config set` would."""
        import yaml

        self.config |= changes
        document = yaml.safe_load((self.engine.folder / "stack.yaml").read_text())
        document["config"] = {
            f"{PROJECT}:{key}": json.dumps(value) if isinstance(value, (list, dict)) else value
            for key, value in self.config.items()
            if value is not None
        }
        self.settings_file.write_text(yaml.safe_dump(document))

    def preview(self, *arguments: str) -> Result:
        return self.start("preview", *arguments).wait()

    def up(self, *arguments: str) -> Result:
        return self.start("up", "--yes", "--skip-preview", *arguments).wait()

    def destroy(self, *arguments: str, timeout: float = TIMEOUT_SECONDS) -> Result:
        return self.start("destroy", "--yes", "--skip-preview", *arguments).wait(timeout)

    def refresh(self, *arguments: str) -> Result:
        return self.start("refresh", "--yes", "--skip-preview", *arguments).wait()

    def cancel(self) -> Result:
        return self._cli(["cancel", "--yes"])

    def run_cli(self, *arguments: str) -> Result:
        return self._cli(list(arguments))

    def state(self) -> dict[str, Any]:
        path = self.backend / ".pulumi" / "stacks" / PROJECT / f"{self.name}.json"
        return json.loads(path.read_text())["checkpoint"]["latest"]

    def resources(self) -> list[dict[str, Any]]:
        """What the state holds, without the stack itself and the providers."""
        hidden = ("pulumi:pulumi:Stack", "pulumi:providers:")
        return [one for one in self.state().get("resources") or [] if not one["type"].startswith(hidden)]

    def outputs(self) -> dict[str, Any]:
        roots = [one for one in self.state()["resources"] if one["type"] == "pulumi:pulumi:Stack"]
        return roots[0].get("outputs") or {}

    def start(self, command: str, *arguments: str) -> Running:
        server, cleanup = _language_server(self.program)
        log = Path(tempfile.mkstemp(prefix=f"{command}-", suffix=".jsonl", dir=self.folder)[1])
        client = [] if command in ("destroy", "refresh") else [f"--client=127.0.0.1:{server}"]
        parallel = [] if any(one.startswith("--parallel") for one in arguments) else ["--parallel=4"]
        full = [
            command,
            *client,
            "--exec-kind",
            "auto.inline",
            "--event-log",
            str(log),
            *parallel,
            *arguments,
        ]
        return Running(self._spawn([*full, "--color=never", "--suppress-progress"]), log, cleanup)

    def _cli(self, arguments: Sequence[str], *, backend: Path | None = None) -> Result:
        log = self.folder / "none.jsonl"
        return Running(self._spawn(arguments, backend=backend), log, lambda: None).wait()

    def _spawn(self, arguments: Sequence[str], *, backend: Path | None = None) -> subprocess.Popen[str]:
        served = self.engine.served.items()
        attach = ",".join(f"{name}:{one.port}" for name, one in served if name not in self.own_plugins)
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.engine.folder),
            "PULUMI_HOME": str(self.engine.home),
            "PULUMI_BACKEND_URL": f"file://{backend or self.backend}",
            "PULUMI_CONFIG_PASSPHRASE": PASSPHRASE,
            "PULUMI_AUTOMATION_API": "true",
            "PULUMI_DEBUG_COMMANDS": "true",
            "PULUMI_SKIP_UPDATE_CHECK": "true",
            "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
            "PULUMI_DIY_BACKEND_DISABLE_CHECKPOINT_BACKUPS": "true",
            "PULUMI_DEBUG_PROVIDERS": attach,
            **({} if self.checkpoints else _ONE_CHECKPOINT),
            **self.environment,
        }
        stack = [] if arguments[0] == "stack" else ["--stack", f"organization/{PROJECT}/{self.name}"]
        command = [str(self.engine.pulumi), "--non-interactive", *arguments, *stack]
        return subprocess.Popen(
            command,
            cwd=self.folder / "project",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )


def _language_server(program: Callable[[], None]) -> tuple[int, Callable[[], None]]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4), options=OPTIONS)
    language_pb2_grpc.add_LanguageRuntimeServicer_to_server(LanguageServer(program), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return port, lambda: server.stop(0)
