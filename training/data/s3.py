"""Objects of an S3 prefix: listing and downloading. AWS_ENDPOINT_URL is honoured, as by every AWS SDK."""

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from training.data.errors import DataError
from training.data.locks import file_lock


@dataclass(frozen=True)
class S3Object:
    bucket: str
    key: str
    size: int
    etag: str

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


def _client() -> Any:
    import boto3

    return boto3.client("s3", config=Config(retries={"mode": "standard", "max_attempts": 8}))


def list_objects(uri: str) -> list[S3Object]:
    """Every object under s3://bucket/prefix in key order, without hidden ones (`.x`, `_x`) and folder marks.

    A prefix without a trailing slash names one object, or the folder of that name, never its namesakes
    (`s3://b/train` does not take in `train-old/`). Raises DataError.
    """
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    found: list[S3Object] = []
    try:
        for page in _client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            found += [
                S3Object(bucket, entry["Key"], entry["Size"], entry["ETag"].strip('"'))
                for entry in page.get("Contents", [])
            ]
    except (ClientError, BotoCoreError) as error:
        raise DataError(_message(uri, error)) from error
    folder = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
    chosen = [entry for entry in found if entry.key == prefix or entry.key.startswith(folder)]
    return sorted(
        (
            entry
            for entry in chosen
            if not entry.key.endswith("/")
            and not any(part.startswith((".", "_")) for part in entry.key.removeprefix(folder).split("/"))
        ),
        key=lambda entry: entry.key,
    )


@contextmanager
def download(found: S3Object, folder: Path) -> Generator[Path]:
    """The object as a local file while the context lasts. Raises DataError when it changed since the
    listing."""
    path = folder / hashlib.sha256(f"{found.uri} {found.etag}".encode()).hexdigest()
    with file_lock(path):
        try:
            client = _client()
            client.download_file(found.bucket, found.key, str(path))
            etag = client.head_object(Bucket=found.bucket, Key=found.key)["ETag"].strip('"')
            if etag != found.etag or path.stat().st_size != found.size:
                raise DataError(
                    f"{found.uri} was replaced while it was read; start again when its writer is done"
                )
            yield path
        except (ClientError, BotoCoreError) as error:
            raise DataError(_message(found.uri, error)) from error
        finally:
            path.unlink(missing_ok=True)


def _message(uri: str, error: ClientError | BotoCoreError) -> str:
    if isinstance(error, ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))
        advice = {
            "NoSuchBucket": "the bucket does not exist; check its name and the endpoint",
            "AccessDenied": "access denied; the role needs s3:ListBucket on the bucket and s3:GetObject on "
            "its objects",
            "403": "access denied; the role needs s3:ListBucket on the bucket and s3:GetObject on its "
            "objects",
            "404": "the object does not exist any more",
            "NoSuchKey": "the object does not exist any more",
        }.get(code)
        return f"{uri}: {advice or error}"
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return (
            f"{uri}: no AWS credentials were found; in the cluster they come from the pod's service account"
        )
    return f"{uri}: {error}"
