"""Where run folders live: a local path or an s3:// prefix, behind one small interface.

S3 goes through boto3, which is in the image (s3fs is not). AWS_ENDPOINT_URL names an S3-compatible server.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from training.errors import UsageError


class Storage(ABC):
    """Files under one prefix. Names are relative, with '/' between parts. Writes are atomic: a reader never sees half a file."""

    uri: str
    local_path: Path | None = None

    @abstractmethod
    def read_bytes(self, name: str) -> bytes:
        """The content. Raises FileNotFoundError."""

    @abstractmethod
    def write_bytes(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def upload(self, source: Path, name: str) -> None:
        """Copies a local file; a large one goes to S3 in parallel parts that are retried one by one."""

    @abstractmethod
    def download(self, name: str, target: Path) -> None:
        """Copies to a local file. Raises FileNotFoundError."""

    @abstractmethod
    def exists(self, name: str) -> bool: ...

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of a file. Raises FileNotFoundError."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """Names of all files under a folder, sorted. A missing folder has none."""

    @abstractmethod
    def delete(self, prefix: str) -> None:
        """Removes a file, or a folder with all in it. Missing is fine."""

    def read_text(self, name: str) -> str:
        return self.read_bytes(name).decode("utf-8")

    def write_text(self, name: str, text: str) -> None:
        self.write_bytes(name, text.encode("utf-8"))


class LocalStorage(Storage):
    def __init__(self, root: Path) -> None:
        self.local_path: Path | None = root
        self.root = root
        self.uri = str(root)

    def read_bytes(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write_bytes(self, name: str, data: bytes) -> None:
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def upload(self, source: Path, name: str) -> None:
        target = self.root / name
        if source.resolve() == target.resolve():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(source, temporary)
        temporary.replace(target)

    def download(self, name: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.root / name, target)

    def exists(self, name: str) -> bool:
        return (self.root / name).is_file()

    def size(self, name: str) -> int:
        return (self.root / name).stat().st_size

    def list(self, prefix: str = "") -> list[str]:
        folder = self.root / prefix
        return sorted(
            path.relative_to(self.root).as_posix()
            for path in folder.rglob("*")
            if path.is_file() and not path.name.startswith(".tmp")
        )

    def delete(self, prefix: str) -> None:
        target = self.root / prefix
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


class S3Storage(Storage):
    def __init__(self, uri: str) -> None:
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        if not bucket:
            raise UsageError(f"{uri}: expected s3://BUCKET/PREFIX")
        self.uri = uri.rstrip("/")
        self.bucket = bucket
        self.prefix = prefix.strip("/")
        self._client = s3_client()

    def _key(self, name: str) -> str:
        return "/".join(part for part in (self.prefix, name.strip("/")) if part)

    def read_bytes(self, name: str) -> bytes:
        from botocore.exceptions import ClientError

        try:
            return self._client.get_object(Bucket=self.bucket, Key=self._key(name))["Body"].read()
        except ClientError as error:
            raise self._missing(name, error) from None

    def write_bytes(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.bucket, Key=self._key(name), Body=data)

    def upload(self, source: Path, name: str) -> None:
        self._client.upload_file(str(source), self.bucket, self._key(name), Config=_transfer_config())

    def download(self, name: str, target: Path) -> None:
        from botocore.exceptions import ClientError

        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._client.download_file(self.bucket, self._key(name), str(target), Config=_transfer_config())
        except ClientError as error:
            raise self._missing(name, error) from None

    def exists(self, name: str) -> bool:
        from botocore.exceptions import ClientError

        try:
            self._client.head_object(Bucket=self.bucket, Key=self._key(name))
        except ClientError as error:
            if _status(error) == 404:
                return False
            raise
        return True

    def size(self, name: str) -> int:
        from botocore.exceptions import ClientError

        try:
            return int(self._client.head_object(Bucket=self.bucket, Key=self._key(name))["ContentLength"])
        except ClientError as error:
            raise self._missing(name, error) from None

    def list(self, prefix: str = "") -> list[str]:
        folder = self._key(prefix)
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=f"{folder}/" if folder else ""
        )
        strip = len(self.prefix) + 1 if self.prefix else 0
        return sorted(item["Key"][strip:] for page in pages for item in page.get("Contents", []))

    def delete(self, prefix: str) -> None:
        keys = [*(self._key(name) for name in self.list(prefix)), self._key(prefix)]
        for start in range(0, len(keys), 1000):  # DeleteObjects takes at most 1,000 keys a call
            objects = [{"Key": key} for key in keys[start : start + 1000]]
            answer = self._client.delete_objects(
                Bucket=self.bucket, Delete={"Objects": objects, "Quiet": True}
            )
            if answer.get("Errors"):
                first = answer["Errors"][0]
                raise OSError(
                    f"{self.uri}: cannot delete {first.get('Key')}: {first.get('Code')} {first.get('Message')}"
                )

    def _missing(self, name: str, error: Any) -> Exception:
        if _status(error) == 404:
            return FileNotFoundError(f"s3://{self.bucket}/{self._key(name)}")
        return error


def open_storage(uri: str | Path) -> Storage:
    """The storage behind a local path or an s3:// prefix. Raises UsageError for another scheme."""
    text = str(uri)
    if text.startswith("s3://"):
        return S3Storage(text)
    if "://" in text:
        raise UsageError(f"{text}: a run folder is a local path or s3://BUCKET/PREFIX")
    return LocalStorage(Path(text))


def s3_client() -> Any:
    """An S3 client with bounded waits: a hanging connection must not hang the job."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        config=Config(
            retries={"max_attempts": 8, "mode": "adaptive"},
            connect_timeout=10,
            read_timeout=60,
            max_pool_connections=32,
            s3={"addressing_style": "path"} if os.environ.get("AWS_ENDPOINT_URL") else {},
        ),
    )


def _transfer_config() -> Any:
    from boto3.s3.transfer import TransferConfig

    # 64 MiB parts, 8 at a time (2026-12): a 2.3 GB shard is 36 parts, so a lost connection costs one part, not the file.
    return TransferConfig(multipart_threshold=64 * 2**20, multipart_chunksize=64 * 2**20, max_concurrency=8)


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
