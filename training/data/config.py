"""DataSpec: the `data` section of a job file."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Format = Literal["auto", "messages", "prompt-completion", "text", "instruction", "preference"]
Mask = Literal["auto", "assistant", "completion", "all"]
RowPolicy = Literal["skip", "stop"]
LongPolicy = Literal["skip", "stop", "truncate", "split"]
Kind = Literal["local", "hub", "s3", "python-docs", "random"]

FIELDS_OF_FORMAT: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "tools"),
    "prompt-completion": ("prompt", "completion", "system"),
    "instruction": ("instruction", "input", "output", "system"),
    "text": ("text",),
    "preference": ("prompt", "chosen", "rejected", "system", "tools"),
}
"""What a row of each format may hold; `fields` maps these names to the columns of a data set."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DATA_SUFFIX = re.compile(r"\.(jsonl|json|csv|parquet)(\.gz)?$", re.IGNORECASE)


def source_kind(source: str) -> Kind:
    """Where a source string points. A path wins over a hub id only by its look (`./`, `/`, `~`, a data
    suffix, or no `owner/name` form), never by what happens to lie on the disk: the cluster reads the same job
    file."""
    if source in ("python-docs", "random"):
        return source
    if source.startswith("s3://"):
        return "s3"
    if source.startswith("hf://"):
        return "hub"
    looks_local = source.startswith((".", "/", "~")) or _DATA_SUFFIX.search(source) is not None
    if not looks_local and _HUB_ID.fullmatch(source):
        return "hub"
    return "local"


def hub_id(source: str) -> str:
    """`owner/name` of a hub source."""
    return source.removeprefix("hf://").removeprefix("datasets/")


class SourceSpec(BaseModel):
    """One place that rows come from, and how to read them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = Field(
        min_length=1,
        description="A file (.jsonl .json .csv .parquet, jsonl/json/csv also .gz), a folder of these, a "
        "saved Hugging Face data set, `hf://owner/name` or `owner/name`, `s3://bucket/prefix`, "
        "`python-docs` or `random`.",
    )
    format: Format = Field(
        default="auto", description="How a row is laid out; auto reads it off the columns."
    )
    fields: dict[str, str] = Field(
        default_factory=dict,
        description="Our field name -> the column's name, for example {prompt: question}.",
    )
    subset: str | None = Field(default=None, description="Configuration of a hub data set.")
    split: str | None = Field(default=None, description="Split of a hub or saved data set (default train).")
    revision: str | None = Field(default=None, description="Commit, tag or branch of a hub data set.")
    limit: int | None = Field(default=None, ge=1, description="Read only this many rows.")

    @property
    def kind(self) -> Kind:
        return source_kind(self.source)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        kind = self.kind
        if kind == "s3" and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", self.source):
            raise ValueError(f"source {self.source!r} is not s3://bucket/prefix")
        if kind == "hub" and not _HUB_ID.fullmatch(hub_id(self.source)):
            raise ValueError(f"source {self.source!r} is not hf://owner/name")
        for name in ("revision", "subset"):
            if getattr(self, name) is not None and kind != "hub":
                raise ValueError(
                    f"{name} is only for a data set of the hub (hf://owner/name); source {self.source!r} is "
                    f"{kind}"
                )
        if self.split is not None and kind not in ("hub", "local"):
            raise ValueError(
                f"split is only for a data set of the hub or a saved one; source {self.source!r} is {kind}"
            )
        if kind in ("python-docs", "random") and (self.format != "auto" or self.fields):
            raise ValueError(f"source {self.source!r} has its own layout: leave out format and fields")
        if self.fields and self.format == "auto":
            raise ValueError(
                "fields needs the format that its names belong to: set format to one of "
                + ", ".join(FIELDS_OF_FORMAT)
            )
        allowed = FIELDS_OF_FORMAT.get(self.format, ())
        unknown = [name for name in self.fields if name not in allowed]
        if unknown:
            raise ValueError(
                f"fields.{unknown[0]} is not a field of format {self.format}; allowed: {', '.join(allowed)}"
            )
        return self


class MixtureSource(SourceSpec):
    """A source with its share of the mixture."""

    weight: float = Field(
        gt=0, allow_inf_nan=False, description="Share of the tokens; shares need not add up to 1."
    )


class ValidationSpec(BaseModel):
    """Held-out documents: a fraction or a number of the training source's, or a source of their own.

    The held-out ones are chosen by a hash of their content and not by the seed, so that runs with other seeds
    stay comparable and equal documents never land on both sides.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fraction: float | None = Field(default=None, gt=0, lt=1)
    count: int | None = Field(default=None, ge=1)
    source: SourceSpec | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        given = [name for name in ("fraction", "count", "source") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"validation needs exactly one of fraction, count, source; found {given or 'none'}"
            )
        return self


class DataSpec(BaseModel):
    """What to train on. Either `source` (with format, fields, subset, split, revision, limit) or
    `mixture`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str | None = None
    format: Format = "auto"
    fields: dict[str, str] = Field(default_factory=dict)
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    limit: Annotated[int, Field(ge=1)] | None = None

    mixture: tuple[MixtureSource, ...] | None = None

    max_length: int = Field(default=2048, ge=8, description="Longest document, in tokens.")
    packing: bool = Field(
        default=True, description="Several documents in one row; false: one per max_length slot."
    )
    mask: Mask = Field(
        default="auto",
        description="Which tokens are learnt: every assistant turn, the last one only (completion), or "
        "all. auto: assistant for conversations, all for plain text, completion for preference pairs.",
    )
    on_bad_row: RowPolicy = "skip"
    too_long: LongPolicy | None = Field(
        default=None,
        description="Documents over max_length: skip, stop, truncate, or split (plain text only). Left "
        "out: as on_bad_row.",
    )
    chat_template: str | None = Field(
        default=None,
        description="Path of a Jinja file, or `chatml`, in place of the tokenizer's own template.",
    )
    validation: ValidationSpec | None = None
    shuffle: bool = True
    streaming: bool = Field(
        default=False,
        description="Tokenize file by file while training, for data too big to prepare first. Needs `steps`.",
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if (self.source is None) == (self.mixture is None):
            raise ValueError("data needs either source or mixture" + (", not both" if self.source else ""))
        if self.mixture is not None:
            if not self.mixture:
                raise ValueError("mixture is empty: list at least one {source, weight}")
            for name in ("fields", "subset", "split", "revision", "limit"):
                if getattr(self, name):
                    raise ValueError(f"{name} belongs to each entry of mixture, not beside it")
            if not self.shuffle:
                raise ValueError(
                    "shuffle: false keeps the order of the files, in which a mixture would be one source after "
                    "the other: leave shuffle on"
                )
            if self.format != "auto":
                raise ValueError("format belongs to each entry of mixture, not beside it")
        sources = self.sources()
        kinds = {source.kind for source in sources}
        formats = {source.format for source in sources}
        if "random" in kinds:
            if len(sources) > 1:
                raise ValueError("source random is for benchmarks and cannot be mixed with others")
            if self.mask not in ("auto", "all"):
                raise ValueError(
                    f"mask {self.mask!r} is impossible with source random: it has no turns (use all)"
                )
        if "text" in formats and self.mask in ("assistant", "completion"):
            raise ValueError(
                f"mask {self.mask!r} is impossible with format text: it has no turns (use auto or all)"
            )
        if self.too_long == "split" and not formats <= {"text", "auto"}:
            raise ValueError(
                "too_long: split cuts a document into several, which only format text survives; found format "
                + ", ".join(sorted(formats - {"text", "auto"}))
            )
        if self.streaming and "random" in kinds:
            raise ValueError("streaming is impossible with source random: it has no files")
        if self.streaming and any(source.limit is not None for source in sources):
            raise ValueError(
                "limit counts rows in the order of the files, which streaming shuffles: leave one out"
            )
        if self.streaming and self.validation is not None and self.validation.source is None:
            raise ValueError(
                "streaming cannot hold out a fraction or count, since it never sees all documents before "
                "training: give validation.source"
            )
        return self

    def keyed_sources(self) -> Iterator[tuple[str, SourceSpec]]:
        """Every source, of training and of validation, with the key of the job file that it stands at."""
        for index, source in enumerate(self.sources()):
            yield ("data" if self.mixture is None else f"data.mixture.{index}"), source
        if self.validation is not None and self.validation.source is not None:
            yield "data.validation.source", self.validation.source

    @property
    def pairs(self) -> bool:
        """Whether rows are read as preference pairs."""
        return all(source.format == "preference" for source in self.sources())

    def for_pairs(self) -> Self:
        """The same data, every source read as preference pairs. Raises ValueError where it cannot be."""
        for key, source in self.keyed_sources():
            if source.kind in ("python-docs", "random"):
                raise ValueError(
                    f"{key}.source {source.source} holds no preference pairs, which objective.kind dpo needs"
                )
            if source.format not in ("auto", "preference"):
                raise ValueError(
                    f"{key}.format {source.format} holds no preference pairs, which objective.kind dpo needs: "
                    "allowed are auto and preference"
                )
        if self.mask not in ("auto", "completion"):
            raise ValueError(
                f"data.mask {self.mask} is impossible with objective.kind dpo, which compares the answers alone: "
                "allowed are auto and completion"
            )
        if self.too_long == "split":
            raise ValueError(
                "data.too_long split is impossible with objective.kind dpo, which needs a pair's answers whole: "
                "allowed are skip, stop and truncate"
            )
        own: dict[str, Any] = {"mask": "completion"}
        if self.mixture is None:
            own["format"] = "preference"
        else:
            own["mixture"] = tuple(
                source.model_copy(update={"format": "preference"}) for source in self.mixture
            )
        if self.validation is not None and self.validation.source is not None:
            held_out = self.validation.source.model_copy(update={"format": "preference"})
            own["validation"] = self.validation.model_copy(update={"source": held_out})
        return self.model_copy(update=own)

    def refuse_pairs(self) -> None:
        """Raises ValueError where a source is said to hold preference pairs: supervised fine-tuning has no use
        for the rejected answers."""
        for key, source in self.keyed_sources():
            if source.format == "preference":
                raise ValueError(
                    f"{key}.format preference holds pairs of answers, which objective.kind supervised cannot learn "
                    "from: set objective.kind: dpo"
                )

    def sources(self) -> tuple[MixtureSource, ...]:
        """Every training source with its weight (1 for a single source)."""
        if self.mixture is not None:
            return self.mixture
        assert self.source is not None
        return (
            MixtureSource(
                source=self.source,
                format=self.format,
                fields=self.fields,
                subset=self.subset,
                split=self.split,
                revision=self.revision,
                limit=self.limit,
                weight=1.0,
            ),
        )
