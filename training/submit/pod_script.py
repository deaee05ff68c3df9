"""Runs inside the head pod, sent through the standard input of `python -`: asks Ray's job API and reads the
driver's log.

Standard library only, and no import of this package: it must work on a pod that has no bundle. Prints one
JSON object. The job API is at 127.0.0.1 of the head; a token, where Ray asks for one, is in the environment
of the container.
"""

from __future__ import annotations

import base64
import glob
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

MAX_CHUNK_BYTES = 256 * 1024  # of log in one answer: short calls (2026-12)


def main(request: dict[str, Any]) -> dict[str, Any]:
    port = int(request["port"])
    match request["verb"]:
        case "poll":
            answer: dict[str, Any] = {
                "job": job(port, request["id"]),
                "log": log(request["id"], int(request["offset"])),
            }
            if request.get("nodes"):
                answer["nodes"] = nodes(port)
            return answer
        case "list":
            return {"jobs": call(port, "GET", "/api/jobs/")}
        case "stop":
            return {"stopped": call(port, "POST", f"/api/jobs/{urllib.parse.quote(request['id'])}/stop")}
        case verb:
            raise ValueError(f"unknown verb {verb}")


def job(port: int, submission_id: str) -> Any:
    """Ray's record of the job, None where Ray knows no such job."""
    try:
        return call(port, "GET", f"/api/jobs/{urllib.parse.quote(submission_id)}")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def nodes(port: int) -> list[dict[str, Any]]:
    """Memory and GPUs of each node, as Ray's agents report them."""
    summary = call(port, "GET", "/nodes?view=summary")["data"]["summary"]
    return [
        {
            "host": node.get("hostname"),
            "memory": list(node.get("mem") or [])[:4],
            "gpus": [
                {key: gpu.get(key) for key in ("name", "utilizationGpu", "memoryUsed", "memoryTotal")}
                for gpu in node.get("gpus") or []
            ],
        }
        for node in summary
    ]


def log(submission_id: str, offset: int) -> dict[str, Any]:
    """The driver's log from a byte offset on, base64. `size` is the size of the whole file."""
    base = os.environ.get("RAY_TMPDIR") or "/tmp/ray"  # noqa: S108 - where Ray writes it
    found = glob.glob(f"{base}/session_latest/logs/job-driver-{glob.escape(submission_id)}.log")  # noqa: PTH207
    if not found:
        return {"size": 0, "offset": offset, "data": ""}
    with open(found[0], "rb") as file:  # noqa: PTH123
        size = file.seek(0, os.SEEK_END)
        file.seek(min(offset, size))
        data = file.read(MAX_CHUNK_BYTES)
    return {"size": size, "offset": offset, "data": base64.b64encode(data).decode()}


def call(port: int, method: str, path: str) -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    token = auth_token()
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=20) as response:  # noqa: S310
        return json.loads(response.read())


def auth_token() -> str:
    """Ray's token, looked for where Ray itself looks for it."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return ""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"].strip()
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")  # noqa: PTH111
    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        return file.read().strip()


if __name__ == "__main__":
    try:
        answer = main(json.loads(sys.argv[1]))
    except urllib.error.HTTPError as error:
        answer = {
            "error": f"Ray's job API: HTTP {error.code} {error.read()[:2000].decode(errors='replace')}",
            "code": error.code,
        }
    except (OSError, ValueError) as error:
        answer = {"error": f"Ray's job API: {error}"}
    sys.stdout.write(json.dumps(answer))
