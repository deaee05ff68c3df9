"""What became of every row: read, used, or rejected for a reason, with file and line."""

from pydantic import BaseModel, ConfigDict, Field

EXAMPLES_PER_REASON = 5


class BadRow(BaseModel):
    """A rejected row."""

    model_config = ConfigDict(frozen=True)

    file: str
    line: int = Field(description="1-based line of a text file, 1-based row of a columnar one.")
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}: {self.detail}"


class SourceReport(BaseModel):
    """The rows of one source."""

    source: str
    revision: str | None = None
    format: str = "auto"
    files: int = 0
    ignored_files: list[str] = Field(default_factory=list)
    rows_read: int = 0
    rows_used: int = 0
    rows_truncated: int = 0
    rejected: dict[str, int] = Field(default_factory=dict, description="Reason -> rows.")
    examples: list[BadRow] = Field(
        default_factory=list, description=f"The first {EXAMPLES_PER_REASON} rejected rows of each reason."
    )
    documents: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    passes_per_epoch: float | None = Field(
        default=None, description="How often a pass over the mixture sees the source; null while streaming."
    )
    from_cache: int = Field(default=0, description="Files whose tokens were already in the cache.")


class DataReport(BaseModel):
    """The whole data side of a run. While streaming, it covers the files opened so far."""

    sources: list[SourceReport] = Field(default_factory=list)
    pairs: bool = Field(default=False, description="Documents are preference pairs.")
    train_documents: int = 0
    train_tokens: int = 0
    train_supervised_tokens: int = 0
    validation_documents: int = 0
    validation_tokens: int = 0
    validation_supervised_tokens: int = 0
    packs_per_epoch: int | None = Field(
        default=None, description="Micro-batches of one pass, over all ranks."
    )
    packing_efficiency: float | None = Field(
        default=None, description="Share of the row that is not padding."
    )
    fingerprint: str = ""
    warnings: list[str] = Field(default_factory=list)

    @property
    def rejected(self) -> dict[str, int]:
        """Reason -> rows, over all sources."""
        total: dict[str, int] = {}
        for source in self.sources:
            for reason, count in source.rejected.items():
                total[reason] = total.get(reason, 0) + count
        return total

    def lines(self) -> list[str]:
        """The report for a terminal."""
        lines: list[str] = []
        for source in self.sources:
            lines.append(
                f"{source.source}: {source.rows_read:,} rows read, {source.rows_used:,} used, "
                f"{source.tokens:,} tokens ({source.supervised_tokens:,} supervised)"
            )
            if source.ignored_files:
                shown = ", ".join(source.ignored_files[:5])
                lines.append(
                    f"  not data, ignored: {shown}" + (" ..." if len(source.ignored_files) > 5 else "")
                )
            for reason, count in source.rejected.items():
                lines.append(f"  rejected, {reason}: {count:,}")
                lines += [f"    {row}" for row in source.examples if row.reason == reason]
            if source.passes_per_epoch is not None and source.passes_per_epoch != 1:
                lines.append(f"  seen {source.passes_per_epoch:.2f} times per epoch, as its weight asks for")
            if source.rows_truncated:
                lines.append(f"  truncated to max_length: {source.rows_truncated:,} rows")
        if self.packs_per_epoch is not None and self.packing_efficiency is not None:
            what = "pairs" if self.pairs else "documents"
            lines.append(
                f"training: {self.train_documents:,} {what} in {self.packs_per_epoch:,} rows, "
                f"{self.packing_efficiency:.1%} of them filled; held out: {self.validation_documents:,} "
                f"{what}"
            )
        lines += [f"warning: {warning}" for warning in self.warnings]
        return lines
