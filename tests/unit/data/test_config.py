from typing import Any

import pytest
from pydantic import ValidationError

from training.data.config import DataSpec, SourceSpec, ValidationSpec, source_kind


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("rows.jsonl", "local"),
        ("data/rows.parquet", "local"),
        ("./data/train", "local"),
        ("/data/train", "local"),
        ("~/train", "local"),
        ("train", "local"),
        ("a/b/c", "local"),
        ("owner/name", "hub"),
        ("hf://owner/name", "hub"),
        ("hf://datasets/owner/name", "hub"),
        ("s3://bucket/prefix", "s3"),
        ("python-docs", "python-docs"),
        ("random", "random"),
    ],
)
def test_kind_of_a_source(source: str, kind: str) -> None:
    assert source_kind(source) == kind


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "data needs either source or mixture"),
        (
            {"source": "a.jsonl", "mixture": [{"source": "b.jsonl", "weight": 1}]},
            "either source or mixture, not both",
        ),
        ({"mixture": []}, "mixture is empty"),
        ({"mixture": [{"source": "b.jsonl", "weight": 0}]}, "greater than 0"),
        (
            {"mixture": [{"source": "b.jsonl", "weight": 1}], "split": "train"},
            "split belongs to each entry of mixture",
        ),
        ({"mixture": [{"source": "b.jsonl", "weight": 1}], "format": "text"}, "format belongs to each entry"),
        ({"mixture": [{"source": "b.jsonl", "weight": 1}], "shuffle": False}, "leave shuffle on"),
        ({"source": "a.jsonl", "revision": "main"}, "revision is only for a data set of the hub"),
        (
            {"source": "s3://bucket/x", "split": "train"},
            "split is only for a data set of the hub or a saved one",
        ),
        ({"source": "s3://Bad_Bucket"}, "is not s3://bucket/prefix"),
        ({"source": "hf://name"}, "is not hf://owner/name"),
        ({"source": "python-docs", "format": "text"}, "has its own layout: leave out format and fields"),
        ({"source": "a.jsonl", "fields": {"prompt": "q"}}, "fields needs the format"),
        (
            {"source": "a.jsonl", "format": "text", "fields": {"prompt": "q"}},
            "fields.prompt is not a field of format text; allowed: text",
        ),
        (
            {"source": "a.jsonl", "format": "text", "mask": "assistant"},
            "mask 'assistant' is impossible with format text",
        ),
        ({"source": "random", "mask": "completion"}, "mask 'completion' is impossible with source random"),
        (
            {"mixture": [{"source": "random", "weight": 1}, {"source": "a.jsonl", "weight": 1}]},
            "source random is for benchmarks and cannot be mixed",
        ),
        (
            {"source": "a.jsonl", "format": "messages", "too_long": "split"},
            "only format text survives; found format messages",
        ),
        ({"source": "random", "streaming": True}, "streaming is impossible with source random"),
        ({"source": "a.jsonl", "streaming": True, "limit": 5}, "limit counts rows in the order of the files"),
        ({"source": "a.jsonl", "streaming": True, "validation": {"count": 5}}, "give validation.source"),
        ({"source": "a.jsonl", "max_lenght": 5}, "Extra inputs are not permitted"),
        ({"source": "a.jsonl", "max_length": 4}, "greater than or equal to 8"),
        ({"source": "a.jsonl", "validation": {}}, "exactly one of fraction, count, source; found none"),
        ({"source": "a.jsonl", "validation": {"fraction": 0.1, "count": 3}}, r"found ['fraction', 'count']"),
        ({"source": "a.jsonl", "validation": {"fraction": 1.0}}, "less than 1"),
    ],
)
def test_impossible_settings_say_why(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DataSpec(**settings)
    assert message in str(caught.value)


def test_a_single_source_is_a_mixture_of_one() -> None:
    [source] = DataSpec(source="hf://owner/name", split="test", limit=5, format="text").sources()
    assert (source.source, source.split, source.limit, source.format, source.weight) == (
        "hf://owner/name",
        "test",
        5,
        "text",
        1.0,
    )


def test_settings_do_not_change() -> None:
    spec = DataSpec(source="a.jsonl", validation=ValidationSpec(source=SourceSpec(source="b.jsonl")))
    with pytest.raises(ValidationError, match="frozen"):
        spec.source = "b"  # type: ignore[misc]
