"""Fixtures for tests on a real Kubernetes.

rig     the cluster, started once for all tests of a session; a rig that runs already is used and left
running. FINETUNE_RIG_KEEP=1 also leaves running what the tests started. stack   the local stack on that
rig, deployed once: `stack.outputs_file` is what `finetune --outputs` reads, `stack.environment()` has
KUBECONFIG, kubectl on the PATH and the keys of the object store. A test may change `stack.settings` and
call `stack.up()`, or destroy it: the next test that asks for it gets it back as it was. spare   a second
rig beside it for tests that break one, as the test before left it: `up` makes a running one of any.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gotools.build import ensure
from tests.rig import machine
from tests.rig.cluster import Rig
from tests.rig.deployment import Deployment
from tests.rig.layout import TOOLS, Layout

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in _of_the_rig(items):
        item.add_marker(pytest.mark.rig)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds what is missing before the first test starts: no test's time limit holds for half an hour of
    compiling.
    """
    if session.config.option.collectonly or not _of_the_rig(session.items) or machine.unsupported():
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        ensure(TOOLS)


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    _require_support()
    rig = Rig()
    ours = rig.status().phase != "ready"
    rig.up()
    yield rig
    if ours and os.environ.get("FINETUNE_RIG_KEEP") != "1":
        rig.down()


@pytest.fixture(scope="session")
def _deployment(rig: Rig) -> Iterator[Deployment]:
    deployment = Deployment(rig, rig.layout.state / "stack")
    yield deployment
    if deployment.is_up and os.environ.get("FINETUNE_RIG_KEEP") != "1":
        deployment.destroy()


@pytest.fixture
def stack(_deployment: Deployment) -> Deployment:
    _deployment.settings = dict(_deployment.original)
    _deployment.ensure_up()
    return _deployment


@pytest.fixture
def stack_as_it_is(_deployment: Deployment) -> Deployment:
    """For tests that do not care for its settings: nothing is put back first."""
    if not _deployment.is_up:
        _deployment.up()
    return _deployment


@pytest.fixture(scope="module")
def spare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    _require_support()
    rig = Rig(Layout(tmp_path_factory.mktemp("spare") / "spare", "10.98.77"))
    yield rig
    rig.down()


def _require_support() -> None:
    reason = machine.unsupported()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"in CI the rig's tests must run: {reason}")
    if reason:
        pytest.skip(reason)


def _of_the_rig(items: list[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if item.path.is_relative_to(HERE)]
