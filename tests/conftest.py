"""Settings of all tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# No test judges time: the machines that run them are shared and noisy.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup` the files that mark tests as `xdist_group("ray")` stay on one worker.

    pytest-xdist 3.8 tells groups apart by a suffix that it writes to a field which pytest 9.2 no longer has: each test
    is then a group of its own (2026-12), and two clusters of Ray beside each other starve one another.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    mark = 'xdist_group("ray")'
    folder = Path(__file__).parent
    files = {
        str(path.relative_to(config.rootpath))
        for path in folder.rglob("test_*.py")
        if mark in path.read_text()
    }

    class RayOnOneWorker(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.partition("::")[0] in files else nodeid

    return RayOnOneWorker(config, log)
