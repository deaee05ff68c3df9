"""The documentation's commands of Pulumi: those that need no cloud are run, the others have flags that exist."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any, get_origin

import pytest
import yaml
from pydantic.alias_generators import to_camel

from infra.settings import StackSettings, read_settings_file
from tests.gotools import build
from tests.unit.operations.test_docs import ROOT
from tests.unit.operations.test_docs_commands import all_commands, settings_that_are_set

LISTS = {
    to_camel(name)
    for name, field in StackSettings.model_fields.items()
    if get_origin(field.annotation) is tuple
}
# These read or change what is deployed.
DEPLOYED = {"up", "preview", "destroy", "refresh", "cancel", "stack"}


@pytest.fixture(scope="module")
def pulumi(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Pulumi in a folder with nothing but the project and its example of a stack, with a home and a state of its own:
    what `pulumi login --local` would use is the user's."""
    try:
        binary = build.ensure(["pulumi"])["pulumi"]
    except build.BuildError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the Pulumi engine cannot be built on this machine: {error}")
    folder = tmp_path_factory.mktemp("newcomer")
    for name in ("Pulumi.yaml", "Pulumi.dev.yaml"):
        shutil.copy(ROOT / name, folder)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "PULUMI_"))},
        "PULUMI_HOME": str(folder / "home"),
        "PATH": f"{binary.parent}{os.pathsep}{os.environ['PATH']}",
        "PULUMI_CONFIG_PASSPHRASE": "passphrase",
        "PULUMI_SKIP_UPDATE_CHECK": "true",
    }
    (folder / "state").mkdir()

    def run(*arguments: str) -> str:
        done = subprocess.run(
            ["pulumi", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"pulumi {' '.join(arguments)}: {done.stderr or done.stdout}"
        return done.stdout

    run.folder = folder  # type: ignore[attr-defined]
    return run


def test_a_newcomer_makes_a_stack_and_its_settings(pulumi: Any) -> None:
    """The way of quickstart.md up to the first call to AWS, with every setting that a page sets."""
    pulumi("login", f"file://{pulumi.folder}/state")
    pulumi("stack", "init", "dev")
    pulumi("config", "set", "accountId", "123456789012", "--stack", "dev")
    pulumi("config", "set", "--path", "publicCidrs[0]", "198.18.0.1/32", "--stack", "dev")
    stack_file = pulumi.folder / "Pulumi.dev.yaml"
    before = stack_file.read_bytes()
    assert read_settings_file(stack_file).account_id == "123456789012"

    for key, value in settings_that_are_set():
        if value.isupper() or value.startswith('"$('):
            continue
        stack_file.write_bytes(before)
        if key == "kuberayVersion":
            pulumi("config", "set", "kuberayCrds", "crds", "--stack", "dev")
        many = key in LISTS
        place = ("--plaintext", "--path", f"{key}[0]") if many else (key,)
        pulumi("config", "set", *place, value, "--stack", "dev")
        written = yaml.safe_load(stack_file.read_text())["config"][f"efa-finetune:{key}"]
        assert written == [value] if many else str(written).lower() == value
        read_settings_file(stack_file)
    stack_file.write_bytes(before)
    pulumi("config", "set", "expires", "2099-12-01T18:00:00Z", "--stack", "dev")
    assert read_settings_file(stack_file).expires is not None


@pytest.mark.parametrize(
    "words", [parameter for parameter in all_commands() if parameter.values[0][0] == "pulumi"]
)
def test_flags_of_pulumi_exist(pulumi: Any, words: tuple[str, ...]) -> None:
    command = [word for word in words[1:4] if word in {*DEPLOYED, "init", "login", "config", "set"}]
    said = pulumi(*command, "--help")
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert [flag for flag in flags if f"{flag} " not in said] == [], " ".join(words)


@pytest.mark.parametrize("words", [("cancel",), ("state", "taint"), ("refresh", "--clear-pending-creates")])
def test_ways_back_exist(pulumi: Any, words: tuple[str, ...]) -> None:
    """Of recovery.md, whose blocks have no prompt."""
    said = pulumi(*(word for word in words if not word.startswith("--")), "--help")
    assert "Usage:" in said
    assert all(word in said for word in words if word.startswith("--"))
    assert f"pulumi {' '.join(words)}" in (ROOT / "docs" / "recovery.md").read_text()
