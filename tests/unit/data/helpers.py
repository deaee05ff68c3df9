"""Rows for the tests of the data pipeline."""

from typing import Any


def text_rows(count: int, tag: str = "t") -> list[dict[str, str]]:
    """Distinct texts of varied length."""
    return [{"text": f"{tag}{n} " + "cat sat " * (1 + n * 7 % 12)} for n in range(count)]


def chat_row(question: str = "hello", answer: str = "the cat sat") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
