"""An AWS account in memory: ministack inside this process, reached directly or over loopback.

Each account number is an account of its own in ministack, so a test that takes a fresh number starts with nothing and
two tests never meet. Requests of this process skip the socket (`connect`): botocore still validates, serializes, signs
and parses, and a call costs well under a millisecond instead of several. Other processes use `endpoint()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.config
import botocore.credentials
import botocore.session
from botocore.awsrequest import AWSPreparedRequest, AWSResponse

REGION = "us-west-2"
"""ministack keeps region-scoped state for every region; the tests live in one."""

# Read by ministack when it is imported: no listeners of its own, nothing written outside the temporary folder.
_SETTINGS = {
    "IOT_MTLS_ENABLED": "0",
    "SFTP_ENABLED": "0",
    "MINISTACK_TEST_NO_AUTOSTART": "1",
    "LOG_LEVEL": "ERROR",
    "DOCKER_HOST": "unix:///nonexistent",
    "S3_DATA_DIR": str(Path(tempfile.gettempdir()) / "ministack-unused"),
}

_accounts = itertools.count(int.from_bytes(os.urandom(4), "big") % 10**9)


def new_account() -> str:
    """The number of an account in which nothing exists yet."""
    return f"2{next(_accounts) % 10**11:011d}"


@dataclass
class Identity:
    """Whose credentials a session signs with. `account` None: there are none. Changing it switches at once."""

    account: str | None

    def frozen(self) -> botocore.credentials.ReadOnlyCredentials:
        return botocore.credentials.ReadOnlyCredentials(self.account or "none", "secret", None)


class _Credentials(botocore.credentials.Credentials):
    def __init__(self, identity: Identity) -> None:
        super().__init__("unused", "unused")
        self._identity = identity

    def get_frozen_credentials(self) -> botocore.credentials.ReadOnlyCredentials:
        return self._identity.frozen()


@dataclass
class _Loop:
    """ministack's event loop, in a thread of its own for the whole life of the process."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __post_init__(self) -> None:
        threading.Thread(target=self.loop.run_forever, name="emulated-aws", daemon=True).start()

    def run(self, work: Any, timeout: float = 60) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)


class Emulator:
    """The emulated AWS. One per process: ministack keeps its state in module globals."""

    def __init__(self) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        import ministack.app
        import ministack.services.eks

        from tests.engine import additions, fsx  # they import ministack, so after its settings

        logging.getLogger("ministack").setLevel(logging.ERROR)
        self._thread = _Loop()
        additions.install()
        self.app: Callable[..., Any] = fsx.around(ministack.app.app)
        self._endpoint: str | None = None
        self._stop: asyncio.Event | None = None

    def session(self, identity: Identity, *, before_call: Callable[..., Any] | None = None) -> boto3.Session:
        """A boto3 session whose requests reach the emulator. `before_call` sees each call after botocore has accepted
        its parameters and before it is sent, and may raise in its place."""
        core = botocore.session.Session()
        core._credentials = _Credentials(identity)  # pyright: ignore[reportPrivateUsage]
        core.set_default_client_config(
            botocore.config.Config(
                retries={"total_max_attempts": 1, "mode": "standard"},
                s3={"addressing_style": "path"},
                parameter_validation=True,
            )
        )
        core.set_config_variable("region", REGION)
        core.register("before-send", self._send)
        if before_call is not None:
            core.register("before-call", before_call)
        return boto3.Session(botocore_session=core, region_name=REGION)

    def endpoint(self) -> str:
        """The address at which other processes reach the same state; starts listening on loopback at the first call."""
        if self._endpoint is None:
            self._endpoint = self._thread.run(self._listen())
        return self._endpoint

    async def _listen(self) -> str:
        from hypercorn.asyncio import serve
        from hypercorn.config import Config

        listener = socket.create_server(("127.0.0.1", 0))
        config = Config()
        config.bind = [f"fd://{listener.detach()}"]
        config.loglevel = "ERROR"
        self._stop = asyncio.Event()
        self._serving = asyncio.ensure_future(
            serve(_without_lifespan(self.app), config, shutdown_trigger=self._stop.wait)
        )
        port = socket.socket(fileno=os.dup(int(config.bind[0][5:]))).getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def _send(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        status, headers, body = self._thread.run(_call(self.app, request))
        return AWSResponse(request.url, status, headers, _Body(body))


class _Body(io.BytesIO):
    """What botocore reads a response from, in place of a urllib3 response."""

    def stream(self, amount: int = 65536, **_: Any) -> Iterator[bytes]:
        while chunk := self.read(amount):
            yield chunk


async def _call(app: Callable[..., Any], request: AWSPreparedRequest) -> tuple[int, dict[str, str], bytes]:
    url = urlsplit(request.url)
    body = request.body or b""
    if not isinstance(body, bytes):
        body = body.encode() if isinstance(body, str) else body.read()
    headers = [(name.lower().encode(), _text(value).encode()) for name, value in request.headers.items()]
    if not any(name == b"content-length" for name, _ in headers):
        headers.append((b"content-length", str(len(body)).encode()))
    if not any(name == b"host" for name, _ in headers):
        headers.append((b"host", url.netloc.encode()))
    from urllib.parse import unquote

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(url.path) or "/",
        "raw_path": url.path.encode(),
        "query_string": url.query.encode(),
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": (url.hostname, 80),
    }
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    status, answer_headers, answer = 500, {}, bytearray()

    async def receive() -> dict[str, Any]:
        return incoming.pop() if incoming else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, answer_headers
        if message["type"] == "http.response.start":
            status = message["status"]
            answer_headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.extend(message.get("body", b""))

    await app(scope, receive, send)
    return status, answer_headers, bytes(answer)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _without_lifespan(app: Callable[..., Any]) -> Callable[..., Any]:
    # ministack's start-up looks for Docker and starts schedulers that fire targets; nothing here needs either.
    async def wrapped(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    return wrapped


@contextlib.contextmanager
def environment(endpoint: str, account: str) -> Iterator[dict[str, str]]:
    """The environment variables with which another process works in `account` of the emulator at `endpoint`."""
    yield {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": account,
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
