"""Where rows come from: a source resolved to shards (files), each with an identity and an iterator of rows.

Listing is cheap and happens on every rank; reading happens once per node, in the tokenization cache.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from training.data import readers
from training.data.config import SourceSpec, hub_id
from training.data.errors import DataError
from training.data.locks import file_lock
from training.data.readers import Row
from training.data.s3 import S3Object, download, list_objects

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Shard:
    """One file, or one table of a data set.

    name      what messages call it
    identity  cheap: name, size and, on S3, the ETag
    key       hash of the content, read once per file and node
    rows      opens it
    """

    name: str
    identity: str
    key: Callable[[], str]
    rows: Callable[[], Iterator[Row]]


@dataclass(frozen=True)
class Resolved:
    """A source with its shards in name order."""

    spec: SourceSpec
    shards: list[Shard]
    ignored_files: list[str] = field(default_factory=list)
    revision: str | None = None


def resolve(spec: SourceSpec, work_dir: Path) -> Resolved:
    """Find the shards of a source that holds rows (not `random`). Raises DataError."""
    match spec.kind:
        case "local":
            return _local(spec, work_dir)
        case "s3":
            return _s3(spec, work_dir)
        case "hub":
            return _hub(spec, work_dir)
        case "python-docs":
            return _python_docs(spec)
        case "random":
            raise AssertionError("random has no rows")


def _local(spec: SourceSpec, work_dir: Path) -> Resolved:
    path = Path(spec.source).expanduser()
    if not path.exists():
        hint = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
        raise DataError(
            f"source {spec.source!r} does not exist{hint}. A data set of the hub is written hf://owner/name."
        )
    if path.is_dir() and readers.is_saved_dataset(path):
        return _saved_dataset(spec, path, work_dir)
    if spec.split is not None:
        raise DataError(f"split {spec.split!r} is only for a data set; source {spec.source!r} is plain files")
    if path.is_file():
        if not readers.is_readable(path.name):
            raise DataError(f"source {spec.source!r} is not one of {', '.join(readers.SUFFIXES)}")
        return Resolved(spec, [_file_shard(path, path.name, work_dir)])
    files = sorted(
        found
        for found in path.rglob("*")
        if found.is_file() and not any(part.startswith((".", "_")) for part in found.relative_to(path).parts)
    )
    data = [found for found in files if readers.is_readable(found.name)]
    ignored = [str(found.relative_to(path)) for found in files if not readers.is_readable(found.name)]
    if not data:
        found_text = f"; it holds: {', '.join(ignored[:5])}" if ignored else "; it is empty"
        raise DataError(f"folder {spec.source!r} holds none of {', '.join(readers.SUFFIXES)}{found_text}")
    shards = [_file_shard(found, str(found.relative_to(path.parent)), work_dir) for found in data]
    return Resolved(spec, shards, ignored)


def _file_shard(path: Path, name: str, work_dir: Path) -> Shard:
    return Shard(
        name=name,
        identity=f"{name} {path.stat().st_size}",
        key=lambda: _content_hash(path, work_dir),
        rows=lambda: readers.read_file(path, name),
    )


def _content_hash(path: Path, work_dir: Path) -> str:
    """SHA-256 of a file, remembered under its path, size and time so that one process per node reads it."""
    status = path.stat()
    stamp = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
    memo = work_dir / "hashes" / hashlib.sha256(stamp.encode()).hexdigest()
    with file_lock(memo):
        if memo.exists():
            return memo.read_text(encoding="ascii")
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
        partial = memo.with_name(f"{memo.name}.partial")
        partial.write_text(digest.hexdigest(), encoding="ascii")
        partial.replace(memo)
    return digest.hexdigest()


def _s3(spec: SourceSpec, work_dir: Path) -> Resolved:
    objects = list_objects(spec.source)
    data = [found for found in objects if readers.is_readable(found.key)]
    ignored = [found.key for found in objects if not readers.is_readable(found.key)]
    if not data:
        found_text = f"; it holds: {', '.join(ignored[:5])}" if ignored else "; nothing is there"
        raise DataError(f"source {spec.source!r} holds none of {', '.join(readers.SUFFIXES)}{found_text}")
    return Resolved(spec, [_s3_shard(found, work_dir) for found in data], ignored)


def _s3_shard(found: S3Object, work_dir: Path) -> Shard:
    identity = f"{found.key} {found.size} {found.etag}"

    def rows() -> Iterator[Row]:
        with download(found, work_dir / "downloads") as path:
            yield from readers.read_file(path, found.uri)

    return Shard(
        name=found.uri,
        identity=identity,
        key=lambda: hashlib.sha256(
            f"s3 {found.etag} {found.size} {Path(found.key).suffix}".encode()
        ).hexdigest(),
        rows=rows,
    )


def _saved_dataset(spec: SourceSpec, path: Path, work_dir: Path) -> Resolved:
    dataset = readers.load_saved_dataset(path, spec.split)
    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    size = sum(file.stat().st_size for file in files)
    shard = Shard(
        name=spec.source,
        identity=f"{spec.source} {spec.split} {size}",
        key=lambda: hashlib.sha256(
            " ".join(_content_hash(file, work_dir) for file in files).encode()
        ).hexdigest(),
        rows=lambda: readers.read_dataset(dataset),
    )
    return Resolved(spec, [shard])


def _hub(spec: SourceSpec, work_dir: Path) -> Resolved:
    name = hub_id(spec.source)
    if not spec.source.startswith("hf://") and Path(spec.source).exists():
        raise DataError(
            f"source {spec.source!r} is a folder here and could be a data set of the hub: write "
            f"./{spec.source} or hf://{spec.source}"
        )
    revision = readers.hub_revision(name, spec.revision)
    split = spec.split or "train"
    identity = f"hub {name} {revision} {spec.subset} {split}"

    def rows() -> Iterator[Row]:
        with file_lock(work_dir / "hub" / hashlib.sha256(identity.encode()).hexdigest()):
            dataset = readers.load_hub_dataset(name, spec.subset, split, revision)
        yield from readers.read_dataset(dataset)

    shard = Shard(
        name=f"{name} ({split})",
        identity=identity,
        key=lambda: hashlib.sha256(identity.encode()).hexdigest(),
        rows=rows,
    )
    return Resolved(spec, [shard], revision=revision)


def _python_docs(spec: SourceSpec) -> Resolved:
    from training.data.python_docs import pairs

    def rows() -> Iterator[Row]:
        for number, pair in enumerate(pairs(), start=1):
            yield Row(number, pair)

    def key() -> str:
        digest = hashlib.sha256()
        for pair in pairs():
            digest.update(repr((pair.group, pair.messages)).encode())
        return digest.hexdigest()

    return Resolved(spec, [Shard("python-docs", f"python-docs {key()}", key, rows)])
