"""`finetune doctor` and `finetune zones` with this machine's credentials, stacks and terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.prompt import Confirm

from infra.outputs import StackOutputs
from operations.checks import Report
from operations.doctor import Doctor
from operations.zones import ZoneReport, find_zones, instance_of, probe, probe_price
from training.errors import UsageError
from training.submit.target import load_target


def examine(settings_file: Path | None, outputs: StackOutputs | None) -> Report:
    """All checks of a stack, known by its settings file or by its outputs."""
    import boto3

    return Doctor(settings_file, outputs, boto3.Session, lambda stack: load_target(stack)).run()


def look_for_zones(
    instance: str, nodes: int, regions: Sequence[str], *, probe_capacity: bool, yes: bool
) -> ZoneReport:
    """Where an instance type can be had; with `probe_capacity` tried for real, after asking.

    Raises:
        UsageError: for an unknown type, refused credentials, or a probe that nobody agreed to.
        FinetuneError: when the reservation of a probe could not be cancelled.
    """
    import boto3

    session = boto3.Session()
    report = find_zones(session, instance_of(instance), nodes, regions)
    if not probe_capacity:
        return report
    if not yes:
        _ask(report)
    return probe(session, report)


def _ask(report: ZoneReport) -> None:
    price = probe_price(report)
    cost = "a price that is not known" if price is None else f"up to {price:.2f} USD"
    if not sys.stdin.isatty():
        raise UsageError(
            f"--probe reserves {report.nodes} x {report.instance.name} for a moment, for {cost}, and standard input "
            "is no terminal to ask on: --yes does it without a question."
        )
    question = (
        f"Reserve {report.nodes} x {report.instance.name} in the zones that fit, one after the other up to the first "
        f"with capacity, and cancel at once? It costs {cost}"
    )
    if not Confirm.ask(question, console=Console(stderr=True), default=False):
        raise UsageError("Nothing was reserved.")
