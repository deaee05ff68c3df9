"""Fixtures of the engine tests: one engine per test process, one account and one state backend per test."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gotools import build

HERE = Path(__file__).parent

# The address belongs to nobody's documentation, which the program refuses to deploy with.
BASE: dict[str, Any] = {"owner": "tests", "publicCidrs": ["81.2.69.160/32"]}
EVERYTHING: dict[str, Any] = {
    **BASE,
    "admins": ["arn:aws:iam::123456789012:role/admin"],
    "users": ["arn:aws:iam::123456789012:role/user"],
    "budgetMonthlyUsd": 100,
    "budgetEmails": ["owner@example.org"],
    "expires": "2099-12-01T00:00:00+00:00",
    "flowLogs": True,
    "forceDestroy": True,
    "fsx": True,
    "natPerZone": True,
    "observability": "cloudwatch",
    "secretsEncryption": True,
}
"""All optional parts of the AWS layer at once."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("engine")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """A report parses source, and Python 3.11 ends the whole session there ("AST constructor recursion depth mismatch")
    if the collector meanwhile finalizes a program that has failed."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    try:
        build.ensure(["pulumi"])
    except build.BuildError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the Pulumi engine cannot be built on this machine: {error}")
    from tests.engine.harness import Engine

    one = Engine(tmp_path_factory.mktemp("engine"))
    yield one
    one.stop()


@pytest.fixture(scope="session")
def small_crds(tmp_path_factory: pytest.TempPathFactory) -> str:
    """KubeRay's CRDs without their schemas: eight megabytes less of state to write at each step."""
    from infra.crds import packaged_crds

    folder = tmp_path_factory.mktemp("crds")
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    for crd in packaged_crds():
        for version in crd["spec"]["versions"]:
            version["schema"] = schema
            version.pop("additionalPrinterColumns", None)
        (folder / f"{crd['metadata']['name']}.yaml").write_text(yaml.safe_dump(crd))
    return str(folder)


@pytest.fixture
def account(engine: Any) -> Iterator[str]:
    """The number of an empty account whose credentials the plugins have."""
    with engine.fresh_account() as number:
        yield number


@pytest.fixture
def make_stack(engine: Any, account: str, small_crds: str, tmp_path: Path) -> Callable[..., Any]:
    """A stack of the project's own program, in the account of the test."""
    from infra.program import program
    from tests.engine.harness import Stack

    def make(settings: dict[str, Any] | None = None, **options: Any) -> Any:
        config = {"accountId": account, "kuberayCrds": small_crds, **(BASE if settings is None else settings)}
        return Stack(engine, tmp_path / options.pop("folder", "stack"), program, config=config, **options)

    return make
