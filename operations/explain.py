"""What an error of `pulumi up` or `pulumi destroy` means: which resource, why, and what to do next.

Reads what Pulumi printed, or its event log (one JSON object a line):

    pulumi up --yes 2>&1 | tee up.log
    python -m operations.explain up.log

The sentences hold for the errors of the AWS provider ("operation error EC2: CreateVpc, ... api error CODE: ...") and of
the engine. An error that no rule knows is shown as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RECOVERY = "docs/recovery.md"


@dataclass(frozen=True)
class Explanation:
    """One failed resource. `code` is the error code of AWS, or empty."""

    resource: str
    urn: str
    code: str
    why: str
    fix: str
    message: str

    def render(self) -> str:
        code = f" ({self.code})" if self.code else ""
        return f"{self.resource}{code}\n  why:  {self.why}\n  next: {self.fix}\n  said: {self.message}"


@dataclass(frozen=True)
class _Rule:
    pattern: re.Pattern[str]
    why: str
    fix: str


def _rule(pattern: str, why: str, fix: str) -> _Rule:
    return _Rule(re.compile(pattern, re.IGNORECASE | re.DOTALL), why, fix)


# The first that matches wins. {type} is an instance type, {action} the API call, {urn} the resource.
_RULES = (
    _rule(
        r"AWS account ID not allowed: (?P<account>\d+)",
        "the credentials belong to account {account}, and this stack may only touch the one of its accountId "
        "setting. Nothing was changed",
        "use credentials of the stack's account (check with: aws sts get-caller-identity), then run the same command",
    ),
    _rule(
        r"No valid credential sources|no EC2 IMDS role found|failed to refresh cached credentials",
        "there are no AWS credentials",
        "sign in (aws sso login, or AWS_PROFILE / AWS_ACCESS_KEY_ID), check with: aws sts get-caller-identity",
    ),
    _rule(
        r"ExpiredToken|RequestExpired|token (included in the request )?(is|has) expired",
        "the AWS credentials ran out while Pulumi was working",
        "sign in again and run the same command: what was created is in the state, and Pulumi goes on from there. "
        "Use a session of two hours or more for the first up",
    ),
    _rule(
        r"InsufficientReservedInstanceCapacity|ReservationCapacityExceeded",
        "the capacity reservation has fewer free instances than the node group wants",
        "compare the reservation's free instances (aws ec2 describe-capacity-reservations) with gpuCount, lower "
        "gpuCount or enlarge the reservation, then pulumi up. finetune zones shows where else the type is offered",
    ),
    _rule(
        r"Insufficient\w*Capacity|do not have sufficient \S+ capacity",
        "AWS has no {type} free in this zone now. On-demand capacity of GPU types comes and goes",
        "finetune zones shows the zones that offer the type: set gpuZone (and zones) to one of them; or reserve the "
        "capacity and set purchase to reservation or capacity-block with reservationId; or wait and run pulumi up "
        f"again. A node group that AWS shows as CREATE_FAILED has to go first: {RECOVERY}, 'No capacity'",
    ),
    _rule(
        r"Throttl|RequestLimitExceeded|SlowDown|TooManyRequests|Rate exceeded",
        "AWS answered {action} with 'too many requests' until the provider gave up",
        "wait a minute and run the same command again, with --parallel 4 if it returns",
    ),
    _rule(
        r"VcpuLimitExceeded|MaxSpotInstanceCountExceeded",
        "the account's vCPU quota for this family of instances is too small (two g6.12xlarge need 96)",
        "finetune doctor shows the quota; raise it: aws service-quotas request-service-quota-increase "
        "--service-code ec2 "
        "--quota-code L-DB2E81BA (G and VT, on demand) or L-417A185B (P), --desired-value VCPUS; then pulumi up",
    ),
    _rule(
        r"(Vpc|Address|NatGateway|InternetGateway|SecurityGroup|Subnet|RouteTable|NetworkInterface)\w*LimitExceeded"
        r"|ResourceLimitExceeded|LimitExceeded|QuotaExceeded|TooManyBuckets",
        "a quota of the account is used up: {action} was refused",
        "finetune audit shows what earlier stacks left behind and how to remove it; else raise the quota in Service "
        "Quotas; then run the same command again",
    ),
    _rule(
        r"AccessDenied|UnauthorizedOperation|not authorized to perform",
        "the credentials may not do {action}",
        "let an administrator allow it (docs/operations.md lists the actions that the stack needs) or use "
        "another role, "
        "then run the same command",
    ),
    _rule(
        r"deletion protection",
        "the cluster is protected against deletion",
        "pulumi config set deletionProtection false && pulumi up, then pulumi destroy",
    ),
    _rule(
        r"BucketNotEmpty",
        "the bucket still holds data, checkpoints or old versions, and forceDestroy is off",
        "copy what is needed, then: pulumi config set forceDestroy true && pulumi up && pulumi destroy",
    ),
    _rule(
        r"DependencyViolation|InvalidIPAddress\.InUse|has a dependent object",
        "something that this stack does not manage still uses the resource: usually a network interface or load "
        "balancer that a controller in the cluster made",
        "finetune audit names it with the command that removes it; then pulumi destroy again",
    ),
    _rule(
        r"ResourceInUseException: Cluster has nodegroups attached",
        "the cluster still has a node group that the state does not know",
        "finetune audit names it with the command that removes it; then pulumi destroy again",
    ),
    _rule(
        r"AlreadyExists|EntityAlreadyExists|BucketAlreadyOwnedByYou|InvalidGroup\.Duplicate|already exists",
        "a resource of this name exists and is not in the state: an interrupted run made it, or another stack owns it",
        f"finetune audit says whether it is a leftover of this stack; remove it, or import it: {RECOVERY}, 'It exists "
        "already'",
    ),
    _rule(
        r"cluster is unreachable|connection refused.*6443|no such host.*eks|dial tcp.*eks",
        "the Kubernetes API of the cluster cannot be reached: not your address, no VPN, or the cluster is gone",
        "check publicCidrs and your address; to tear down, pulumi destroy does not need the API. If the "
        "cluster is gone: "
        f"{RECOVERY}, 'The cluster is gone'",
    ),
    _rule(
        r"the stack is currently locked",
        "another pulumi works on the stack, or one was killed and left its lock",
        f"make sure that no other run is going on, then: pulumi cancel && pulumi refresh. {RECOVERY}, 'Interrupted'",
    ),
    _rule(
        r"pending (CREATE|operations?)|interrupted while creating",
        "an earlier run was cut off while AWS was creating this resource, so it is not known whether it exists",
        f"pulumi refresh, then finetune audit for what was created unseen: {RECOVERY}, 'Interrupted'",
    ),
    _rule(
        r"error reading from server|plugin.*exited|transport is closing|connection (refused|reset)|Unavailable desc",
        "the provider's process died in the middle of the run",
        "run pulumi up again; what the lost call may have created is found by finetune audit. "
        f"{RECOVERY}, 'Interrupted'",
    ),
    _rule(
        r"canceled|cancelled|context deadline|timeout while waiting|timed out",
        "the run was stopped, or waiting for AWS took longer than allowed, before the resource was ready",
        "pulumi refresh shows what AWS made of it; then run the same command again",
    ),
    _rule(
        r"unknown property|missing required property|Invalid or unknown key",
        "the program and the installed provider package do not fit",
        "make setup brings back the pinned versions",
    ),
)
_UNKNOWN_FIX = f"look for the message in {RECOVERY}; running the same command again is always safe"

_CODE = re.compile(r"api error (?P<code>[\w.]+):|(?P<issue>AsgInstanceLaunchFailures)")
_TYPE = re.compile(r"sufficient (?P<type>[a-z0-9-]+\.\w+) capacity")
_ACTION = re.compile(r"operation error (?P<service>[\w ]+): (?P<operation>\w+)")


def explain(message: str, resource: str = "", urn: str = "") -> Explanation:
    """Explains one error message. `resource` is "TYPE NAME" for people."""
    code = _CODE.search(message)
    action, kind = _ACTION.search(message), _TYPE.search(message)
    values = {
        "action": f"{action['service']}:{action['operation']}" if action else "the call",
        "type": kind["type"] if kind else "instance of the wanted type",
        "urn": urn,
    }
    short = _shorten(message)
    for rule in _RULES:
        found = rule.pattern.search(message)
        if found:
            values |= {key: value for key, value in found.groupdict().items() if value}
            return Explanation(
                resource or "the run",
                urn,
                (code["code"] or code["issue"]) if code else "",
                rule.why.format(**values),
                rule.fix.format(**values),
                short,
            )
    found_code = (code["code"] or code["issue"]) if code else ""
    return Explanation(
        resource or "the run", urn, found_code, "no rule knows this error", _UNKNOWN_FIX, short
    )


def _shorten(message: str) -> str:
    """One line, without what the provider repeats."""
    lines = [line.strip(" *\t") for line in message.strip().splitlines()]
    kept = [line for line in lines if line and not re.match(r"\d+ errors? occurred:?$", line)]
    text = " ".join(dict.fromkeys(kept))
    return text if len(text) <= 600 else f"{text[:600]}..."


def explain_output(text: str) -> list[Explanation]:
    """All failed resources in what Pulumi printed (text or event log), each once, most telling first."""
    found = _from_events(text) if text.lstrip().startswith("{") else _from_text(text)
    unique: dict[tuple[str, str], Explanation] = {}
    for resource, urn, message in found:
        one = explain(message, resource, urn)
        present = unique.get((one.resource, one.why))
        if present is None or len(one.message) > len(present.message):
            unique[(one.resource, one.why)] = one
    known = [one for one in unique.values() if one.fix != _UNKNOWN_FIX]
    return known or list(unique.values())


def _from_events(text: str) -> Iterable[tuple[str, str, str]]:
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        diagnostic: dict[str, Any] = json.loads(line).get("diagnosticEvent") or {}
        if diagnostic.get("severity") == "error":
            urn = diagnostic.get("urn") or ""
            yield _of_urn(urn), urn, diagnostic["message"]


def _of_urn(urn: str) -> str:
    parts = urn.split("::")
    return f"{parts[2].split('$')[-1]} {parts[-1]}" if len(parts) >= 4 else ""


_HEADING = re.compile(r"^  (?P<type>[\w.:/-]+:[\w.:/-]+) \((?P<name>[^)]+)\):\s*$")


def _from_text(text: str) -> Iterable[tuple[str, str, str]]:
    resource, error = "", list[str]()
    for line in [*text.splitlines(), ""]:
        heading = _HEADING.match(line)
        starts = re.match(r"^\s*error: (?P<rest>.*)", line)
        if (heading or starts or not line.strip()) and error:
            yield resource, "", "\n".join(error)
            error = []
        if heading:
            resource = f"{heading['type']} {heading['name']}"
        elif starts:
            error = [starts["rest"]]
        elif error:
            error.append(line)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m operations.explain", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("file", help="what Pulumi printed, or its event log; - reads standard input")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args(arguments)
    if options.file != "-" and not Path(options.file).is_file():
        parser.error(f"{options.file}: no such file")
    text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text(errors="replace")
    explanations = explain_output(text)
    if options.json:
        sys.stdout.write(json.dumps({"errors": [asdict(one) for one in explanations]}, indent=2) + "\n")
    elif explanations:
        sys.stdout.write("\n\n".join(one.render() for one in explanations) + "\n")
    else:
        sys.stdout.write("No error in it.\n")
    return 1 if explanations else 0


if __name__ == "__main__":
    sys.exit(main())
