from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from training.transport.collect import collect_logs, prepare_rank_env, rank_record, write_ranks
from training.transport.records import RankRecord, load_ranks
from training.transport.verdict import judge


def test_rank_env_logs_to_the_folder_of_this_attempt(tmp_path: Path) -> None:
    env = prepare_rank_env(tmp_path, "attempt-2", environ={})
    assert env == {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        "NCCL_DEBUG_FILE": f"{tmp_path}/attempt-2/%h.%p.log",
    }
    assert (tmp_path / "attempt-2").is_dir()


@pytest.mark.parametrize(
    ("wanted", "subsystems"),
    [
        ("COLL,net", "INIT,NET,ENV,COLL"),
        ("ALL", "INIT,NET,ENV,ALL"),
        ("^INIT,NET", "ALL"),
        ("^COLL,INIT", "^COLL"),
        ("", "INIT,NET,ENV"),
    ],
)
def test_rank_env_keeps_what_the_job_asks_for(wanted: str, subsystems: str, tmp_path: Path) -> None:
    env = prepare_rank_env(tmp_path, "a", environ={"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_SUBSYS": wanted})
    assert (env["NCCL_DEBUG"], env["NCCL_DEBUG_SUBSYS"]) == ("TRACE", subsystems)


def test_rank_record_speaks_in_nccls_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "ip-10-0-1-23.ec2.internal")
    record = rank_record(5, 1)
    assert (record.host, record.pid, record.rank, record.local_rank) == ("ip-10-0-1-23", os.getpid(), 5, 1)


def test_ranks_are_written_in_order_and_read_back(tmp_path: Path) -> None:
    records = [RankRecord(rank=r, host="h", pid=100 + r, local_rank=r) for r in (1, 0)]
    path = write_ranks(tmp_path, records)
    assert [entry["rank"] for entry in json.loads(path.read_text())] == [0, 1]
    assert load_ranks(tmp_path) == tuple(reversed(records))


def test_each_rank_brings_its_own_log(tmp_path: Path) -> None:
    local, run = tmp_path / "local", tmp_path / "run"
    local.mkdir()
    for pid in (1, 2):
        (local / f"h.{pid}.log").write_text(f"{pid}\n")
    record = RankRecord(rank=0, host="h", pid=1, local_rank=0)
    assert collect_logs(local, run, record) == [run / "h.1.log"]
    assert sorted(path.name for path in run.iterdir()) == ["h.1.log"]
    assert collect_logs(local, run) == [run / "h.1.log", run / "h.2.log"]
    assert collect_logs(run, run) == [run / "h.1.log", run / "h.2.log"]
    silent = RankRecord(rank=1, host="h", pid=3, local_rank=1)
    assert collect_logs(local, run, silent) == []


def test_gloo_on_this_machine_is_none(tmp_path: Path) -> None:
    write_ranks(tmp_path, [rank_record(0, 0, backend="gloo")])
    report = judge(tmp_path, require="efa")
    assert (report.verdict, report.backend) == ("none", "gloo")
