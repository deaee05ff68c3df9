"""Commands of the documentation that are not finetune's: programs, targets, settings and flags that exist.

tests/engine/test_docs.py runs those of Pulumi that need no cloud.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import botocore.session
import pytest
from botocore import xform_name

from infra.settings import StackSettings, parse_settings
from tests.unit.operations.test_docs import PAGES, ROOT, blocks, page

# What a line of finetune needs beside this checkout. What needs nothing is run: its block stands behind <!-- runs -->.
NEEDS = {
    **dict.fromkeys(("cost", "plan", "transport", "report"), "nothing"),
    "local": "minutes",  # tests/unit/training runs the demo
    "image": "the registry of the image",
    **dict.fromkeys(("doctor", "zones", "audit", "extend"), "AWS"),
    **dict.fromkeys(
        ("submit", "status", "logs", "stop", "list", "compare", "probe", "sleep", "wake"), "a stack"
    ),
}
VERBS = {
    "kubectl": {"get", "describe", "logs", "create", "label", "port-forward"},
    "helm": {"show"},
    "git": {"clone", "ls-remote"},
    "wandb": {"sync"},
}
SHELL = {"cd", "mkdir", "source", "grep", "tee"}
AWS_EVERYWHERE = {"region", "query", "output", "profile"}
AWS_CUSTOM = {("sso", "login"), ("eks", "update-kubeconfig"), ("eks", "get-token")}


def lines() -> Iterator[tuple[Path, str]]:
    """Commands at a prompt, one a line, without their comments."""
    for path in PAGES:
        if path.name == "cli.md":
            continue
        for _, body in blocks(page(path)):
            for line in body.replace("\\\n", " ").splitlines():
                if line.strip().startswith("$ "):
                    yield path, re.sub(r"\s+# .*", "", line.strip().removeprefix("$ "))


def single(line: str) -> list[list[str]]:
    """The words of each command of a line with && and |; what stands in $(...) is one word."""
    flat = re.sub(r'"\$\((?:[^()]|\([^()]*\))*\)"', "SUBSTITUTED", line)
    words = shlex.split(flat)
    found: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", "|"):
            found.append([])
        else:
            found[-1].append(word)
    return found


def all_commands() -> list[Any]:
    found = {(path.name, tuple(words)) for path, line in lines() for words in single(line)}
    return [pytest.param(words, id=f"{name}: {' '.join(words)[:70]}") for name, words in sorted(found)]


def of(program: str) -> list[Any]:
    return [parameter for parameter in all_commands() if parameter.values[0][0] == program]


@pytest.mark.parametrize("words", all_commands())
def test_every_program_is_one_that_a_test_knows(words: tuple[str, ...]) -> None:
    known = {"finetune", "pulumi", "aws", "make", "python", "uv", *VERBS, *SHELL}
    assert words[0] in known, f"{' '.join(words)}: write a check for {words[0]}"


def test_what_needs_nothing_is_run() -> None:
    for path in PAGES:
        if path.name == "cli.md":
            continue
        for marked, body in blocks(page(path)):
            commands = [line.strip().removeprefix("$ ") for line in body.splitlines() if "$ finetune" in line]
            needs = {NEEDS[command.split()[1]] for command in commands}
            if needs == {"nothing"}:
                assert marked, f"{path.name}: put <!-- runs --> before the block of {commands[0]}"
            if marked:
                assert needs <= {"nothing"}, f"{path.name}: {commands} cannot run without {needs}"


def test_every_command_of_finetune_has_its_need() -> None:
    from typer.main import get_command

    from training.cli import app

    group: Any = get_command(app)
    assert set(group.commands) == set(NEEDS)


@pytest.mark.parametrize("words", of("make"))
def test_targets_exist(words: tuple[str, ...]) -> None:
    assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize(
    "words", [*of("python"), pytest.param(("python", "-m", "operations.explain"), id="explain")]
)
def test_python_runs_a_module_of_ours_or_an_example_of_the_page(words: tuple[str, ...]) -> None:
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2])
    else:
        assert any(f"<!-- example: {words[1]} -->" in page(path) for path in PAGES)


@pytest.mark.parametrize("words", [parameter for program in VERBS for parameter in of(program)])
def test_verbs_exist(words: tuple[str, ...]) -> None:
    assert VERBS[words[0]] & set(words[1:4]), " ".join(words)


@pytest.mark.parametrize("words", of("aws"))
def test_calls_of_aws_are_in_its_models(words: tuple[str, ...]) -> None:
    service, operation = words[1], words[2]
    if (service, operation) in AWS_CUSTOM:
        return
    # The command line has a second name for S3's API.
    model = botocore.session.get_session().get_service_model({"s3api": "s3"}.get(service, service))
    names = {xform_name(name, "-"): name for name in model.operation_names}
    assert operation in names, f"aws {service} has no {operation}"
    members = model.operation_model(names[operation]).input_shape.members
    flags = {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")}
    known = AWS_EVERYWHERE | {xform_name(member, "-") for member in members}
    assert flags - known == set()


def settings_that_are_set() -> dict[tuple[str, str], str]:
    """Key and value of each `pulumi config set`, in a block or in a sentence, and where it stands."""
    form = r"pulumi config set (?:--plaintext )?(?:--path ')?(\w+)(?:\[\d+\]')? ([^\s`]+)"
    return {found: path.name for path in PAGES for found in re.findall(form, page(path))}


@pytest.mark.parametrize(("setting", "where"), settings_that_are_set().items())
def test_settings_that_the_pages_set_exist(setting: tuple[str, str], where: str) -> None:
    from pydantic.alias_generators import to_camel

    key, value = setting
    assert key in {to_camel(name) for name in StackSettings.model_fields}, f"{where}: {key}"
    if value.isupper() or value.startswith('"$('):
        return  # a placeholder
    annotation = next(f.annotation for n, f in StackSettings.model_fields.items() if to_camel(n) == key)
    given: Any = [value] if get_origin(annotation) is tuple else value
    # What has to be set together with it.
    companions: dict[str, Any] = {"kuberayVersion": {"kuberayCrds": "crds"}}.get(key, {})
    parse_settings({"owner": "team", "publicCidrs": ["198.18.0.1/32"], **companions, key: given}, "dev")
