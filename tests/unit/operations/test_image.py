"""The digest of a tag, asked of a registry on this machine that behaves like a public one."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from operations.image import digest_of, resolve_settings_file
from training.errors import UsageError

DIGEST = f"sha256:{'ab' * 32}"


class Registry(http.server.BaseHTTPRequestHandler):
    """Anonymous tokens, one repository, one tag."""

    anonymous = True
    digest = DIGEST
    status = 200

    def do_HEAD(self) -> None:
        host = self.headers["Host"]
        if self.headers.get("Authorization") != "Bearer t0ken" and self.anonymous:
            challenge = f'Bearer realm="http://{host}/token/",service="here",scope="aws"'
            self._answer(401, {"WWW-Authenticate": challenge})
        elif not self.anonymous:
            self._answer(401, {"WWW-Authenticate": 'Basic realm="here"'})
        elif self.path == "/v2/dlc/ray/manifests/v1.1.0":
            assert "application/vnd.oci.image.index.v1+json" in self.headers["Accept"]
            self._answer(self.status, {"Docker-Content-Digest": self.digest})
        else:
            self._answer(404, {})

    def do_GET(self) -> None:
        assert self.path == "/token/?service=here&scope=aws"
        self._answer(200, {}, json.dumps({"token": "t0ken"}).encode())

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


def test_digest_with_an_anonymous_token(registry: str) -> None:
    assert digest_of(f"{registry}/dlc/ray", "v1.1.0") == DIGEST


def test_settings_that_pin_it(registry: str, settings_file: Path) -> None:
    image = f"  efa-finetune:image: {registry}/dlc/ray\n  efa-finetune:imageTag: v1.1.0\n"
    settings_file.write_text(settings_file.read_text() + image)

    found = resolve_settings_file(settings_file)
    assert found.command == f"pulumi config set imageDigest {DIGEST} --stack dev"
    assert found.command in found.render()

    settings_file.write_text(settings_file.read_text() + f"  efa-finetune:imageDigest: {DIGEST}\n")
    found = resolve_settings_file(settings_file)
    assert found.to_dict()["command"] is None
    assert "Nothing to change" in found.render()


def test_what_goes_wrong(registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="has no such tag; correct imageTag"):
        digest_of(f"{registry}/dlc/ray", "v9")
    with pytest.raises(UsageError, match="the registry is missing"):
        digest_of("ray", "v1")
    with pytest.raises(UsageError, match="the registry does not answer"):
        digest_of("127.0.0.1:9/dlc/ray", "v1")

    monkeypatch.setattr(Registry, "digest", "")
    with pytest.raises(UsageError, match="no digest in the answer"):
        digest_of(f"{registry}/dlc/ray", "v1.1.0")
    monkeypatch.setattr(Registry, "status", 503)
    with pytest.raises(UsageError, match="answers 503"):
        digest_of(f"{registry}/dlc/ray", "v1.1.0")
    monkeypatch.setattr(Registry, "anonymous", False)
    with pytest.raises(UsageError, match="asks for a login that is not known here"):
        digest_of(f"{registry}/dlc/ray", "v1.1.0")
