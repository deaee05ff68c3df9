"""Where model and tokenizer come from: a hub repository, an s3:// prefix, a folder, or an architecture and the data."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerFast

from training.data.tokenizer import load_tokenizer, save_tokenizer, train_bpe
from training.errors import UsageError
from training.job import JobSpec, is_commit
from training.model import config_from_folder, config_of
from training.parallel import World
from training.storage import Storage, open_storage

TOKENIZER_FOLDER = "tokenizer"
# Only what is read: weights that are not safetensors can run code when they are loaded.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True)
class ModelSource:
    """A model to be built: its configuration, its tokenizer, and the folder of its weights (None: random weights)."""

    config: Any
    tokenizer: PreTrainedTokenizerFast
    weights: Path | None
    revision: str | None


def prepare_source(job: JobSpec, storage: Storage, world: World, work_dir: Path) -> ModelSource:
    """Fetches model and tokenizer, once per node; every rank calls it.

    Raises UsageError where the source cannot be read or is not supported.
    """
    if job.model.source is not None:
        folder, revision = _once_per_node(world, work_dir, lambda: fetch_model(job, work_dir))
        tokenizer = named_tokenizer(job.model.tokenizer or str(folder))
        return ModelSource(config_from_folder(folder), tokenizer, folder, revision)
    assert job.model.architecture is not None
    tokenizer = _run_tokenizer(job, storage, world, work_dir)
    if job.model.tokenizer == "train":
        vocab_size = _padded_vocab(len(tokenizer))
    else:
        vocab_size = job.model.architecture.vocab_size
        if vocab_size < len(tokenizer):
            raise UsageError(
                f"model.architecture.vocab_size {vocab_size} is less than the {len(tokenizer)} tokens of "
                f"tokenizer {job.model.tokenizer}: set it to at least that"
            )
    config = config_of(
        job.model.architecture,
        vocab_size,
        _token_id(tokenizer, "eos_token"),
        _token_id(tokenizer, "pad_token"),
    )
    return ModelSource(config, tokenizer, None, None)


def fetch_model(job: JobSpec, work_dir: Path) -> tuple[Path, str | None]:
    """The model's folder on this machine, and the commit it is from. Raises UsageError."""
    source = job.model.source
    assert source is not None
    if source.startswith("s3://"):
        remote, folder = open_storage(source), work_dir / "model"
        names = [name for name in remote.list() if "/" not in name]
        if not names:
            raise UsageError(f"model.source {source}: nothing is there")
        for name in names:
            if not (folder / name).is_file():
                remote.download(name, folder / name)
        return folder, None
    if Path(source).is_dir():
        return Path(source), None
    if source.startswith((".", "/", "~")):
        raise UsageError(f"model.source {source}: no such folder")
    return _fetch_from_hub(source, job.model.revision)


def _fetch_from_hub(source: str, revision: str | None) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download

    if revision is None:
        raise UsageError(
            f"model.source {source}: give model.revision, the commit of the hub repository: "
            "without it, a later run may train another model"
        )
    try:
        folder = snapshot_download(source, revision=revision, allow_patterns=HUB_PATTERNS)
    except Exception as error:  # the hub client raises its own, requests' and plain OSErrors
        raise UsageError(
            f"model.source {source} at {revision} cannot be fetched: {str(error).splitlines()[0]}. Check the name and "
            "the commit, that this machine reaches the hub, and for a gated model the token Secret of the stack"
        ) from None
    return Path(folder), revision


def _run_tokenizer(job: JobSpec, storage: Storage, world: World, work_dir: Path) -> PreTrainedTokenizerFast:
    """The run folder's tokenizer, so that a resumed run has the same; made by rank 0 where there is none yet."""
    problem: list[str | None] = [None]
    if world.rank == 0 and not storage.exists(f"{TOKENIZER_FOLDER}/tokenizer.json"):
        try:
            _make_tokenizer(job, storage, work_dir)
        except UsageError as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, src=0, group=world.control)
    if problem[0] is not None:
        raise UsageError(problem[0])
    folder = work_dir / f"tokenizer-{world.rank}"
    for name in storage.list(TOKENIZER_FOLDER):
        storage.download(name, folder / Path(name).name)
    return load_tokenizer(str(folder))


def _make_tokenizer(job: JobSpec, storage: Storage, work_dir: Path) -> None:
    from training.data.texts import texts

    assert job.model.architecture is not None
    assert job.model.tokenizer is not None
    if job.model.tokenizer == "train":
        tokenizer = train_bpe(texts(job.training_data, work_dir / "data"), job.model.architecture.vocab_size)
    else:
        tokenizer = named_tokenizer(job.model.tokenizer)
    folder = work_dir / "tokenizer-made"
    save_tokenizer(tokenizer, folder)
    for path in sorted(folder.iterdir()):
        storage.upload(path, f"{TOKENIZER_FOLDER}/{path.name}")


def named_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder, or of a hub repository at a commit (owner/name@COMMIT)."""
    if Path(source).is_dir():
        return load_tokenizer(source)
    if source.startswith((".", "/", "~")):
        raise UsageError(f"model.tokenizer {source}: no such folder")
    repository, _, commit = source.partition("@")
    if not is_commit(commit):
        raise UsageError(
            f"model.tokenizer {source}: give a folder, or a hub repository with its commit, {repository}@ and 40 lower-case "
            "hexadecimal digits: without it, a later run may have other tokens"
        )
    return load_tokenizer(repository, commit)


def _token_id(tokenizer: PreTrainedTokenizerFast, name: str) -> int:
    token = getattr(tokenizer, f"{name}_id")
    if not isinstance(token, int):
        raise UsageError(f"the tokenizer has no {name}; give one that has (tokenizer_config.json)")
    return token


def _padded_vocab(size: int) -> int:
    """Rows of the embedding: a multiple of 64, which matrix kernels like."""
    return -(-size // 64) * 64


def _once_per_node(
    world: World, work_dir: Path, fetch: Callable[[], tuple[Path, str | None]]
) -> tuple[Path, str | None]:
    """One rank of a node downloads, the others wait at its lock and find everything there."""
    work_dir.mkdir(parents=True, exist_ok=True)
    with (work_dir / "model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = fetch()
    dist.barrier(group=world.control)
    return found
