"""`finetune sleep`, `wake` and `extend` beside Pulumi: neither undoes what the other did. The state has no secret."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from infra.outputs import StackOutputs
from operations.power import extend, sleep, wake
from tests.engine import inventory
from tests.engine.conftest import BASE, EVERYTHING

WORKFLOW = Path(__file__).parents[2] / ".github" / "workflows" / "nightly.yml"
# How the engine marks a secret value, encrypted or not.
SECRET_MARK = "1b47061264138c4ac30d75fd1eb44270"
TOKENS = re.compile(
    r"k8s-aws-v1\.|eyJhbGciOi|AKIA[0-9A-Z]{16}|hf_[A-Za-z0-9]{30}|-----BEGIN [A-Z ]*PRIVATE KEY"
)


class Session:
    """The emulated account, for commands that make their own clients."""

    def __init__(self, engine: Any) -> None:
        self._session = engine.session

    def client(self, service: str, region_name: str) -> Any:
        return self._session.client(service, region_name=region_name, endpoint_url="http://aws.test")


def nodes(account: str) -> int:
    return inventory.counts(account)["ec2.instances"]


def test_up_lets_sleeping_nodes_lie(make_stack: Callable[..., Any], engine: Any, account: str) -> None:
    stack = make_stack()
    stack.up().require_ok()
    target = StackOutputs.model_validate(stack.outputs()["training"])

    sleep(Session(engine), target, None)
    assert nodes(account) == 1

    assert stack.up().require_ok().changes == []
    assert nodes(account) == 1, "an up that changes nothing wakes nobody"

    # Another part of the stack changes: the nodes still sleep.
    stack.write_config(flowLogs=True)
    stack.up().require_ok()
    assert nodes(account) == 1

    wake(Session(engine), target)
    assert nodes(account) == 3
    assert stack.up("--refresh").require_ok().changes == [], "awake, the group is as the program says"


def test_drift_check_of_the_workflow_knows_sleeping_nodes(
    make_stack: Callable[..., Any], engine: Any
) -> None:
    stack = make_stack()
    stack.up().require_ok()
    target = StackOutputs.model_validate(stack.outputs()["training"])
    script = "\n".join(
        step.get("run", "") for step in yaml.safe_load(WORKFLOW.read_text())["jobs"]["drift"]["steps"]
    )
    excluded = re.search(r'--exclude "([^"]+)"', script)
    assert excluded is not None
    assert stack.outputs()["cluster_name"] == "efa-dev"
    assert stack.outputs()["gpu_node_group"].startswith("efa-dev-gpu-")
    check = ("refresh", "--preview-only", "--expect-no-changes", "--diff")
    assert all(flag in script for flag in check)

    stack.run_cli(*check).require_ok()
    sleep(Session(engine), target, None)

    assert not stack.run_cli(*check).ok, "a group without nodes is drift"
    stack.run_cli(*check, "--exclude", excluded[1].replace("$cluster", "efa-dev")).require_ok()


def test_extend_and_up_agree(make_stack: Callable[..., Any], engine: Any, account: str) -> None:
    stack = make_stack({**BASE, "expires": "2099-12-01T00:00:00+00:00"})
    stack.up().require_ok()
    instances = {one["id"] for one in stack.resources() if one["type"].endswith("NodeGroup")}

    done = extend(Session(engine), stack.settings_file, 2)

    assert done.expires == datetime(2099, 12, 1, 2, tzinfo=UTC)
    assert done.schedule is not None
    scheduler = Session(engine).client("scheduler", region_name="us-west-2")
    moved = scheduler.get_schedule(Name=done.schedule)
    assert moved["ScheduleExpression"] == "at(2099-12-01T02:00:00)"

    stack.up().require_ok()
    again = scheduler.get_schedule(Name=done.schedule)
    assert again["ScheduleExpression"] == moved["ScheduleExpression"]
    assert again["Target"] == moved["Target"], "extend left alone what it does not change"
    assert StackOutputs.model_validate(stack.outputs()["training"]).expires == "2099-12-01T02:00:00+00:00"
    assert {one["id"] for one in stack.resources() if one["type"].endswith("NodeGroup")} == instances
    assert stack.up().require_ok().changes == []


def test_state_has_no_secret(make_stack: Callable[..., Any]) -> None:
    stack = make_stack(EVERYTHING)
    stack.up().require_ok()

    state = json.dumps(stack.state())

    assert SECRET_MARK not in state, "nothing to encrypt, so nothing to leak with the key"
    assert TOKENS.search(state) is None
