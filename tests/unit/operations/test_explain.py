"""What Pulumi prints becomes: which resource, why, what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from operations.explain import explain, explain_output, main

GPU = "urn:pulumi:dev::efa-finetune::efa:infra:GpuNodes$aws:eks/nodeGroup:NodeGroup::efa-dev-gpu"
CREATE_FAILED = (
    "waiting for EKS Node Group (efa-dev:gpu) create: unexpected state 'CREATE_FAILED', wanted target 'ACTIVE'. last "
    "error: asg-1: AsgInstanceLaunchFailures: Could not launch On-Demand Instances. InsufficientInstanceCapacity - We "
    "currently do not have sufficient p5.48xlarge capacity"
)
PRINTED = """\
Updating (dev):
    pulumi:pulumi:Stack efa-finetune-dev running error: update failed
Diagnostics:
  aws:ec2:Eip (efa-dev-nat-us-west-2a):
    error:   sdk-v2/provider2.go:572: sdk.helper_schema: creating EC2 EIP: operation error EC2: AllocateAddress, https response error StatusCode: 400, RequestID: 1, api error AddressLimitExceeded: The maximum number of addresses has been reached.: provider=aws@7.51.1
    error: 1 error occurred:
    \t* creating EC2 EIP: operation error EC2: AllocateAddress, https response error StatusCode: 400, RequestID: 1, api error AddressLimitExceeded: The maximum number of addresses has been reached.

  pulumi:pulumi:Stack (efa-finetune-dev):
    error: update failed

Resources:
    + 3 created
"""  # noqa: E501


def message(service: str, operation: str, code: str, text: str = "said AWS") -> str:
    return (
        f"operation error {service}: {operation}, https response error StatusCode: 400, RequestID: 1, "
        f"api error {code}: {text}"
    )


@pytest.mark.parametrize(
    ("said", "why", "fix"),
    [
        (
            message("EC2", "RunInstances", "InsufficientInstanceCapacity", "not have sufficient g6.12xlarge capacity"),
            "AWS has no g6.12xlarge free in this zone",
            "finetune zones",
        ),
        (
            CREATE_FAILED,
            "AWS has no p5.48xlarge free",
            "reservationId",
        ),
        (
            message("EC2", "RunInstances", "InsufficientReservedInstanceCapacity"),
            "reservation has fewer free instances",
            "gpuCount",
        ),
        (message("EC2", "RunInstances", "VcpuLimitExceeded"), "vCPU quota", "L-DB2E81BA"),
        (message("EC2", "CreateVpc", "VpcLimitExceeded"), "EC2:CreateVpc was refused", "finetune audit"),
        (message("EKS", "CreateCluster", "ResourceLimitExceededException"), "EKS:CreateCluster", "Service Quotas"),
        (message("EC2", "CreateSubnet", "RequestLimitExceeded"), "too many requests", "again"),
        (message("EKS", "CreateCluster", "AccessDeniedException"), "may not do EKS:CreateCluster", "administrator"),
        (message("EC2", "CreateVpc", "UnauthorizedOperation"), "may not do EC2:CreateVpc", "administrator"),
        (message("STS", "GetCallerIdentity", "ExpiredToken"), "ran out", "sign in again"),
        ("AWS account ID not allowed: 999988887777", "belong to account 999988887777", "aws sts get-caller-identity"),
        ("No valid credential sources found. Please see", "no AWS credentials", "aws sso login"),
        (message("EC2", "DeleteSubnet", "DependencyViolation"), "does not manage", "finetune audit"),
        (message("S3", "DeleteBucket", "BucketNotEmpty"), "forceDestroy is off", "forceDestroy true"),
        (message("EKS", "CreateNodegroup", "ResourceInUseException", "already exists"), "is not in the state", ""),
        ("the stack is currently locked by 1 lock(s)", "another pulumi works", "pulumi cancel"),
        ("error reading from server: EOF", "process died", "finetune audit"),
        ("configured Kubernetes cluster is unreachable: dial tcp", "cannot be reached", "does not need the API"),
    ],
)  # fmt: skip
def test_each_kind_of_error(said: str, why: str, fix: str) -> None:
    explained = explain(said, "aws:eks/nodeGroup:NodeGroup efa-dev-gpu", GPU)

    assert why in explained.why
    assert fix in explained.fix
    assert "{" not in explained.why + explained.fix
    assert explained.urn == GPU


def test_capacity_errors_point_to_zones_and_reservations() -> None:
    fix = explain(message("EC2", "RunInstances", "InsufficientInstanceCapacity")).fix

    assert "finetune zones" in fix
    assert "purchase" in fix
    assert "reservationId" in fix


def test_unknown_error_is_shown_as_it_is() -> None:
    explained = explain("something new went wrong")

    assert explained.why == "no rule knows this error"
    assert explained.message == "something new went wrong"


def test_text_that_pulumi_printed() -> None:
    [explained] = explain_output(PRINTED)

    assert explained.resource == "aws:ec2:Eip efa-dev-nat-us-west-2a"
    assert explained.code == "AddressLimitExceeded"
    assert "EC2:AllocateAddress was refused" in explained.why


def test_event_log() -> None:
    said = message("EC2", "CreateVpc", "VpcLimitExceeded")
    events = [
        {"sequence": 1, "diagnosticEvent": {"urn": GPU, "severity": "error", "message": said}},
        {"sequence": 2, "diagnosticEvent": {"urn": GPU, "severity": "warning", "message": "never mind"}},
        {"sequence": 3, "diagnosticEvent": {"severity": "error", "message": "update failed"}},
    ]

    [explained] = explain_output("\n".join(json.dumps(one) for one in events))

    assert explained.urn == GPU
    assert explained.resource == "aws:eks/nodeGroup:NodeGroup efa-dev-gpu"


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "up.log"
    log.write_text(PRINTED)

    assert main([str(log)]) == 1
    printed = capsys.readouterr().out
    assert "aws:ec2:Eip efa-dev-nat-us-west-2a (AddressLimitExceeded)" in printed
    assert "  why:  a quota of the account is used up" in printed
    assert "  next: finetune audit" in printed

    assert main([str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == "AddressLimitExceeded"


def test_command_without_errors_and_without_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "up.log"
    log.write_text("Resources:\n    + 3 created\n")
    assert main([str(log)]) == 0
    assert capsys.readouterr().out == "No error in it.\n"

    with pytest.raises(SystemExit):
        main([str(tmp_path / "missing.log")])
    assert "no such file" in capsys.readouterr().err
