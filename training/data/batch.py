"""One micro-batch of one rank: a flattened row of documents."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

IGNORE = -100
"""The label that the loss leaves out."""


@dataclass(frozen=True)
class Batch:
    """Documents laid end to end in one row of a fixed number of tokens T.

    `labels` are already shifted: `labels[i]` is the token that position i must predict, and the last
    position of every document is -100, so that nothing that reads them needs to know where a document ends.
    Nothing of the padding is learnt: with packing it stands behind the documents as documents of its own,
    without packing every document is as long as its slot and padded at its end, where causal attention never
    sees it.

    input_ids     int64 [T]
    labels        int64 [T], -100 where nothing is learnt
    position_ids  int64 [T], from 0 in every document
    cu_seqlens    int32 [D + 1], the documents' borders, from 0 to T
    max_seqlen    longest document, padding included; never more than the job's max_length
    num_supervised  labels that are not -100
    num_tokens    tokens that are not padding
    num_documents documents that are not padding; they are the row's first ones
    num_pairs     preference pairs: documents 2p and 2p + 1 are the chosen and the rejected answer of pair p, each
                  after its prompt; 0 where the job learns from single documents
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    num_supervised: int
    num_tokens: int
    num_documents: int
    num_pairs: int = 0

    def to(self, device: torch.device | str) -> Self:
        """The same batch on a device; from pinned memory the copies are asynchronous."""
        return type(self)(
            input_ids=self.input_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=True),
            max_seqlen=self.max_seqlen,
            num_supervised=self.num_supervised,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            num_pairs=self.num_pairs,
        )
