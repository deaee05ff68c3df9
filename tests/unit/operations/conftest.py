"""Fixtures of the operations tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.settings import StackSettings, read_settings_file
from tests.unit.operations.fake_aws import FakeAws, fake_aws


@pytest.fixture
def aws() -> Iterator[FakeAws]:
    with fake_aws() as fake:
        yield fake


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    """A settings file as a user has it after the quickstart."""
    path = tmp_path / "Pulumi.dev.yaml"
    path.write_text(
        "# The AWS stack.\n"
        "config:\n"
        "  efa-finetune:owner: platform-team\n"
        "  efa-finetune:region: us-west-2\n"
        '  efa-finetune:zones: ["us-west-2a", "us-west-2b"]\n'
        "  efa-finetune:gpuZone: us-west-2a\n"
        '  efa-finetune:publicCidrs: ["198.18.0.1/32"]\n'
        "  efa-finetune:gpuInstanceType: g6.12xlarge\n"
        "  efa-finetune:gpuCount: 2\n"
    )
    return path


@pytest.fixture
def settings(settings_file: Path) -> StackSettings:
    return read_settings_file(settings_file)
