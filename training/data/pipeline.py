"""From the `data` section of a job file to the batches of one rank."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerFast

from training.data.batch import Batch
from training.data.config import DataSpec
from training.data.loader import PackedLoader
from training.data.report import DataReport


@dataclass(frozen=True)
class DataBundle:
    """What a rank trains on.

    train_loader         endless iterator of micro-batches, with state_dict() and load_state_dict()
    report               what was read, used and rejected
    """

    train_loader: PackedLoader
    report: DataReport

    def validation(self) -> Iterator[Batch]:
        """This rank's held-out batches, from the start; every rank gets the same number of them."""
        raise NotImplementedError

    def num_packs(self, epochs: int) -> int:
        """Micro-batches (over all ranks) of the first `epochs` passes; DataError when streaming."""
        raise NotImplementedError


def build(
    spec: DataSpec,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    tokens_per_batch: int,
    rank: int,
    world_size: int,
    work_dir: Path,
) -> DataBundle:
    """Read, tokenize (once per node, cached under work_dir) and pack.

    tokens_per_batch: tokens of one micro-batch of one rank. Raises DataError.
    """
    raise NotImplementedError
