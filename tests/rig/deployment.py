"""The local stack on the rig, deployed by the real Pulumi engine through the real Kubernetes provider."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pexpect
from pulumi import automation

from infra.outputs import OUTPUT_NAME, StackOutputs
from infra.program import program
from infra.settings import PROJECT, StackSettings, parse_settings
from tests.gotools.build import PULUMI_KUBERNETES_VERSION, ensure
from tests.rig import layout
from tests.rig.cluster import Rig
from tests.rig.machine import RigError

STACK = "local"
STORAGE_SECRET = "storage"
# Objects that come and go by themselves, or belong to no one's deployment.
_VOLATILE = ("events", "events.events.k8s.io", "leases.coordination.k8s.io", "componentstatuses")

# The sizes: two cores and 24 GiB hold the head, the operator and two workers beside a test run (2026-12).
# No GPUs: jobs run on the CPU here. The nodes do advertise them; tests ask for them by `gpusPerWorker`.
SETTINGS: dict[str, str] = {
    "target": "existing",
    "image": layout.RAY_IMAGE.rpartition(":")[0],
    "imageTag": layout.RAY_IMAGE.rpartition(":")[2],
    "devicePlugins": "false",
    "requireEfa": "false",
    "gpusPerWorker": "0",
    "efaPerWorker": "0",
    "headCpu": "1",
    "headMemoryGib": "3",
    "headScratchGib": "4",
    "workerCpu": "1",
    "workerMemoryGib": "5",
    "workerScratchGib": "4",
    "storageSecret": STORAGE_SECRET,
}


@dataclass
class Deployment:
    """One stack in a backend of its own; the engine is driven by Pulumi's Automation API."""

    rig: Rig
    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    _deployed: dict[str, str] | None = None
    _configured: dict[str, str] | None = None

    def __post_init__(self) -> None:
        tools = ensure(["pulumi", "pulumi-resource-kubernetes", "kubectl"])
        plugin = self.folder / "home" / "plugins" / f"resource-kubernetes-v{PULUMI_KUBERNETES_VERSION}"
        _link(self.folder / "engine" / "bin" / "pulumi", tools["pulumi"])
        _link(plugin / "pulumi-resource-kubernetes", tools["pulumi-resource-kubernetes"])
        (self.folder / "backend").mkdir(exist_ok=True)
        self.settings = {
            **SETTINGS,
            "kubeconfig": str(self.rig.layout.kubeconfig),
            "kubeContext": "rig",
            "kuberayChart": str(self.rig.layout.chart),
            "storageUri": self.rig.storage_uri,
            "storageEndpointUrl": self.rig.layout.s3_url,
            **self.settings,
        }
        self._stack = automation.create_or_select_stack(
            stack_name=STACK,
            project_name=PROJECT,
            program=program,
            opts=automation.LocalWorkspaceOptions(
                work_dir=str(self.folder),
                pulumi_home=str(self.folder / "home"),
                pulumi_command=automation.PulumiCommand(
                    root=str(self.folder / "engine"), skip_version_check=True
                ),
                env_vars=self._pulumi_environment(),
            ),
        )

        self.original = dict(self.settings)

    @property
    def is_up(self) -> bool:
        return self._deployed is not None

    @property
    def namespace(self) -> str:
        return self.typed_settings().namespace

    @property
    def outputs_file(self) -> Path:
        """StackOutputs as `finetune --outputs FILE` reads them."""
        return self.folder / "outputs.json"

    def typed_settings(self) -> StackSettings:
        return parse_settings(self.settings, STACK)

    def outputs(self) -> StackOutputs:
        return StackOutputs.model_validate_json(self.outputs_file.read_text())

    def environment(self) -> dict[str, str]:
        """For commands on this machine that use the cluster, its store and the stack."""
        return self.rig.environment()

    def ensure_up(self) -> None:
        """Brings the cluster to the settings; nothing to do where it is there."""
        if self._deployed != self.settings:
            self.up()

    def up(self) -> automation.UpResult:
        before = self.folder / "before.json"
        if not before.exists():
            before.write_text(json.dumps(sorted(self.objects())))
        self._configure()
        # A thread, because the stack makes the namespace and then waits for pods that need the Secret.
        keys = threading.Thread(target=self._create_storage_secret, daemon=True)
        keys.start()
        try:
            result = self._stack.up(log_to_std_err=False, on_output=self._log)
        except automation.CommandError as error:
            raise RigError(f"`pulumi up` failed; log: {self.log}\n{error}\n{self._diagnosis()}") from error
        self._deployed = dict(self.settings)
        self.outputs_file.write_text(json.dumps(result.outputs[OUTPUT_NAME].value))
        return result

    def preview(self) -> automation.PreviewResult:
        self._configure()
        return self._stack.preview(on_output=self._log)

    def destroy(self) -> automation.DestroyResult:
        result = self._stack.destroy(on_output=self._log)
        self.forget()
        return result

    def forget(self) -> None:
        """The stack is gone."""
        self._deployed = None
        self.outputs_file.unlink(missing_ok=True)

    def destroy_in_terminal(self) -> pexpect.spawn[str]:
        """`pulumi destroy` as a user types it: it shows what goes, and asks."""
        return pexpect.spawn(
            str(self.folder / "engine" / "bin" / "pulumi"),
            ["destroy", "--stack", STACK],
            cwd=str(self.folder),
            env={
                **os.environ,
                **self._pulumi_environment(),
                "PULUMI_HOME": str(self.folder / "home"),
                "TERM": "xterm",
            },
            dimensions=(50, 200),
            encoding="utf-8",
            codec_errors="replace",
            timeout=300,
        )

    @property
    def before(self) -> set[str]:
        """All objects of the cluster as they were before the stack was first deployed."""
        return set(json.loads((self.folder / "before.json").read_text()))

    def objects(self) -> set[str]:
        """Kind, namespace and name of every object in the cluster."""
        kinds = self.rig.kubectl("api-resources", "--verbs=list", "--output=name").split()
        listed = ",".join(kind for kind in kinds if kind not in _VOLATILE)
        columns = "K:.kind,NS:.metadata.namespace,N:.metadata.name"
        found = self.rig.kubectl(
            "get", listed, "--all-namespaces", "--no-headers", "-o", f"custom-columns={columns}"
        )
        return {" ".join(line.split()) for line in found.splitlines()}

    def pods(self) -> dict[str, dict[str, Any]]:
        """The Ray pods by name."""
        selector = f"--selector=ray.io/cluster={self.typed_settings().ray_cluster}"
        found = self.rig.get("pods", "--namespace", self.namespace, selector)["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def head_pod(self) -> str:
        heads = [n for n, p in self.pods().items() if p["metadata"]["labels"]["ray.io/node-type"] == "head"]
        assert len(heads) == 1, f"one head pod is expected, there are {heads}"
        return heads[0]

    def kubectl(self, *arguments: str, stdin: str | None = None, seconds: float = 60) -> str:
        return self.rig.kubectl("--namespace", self.namespace, *arguments, stdin=stdin, seconds=seconds)

    def _pulumi_environment(self) -> dict[str, str]:
        return {
            "PULUMI_BACKEND_URL": f"file://{self.folder / 'backend'}",
            "PULUMI_CONFIG_PASSPHRASE": "rig",
            "PULUMI_SKIP_UPDATE_CHECK": "true",
            # Everything is here: without it a command in a terminal waits minutes for downloads nobody needs.
            "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
        }

    @property
    def log(self) -> Path:
        return self.folder / "pulumi.log"

    def _log(self, line: str) -> None:
        with self.log.open("a") as file:
            file.write(line.rstrip("\n") + "\n")

    def _configure(self) -> None:
        """Each question to the engine is a process of its own, so none is asked twice."""
        if self._configured == self.settings:
            return
        wanted = {f"{PROJECT}:{name}": automation.ConfigValue(value) for name, value in self.settings.items()}
        gone = [name for name in self._stack.get_all_config() if name not in wanted]
        if gone:
            self._stack.remove_all_config(gone)
        self._stack.set_all_config(wanted)
        self._configured = dict(self.settings)

    def _create_storage_secret(self, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        keys = self.rig.storage_environment()
        literals = [f"--from-literal={k}={keys[k]}" for k in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
        while time.monotonic() < deadline:
            try:
                self.kubectl("create", "secret", "generic", STORAGE_SECRET, *literals)
                return
            except RigError as error:
                if "already exists" in str(error):
                    return
            time.sleep(0.5)

    def _diagnosis(self) -> str:
        """What the cluster says, for the message of a deployment that failed."""
        questions = (
            ["get", "pods", "--all-namespaces", "-o", "wide"],
            ["get", "events", "-A", "--sort-by=.lastTimestamp"],
        )
        said = []
        for question in questions:
            try:
                said.append("\n".join(self.rig.kubectl(*question).splitlines()[-15:]))
            except RigError as error:
                said.append(str(error))
        return "\n".join(said)


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
