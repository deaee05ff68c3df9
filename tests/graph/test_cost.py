"""What a stack costs an hour, from the recorded graph, and no guess."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.cost import (
    FREE_TYPES,
    UnknownPriceError,
    cost_of_settings_file,
    price,
    price_graph,
)
from infra.instances import PRICE_TABLE_DATE
from infra.recorder import Graph, Resource
from tests.graph import graphs


def _lines(**values: object) -> dict[str, tuple[float, float]]:
    settings = graphs.settings(**values)
    report = price_graph(graphs.graph(**values), settings)
    return {line.name: (line.quantity, line.unit_usd) for line in report.lines}


def test_the_dev_stack_costs_what_the_price_list_says() -> None:
    report = cost_of_settings_file(graphs.DEV_FILE)
    assert report.hourly_usd == pytest.approx(9.55, rel=0.02)
    assert (report.region, report.table_date) == ("us-west-2", PRICE_TABLE_DATE)
    lines = {line.name: (line.quantity, round(line.hourly_usd, 4)) for line in report.lines}
    assert lines == {
        "g6.12xlarge (efa-dev-gpu)": (2, 9.2032),
        "m7i.xlarge (efa-dev-system)": (1, 0.2016),
        "EKS control plane (efa-dev-eksCluster)": (1, 0.10),
        "NAT gateway (efa-dev-nat-us-west-2a)": (1, 0.045),
        "public IPv4 address (efa-dev-nat-us-west-2a)": (1, 0.005),
        "gp3 disks, GiB (efa-dev-gpu)": (400, 0.0438),
        "gp3 disks, GiB (efa-dev-system)": (80, 0.0088),
    }


def test_the_report_is_plain_json_with_the_keys_that_stay() -> None:
    report = price_graph(graphs.dev(), graphs.dev_settings()).to_dict()
    assert json.loads(json.dumps(report)) == report
    assert {"hourly_usd", "lines", "region", "table_date", "by_use"} == set(report)
    assert all(set(line) == {"name", "quantity", "unit_usd", "hourly_usd"} for line in report["lines"])
    assert report["hourly_usd"] == pytest.approx(
        sum(line["hourly_usd"] for line in report["lines"]), abs=1e-3
    )


def test_a_cluster_of_somebody_else_costs_nothing() -> None:
    assert price(graphs.local_settings()).hourly_usd == 0


def test_options_have_their_lines() -> None:
    report = price_graph(graphs.everything(), graphs.settings("full", **graphs.EVERYTHING))
    names = [line.name for line in report.lines]
    assert sum(name.startswith("NAT gateway") for name in names) == 2
    assert "KMS key (efa-full-secrets)" in names
    assert "FSx for Lustre (efa-full-fsx)" in names
    lustre = next(line for line in report.lines if line.name.startswith("FSx"))
    assert lustre.hourly_usd == pytest.approx(1200 * 0.145 / 730)


def test_more_nodes_cost_more() -> None:
    assert _lines(gpuCount=4)["g6.12xlarge (efa-test-gpu)"] == (4, 4.6016)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"purchase": "spot"}, "g6.12xlarge as spot"),
        (
            {"purchase": "capacity-block", "reservationId": "cr-0123456789abcdef0"},
            "g6.12xlarge as capacity block",
        ),
        ({"gpuInstanceType": "p4d.24xlarge"}, "p4d.24xlarge on demand"),
        (
            {
                "region": "eu-central-1",
                "zones": ["eu-central-1a", "eu-central-1b"],
                "gpuZone": "eu-central-1a",
            },
            "NAT gateway, hour",
        ),
    ],
)
def test_an_unknown_price_is_no_guess(values: dict[str, object], words: str) -> None:
    with pytest.raises(UnknownPriceError) as caught:
        _lines(**values)
    message = str(caught.value)
    assert words in message
    assert "set gpuHourlyUsd" in message
    assert PRICE_TABLE_DATE in message


def test_an_agreed_price_answers_it() -> None:
    assert _lines(purchase="spot", gpuHourlyUsd=1.9)["g6.12xlarge (efa-test-gpu)"] == (2, 1.9)


def test_a_new_kind_of_resource_is_refused_until_somebody_looks_at_its_price() -> None:
    template = graphs.dev().resources[0]
    unknown = Resource(
        **{**vars(template), "type": "aws:rds/instance:Instance", "name": "db", "custom": True}
    )
    graph = Graph((*graphs.dev().resources, unknown), {})
    with pytest.raises(UnknownPriceError, match=r"aws:rds/instance:Instance \(db\)"):
        price_graph(graph, graphs.dev_settings())


def test_every_type_of_the_largest_stack_is_free_or_priced() -> None:
    price_graph(graphs.everything(), graphs.settings("full", **graphs.EVERYTHING))
    used = {r.type for r in graphs.everything().resources} | {r.type for r in graphs.dev().resources}
    assert used >= FREE_TYPES, f"not used any more: {FREE_TYPES - used}"


def test_a_file_with_mistakes_has_no_price(tmp_path: Path) -> None:
    from infra.settings import SettingsError

    path = tmp_path / "Pulumi.bad.yaml"
    path.write_text("config:\n  efa-finetune:gpuCount: 0\n")
    with pytest.raises(SettingsError, match="gpuCount"):
        cost_of_settings_file(path)
