"""zones tells where a type can be had, and a probe leaves nothing behind."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import NoCredentialsError
from rich.console import Console

from operations.zones import Zone, ZoneReport, find_zones, instance_of, probe, probe_price
from tests.unit.operations.fake_aws import AwsError, FakeAws, quota
from training.errors import FinetuneError, UsageError

G6 = instance_of("g6.12xlarge")


def scores(*pairs: tuple[str, int]) -> dict[str, Any]:
    return {
        "SpotPlacementScores": [
            {"Region": "r", "AvailabilityZoneId": zone, "Score": score} for zone, score in pairs
        ]
    }


@pytest.fixture
def account(aws: FakeAws) -> FakeAws:
    aws.answer("GetServiceQuota", quota({"L-DB2E81BA": 96.0, "L-3819A6DF": 0.0}))
    aws.answer("GetSpotPlacementScores", scores(("usw2-az1", 9), ("usw2-az2", 3)))
    return aws


def find(aws: FakeAws, nodes: int = 2, *regions: str) -> ZoneReport:
    return find_zones(aws.session(), G6, nodes, regions or ("us-west-2",))


def test_zones_quota_price_and_score(account: FakeAws) -> None:
    report = find(account)

    assert {zone.zone for zone in report.zones} == {"us-west-2a", "us-west-2b", "us-west-2c", "us-west-2d"}
    first = report.zones[0]
    assert first.zone_id == "usw2-az1", "of the same price, the better spot score comes first"
    assert (first.on_demand_nodes, first.spot_nodes, first.spot_score) == (2, 0, 9)
    assert first.hourly_usd == 4.6016
    settings = report.to_dict()["settings"]
    assert settings["gpuZone"] == first.zone
    assert settings["region"] == "us-west-2"
    assert len(set(settings["zones"])) == 2
    assert first.zone in settings["zones"]


def test_quota_too_small_fits_nowhere(account: FakeAws) -> None:
    report = find(account, 3)

    assert report.best is None
    assert report.to_dict()["settings"] is None
    assert "No zone fits 3 nodes" in shown(report)


def test_quota_that_cannot_be_read_is_unknown_and_not_zero(account: FakeAws) -> None:
    account.answer("GetServiceQuota", AwsError("AccessDeniedException"))

    report = find(account)

    assert report.zones[0].on_demand_nodes is None
    assert report.best is not None
    assert "unknown" in shown(report)


def test_region_that_does_not_answer_is_a_row(account: FakeAws) -> None:
    def offerings(parameters: dict[str, Any]) -> dict[str, Any]:
        raise AwsError("AuthFailure")

    account.answer("DescribeInstanceTypeOfferings", offerings)

    assert find(account).zones == (Zone("us-west-2", problem="AuthFailure"),)


def test_region_without_the_type(account: FakeAws) -> None:
    report = find(account, 2, "us-west-2", "us-west-1")

    assert report.zones[-1] == Zone("us-west-1", problem="not offered")


def test_default_regions_are_those_with_a_price(account: FakeAws) -> None:
    report = find_zones(account.session(), G6, 1)

    assert {zone.region for zone in report.zones} == set(G6.price_usd_per_hour)


def test_no_credentials(account: FakeAws) -> None:
    account.answer("GetCallerIdentity", NoCredentialsError())

    with pytest.raises(UsageError, match="AWS does not accept the credentials"):
        find(account)


def test_unknown_type() -> None:
    with pytest.raises(UsageError, match=r"--instance g6\.13xlarge: not in the catalog; it has g5"):
        instance_of("g6.13xlarge")


def made(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"CapacityReservation": {"CapacityReservationId": f"cr-{parameters['AvailabilityZone']}"}}


def test_probe_reserves_and_cancels(account: FakeAws) -> None:
    account.answer("CreateCapacityReservation", made)
    account.answer("CancelCapacityReservation", {"Return": True})
    report = find(account)

    probed = probe(account.session(), report)

    assert probed.zones[0].capacity == "free"
    assert probed.best == probed.zones[0]
    (create,) = account.called("CreateCapacityReservation")
    assert create["InstanceCount"] == 2
    assert create["InstanceMatchCriteria"] == "targeted"
    assert create["EndDateType"] == "limited"
    assert create["EndDate"] < datetime.now(UTC) + timedelta(hours=2)
    assert account.called("CancelCapacityReservation") == [
        {"CapacityReservationId": f"cr-{probed.zones[0].zone}"}
    ]


def test_probe_goes_on_where_there_is_no_capacity(account: FakeAws) -> None:
    def scarce(parameters: dict[str, Any]) -> dict[str, Any]:
        if parameters["AvailabilityZone"] != "us-west-2c":
            raise AwsError("InsufficientInstanceCapacity")
        return made(parameters)

    account.answer("CreateCapacityReservation", scarce)
    account.answer("CancelCapacityReservation", {"Return": True})

    probed = probe(account.session(), find(account))

    assert probed.best is not None
    assert probed.best.zone == "us-west-2c"
    assert "none now" in {zone.capacity for zone in probed.zones}


def test_no_capacity_anywhere(account: FakeAws) -> None:
    account.answer("CreateCapacityReservation", AwsError("InsufficientInstanceCapacity"))

    probed = probe(account.session(), find(account))

    assert probed.best is None
    assert account.called("CancelCapacityReservation") == []


@pytest.mark.parametrize("answer", [AwsError("InternalError"), {"Return": False}])
def test_reservation_that_stays_is_an_error_with_the_command(account: FakeAws, answer: Any) -> None:
    account.answer("CreateCapacityReservation", made)
    account.answer("CancelCapacityReservation", answer)

    with pytest.raises(FinetuneError) as raised:
        probe(account.session(), find(account))

    assert "It bills until it is" in str(raised.value)
    assert "aws ec2 cancel-capacity-reservation --capacity-reservation-id cr-us-west-2" in str(raised.value)


def test_price_of_a_probe(account: FakeAws) -> None:
    # Four zones, two nodes each, one minute.
    assert probe_price(find(account)) == pytest.approx(4 * 2 * 4.6016 / 60)


def test_probe_asks_first(account: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    from operations import examine

    session = account.session()
    monkeypatch.setattr("boto3.Session", lambda: session)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)

    with pytest.raises(UsageError, match=r"reserves 2 x g6.12xlarge for a moment, for up to 0\.61 USD"):
        examine.look_for_zones("g6.12xlarge", 2, ["us-west-2"], probe_capacity=True, yes=False)
    assert account.called("CreateCapacityReservation") == []


def test_all_calls_are_in_the_security_model(account: FakeAws) -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    account.answer("CreateCapacityReservation", made)
    account.answer("CancelCapacityReservation", {"Return": True})

    probe(account.session(), find(account))

    assert {name for name, _ in account.calls if f":{name}`" not in page} == set()


def shown(report: ZoneReport) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(report.view())
    return capture.get()
