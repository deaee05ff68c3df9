"""Every single call to AWS fails once: `up` after `up` completes the stack, and `destroy` leaves nothing.

Each call of a whole `up` is refused once. The calls are dealt over the parts below so that no resource has two in the
same part: within a part one `up` after the other meets the next refusals, each on a resource that has seen none, and
goes on from what the one before left. A resource whose call was refused has to come through the next time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from operations.explain import explain_output
from tests.engine import inventory
from tests.engine.conftest import EVERYTHING
from tests.engine.faults import Call, Kind

# As many as the resource with the most calls has (the VPC).
PARTS = 8
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

    def part(self, part: int) -> dict[Call, Kind]:
        """The calls that this part refuses, each for one of the reasons in turn."""
        number_of: Counter[str] = Counter()
        resources = {urn: place for place, urn in enumerate(dict.fromkeys(call.urn for call in self.calls))}
        chosen: dict[Call, Kind] = {}
        for number, call in enumerate(self.calls):
            if (resources[call.urn] + number_of[call.urn]) % PARTS == part:
                chosen[call] = KINDS[number % len(KINDS)]
            number_of[call.urn] += 1
        return chosen


@pytest.fixture(scope="module")
def reference(engine: Any, small_crds: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    with engine.fresh_account() as account:
        _touch(engine)
        empty = inventory.contents(account)
        engine.faults.reset()
        stack = _stack(engine, folder, small_crds)
        stack.up().require_ok()
        calls = tuple(sorted(engine.faults.calls))
        assert max(Counter(calls).values()) == 1
        urns = frozenset(one["urn"] for one in stack.resources())
        return Reference(calls, empty, inventory.counts(account), urns)


def test_the_parts_are_all_calls_and_refuse_each_resource_once(reference: Reference) -> None:
    parts = [reference.part(part) for part in range(PARTS)]

    assert sorted(call for part in parts for call in part) == list(reference.calls)
    assert all(max(Counter(call.urn for call in part).values()) == 1 for part in parts)


@pytest.mark.parametrize("part", range(PARTS))
def test_ups_after_refused_calls_complete_and_destroy_leaves_nothing(
    engine: Any, reference: Reference, small_crds: str, tmp_path: Path, part: int
) -> None:
    refusals = reference.part(part)
    with engine.fresh_account() as account:
        _touch(engine)
        engine.faults.reset()
        engine.faults.refuse_each(refusals)
        stack = _stack(engine, tmp_path, small_crds)
        wrong = _ups(engine, stack, refusals)
        if not wrong:
            wrong = [*_differences(stack, account, reference), *_destroy(stack, account, reference)]
    assert not wrong, "\n".join(wrong)


def _ups(engine: Any, stack: Any, refusals: dict[Call, Kind]) -> list[str]:
    """Runs `up` until one meets no refusal: that one succeeds, and each before it failed by its refusals alone."""
    problems: list[str] = []
    met: list[Call] = []
    while True:
        run = stack.up()
        new = engine.faults.refused[len(met) :]
        if not new:
            break
        met += new
        named = ", ".join(f"{call} ({refusals[call].value})" for call in new)
        if run.ok:
            problems.append(f"{named}: up did not report the failure")
        problems += [f"{named}: {problem}" for problem in _report_problems(run, new)]
    if not run.ok:
        problems.append(f"up did not recover: {run.errors}")
    problems += [f"{call}: the call did not come" for call in refusals if call not in met]
    return problems


def _report_problems(failed: Any, refused: Iterable[Call]) -> list[str]:
    """Nothing failed but the refused calls' resources; the report names each of them, why, and what to do."""
    explanations = explain_output(failed.log.read_text())
    urns = {call.urn for call in refused}
    # A call for no resource is the provider's, which asks whose account it is: the provider is what fails then.
    problems = [f"failed as well: {one.urn}" for one in failed.failed if not {one.urn, ""} & urns]
    ours = [one for one in explanations if one.urn in urns or "" in urns]
    unnamed = urns - {one.urn for one in ours} - {""}
    if unnamed or not ours:
        problems.append(f"the report does not name {', '.join(unnamed)}: {failed.errors[:500]}")
    return [
        *problems,
        *(f"not explained: {one.message}" for one in ours if one.why == "no rule knows this error"),
    ]


def _differences(stack: Any, account: str, reference: Reference) -> list[str]:
    """Where state and account are not as after an undisturbed `up`."""
    problems: list[str] = []
    if {one["urn"] for one in stack.resources()} != reference.urns:
        problems.append("the state has other resources than after an undisturbed up")
    found, wanted = inventory.counts(account), reference.counts
    problems += [
        f"the account holds {found.get(one, 0)} instead of {wanted.get(one, 0)} {one}"
        for one in sorted(found.keys() | wanted.keys())
        if found.get(one, 0) != wanted.get(one, 0)
    ]
    return problems


def _destroy(stack: Any, account: str, reference: Reference) -> list[str]:
    destroyed = stack.destroy()
    if not destroyed.ok:
        return [f"destroy failed: {destroyed.errors}"]
    problems: list[str] = []
    left = inventory.contents(account)
    left.pop("scheduler.schedule_groups", None)  # the default group of the account
    if left != reference.empty:
        problems.append(f"destroy left {left}")
    if stack.resources():
        problems.append(f"destroy left {len(stack.resources())} resources in the state")
    return problems


def _stack(engine: Any, folder: Path, small_crds: str) -> Any:
    from infra.program import program
    from tests.engine.harness import Stack

    config = {"accountId": engine.identity.account, "kuberayCrds": small_crds, **SETTINGS}
    return Stack(engine, folder, program, config=config)


def _touch(engine: Any) -> None:
    """The default VPC of an account exists from the first look at it."""
    engine.session.client("ec2", endpoint_url="http://aws.test").describe_vpcs()
