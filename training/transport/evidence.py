"""A line of a log that a statement rests on."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Evidence(BaseModel):
    """``text`` is the line as logged, without its line end and at most 300 characters of it."""

    model_config = ConfigDict(frozen=True)

    file: str
    line: int
    text: str
