"""The AWS account behind a settings file, for the commands that look at it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from infra.settings import SettingsError, read_settings_file
from operations.audit import AuditReport, AuditScope, audit, managed_ids
from training.errors import UsageError


def audit_settings_file(path: Path) -> AuditReport:
    """What the stack of a settings file has left in the account of the current credentials.

    What the stack's own state still manages is not left over; without a readable state all of it is.
    Raises UsageError for a broken file or credentials that AWS does not accept.
    """
    import boto3

    try:
        settings = read_settings_file(path)
    except SettingsError as error:
        raise UsageError(str(error)) from None
    if not settings.on_aws:
        raise UsageError(f"{path}: the stack brings its own cluster: nothing of it is in an AWS account")
    try:
        return audit(boto3.Session(), AuditScope.of(settings), managed=_managed(settings.stack))
    except (BotoCoreError, ClientError) as error:
        raise UsageError(
            f"AWS does not accept the credentials ({error}). Log in (aws sso login, or AWS_PROFILE) to the account "
            "of the stack and try again"
        ) from None


def _managed(stack: str) -> frozenset[str]:
    """What the stack's state manages; nothing where there is no Pulumi, no such stack, or no access to its state."""
    try:
        exported = subprocess.run(
            ["pulumi", "stack", "export", "--stack", stack],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    return managed_ids(json.loads(exported.stdout))
