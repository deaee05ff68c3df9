"""The shape of a job's model, for planning on a machine that may reach no hub."""

from __future__ import annotations

import json
from pathlib import Path

from training.errors import UsageError
from training.job import JobSpec
from training.planning import ModelShape

# From the models' config.json on the hub, 2026-12: layers, hidden, intermediate, query, key/value, vocabulary, tied.
KNOWN = {
    "Qwen/Qwen2.5-0.5B": ModelShape(24, 896, 4864, 896, 128, 151_936, True, True),
    "Qwen/Qwen2.5-1.5B": ModelShape(28, 1536, 8960, 1536, 256, 151_936, True, True),
    "Qwen/Qwen2.5-3B": ModelShape(36, 2048, 11_008, 2048, 256, 151_936, True, True),
    "Qwen/Qwen2.5-7B": ModelShape(28, 3584, 18_944, 3584, 512, 152_064, False, True),
    "Qwen/Qwen2.5-14B": ModelShape(48, 5120, 13_824, 5120, 1024, 152_064, False, True),
}


def shape_of(job: JobSpec) -> ModelShape:
    """The shape of a job's model: from the job, a folder, a table of known models, or the hub.

    Raises UsageError where none of them knows.
    """
    if job.model.architecture is not None:
        return ModelShape.of_architecture(job.model.architecture)
    source = job.model.source
    assert source is not None
    if source in KNOWN:
        return KNOWN[source]
    if Path(source).is_dir():
        return _of_file(Path(source) / "config.json")
    return _of_hub(source, job.model.revision)


def _of_file(path: Path) -> ModelShape:
    try:
        return ModelShape.of_config(json.loads(path.read_text()))
    except FileNotFoundError:
        raise UsageError(f"{path}: missing: model.source must be a Hugging Face folder") from None
    except (KeyError, ValueError) as error:
        raise UsageError(f"{path}: not a decoder's configuration: {error!r}") from None


def _of_hub(source: str, revision: str | None) -> ModelShape:
    from huggingface_hub import hf_hub_download

    try:
        return _of_file(Path(hf_hub_download(source, "config.json", revision=revision)))
    except UsageError:
        raise
    except Exception as error:  # the hub client raises its own, the transport's and plain OSErrors
        raise UsageError(
            f"model.source {source}: its config.json cannot be read from the hub ({type(error).__name__}). "
            f"Plan where the hub is reachable, or with one of {', '.join(KNOWN)}"
        ) from None
