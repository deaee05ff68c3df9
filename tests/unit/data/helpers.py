"""Rows for the tests of the data pipeline."""

from typing import Any

from transformers import PreTrainedTokenizerFast

from training.data.batch import Batch


def text_rows(count: int, tag: str = "t") -> list[dict[str, str]]:
    """Distinct texts of varied length."""
    return [{"text": f"{tag}{n} " + "cat sat " * (1 + n * 7 % 12)} for n in range(count)]


def chat_row(question: str = "hello", answer: str = "the cat sat") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def documents_of(batch: Batch, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The plain texts in a batch, without their end token and padding."""
    borders = batch.cu_seqlens.tolist()
    end = tokenizer.eos_token_id
    texts: list[str] = []
    for start, stop in list(zip(borders, borders[1:], strict=False))[: batch.num_documents]:
        ids = batch.input_ids[start:stop].tolist()
        texts.append(tokenizer.decode(ids[: ids.index(end)]))
    return texts
