"""Versions that must move together, and none that floats."""

from __future__ import annotations

import re
import tomllib

from infra import versions
from infra.settings import StackSettings
from tests.graph.graphs import REPOSITORY


def test_the_default_kubernetes_is_the_one_that_the_rig_runs() -> None:
    module = (REPOSITORY / "tests/gotools/kubernetes/go.mod").read_text()
    found = re.search(r"k8s\.io/kubernetes v(\d+\.\d+)\.\d+", module)
    assert found
    assert StackSettings.model_fields["kubernetes_version"].default == found[1]
    assert found[1] in versions.KUBERNETES_VERSIONS


def test_a_local_run_has_the_ray_of_the_image() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert any(
        re.fullmatch(rf"ray\[.*\]=={re.escape(versions.RAY_VERSION)}", d) for d in project["dependencies"]
    )
    assert StackSettings.model_fields["ray_version"].default == versions.RAY_VERSION


def test_the_image_is_a_frozen_tag() -> None:
    assert re.fullmatch(r"train-ml-cuda-v\d+\.\d+\.\d+", versions.RAY_IMAGE_TAG)


def test_every_chart_is_pinned_to_one_version() -> None:
    pinned = {name: value for name, value in vars(versions).items() if name.endswith("_VERSION")}
    assert len(pinned) >= 6
    assert {n: v for n, v in pinned.items() if not re.fullmatch(r"v?\d+\.\d+\.\d+", v)} == {}
