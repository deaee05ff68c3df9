from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.transport.builder import EXPECTED_BYTES, job, to_sockets
from tests.unit.transport.corpus import Case, cases
from training.transport.verdict import TransportReport, Verdict, exit_status, judge

CASES = list(cases())


def test_corpus_is_large_and_its_names_are_distinct() -> None:
    assert len(CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_corpus(case: Case, tmp_path: Path) -> None:
    folder = case.build(tmp_path / "attempt-0")
    report = judge(folder, require="efa", gpudirect_required=case.gpudirect_required)
    assert (report.verdict, report.reason) == (case.verdict, report.reason)
    assert case.says in report.reason
    if case.diagnosis is not None:
        found = {diagnosis.kind: diagnosis for diagnosis in report.diagnosis}
        assert case.diagnosis in found, found
        assert found[case.diagnosis].change
    assert TransportReport.model_validate_json(report.model_dump_json()) == report


@pytest.mark.parametrize(
    ("verdict", "efa", "any_transport"),
    [("efa", 0, 0), ("tcp", 13, 0), ("mixed", 13, 0), ("none", 13, 0), ("unknown", 14, 0)],
)
def test_exit_status_follows_the_verdict(
    verdict: Verdict, efa: int, any_transport: int, tmp_path: Path
) -> None:
    report = judge(tmp_path, require="efa").model_copy(update={"verdict": verdict})
    assert (exit_status(report, "efa"), exit_status(report, "any")) == (efa, any_transport)


def test_reason_names_rank_file_and_line(tmp_path: Path) -> None:
    built = job()
    built.ranks[3].drop("[send]", only_first=True)
    reason = judge(built.write(tmp_path), require="efa").reason
    assert "from rank 3 to 4" in reason
    assert f"{built.ranks[4].host}.{built.ranks[4].pid}.log:" in reason


def test_logs_filtered_to_one_direction_still_prove_every_connection(tmp_path: Path) -> None:
    """With the receiving ends filtered out, each rank on a connection must still show its own channel."""
    built = job(gpus=1)
    for rank in built.ranks:
        rank.drop("[receive]")
    assert judge(built.write(tmp_path / "0"), require="efa").verdict == "efa"
    built.ranks[1].drop("[send]")
    assert judge(built.write(tmp_path / "1"), require="efa").verdict == "unknown"


def test_counters_stand_beside_the_expected_bytes(tmp_path: Path) -> None:
    node = judge(job().write(tmp_path), require="efa").nodes[0]
    assert (node.expected_bytes, node.tx_bytes) == (EXPECTED_BYTES, int(1.02 * EXPECTED_BYTES))
    assert node.counters["retrans_bytes"] == 640
    assert "10.608 GB sent" in node.note


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "no JSON object"),
        ('{"a": 1}', "a is no object"),
        ('{"a": {"d": {"before": {"x": "y"}}}}', "before.x"),
    ],
)
def test_counters_of_another_shape_are_named(content: str, says: str, tmp_path: Path) -> None:
    folder = job().write(tmp_path)
    (folder / "counters.json").write_text(content)
    report = judge(folder, require="efa")
    assert report.verdict == "unknown"
    assert says in report.reason


def test_reason_of_many_ranks_stays_readable(tmp_path: Path) -> None:
    built = job(hosts=4, gpus=8)
    for rank in built.ranks[:9]:
        rank.drop("elected")
    reason = judge(built.write(tmp_path), require="efa").reason
    assert reason == "rank 0-8: no 'Selected provider' line, although the network is the plugin's"


def test_missing_evidence_still_says_what_the_rest_shows(tmp_path: Path) -> None:
    built = job()
    for rank in built.ranks[:3]:
        to_sockets(rank, built.versions)
    built.ranks[7].messages = []
    reason = judge(built.write(tmp_path), require="efa").reason
    assert "no NCCL log of rank 7" in reason
    assert "the lines that are there show TCP on rank 0-2" in reason
