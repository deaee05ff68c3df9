"""The comment of a pull request: what it says of price, policies and resources, and that it always fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from operations import review


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shipped stack, before and after it got a third node and lost its network policies."""
    folder = tmp_path_factory.mktemp("stacks")
    path = folder / "Pulumi.dev.yaml"
    path.write_text((Path(__file__).parents[3] / "Pulumi.dev.yaml").read_text())
    before = review.snapshot(path)
    path.write_text(
        path.read_text().replace("gpuCount: 2", "gpuCount: 3") + "  efa-finetune:networkPolicies: false\n"
    )
    return before, review.snapshot(path)


def test_price_table_resources_and_policies(snapshots: tuple[dict[str, Any], dict[str, Any]]) -> None:
    text = review.comment([snapshots], {"dev": "Previewing update (dev)\n```\n"})

    assert text.startswith(review.MARKER)
    assert "| g6.12xlarge (efa-dev-gpu) | 9.2032 | 13.8048 | +4.6016 |" in text
    assert "m7i.xlarge" not in text, "what stays the same is not in the table"
    assert "Policies: all" in text
    assert "- kubernetes:networking.k8s.io/v1:NetworkPolicy efa-dev-default-deny" in text
    assert "scalingConfig.maxSize: 2 -> 3" in text
    assert "Previewing update (dev)\n'''" in text, "a fence in the preview does not end the block"


def test_same_program_says_so(snapshots: tuple[dict[str, Any], dict[str, Any]]) -> None:
    before, _ = snapshots

    text = review.comment([(before, before)])

    assert "registers the same resources as before" in text
    assert "| **all of it** |" in text
    assert "none" in text


def test_nothing_to_compare_with(snapshots: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert "nothing to compare them with" in review.comment([(None, snapshots[0])])


def test_violations_and_mistakes_fail(
    snapshots: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {
        **snapshots[0],
        "violations": [{"policy": "imds-v2", "mandatory": True, "text": "efa-dev-gpu: no"}],
    }
    broken = tmp_path / "Pulumi.prod.yaml"
    broken.write_text("config:\n  efa-finetune:gpuCounts: 1\n")
    after, before = tmp_path / "after.json", tmp_path / "before.json"
    before.write_text("")
    after.write_text(json.dumps([bad, review.snapshot(broken)]))

    assert review.main(["comment", "--before", str(before), "--after", str(after)]) == 1

    text = capsys.readouterr().out
    assert "- `imds-v2`: efa-dev-gpu: no" in text
    assert "Did you mean gpuCount?" in text


def test_long_previews_are_cut(snapshots: tuple[dict[str, Any], dict[str, Any]]) -> None:
    text = review.comment([snapshots, snapshots], {"dev": "x" * 200_000})

    assert len(text) <= review.MAX_COMMENT
    assert text.count("This part is cut") == 2


def test_snapshot_of_the_other_stack() -> None:
    """The stack on somebody else's cluster has no price, and its policies hold."""
    found = review.snapshot(Path(__file__).parents[3] / "Pulumi.local.yaml")

    assert found["cost"] is None
    assert found["violations"] == []
    assert "Price: nothing" in review.comment([(None, found)])
