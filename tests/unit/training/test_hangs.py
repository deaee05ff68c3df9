"""A rank that stops is named, and not those that wait for it; what the flight recorder adds."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.jobs import tiny_job
from tests.unit.training.processes import free_port
from training.flight import (
    Missed,
    Recorder,
    missed_collectives,
    read_dump,
    read_dumps,
    upload_left_behind,
)
from training.hangs import Report, diagnose, read_reports
from training.outcome import end_of_launch, hang_error
from training.storage import LocalStorage, open_storage
from training.watchdog import HUNG_EXIT_CODE

HOSTS = {0: "host-a", 1: "host-a", 2: "host-b", 3: "host-b"}


def _frame(file: str, function: str) -> str:
    return f'  File "{file}", line 7, in {function}\n    a line of code\n'


LOOP = _frame("/site/training/loop.py", "_agree")
WAITS = (
    LOOP
    + _frame("/site/torch/distributed/c10d_logger.py", "wrapper")
    + _frame("/site/torch/distributed/distributed_c10d.py", "all_reduce")
)
READS = LOOP + _frame("/site/training/data/loader.py", "__next__")


def _report(rank: int, step: int, phase: str, stack: str) -> Report:
    return Report(rank, HOSTS[rank], step, phase, stack, timeout_seconds=600)


def test_the_rank_outside_of_collectives_is_named() -> None:
    reports = [_report(rank, 4, "data", READS if rank == 2 else WAITS) for rank in HOSTS]
    found = diagnose(reports, HOSTS)
    assert found is not None
    assert (found.rank, found.host, found.step, found.phase) == (2, "host-b", 4, "data")
    assert found.message.startswith("rank 2 on host-b made no progress for 600 s: it is in step 5 (data)")
    assert 'training/data/loader.py", line 7, in __next__' in found.message
    assert "Ranks 0, 1, 3 wait in all_reduce" in found.message
    assert "resilience.step_timeout_seconds" in found.message


def test_of_ranks_that_all_wait_the_one_behind_is_named() -> None:
    """As when one rank left a collective out: it waits for the others in a later one of an earlier step."""
    places = {0: (5, "data"), 1: (5, "data"), 2: (5, "data"), 3: (4, "optimizer")}
    found = diagnose([_report(rank, *place, WAITS) for rank, place in places.items()], HOSTS)
    assert found is not None
    assert found.rank == 3
    assert "in step 5 (optimizer) in all_reduce, behind the others" in found.message


def test_nobody_is_blamed_where_nobody_is_behind() -> None:
    found = diagnose([_report(rank, 5, "data", WAITS) for rank in HOSTS], HOSTS)
    assert found is not None
    assert found.rank is None
    assert "Ranks 0, 1, 2, 3 wait in all_reduce" in found.message


def test_a_rank_that_cannot_even_report_is_named() -> None:
    found = diagnose([_report(rank, 5, "data", WAITS) for rank in (0, 1, 3)], HOSTS)
    assert found is not None
    assert (found.rank, found.host) == (2, "host-b")
    assert found.message.startswith("rank 2 on host-b made no progress for 600 s and did not answer")


def test_without_reports_nothing_hung() -> None:
    assert diagnose([], HOSTS) is None


# With real process groups


def _rank(rank: int, world_size: int, port: int, job_yaml: str, run: str, lazy_rank: int) -> None:
    """One rank of a job in which `lazy_rank` goes to sleep in the third step."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    import torch

    from training import loop
    from training.evidence import Evidence
    from training.job import job_from_yaml
    from training.parallel import join_world

    torch.set_num_threads(1)
    original = loop._Trainer._forward_backward  # pyright: ignore[reportPrivateUsage]

    def forward_backward(self: Any, *arguments: Any) -> Any:
        if rank == lazy_rank and self.progress.step == 2:
            _oversleep()
        return original(self, *arguments)

    loop._Trainer._forward_backward = forward_backward  # pyright: ignore[reportPrivateUsage]
    storage, work = open_storage(run), Path(run).with_name("work")
    world = join_world()
    attempt = loop.new_attempt(storage, world)
    Evidence(storage, work, world, attempt).publish_ranks()
    loop.train(job_from_yaml(job_yaml), storage, work, attempt=attempt, world=world)


def _oversleep() -> None:
    time.sleep(3600)


@pytest.mark.slow
def test_a_sleeping_rank_is_named_with_its_stack_and_the_collective_it_missed(tmp_path: Path) -> None:
    job = tiny_job(resilience={"step_timeout_seconds": 8})
    run = tmp_path / "run"
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["training.loop"])
    port = free_port()
    arguments = (3, port, job.dump_yaml(), str(run), 1)
    processes = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout=240)
        # The first that ends may take the others with it: they lose their connection.
        assert HUNG_EXIT_CODE in [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    storage = LocalStorage(run)
    (attempt,) = {name.split("/")[1] for name in storage.list("hangs")}
    assert [report.rank for report in read_reports(storage, attempt)] == [0, 1, 2]
    error = hang_error(storage, attempt)
    assert (error["kind"], error["rank"], error["step"]) == ("hang", 1, 2)
    assert error["phase"] == "forward and backward"
    assert "in _oversleep" in error["frames"]
    assert "in step 3 (forward and backward) and in no collective" in error["message"]
    assert "Ranks 0, 2 wait in" in error["message"]
    assert error["flight"] == f"flight/{attempt}/"
    assert any("rank 1 never started" in missed for missed in error["missed_collectives"])
    assert error["missed_collectives"][0] in error["message"]

    outcome = end_of_launch(
        storage, "launch", frozenset(), RuntimeError("the workers died"), "control/final-launch.json"
    )
    assert (outcome["status"], outcome["exit_status"]) == ("failed", 10)
    assert outcome["error"] == error


# The flight recorder


def _dump(group: str, number: int, *, state: str = "scheduled", ranks: str | None = None) -> dict[str, Any]:
    """A dump in which collectives 1 to `number` of one group stand, the last one in `state`."""
    entries = [
        {
            "process_group": (group, "default_pg"),
            "collective_seq_id": one,
            "profiling_name": "nccl:all_gather",
            "state": state if one == number else "completed",
            "retired": False,
            "is_p2p": False,
        }
        for one in range(1, number + 1)
    ]
    config = {} if ranks is None else {group: {"name": group, "desc": "default_pg", "ranks": ranks}}
    return {"version": "2.10", "entries": entries, "pg_config": config}


def test_the_ranks_that_missed_a_collective_are_told_from_those_that_wait() -> None:
    dumps = {rank: _dump("0", 6 if rank == 2 else 7, ranks="[0, 1, 2, 3]") for rank in range(4)}
    assert missed_collectives("nccl", dumps) == [
        Missed("nccl", "0 (default_pg)", "all_gather", 7, (0, 1, 3), (2,))
    ]
    assert str(missed_collectives("nccl", dumps)[0]) == (
        "rank 2 never started all_gather (number 7 of nccl group 0 (default_pg)), in which ranks 0, 1, 3 wait"
    )


def test_a_rank_that_never_used_its_group_missed_its_first_collective() -> None:
    dumps = {0: _dump("5", 1, ranks="[0, 1]"), 1: _dump("9", 0), 2: _dump("9", 0)}
    (missed,) = missed_collectives("nccl", dumps)
    assert (missed.waiting, missed.missing) == ((0,), (1,))  # rank 2 is no member


def test_finished_collectives_are_no_hang() -> None:
    dumps = {0: _dump("0", 7, state="completed"), 1: _dump("0", 6, state="completed")}
    assert missed_collectives("nccl", dumps) == []


def test_dumps_that_torch_left_on_a_node_are_brought_to_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(variable, "")
    storage, work = LocalStorage(tmp_path / "run"), tmp_path / "work"
    Recorder(storage, work, "000-abc", rank=3)
    Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "3").write_bytes(pickle.dumps(_dump("0", 2), protocol=2))
    assert upload_left_behind(storage, work) == ["flight/000-abc/nccl-3"]
    assert upload_left_behind(storage, work) == []
    assert len(read_dumps(storage, "000-abc")["nccl"][3]["entries"]) == 2


def test_a_dump_with_code_in_it_is_refused_and_a_cut_one_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"holds no posix.system|holds no nt.system"):
        read_dump(pickle.dumps({"entries": [os.system]}))
    storage = LocalStorage(tmp_path)
    whole = pickle.dumps(_dump("0", 2), protocol=2)
    storage.write_bytes("flight/000-abc/nccl-0", whole)
    storage.write_bytes("flight/000-abc/nccl-1", whole[: len(whole) // 2])
    assert set(read_dumps(storage, "000-abc")["nccl"]) == {0}
    assert "flight/000-abc/nccl-1 cannot be read" in caplog.text
