"""Every single call to AWS fails once: the next `up` completes the stack, and `destroy` leaves nothing.

Each call of a whole `up` is refused in turn, one cycle of three runs per call. The calls are dealt over the parts
below, so that pytest-xdist can run them side by side; together the parts are all of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from operations.explain import explain_output
from tests.engine import inventory
from tests.engine.conftest import EVERYTHING
from tests.engine.faults import Call, Kind

PARTS = 64
# All of the AWS layer. What Kubernetes gets is left out as far as settings allow: it makes no call to AWS.
SETTINGS: dict[str, Any] = {
    **EVERYTHING,
    # More of types that are there already.
    "natPerZone": False,
    "observability": "none",
    "devicePlugins": False,
    "kuberay": False,
    "networkPolicies": False,
}
KINDS = tuple(Kind)


@dataclass(frozen=True)
class Reference:
    """An undisturbed `up`: its calls, what it leaves in the account, and which resources the state then has."""

    calls: tuple[Call, ...]
    empty: dict[str, list[str]]
    counts: dict[str, int]
    urns: frozenset[str]


@pytest.fixture(scope="module")
def reference(engine: Any, small_crds: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    with engine.fresh_account() as account:
        _touch(engine)
        empty = inventory.contents(account)
        engine.faults.reset()
        stack = _stack(engine, folder, small_crds)
        stack.up().require_ok()
        calls = tuple(sorted(call for call in engine.faults.calls))
        assert max(Counter(calls).values()) == 1
        urns = frozenset(one["urn"] for one in stack.resources())
        found = Reference(calls, empty, inventory.counts(account), urns)
    print(f"\nan up makes {len(calls)} calls to AWS")
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_up_after_a_failure_at_any_call_completes_and_destroy_leaves_nothing(
    engine: Any, reference: Reference, small_crds: str, tmp_path: Path, part: int
) -> None:
    wrong: list[str] = []
    numbered = list(enumerate(reference.calls))[part::PARTS]
    for number, call in numbered:
        kind = KINDS[number % len(KINDS)]
        with engine.fresh_account() as account:
            _touch(engine)
            engine.faults.reset()
            stack = _stack(engine, tmp_path / str(number), small_crds)
            problems = _cycle(engine, stack, account, reference, call, kind)
        wrong += [f"call {number}, {call}, {kind.value}: {problem}" for problem in problems]
    assert not wrong, "\n".join(wrong)


def _cycle(engine: Any, stack: Any, account: str, reference: Reference, call: Call, kind: Kind) -> list[str]:
    engine.faults.fail(call, kind)
    failed = stack.up()
    problems: list[str] = []
    if engine.faults.fired != call:
        problems.append("the call did not come")
    if failed.ok:
        problems.append("up did not report the failure")
    problems += _report_problems(failed, call)

    completed = stack.up()
    if not completed.ok:
        return [*problems, f"up did not recover: {completed.errors}"]
    if {one["urn"] for one in stack.resources()} != reference.urns:
        problems.append("the state has other resources than after an undisturbed up")
    if inventory.counts(account) != reference.counts:
        problems.append(f"the account holds {_difference(inventory.counts(account), reference.counts)}")

    destroyed = stack.destroy()
    if not destroyed.ok:
        return [*problems, f"destroy failed: {destroyed.errors}"]
    left = inventory.contents(account)
    left.pop("scheduler.schedule_groups", None)  # the default group of the account
    if left != reference.empty:
        problems.append(f"destroy left {left}")
    if stack.resources():
        problems.append(f"destroy left {len(stack.resources())} resources in the state")
    return problems


def _report_problems(failed: Any, call: Call) -> list[str]:
    """The report names the resource, why, and what to do."""
    explanations = explain_output(failed.log.read_text())
    ours = [one for one in explanations if one.urn == call.urn or not call.urn]
    if not ours:
        return [f"the report does not name the resource: {failed.errors[:500]}"]
    unexplained = [one for one in ours if one.why == "no rule knows this error"]
    return [f"not explained: {one.message}" for one in unexplained]


def _difference(found: dict[str, int], wanted: dict[str, int]) -> str:
    stores = sorted(set(found) | set(wanted))
    return ", ".join(
        f"{found.get(one, 0)} instead of {wanted.get(one, 0)} {one}"
        for one in stores
        if found.get(one, 0) != wanted.get(one, 0)
    )


def _stack(engine: Any, folder: Path, small_crds: str) -> Any:
    from infra.program import program
    from tests.engine.harness import Stack

    # The engine writes its state once, at its end, instead of around each step: half of its work. It always comes to
    # its end here; runs that are cut off are in test_interrupted.py.
    once = {"PULUMI_SKIP_CHECKPOINTS": "true", "PULUMI_EXPERIMENTAL": "true"}
    config = {"accountId": engine.identity.account, "kuberayCrds": small_crds, **SETTINGS}
    return Stack(engine, folder, program, config=config, environment=once)


def _touch(engine: Any) -> None:
    """The default VPC of an account exists from the first look at it."""
    engine.session.client("ec2", endpoint_url="http://aws.test").describe_vpcs()
