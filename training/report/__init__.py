"""The report of a run: one HTML page that needs nothing else, not even a network."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined

from training.report.folder import read_run
from training.report.page import build_page
from training.storage import Storage

__all__ = ["render_report", "write_report"]


def write_report(storage: Storage) -> None:
    """Writes report.html into a run folder, from whatever of its files are there.

    Raises FileNotFoundError where the folder holds nothing.
    """
    storage.write_text("report.html", render_report(storage))


def render_report(storage: Storage, now: datetime | None = None) -> str:
    """The page as text; `now` is the time of writing that it names. Raises FileNotFoundError."""
    templates = resources.files(__name__) / "templates"
    style = (templates / "page.css").read_text(encoding="utf-8")
    script = (templates / "page.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=PackageLoader(__name__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        page=build_page(read_run(storage), now or datetime.now(UTC)),
        style=style,
        style_hash=_hash_source(style),
        script=script,
        script_hash=_hash_source(script),
    )


def _hash_source(code: str) -> str:
    """The content security policy allows exactly this style and this script: text of the run can add none."""
    return "sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
