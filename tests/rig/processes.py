"""Starting the rig's programs, waiting until they are ready, and saying what went wrong with the log's own
words.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.rig.machine import RigError, tail_file


@dataclass(frozen=True)
class Component:
    name: str
    process: subprocess.Popen[bytes]
    log: Path


def start(
    name: str,
    command: Sequence[str | Path],
    log: Path,
    *,
    network: str | None = None,
    environment: dict[str, str] | None = None,
) -> Component:
    """Starts a program; `network` names the network namespace that it runs in (the control plane's own
    where None).
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    inside = ["nsenter", f"--net=/run/netns/{network}", "--"] if network else []
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*inside, *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    return Component(name, process, log)


def run(*command: str | Path, stdin: str | None = None, seconds: float = 60) -> str:
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RigError(f"`{' '.join(words)}` did not end within {seconds:.0f} s") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise RigError(f"`{' '.join(words)}` failed with status {done.returncode}: {said}")
    return done.stdout


def wait_until(ready: Callable[[], bool], what: str, component: Component, seconds: float = 60) -> None:
    """Polls; a component that ends or never becomes ready is an error with the end of its log."""
    deadline = time.monotonic() + seconds
    while not ready():
        code = component.process.poll()
        if code is not None:
            raise RigError(
                f"{component.name} ended with status {code} before {what}; {tail_file(component.log)}"
            )
        if time.monotonic() > deadline:
            raise RigError(f"{component.name}: not {what} within {seconds:.0f} s; {tail_file(component.log)}")
        time.sleep(0.1)


def answers(url: str, *, authority: Path | None = None, token: str | None = None) -> bool:
    try:
        context = ssl.create_default_context(cafile=str(authority)) if authority else None
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
        with urllib.request.urlopen(request, timeout=2, context=context) as response:
            return 200 <= response.status < 300
    except (OSError, urllib.error.URLError, ssl.SSLError):
        return False
