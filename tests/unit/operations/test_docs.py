"""The documentation: links that lead somewhere, commands that exist with their flags, blocks that run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN = ("architecture", "quickstart", "operations", "troubleshooting", "security")
# A block behind this line needs no cloud: it is run.
MARK = "<!-- runs -->"


def page(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(text: str) -> Iterator[tuple[bool, str]]:
    """Code blocks and whether they are marked."""
    for match in re.finditer(
        r"(?P<mark><!-- runs -->\n)?^ *```[a-z]*\n(?P<body>.*?)^ *```", text, re.M | re.S
    ):
        yield match["mark"] is not None, match["body"]


def commands(text: str) -> Iterator[str]:
    """Lines of code blocks, without prompt, and commands in single backticks, that call finetune."""
    for _, body in blocks(text):
        for line in body.replace("\\\n", " ").splitlines():
            yield line.strip().removeprefix("$ ")
    without_blocks = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    yield from (code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", without_blocks))


def finetune_commands() -> list[Any]:
    found = {
        (path.relative_to(ROOT), command)
        for path in PAGES
        if path.name != "cli.md"
        for command in commands(page(path))
        if re.match(r"finetune [a-z]", command)
    }
    return [pytest.param(path, command, id=f"{path.stem}: {command[:60]}") for path, command in sorted(found)]


@pytest.mark.parametrize(("path", "command"), finetune_commands())
def test_commands_of_the_documentation_are_understood(path: Path, command: str) -> None:
    from click.exceptions import ClickException
    from typer.main import get_command

    from training.cli import app

    words = shlex.split(command, comments=True)[1:]
    # `finetune status|logs|stop` names several commands in one.
    for name in words[0].rstrip(",").split("|"):
        group: Any = get_command(app)
        assert name in group.commands, f"{path}: there is no finetune {name}"
        arguments = [word for word in words[1:] if word not in ("...", "[NAME]", "|", "and")]
        arguments = ["4" if word == "N" else word for word in arguments]
        try:
            with group.commands[name].make_context(name, arguments, resilient_parsing=True):
                pass
        except ClickException as error:
            pytest.fail(f"{path}: {command}: {error.format_message()}")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page(path)):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        if linked.name == "performance.md" and not linked.exists():
            continue  # written with the benchmarks
        assert linked.exists(), f"{path.name}: {target}"
        if anchor:
            assert anchor in anchors(page(linked)), f"{path.name}: {target}"


def anchors(text: str) -> set[str]:
    """Anchors as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(path, body, id=path.stem)
        for path in PAGES
        for marked, body in blocks(page(path))
        if marked
    ],
)
def test_marked_blocks_run(path: Path, body: str) -> None:
    lines = body.replace("\\\n", " ").splitlines()
    script = "\n".join(line.removeprefix("$ ") for line in lines if line.startswith("$ "))
    assert script, f"{path}: a marked block has lines that begin with $"
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("AWS_")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_command_reference_is_current(tmp_path: Path) -> None:
    written = tmp_path / "cli.md"
    command = ["-m", "typer", "training.cli", "utils", "docs", "--name", "finetune", "--title", "Commands"]
    subprocess.run(
        [sys.executable, *command, "--output", str(written)], cwd=ROOT, check=True, capture_output=True
    )

    again = f"python {' '.join(command)} --output docs/cli.md"
    assert page(ROOT / "docs" / "cli.md") == page(written), f"write it again: {again}"


def test_every_command_is_in_a_guide() -> None:
    from typer.main import get_command

    from training.cli import app

    group: Any = get_command(app)
    text = "\n".join(page(path) for path in PAGES if path.name != "cli.md")
    assert [name for name in group.commands if f"finetune {name}" not in text] == []


def test_files_that_the_pages_name_exist() -> None:
    for name in OWN:
        for code in re.findall(
            r"`((?:infra|training|operations|policy|tests|docs)/[\w./-]+)`",
            page(ROOT / "docs" / f"{name}.md"),
        ):
            assert (ROOT / code).exists(), f"docs/{name}.md: {code}"


def test_every_network_policy_is_in_the_security_model() -> None:
    from infra.access import network_policies
    from infra.settings import parse_settings

    values = {"owner": "team", "publicCidrs": ["198.18.0.1/32"], "observability": "prometheus"}
    settings = parse_settings(values, "dev")
    text = page(ROOT / "docs" / "security.md")
    assert [name for name in network_policies(settings) if f"`{name}`" not in text and name != "dns"] == []


def test_policies_that_the_pages_name_exist() -> None:
    from policy.rules import RULES, STACK_RULES

    known = {rule.name for rule in (*RULES, *STACK_RULES)}
    text = page(ROOT / "docs" / "security.md") + page(ROOT / "docs" / "troubleshooting.md")
    named = set(re.findall(r"policy `([a-z0-9-]+)`", text))
    assert named <= known, (named - known, known)


@pytest.mark.parametrize("name", ["layers", "job"])
def test_drawings_show_what_their_sources_say(name: str) -> None:
    images = ROOT / "docs" / "images"
    assert f"(images/{name}.svg)" in page(ROOT / "docs" / "architecture.md")
    drawn = {text.strip() for text in ElementTree.parse(images / f"{name}.svg").getroot().itertext()}
    source = page(images / f"{name}.mmd")
    labels = re.findall(r'"([^"]+)"', source) if name == "layers" else re.findall(r": (.+)$", source, re.M)
    assert len(labels) > 10
    missing = [line for label in labels for line in label.split("<br/>") if line not in drawn]
    assert missing == [], "draw it again: node docs/images/render.mjs"
