"""All inputs of the two shipped stacks, reviewed as files.

``UPDATE_SNAPSHOTS=1 pytest tests/graph/test_snapshots.py`` writes them again, and Pulumi.yaml's settings.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.recorder import Graph, Resource
from tests.graph import graphs, pulumi_yaml

SNAPSHOTS = Path(__file__).parent / "snapshots"


def _rendered(graph: Graph) -> str:
    document = {
        "resources": [_resource(graph, r) for r in sorted(graph.resources, key=lambda r: (r.type, r.name))],
        "outputs": graph.outputs,
    }
    text = json.dumps(document, sort_keys=True)
    home = str(Path.home())
    return yaml.safe_dump(json.loads(text.replace(home, "~")), sort_keys=True, width=110)


def _resource(graph: Graph, resource: Resource) -> dict[str, Any]:
    inputs = dict(resource.inputs)
    if resource.type == graphs.CRD:
        # 300 kB of schema each, unchanged from the release.
        inputs["spec"] = {"group": inputs["spec"]["group"], "names": inputs["spec"]["names"]}
    entry: dict[str, Any] = {
        "type": resource.type,
        "name": resource.name,
        "inputs": {key: _decoded(value) for key, value in inputs.items()},
        "needs": sorted(_label(graph, urn) for urn in resource.dependencies),
    }
    if resource.deleted_with:
        entry["deleted_with"] = _label(graph, resource.deleted_with)
    return entry


def _decoded(value: Any) -> Any:
    """Policies are easier to review as what they say."""
    if isinstance(value, str) and value.startswith("{"):
        return {"json": json.loads(value)}
    return value


def _label(graph: Graph, urn: str) -> str:
    resource = graph.by_urn.get(urn)
    return f"{resource.type} {resource.name}" if resource else urn


def _compare(path: Path, text: str) -> None:
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return
    before = path.read_text().splitlines() if path.exists() else []
    changes = list(difflib.unified_diff(before, text.splitlines(), str(path.name), "now", lineterm="", n=2))
    hint = "not what was reviewed; if that is meant: UPDATE_SNAPSHOTS=1 pytest tests/graph/test_snapshots.py"
    assert not changes, "\n".join([hint, *changes[:200]])


@pytest.mark.parametrize("stack", ["dev", "local", "everything"])
def test_a_stack_registers_what_was_reviewed(stack: str) -> None:
    graph = {"dev": graphs.dev, "local": graphs.local, "everything": graphs.everything}[stack]()
    _compare(SNAPSHOTS / f"{stack}.yaml", _rendered(graph))


def test_pulumi_yaml_documents_and_types_every_setting() -> None:
    _compare(graphs.REPOSITORY / "Pulumi.yaml", pulumi_yaml.render())
