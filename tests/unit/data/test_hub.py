"""Data sets of the hub, against a server that speaks as much of its protocol as a data set needs."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COMMIT = "a" * 40
FILES = {
    "train.jsonl": b"".join(b'{"text": "the cat %d"}\n' % n for n in range(10)) + b'{"text": ""}\n',
    "README.md": b"# rows\n",
}

# The hub's address is read when its client is imported: the tries at one address share a process of their own.
BUILD = """
import json, sys
from pathlib import Path
from training.data.config import DataSpec
from training.data.errors import DataError
from training.data.pipeline import build
from training.data.tokenizer import train_bpe

tokenizer = train_bpe(["the cat sat"] * 9, 300)
for settings in json.loads(sys.argv[1]):
    try:
        bundle = build(
            DataSpec(max_length=64, **settings), tokenizer,
            seed=0, tokens_per_batch=128, rank=0, world_size=1, work_dir=Path(sys.argv[2]),
        )
    except DataError as error:
        print(json.dumps(str(error)))
    else:
        [source] = bundle.report.sources
        print(json.dumps([source.revision, source.rows_used, str(source.examples[0])]))
"""


class Hub(http.server.BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/datasets/owner/rows/revision/gone":
            self.answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/api/datasets/owner/rows/tree/"):
            self.answer(200, json.dumps([self.entry(name) for name in FILES]).encode())
        elif path.startswith("/api/datasets/owner/rows"):
            siblings = [{"rfilename": name} for name in FILES]
            self.answer(200, json.dumps({"id": "owner/rows", "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/datasets/owner/rows/resolve/{COMMIT}/"):
            name = path.rpartition("/")[2]
            if name in FILES:
                headers = {"ETag": f'"{self.entry(name)["oid"]}"', "X-Repo-Commit": COMMIT}
                self.answer(200, FILES[name], headers)
            else:
                self.answer(404, headers={"X-Error-Code": "EntryNotFound"})
        else:
            self.answer(404, headers={"X-Error-Code": "RepoNotFound"})

    def entry(self, name: str) -> dict[str, Any]:
        digest = hashlib.sha1(FILES[name]).hexdigest()
        return {"type": "file", "path": name, "size": len(FILES[name]), "oid": digest}

    def answer(self, status: int, body: bytes = b"{}", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def build_each(endpoint: str, folder: Path, *settings: dict[str, Any]) -> list[Any]:
    """For each data section, what its build gave, or the message of its error."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, json.dumps(settings), str(folder / "work")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(settings) :]]


@pytest.mark.slow
def test_data_set_is_read_at_its_commit_and_what_is_not_there_says_so(endpoint: str, tmp_path: Path) -> None:
    found, absent, gone, split = build_each(
        endpoint,
        tmp_path,
        {"source": "hf://owner/rows"},
        {"source": "owner/absent"},
        {"source": "owner/rows", "revision": "gone"},
        {"source": "owner/rows", "split": "dev"},
    )
    assert found == [COMMIT, 10, "owner/rows (train):11: empty: field 'text' is empty"]
    assert "the hub has no data set 'owner/absent', or it is private or gated and no token" in absent
    assert "data set 'owner/rows' has no revision 'gone'" in gone
    assert "Unknown split \"dev\". Should be one of ['train']" in split


@pytest.mark.slow
def test_hub_that_cannot_be_reached_says_how_to_do_without(tmp_path: Path) -> None:
    [error] = build_each("http://127.0.0.1:1", tmp_path, {"source": "owner/rows"})
    assert "the hub could not be asked for data set 'owner/rows'" in error
    assert "Pin revision to a full commit" in error
