"""The workflows: linted by zizmor and actionlint, and the promises that neither of them knows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from operations import review
from tests.gotools import build

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"^\s*-? ?uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


def load(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def jobs() -> list[Any]:
    return [
        pytest.param(path, name, job, id=f"{path.stem}-{name}")
        for path in WORKFLOWS
        for name, job in load(path)["jobs"].items()
    ]


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_zizmor() -> None:
    zizmor = Path(sys.executable).with_name("zizmor")
    done = subprocess.run(
        [zizmor, "--offline", "--no-progress", ".github"], cwd=ROOT, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_actionlint() -> None:
    if build.missing(["actionlint"]):
        pytest.skip("actionlint is not built: python tests/gotools/build.py actionlint (make test does it)")
    done = subprocess.run(
        [build.tool_path("actionlint"), "-no-color", "-shellcheck=", "-pyflakes="],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_digest_with_their_version(path: Path) -> None:
    used = [line for line in path.read_text().splitlines() if "uses:" in line]

    assert used
    assert [line for line in used if not PINNED.match(line)] == []


def test_one_digest_per_action() -> None:
    used = {
        line.split("uses:")[1].strip()
        for path in WORKFLOWS
        for line in path.read_text().splitlines()
        if "uses:" in line
    }

    names = [entry.partition("@")[0] for entry in used]
    assert len(names) == len(set(names)), used


@pytest.mark.parametrize(("path", "name", "job"), jobs())
def test_rights_are_given_job_by_job_and_are_few(path: Path, name: str, job: dict[str, Any]) -> None:
    assert load(path)["permissions"] == {}
    rights = job["permissions"]
    assert set(rights.items()) <= {("contents", "read"), ("id-token", "write"), ("pull-requests", "write")}
    if "pull-requests" in rights:
        assert len(rights) == 1
        assert "uses" not in str(job["steps"]), "the job that may write runs nothing of the pull request"
        assert "checkout" not in str(job["steps"])
    assert ("id-token" in rights) == ("role-to-assume" in str(job["steps"]))
    assert job["timeout-minutes"]


@pytest.mark.parametrize(("path", "name", "job"), jobs())
def test_no_expression_stands_in_a_script(path: Path, name: str, job: dict[str, Any]) -> None:
    assert "${{" not in commands(job)


@pytest.mark.parametrize(("path", "name", "job"), jobs())
def test_who_changes_a_stack_asks_an_environment_and_gives_the_lock_back(
    path: Path, name: str, job: dict[str, Any]
) -> None:
    script = commands(job)
    if not re.search(r"pulumi (up|destroy|refresh)", script):
        return
    last = [step for step in job["steps"] if step.get("if") == "cancelled()"]
    assert len(last) == 1
    assert "pulumi cancel" in last[0]["run"]
    concurrency = job.get("concurrency") or load(path)["concurrency"]
    assert concurrency["group"].startswith("stack-")
    assert concurrency["cancel-in-progress"] is False
    if "--preview-only" not in script:
        assert job["environment"] in ("dev", "destroy")
        assert "AWS_DEPLOY_ROLE" in str(job["steps"])
    else:
        assert "AWS_DEPLOY_ROLE" not in str(job["steps"])


def test_pull_requests_never_run_with_the_rights_of_the_target() -> None:
    for path in WORKFLOWS:
        assert "pull_request_target" not in path.read_text()
        assert "secrets." not in path.read_text(), "roles are assumed through OIDC: there is nothing to keep"


def test_comment_is_found_by_the_marker_that_the_report_begins_with() -> None:
    job = load(ROOT / ".github/workflows/pull-request.yml")["jobs"]["comment"]

    assert job["env"]["MARKER"] == review.MARKER


def test_commands_of_the_workflows_exist() -> None:
    from typer.main import get_command

    from training.cli import app

    known = set(get_command(app).commands)  # pyright: ignore[reportAttributeAccessIssue]
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    assert set(re.findall(r"finetune ([a-z]+)", text)) - {"what"} <= known


def test_versions_are_those_of_the_repository() -> None:
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    uv = re.search(r"^UV_VERSION := (\S+)", (ROOT / "Makefile").read_text(), re.M)
    assert uv is not None
    assert set(re.findall(r'^ +version: "(\S+)"', text, re.M)) == {uv[1]}
    assert set(re.findall(r"pulumi-version: (\S+)", text)) == {build.PULUMI_VERSION}
