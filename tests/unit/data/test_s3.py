"""s3:// sources against an S3 server: listing, reading, streaming with an exact restart, errors."""

import gzip
import json
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from transformers import PreTrainedTokenizerFast

from tests.unit.data.helpers import documents_of, text_rows
from training.data import s3
from training.data.errors import DataError
from training.data.pipeline import DataBundle

Build = Callable[..., DataBundle]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    urllib.request.urlopen(
        urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    ).close()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "word",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="corpus")
    yield boto3.resource("s3").Bucket("corpus")
    server.stop()


def put_rows(bucket: Any, key: str, rows: list[dict[str, str]]) -> None:
    body = "".join(json.dumps(row) + "\n" for row in rows).encode()
    bucket.put_object(Key=key, Body=gzip.compress(body) if key.endswith(".gz") else body)


def test_objects_under_a_prefix(bucket: Any, build_data: Build, tmp_path: Path) -> None:
    put_rows(bucket, "train/a.jsonl", [*text_rows(10, "a"), {"text": ""}])
    put_rows(bucket, "train/deep/b.jsonl.gz", text_rows(10, "b"))
    pq.write_table(pa.Table.from_pylist(text_rows(10, "c")), tmp_path / "c.parquet")
    bucket.upload_file(str(tmp_path / "c.parquet"), "train/c.parquet")
    bucket.put_object(Key="train/_SUCCESS", Body=b"")
    bucket.put_object(Key="train/notes.txt", Body=b"x")
    bucket.put_object(Key="train/deep/", Body=b"")
    put_rows(bucket, "train-old/a.jsonl", text_rows(99))
    [source] = build_data(source="s3://corpus/train").report.sources
    assert (source.files, source.rows_read, source.rows_used) == (3, 31, 30)
    assert source.ignored_files == ["train/notes.txt"]
    assert str(source.examples[0]) == "s3://corpus/train/a.jsonl:11: empty: field 'text' is empty"
    assert all(path.suffix == ".lock" for path in (tmp_path / "work" / "downloads").iterdir())


def test_one_object(bucket: Any, build_data: Build) -> None:
    put_rows(bucket, "a.jsonl", text_rows(10))
    put_rows(bucket, "a.jsonl.bak.jsonl", text_rows(10))
    assert build_data(source="s3://corpus/a.jsonl").report.sources[0].rows_used == 10


def test_streaming_restarts_exactly_at_another_world_size(
    bucket: Any, build_data: Build, tokenizer: PreTrainedTokenizerFast
) -> None:
    for number in range(5):
        put_rows(bucket, f"train/{number}.jsonl", text_rows(60, f"f{number}x"))
    settings: dict[str, Any] = {"source": "s3://corpus/train", "streaming": True, "seed": 5}

    def run(
        world: int, steps: int, state: dict[str, Any] | None, work: str
    ) -> tuple[list[list[str]], dict[str, Any]]:
        loaders = [
            build_data(**settings, rank=rank, world_size=world, work=work).train_loader
            for rank in range(world)
        ]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        batches = [documents_of(next(loader), tokenizer) for _ in range(steps) for loader in loaders]
        return batches, json.loads(json.dumps(loaders[0].state_dict()))

    whole, _ = run(1, 300, None, "whole")
    first, state = run(2, 60, None, "first")
    second, state = run(3, 40, state, "second")  # on other nodes: nothing is cached there
    third, _ = run(1, 60, state, "third")
    assert first + second + third == whole
    seen = Counter(text for batch in whole for text in batch)
    assert set(seen) == {row["text"] for number in range(5) for row in text_rows(60, f"f{number}x")}


def test_streaming_opens_only_the_files_it_needs(bucket: Any, build_data: Build) -> None:
    for number in range(40):
        put_rows(bucket, f"train/{number:02}.jsonl", text_rows(300, f"f{number}x"))
    bundle = build_data(source="s3://corpus/train", streaming=True)
    next(bundle.train_loader)
    assert 0 < bundle.report.sources[0].rows_read < 40 * 300


def test_streaming_has_no_epoch_length(bucket: Any, build_data: Build) -> None:
    put_rows(bucket, "train/a.jsonl", text_rows(10))
    with pytest.raises(DataError, match="give the job `steps` instead of `epochs`"):
        build_data(source="s3://corpus/train", streaming=True).num_packs(1)


def test_object_replaced_after_the_listing_is_an_error(bucket: Any, build_data: Build) -> None:
    put_rows(bucket, "train/a.jsonl", text_rows(10))
    bundle = build_data(source="s3://corpus/train", streaming=True)
    put_rows(bucket, "train/a.jsonl", text_rows(11))
    with pytest.raises(DataError, match=r"s3://corpus/train/a\.jsonl was replaced while it was read"):
        next(bundle.train_loader)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("s3://absent/train", "s3://absent/train: the bucket does not exist"),
        ("s3://corpus/void", r"source 's3://corpus/void' holds none of \.jsonl, .*; nothing is there"),
    ],
)
def test_what_is_not_there_says_so(bucket: Any, build_data: Build, source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_data(source=source)


def test_missing_rights_and_credentials_say_what_is_needed(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.exceptions import ClientError, NoCredentialsError

    def refuse(error: Exception) -> None:
        def client() -> Any:
            raise error

        monkeypatch.setattr(s3, "_client", client)

    refuse(ClientError({"Error": {"Code": "AccessDenied"}}, "ListObjectsV2"))
    with pytest.raises(DataError, match="the role needs s3:ListBucket on the bucket and s3:GetObject"):
        s3.list_objects("s3://corpus/train")
    refuse(NoCredentialsError())
    with pytest.raises(
        DataError, match="no AWS credentials were found; in the cluster they come from the pod's"
    ):
        s3.list_objects("s3://corpus/train")
