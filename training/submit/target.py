"""The target of a submission: a stack's outputs, and kubectl for its cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from infra.outputs import OUTPUT_NAME, SCHEMA_VERSION, StackOutputs
from training.errors import UsageError
from training.submit.kubectl import Kubectl, find_kubectl

PULUMI_TIMEOUT_SECONDS = 120


def load_target(stack: str | None = None, outputs: Path | None = None) -> StackOutputs:
    """StackOutputs of a Pulumi stack (`pulumi stack output training --json --stack NAME`) or of a file.

    Raises UsageError when neither or both are given, or when what is read is not a StackOutputs.
    """
    if (stack is None) == (outputs is None):
        found = "neither" if stack is None else "both"
        raise UsageError(
            f"Give exactly one of --stack NAME and --outputs FILE (found {found}): they say which cluster runs the "
            "job."
        )
    if outputs is not None:
        try:
            return parse_outputs(outputs.read_text(encoding="utf-8"), str(outputs))
        except OSError as error:
            raise UsageError(f"--outputs {outputs}: {error.strerror or error}") from None
    assert stack is not None
    return parse_outputs(_pulumi_output(stack), f"stack {stack}")


def parse_outputs(text: str, origin: str) -> StackOutputs:
    """StackOutputs from JSON: the output `training` itself, or the whole of `pulumi stack output --json`."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"{origin}: not JSON ({error}); expected what `pulumi stack output --json` prints"
        ) from None
    if isinstance(document, dict) and OUTPUT_NAME in document:
        document = cast("dict[str, Any]", document)[OUTPUT_NAME]
    if not isinstance(document, dict):
        raise UsageError(
            f"{origin}: no output {OUTPUT_NAME!r} in it; run `pulumi up` with this version of the program"
        )
    version = cast("dict[str, Any]", document).get("schema_version", "none")
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{origin}: outputs of schema version {version}, this finetune reads {SCHEMA_VERSION}. Use the finetune "
            "of the checkout that deployed the stack, or run `pulumi up` with this one."
        )
    try:
        return StackOutputs.model_validate(document)
    except ValidationError as error:
        problems = "\n".join(f"  {'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
        raise UsageError(f"{origin}: not the outputs of a stack of this program:\n{problems}") from None


def _pulumi_output(stack: str) -> str:
    if shutil.which("pulumi") is None:
        raise UsageError(
            "pulumi: no such program. --stack reads the outputs of a stack through it: install it "
            "(https://www.pulumi.com/docs/install/), or give the outputs as a file: --outputs FILE."
        )
    command = ["pulumi", "stack", "output", OUTPUT_NAME, "--json", "--stack", stack, "--non-interactive"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PULUMI_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{' '.join(command)}: no answer within {PULUMI_TIMEOUT_SECONDS} s") from None
    if done.returncode != 0:
        said = done.stderr.strip() or "failed without a message"
        raise UsageError(f"{' '.join(command)}: {said}{_next_step(said, stack)}")
    return done.stdout


def _next_step(said: str, stack: str) -> str:
    """What to do about the answers of Pulumi that a first try meets."""
    if "PULUMI_ACCESS_TOKEN" in said:
        return (
            "\nLog in to where the state of the stack lies: pulumi login --local, or pulumi login s3://BUCKET"
        )
    if "no stack named" in said:
        return f"\nStacks of this login: pulumi stack ls. To make it: pulumi stack init {stack}"
    if "does not have output property" in said:
        return f"\nThe stack has not been deployed: pulumi up --stack {stack}"
    return ""


@contextmanager
def connect(target: StackOutputs) -> Generator[Kubectl]:
    """kubectl for the target. A kubeconfig with the exec command stands in a private file as long as it is used."""
    binary = find_kubectl()
    written = target.kube.kubeconfig(target.cluster_name)
    if written is None:
        yield Kubectl((binary, *_user_flags(target)), target.namespace)
        return
    command = cast("tuple[str, ...]", target.kube.exec_command)[0]
    if shutil.which(command) is None:
        raise UsageError(
            f"{command}: no such program, and the credentials of cluster {target.cluster_name} come from it"
        )
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
        path = Path(folder) / "kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps(written), encoding="utf-8")
        yield Kubectl((binary, "--kubeconfig", str(path)), target.namespace)


def _user_flags(target: StackOutputs) -> list[str]:
    flags: list[str] = []
    if target.kube.kubeconfig_path is not None:
        path = Path(os.path.expandvars(target.kube.kubeconfig_path)).expanduser()
        if not path.is_file():
            raise UsageError(f"{path}: the stack's kubeconfig is not there")
        flags += ["--kubeconfig", str(path)]
    if target.kube.context is not None:
        flags += ["--context", target.kube.context]
    return flags
