"""What a check of `finetune doctor` is, and how several become one report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from botocore.exceptions import BotoCoreError, ClientError
from rich.text import Text

from training.errors import FinetuneError

Status = Literal["ok", "warn", "fail"]
_STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}
PARALLEL = 8


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, how it is, what was found, and the command that mends it (empty where ok)."""

    name: str
    status: Status
    detail: str
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status, "detail": self.detail, "fix": self.fix}


def ok(name: str, detail: str) -> Check:
    return Check(name, "ok", detail)


def warn(name: str, detail: str, fix: str = "") -> Check:
    return Check(name, "warn", detail, fix)


def fail(name: str, detail: str, fix: str) -> Check:
    return Check(name, "fail", detail, fix)


@dataclass(frozen=True)
class Report:
    """All checks, in the order in which things are needed."""

    checks: tuple[Check, ...]

    @property
    def failed(self) -> bool:
        return any(check.status == "fail" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The report as ``finetune doctor --json`` prints it."""
        counts = {status: sum(check.status == status for check in self.checks) for status in _STYLES}
        return {"checks": [check.to_dict() for check in self.checks], **counts}

    def view(self) -> Text:
        """For people: one line a check, and below it the command, whole, so that it can be copied."""
        lines: list[Text] = []
        for check in self.checks:
            status = (f"{check.status:<5}", _STYLES[check.status])
            lines.append(Text.assemble(status, (check.name, "bold"), f": {check.detail}"))
            if check.fix:
                lines.append(Text(f"     fix: {check.fix}", style="cyan"))
        return Text("\n").join(lines)


Job = tuple[str, Callable[[], Iterable[Check]]]


def run_checks(jobs: Sequence[Job]) -> list[Check]:
    """Runs checks side by side and keeps their order. One that AWS refuses becomes a line that says so."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        return [check for checks in pool.map(_guarded, jobs) for check in checks]


def _guarded(job: Job) -> list[Check]:
    name, checks = job
    try:
        return list(checks())
    except ClientError as error:
        return [refused(name, error)]
    except BotoCoreError as error:
        return [
            fail(name, f"AWS did not answer: {error}", "finetune doctor  (again, once the network is there)")
        ]
    except FinetuneError as error:
        return [fail(name, str(error), "finetune doctor  (again, once that is mended)")]


def refused(name: str, error: ClientError) -> Check:
    """A call that the credentials may not make says nothing about what it would have shown: a warning."""
    code = error.response.get("Error", {}).get("Code", "")
    operation = error.operation_name
    if code in ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation"):
        return warn(
            name,
            f"these credentials may not call {operation}, so this was not looked at",
            f"allow {operation} in the IAM policy of the caller (docs/security.md lists what doctor reads)",
        )
    message = error.response.get("Error", {}).get("Message", "")
    return fail(
        name, f"{operation}: {code}: {message}", "finetune doctor  (again; https://health.aws.amazon.com)"
    )
