"""What an emulated account holds, read from the stores of the emulator rather than through the calls under test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ministack.services import budgets, cloudwatch_logs, ec2, eks, iam, kms, s3, scheduler

from tests.engine import fsx

_MODULES = {
    "ec2": ec2,
    "eks": eks,
    "iam": iam,
    "s3": s3,
    "kms": kms,
    "logs": cloudwatch_logs,
    "scheduler": scheduler,
    "budgets": budgets,
}
# Notes about resources, not resources: ministack keeps some of them after the resource has gone.
_NOT_RESOURCES = {
    ("ec2", "_tags"),
    ("eks", "_tags"),
    ("scheduler", "_tags"),
    ("budgets", "_tags"),
    ("iam", "_aws_managed_attachment_counts"),
    ("kms", "_alias_dates"),
    ("logs", "_log_records"),
    ("s3", "_object_versions"),
}


def contents(account: str) -> dict[str, list[str]]:
    """Ids of everything in the account, by store (`ec2.subnets`)."""
    found: dict[str, list[str]] = {}
    for service, store, key, value in _entries(account):
        if not _is_gone(value):
            found.setdefault(f"{service}.{store}", []).append(key)
    return {store: sorted(keys) for store, keys in sorted(found.items())}


def counts(account: str) -> dict[str, int]:
    return dict(Counter({store: len(keys) for store, keys in contents(account).items()}))


def _entries(account: str) -> Iterator[tuple[str, str, str, Any]]:
    for service, module in _MODULES.items():
        for name, store in vars(module).items():
            if isinstance(store, type) or not hasattr(store, "_data") or (service, name) in _NOT_RESOURCES:
                continue
            for key, value in list(store._data.items()):
                if key[0] == account:
                    yield service, name.lstrip("_"), str(key[-1]), value
    for name, own in (("file_systems", fsx.file_systems), ("associations", fsx.associations)):
        for key, value in list(own.items()):
            if key[0] == account:
                yield "fsx", name, key[-1], value


def _is_gone(value: Any) -> bool:
    """AWS keeps showing some deleted resources for a while."""
    if not isinstance(value, dict):
        return False
    if value.get("KeyState") == "PendingDeletion":
        return True
    state = value.get("State")
    return state == "deleted" or (isinstance(state, dict) and state.get("Name") == "terminated")
