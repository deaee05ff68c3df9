"""GPU nodes to zero and back through EKS; the expiry in AWS and in the settings file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.settings import read_settings_file
from operations import switch
from operations.power import extend, sleep, wake
from tests.unit.operations.fake_aws import AwsError, FakeAws
from tests.unit.operations.test_doctor import target
from training.errors import FinetuneError, UsageError
from training.submit.bill import bill, bill_words

NOW = datetime(2026, 12, 1, 12, 0, 30, tzinfo=UTC)


def group(name: str, role: str, desired: int, maximum: int) -> dict[str, Any]:
    return {
        "nodegroup": {
            "nodegroupName": name,
            "labels": {"role": role},
            "scalingConfig": {"minSize": 0, "maxSize": maximum, "desiredSize": desired},
        }
    }


@pytest.fixture
def eks(aws: FakeAws) -> FakeAws:
    groups = {
        "efa-dev-system-0000001": group("efa-dev-system-0000001", "system", 1, 1),
        "efa-dev-gpu-0000002": group("efa-dev-gpu-0000002", "gpu", 2, 2),
    }
    aws.answer("ListNodegroups", {"nodegroups": list(groups)})
    aws.answer("DescribeNodegroup", lambda parameters: groups[parameters["nodegroupName"]])

    def update(parameters: dict[str, Any]) -> dict[str, Any]:
        groups[parameters["nodegroupName"]]["nodegroup"]["scalingConfig"] = parameters["scalingConfig"]
        return {"update": {"id": "1"}}

    aws.answer("UpdateNodegroupConfig", update)
    return aws


def test_sleep_and_wake(eks: FakeAws) -> None:
    slept = sleep(eks.session(), target(), lambda: [])
    assert slept.to_dict() == {
        "stack": "dev",
        "cluster": "efa-dev",
        "node_group": "efa-dev-gpu-0000002",
        "nodes_before": 2,
        "nodes": 0,
    }
    assert "finetune wake --stack dev" in slept.render()

    woken = wake(eks.session(), target())
    assert (woken.group.desired, woken.nodes) == (0, 2)
    assert [call["scalingConfig"] for call in eks.called("UpdateNodegroupConfig")] == [
        {"minSize": 0, "maxSize": 2, "desiredSize": 0},
        {"minSize": 0, "maxSize": 2, "desiredSize": 2},
    ]


def test_what_is_so_already_is_left_alone(eks: FakeAws) -> None:
    woken = wake(eks.session(), target())

    assert "has 2 GPU nodes already" in woken.render()
    assert eks.called("UpdateNodegroupConfig") == []


def test_sleep_does_not_cut_off_a_job(eks: FakeAws) -> None:
    with pytest.raises(UsageError, match=r"demo-0123456789ab runs on the GPU nodes.*--then sleep.*--now"):
        sleep(eks.session(), target(), lambda: ["demo-0123456789ab"])
    assert eks.called("UpdateNodegroupConfig") == []

    assert sleep(eks.session(), target(), None).changed


def test_expired_nodes_come_back_with_wake(eks: FakeAws) -> None:
    # What the schedule of infra/guardrails.py does.
    eks.session().client("eks").update_nodegroup_config(
        clusterName="efa-dev",
        nodegroupName="efa-dev-gpu-0000002",
        scalingConfig={"minSize": 0, "maxSize": 2, "desiredSize": 0},
    )

    assert wake(eks.session(), target()).nodes == 2


def test_refusals(eks: FakeAws) -> None:
    eks.answer("UpdateNodegroupConfig", AwsError("ResourceInUseException", "update 7 in progress"))
    with pytest.raises(FinetuneError, match=r"changing the node group right now \(update 7 in progress\)"):
        sleep(eks.session(), target(), None)

    eks.answer("UpdateNodegroupConfig", AwsError("AccessDeniedException", "no"))
    with pytest.raises(FinetuneError, match=r"AWS refuses UpdateNodegroupConfig: AccessDeniedException"):
        sleep(eks.session(), target(), None)

    eks.answer("ListNodegroups", AwsError("ResourceNotFoundException"))
    with pytest.raises(UsageError, match="There is no EKS cluster efa-dev in us-west-2 of this account"):
        wake(eks.session(), target())

    eks.answer("ListNodegroups", {"nodegroups": []})
    with pytest.raises(UsageError, match="no node group with the label role=gpu"):
        wake(eks.session(), target())

    with pytest.raises(UsageError, match="brings its own cluster"):
        wake(eks.session(), target(region=None))


class FakeAccess:
    """Access to a stack whose cluster has these jobs."""

    def __init__(self, *jobs: tuple[str, bool]) -> None:
        self._jobs = [SimpleNamespace(submission_id=name, ended=ended) for name, ended in jobs]

    def target(self) -> Any:
        return target()

    def flags(self) -> str:
        return "--stack dev"

    @contextmanager
    def client(self, *_: Any) -> Iterator[Any]:
        yield SimpleNamespace(jobs=lambda: self._jobs)


@pytest.mark.parametrize("status", [0, 10, 11, 12, 13, 14])
def test_then_sleep(
    eks: FakeAws, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    session = eks.session()
    monkeypatch.setattr("boto3.Session", lambda: session)

    switch.sleep_after(FakeAccess(("a", True)), status)  # pyright: ignore[reportArgumentType]

    assert len(eks.called("UpdateNodegroupConfig")) == 1
    assert capsys.readouterr().out == "", "standard output is the job's summary"


@pytest.mark.parametrize("status", [2, 15, 130])
def test_then_sleep_after_no_end(eks: FakeAws, capsys: pytest.CaptureFixture[str], status: int) -> None:
    switch.sleep_after(FakeAccess(), status)  # pyright: ignore[reportArgumentType]

    assert eks.called("UpdateNodegroupConfig") == []
    assert "The GPU nodes stay" in capsys.readouterr().err


def test_then_sleep_with_another_job(
    eks: FakeAws, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = eks.session()
    monkeypatch.setattr("boto3.Session", lambda: session)

    switch.sleep_after(FakeAccess(("a", True), ("b", False)), 0)  # pyright: ignore[reportArgumentType]

    assert eks.called("UpdateNodegroupConfig") == []
    assert "still running and billing: b runs on the GPU nodes" in capsys.readouterr().err


# --- expiry


SCHEDULE = {
    "Name": "efa-dev-expiry-0a1b2c3",
    "GroupName": "default",
    "Description": "Scales the GPU nodes of efa-dev to zero",
    "ScheduleExpression": "at(2026-12-01T18:00:00)",
    "ScheduleExpressionTimezone": "UTC",
    "FlexibleTimeWindow": {"Mode": "OFF"},
    "Target": {
        "Arn": "arn:aws:scheduler:::aws-sdk:eks:updateNodegroupConfig",
        "RoleArn": "arn:aws:iam::123456789012:role/efa-dev-expiry-0000000",
        "Input": json.dumps({"ClusterName": "efa-dev"}),
    },
    "State": "ENABLED",
}


@pytest.fixture
def scheduled(aws: FakeAws) -> FakeAws:
    aws.answer(
        "ListSchedules",
        {
            "Schedules": [
                {"Name": "efa-dev-expiry-other", "GroupName": "default"},
                {"Name": SCHEDULE["Name"], "GroupName": "default"},
            ]
        },
    )
    aws.answer("GetSchedule", SCHEDULE)
    aws.answer(
        "UpdateSchedule", {"ScheduleArn": "arn:aws:scheduler:us-west-2:123456789012:schedule/default/x"}
    )
    return aws


def with_expiry(path: Path, value: str) -> Path:
    path.write_text(path.read_text() + f"  efa-finetune:expires: {value}\n  # The end.\n")
    return path


def test_extend_moves_schedule_and_file(scheduled: FakeAws, settings_file: Path) -> None:
    path = with_expiry(settings_file, '"2026-12-01T19:00:00+01:00"')
    before = path.read_text()

    done = extend(scheduled.session(), path, 4, NOW)

    (call,) = scheduled.called("UpdateSchedule")
    assert call == {**SCHEDULE, "ScheduleExpression": "at(2026-12-01T22:00:00)"}
    assert path.read_text() == before.replace("2026-12-01T19:00:00+01:00", "2026-12-01T23:00:00+01:00")
    assert done.schedule == SCHEDULE["Name"]
    assert done.to_dict()["hours_left"] == pytest.approx(10.0, abs=0.01)
    assert "finetune wake" not in done.render()


def test_schedule_says_what_the_program_would_say(scheduled: FakeAws, settings_file: Path) -> None:
    """The next `pulumi up` finds nothing to change."""
    path = with_expiry(settings_file, "2126-12-01T18:00:00Z")

    extend(scheduled.session(), path, 1)

    expires = read_settings_file(path).expires
    assert expires is not None
    expression = f"at({expires.astimezone(UTC):%Y-%m-%dT%H:%M:%S})"
    assert (
        scheduled.called("UpdateSchedule")[0]["ScheduleExpression"] == expression == "at(2126-12-01T19:00:00)"
    )


def test_expiry_that_has_passed_counts_from_now(scheduled: FakeAws, settings_file: Path) -> None:
    path = with_expiry(settings_file, '"2026-12-01T10:00:00Z"')

    done = extend(scheduled.session(), path, 24 * 365, NOW)

    assert done.expires == datetime(2027, 12, 1, 12, 1, tzinfo=UTC), "the next full minute"
    assert "finetune wake --stack dev" in done.render()


def test_first_expiry_is_written_and_needs_an_up(aws: FakeAws, settings_file: Path) -> None:
    aws.answer("ListSchedules", {"Schedules": []})

    done = extend(aws.session(), settings_file, 8)

    assert done.schedule is None
    assert "pulumi up --stack dev" in done.render()
    assert settings_file.read_text().splitlines()[:2] == ["# The AWS stack.", "config:"]
    assert read_settings_file(settings_file).expires == done.expires


def test_refused_by_aws_leaves_the_file(scheduled: FakeAws, settings_file: Path) -> None:
    path = with_expiry(settings_file, '"2126-12-01T10:00:00Z"')
    before = path.read_text()
    scheduled.answer("UpdateSchedule", AwsError("AccessDeniedException", "no"))

    with pytest.raises(FinetuneError, match="AWS refuses UpdateSchedule"):
        extend(scheduled.session(), path, 1)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('"tomorrow"', "a time such as 2026-12-01T18:00:00"),
        ('"2126-12-01T18:00:00"', "the offset is missing"),
    ],
)
def test_broken_expiry(aws: FakeAws, settings_file: Path, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        extend(aws.session(), with_expiry(settings_file, value), 1)


def test_broken_files(aws: FakeAws, settings_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--hours 0: more than 0"):
        extend(aws.session(), settings_file, 0)
    with pytest.raises(UsageError, match="No such file"):
        extend(aws.session(), tmp_path / "Pulumi.prod.yaml", 1)
    settings_file.write_text("name: x\n")
    with pytest.raises(UsageError, match="a config block is needed"):
        extend(aws.session(), settings_file, 1)
    settings_file.write_text("config:\n  efa-finetune:owner: ''\n  efa-finetune:gpuCount: 0\n")
    with pytest.raises(UsageError, match="gpuCount"):
        extend(aws.session(), settings_file, 1)


# --- what `finetune status` says of it


def test_bill() -> None:
    stack = target(hourly_usd=9.5, expires="2026-12-01T14:30:30+00:00")

    assert bill(stack, NOW) == {
        "hourly_usd": 9.5,
        "expires": "2026-12-01T14:30:30+00:00",
        "seconds_left": 9000.0,
    }
    assert bill_words(stack, NOW).startswith(
        "stack dev: 9.50 USD an hour while its GPU nodes run, which end in 2"
    )
    assert bill_words(target(), NOW) == "stack dev: an unknown price while its GPU nodes run, no expiry"
    gone = target(hourly_usd=9.5, expires="2026-12-01T11:00:00+00:00")
    assert "they expired at 2026-12-01T11:00:00+00:00" in bill_words(gone, NOW)
