from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.submit.fake_cluster import FakeCluster, pod
from training.submit import commands, ending, submission
from training.submit.follow import Follower, Limits
from training.submit.session import Access

pytestmark = pytest.mark.slow  # each runs kubectl and Python as often as a real submit: 3 s (2026-12)

FAST = Limits(poll=0.05, resources=1.0)
SUMMARY = {"name": "tiny", "status": "succeeded", "steps": 4, "last_loss": 3.5, "restarts": 0}


@pytest.fixture
def access(fake: FakeCluster, tmp_path: Path) -> Access:
    path = tmp_path / "outputs.json"
    path.write_text(fake.outputs().model_dump_json())
    return Access(outputs=path, contact_seconds=60.0)


@pytest.fixture
def run_folder(fake: FakeCluster) -> Path:
    folder = fake.root / "storage/runs/tiny"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def when_submitted(fake: FakeCluster) -> Iterator[Callable[[Callable[[str], None]], None]]:
    """Does something with the id of the next job that is submitted."""
    threads: list[threading.Thread] = []

    def plan(action: Callable[[str], None]) -> None:
        before = set(fake.jobs)

        def wait() -> None:
            for _ in range(1200):
                new = set(fake.jobs) - before
                if new:
                    action(new.pop())
                    return
                time.sleep(0.05)

        threads.append(threading.Thread(target=wait))
        threads[-1].start()

    yield plan
    for thread in threads:
        thread.join()


def ends(fake: FakeCluster, folder: Path, status: str = "SUCCEEDED", **fields: Any) -> Callable[[str], None]:
    def end(name: str) -> None:
        (folder / "summary.json").write_text(json.dumps(SUMMARY | fields.pop("summary", {})))
        (folder / "report.html").write_text("<html></html>")
        fake.say(name, '@finetune {"event": "progress", "step": 4, "steps": 4, "loss": 3.5}')
        fake.say(name, '@finetune {"event": "end", "status": "x"}')
        fake.end(name, status, **({"driver_exit_code": 0} | fields))

    return end


def submit(job_file: Path, access: Access, *overrides: str, **options: Any) -> int:
    options = {"yes": True, "as_json": True, "limits": FAST, "folder": job_file.parent} | options
    return commands.submit(job_file, access, overrides=overrides, **options)


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


def test_a_job_that_succeeds(
    fake: FakeCluster, access: Access, job_file: Path, run_folder: Path, when_submitted: Any, capsys: Any
) -> None:
    when_submitted(ends(fake, run_folder))
    assert submit(job_file, access) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (document["last_loss"], document["exit_status"], document["ray_status"]) == (3.5, 0, "SUCCEEDED")
    assert "512 tokens a step" in err
    assert "12.50 USD an hour" in err
    [job] = fake.jobs.values()
    assert job["submission_id"] == document["submission_id"]
    assert job["entrypoint"].startswith(
        f"python -m training.ray_entry --job job.yaml --run {run_folder} --num-workers 2"
    )
    assert (job_file.parent / "runs" / job["submission_id"] / "report.html").read_text() == "<html></html>"
    resolved = (Path(job["working_dir"]) / "job.yaml").read_text()
    assert str(run_folder) in resolved

    # The same submit again is the same job; nothing is queued.
    assert submit(job_file, access) == 0
    assert answer(capsys)["submission_id"] == job["submission_id"]
    assert len(fake.jobs) == 1

    assert commands.status(access, as_json=True) == 0
    assert answer(capsys)["steps"] == 4
    assert commands.list_jobs(access, as_json=True) == 0
    assert [item["status"] for item in answer(capsys)["jobs"]] == ["succeeded"]


def test_a_job_under_way_is_followed_and_not_queued_again(
    fake: FakeCluster, access: Access, job_file: Path, run_folder: Path, capsys: Any
) -> None:
    assert submit(job_file, access, detach=True) == 0
    name = answer(capsys)["submission_id"]
    ends(fake, run_folder)(name)
    fake.jobs[name]["status"] = "RUNNING"
    threading.Timer(1.0, lambda: fake.end(name, "SUCCEEDED")).start()
    assert submit(job_file, access) == 0
    assert list(fake.jobs) == [name]


def test_a_job_that_failed_is_tried_again_under_its_next_id(
    fake: FakeCluster, access: Access, job_file: Path, run_folder: Path, when_submitted: Any, capsys: Any
) -> None:
    error = {"rank": 1, "host": "w1", "message": "row 7", "traceback": "Traceback\nValueError: row 7"}
    when_submitted(
        ends(fake, run_folder, "FAILED", driver_exit_code=10, summary={"status": "failed", "error": error})
    )
    assert submit(job_file, access) == 10
    out, err = capsys.readouterr()
    first = json.loads(out)
    assert first["failure"] == {"rank": 1, "host": "w1", "error": "Traceback\nValueError: row 7"}
    assert err.index("First failure: rank 1 on w1") < err.index("job failed: row 7")
    when_submitted(ends(fake, run_folder))
    assert submit(job_file, access) == 0
    assert answer(capsys)["submission_id"] == first["submission_id"] + "-2"


@pytest.mark.parametrize(("status", "code"), [("STOPPED", None), ("FAILED", 11)])
def test_a_stopped_job_is_11(
    fake: FakeCluster,
    access: Access,
    job_file: Path,
    run_folder: Path,
    when_submitted: Any,
    status: str,
    code: int | None,
) -> None:
    when_submitted(ends(fake, run_folder, status, driver_exit_code=code))
    assert submit(job_file, access) == 11


def test_without_proof_of_efa_14_and_with_any_0(
    fake: FakeCluster, access: Access, job_file: Path, run_folder: Path, when_submitted: Any
) -> None:
    when_submitted(ends(fake, run_folder))
    assert submit(job_file, access, require_transport="efa") == 14
    when_submitted(ends(fake, run_folder))
    assert submit(job_file, access, require_transport="any") == 0


def test_lost_contact_is_15_and_says_how_to_look_again(
    fake: FakeCluster, access: Access, job_file: Path, run_folder: Path, when_submitted: Any, capsys: Any
) -> None:
    when_submitted(lambda _: (fake.root / "down").touch())
    assert submit(job_file, replace(access, contact_seconds=5.0)) == 15
    out, err = capsys.readouterr()
    assert json.loads(out)["status"] == "contact_lost"
    assert "finetune status tiny-" in err.replace("\n", " ")


def test_resources_that_never_come_are_12(
    fake: FakeCluster, access: Access, job_file: Path, capsys: Any
) -> None:
    fake.objects["pods"][2] = pod("worker-1", "worker", ready=False)
    fake.save()
    assert submit(job_file, access) == 12
    assert "worker-1: Pending" in answer(capsys)["reason"]
    assert fake.jobs == {}


def test_a_job_that_outlives_its_deadline_is_stopped_and_12(
    fake: FakeCluster, access: Access, job_file: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "STOP_GRACE_SECONDS", 0.1)
    assert submit(job_file, access, limits=Limits(poll=0.05, deadline=0.5)) == 12
    assert (run_folder / "control/stop").is_file()
    assert [job["status"] for job in fake.jobs.values()] == ["STOPPED"]


def test_ctrl_c_without_a_terminal_detaches(
    fake: FakeCluster, access: Access, job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def interrupted(_: Follower) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Follower, "follow", interrupted)
    assert submit(job_file, access) == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["status"] == "detached"
    assert f"finetune logs {json.loads(out)['submission_id']} --follow --outputs" in err.replace("\n", " ")
    assert [job["status"] for job in fake.jobs.values()] == ["RUNNING"]


def test_ctrl_c_can_stop_the_job(
    fake: FakeCluster, access: Access, job_file: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = Follower.follow
    interrupts = iter([True])

    def interrupted(self: Follower) -> Any:
        if next(interrupts, False):
            raise KeyboardInterrupt
        return follow(self)

    monkeypatch.setattr(Follower, "follow", interrupted)
    monkeypatch.setattr(submission.Submission, "_choice", lambda _: "stop")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(submission, "STOP_GRACE_SECONDS", 0.1)
    assert submit(job_file, access) == 11


def test_without_a_terminal_and_yes_nothing_is_submitted(
    fake: FakeCluster, access: Access, job_file: Path, run_folder: Path, capsys: Any
) -> None:
    assert submit(job_file, access, yes=False) == 2
    assert "--yes" in answer(capsys)["reason"]
    assert fake.jobs == {}


def test_another_job_that_holds_the_gpus_is_named(
    fake: FakeCluster, access: Access, job_file: Path, run_folder: Path, capsys: Any
) -> None:
    fake.jobs["other-1"] = {"submission_id": "other-1", "status": "RUNNING", "start_time": 1}
    assert submit(job_file, access) == 12
    assert "Job other-1 runs on this RayCluster" in answer(capsys)["reason"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.num_workers=9"], "stack dev has 8 GPUs (2 workers x 4)"),
        (["run.path=here"], "a relative folder would be one pod's own"),
        (["data.source=/no/data.jsonl"], "data.source /no/data.jsonl cannot be read from this pod"),
        (["runtime_env.env.HF_TOKEN=x"], "Kubernetes Secret"),
        (["stepz=4"], "unknown key stepz"),
        (
            ["runtime_env.pip=['absent @ file:///no/absent-1.0-py3-none-any.whl']"],
            "ERROR: Could not install packages",
        ),
    ],
)
def test_what_cannot_run_is_2_before_anything_is_queued(
    fake: FakeCluster,
    access: Access,
    job_file: Path,
    run_folder: Path,
    capsys: Any,
    overrides: list[str],
    words: str,
) -> None:
    assert submit(job_file, access, *overrides) == 2
    assert words in answer(capsys)["reason"]
    assert fake.jobs == {}


def test_workers_other_than_the_outputs_say_are_2(
    fake: FakeCluster, access: Access, job_file: Path, capsys: Any
) -> None:
    fake.objects["pods"][1] = pod("worker-0", "worker", gpus=1)
    fake.save()
    assert submit(job_file, access) == 2
    assert "worker-0 has 1 GPUs, the stack's outputs say 4" in answer(capsys)["reason"]


def test_another_ray_than_the_stack_says_is_2(
    fake: FakeCluster, access: Access, job_file: Path, run_folder: Path, capsys: Any
) -> None:
    assert access.outputs is not None
    access.outputs.write_text(fake.outputs(ray_version="2.11.0").model_dump_json())
    assert submit(job_file, access) == 2
    assert "the stack says 2.11.0" in answer(capsys)["reason"]


def test_efa_without_interfaces_is_2(fake: FakeCluster, access: Access, job_file: Path, capsys: Any) -> None:
    assert access.outputs is not None
    access.outputs.write_text(fake.outputs(efa_per_worker=0).model_dump_json())
    assert submit(job_file, access, require_transport="efa") == 2
    assert "have no EFA interface" in answer(capsys)["reason"]


def test_status_and_logs_of_a_running_job(
    fake: FakeCluster, access: Access, job_file: Path, run_folder: Path, capsys: Any
) -> None:
    assert submit(job_file, access, detach=True) == 0
    name = answer(capsys)["submission_id"]
    fake.say(
        name,
        "(TrainController pid=3) - (ip=10.0.0.2, pid=44) world_rank=1, local_rank=0, node_rank=1",
        "(RayTrainWorker pid=44, ip=10.0.0.2) from rank one",
        '(RayTrainWorker pid=44, ip=10.0.0.1) @finetune {"event": "progress", "step": 2, "steps": 4}',
    )
    assert commands.status(access, "tiny", as_json=True) == 130
    assert answer(capsys)["progress"]["step"] == 2
    assert commands.logs(access, name, rank=1) == 0
    assert capsys.readouterr().out == "from rank one\n"
    assert commands.logs(access, name, rank=7, as_json=True) == 2
    assert "the log tells of ranks 1" in answer(capsys)["reason"]
    assert commands.logs(access, name, first_failure=True) == 0
    assert capsys.readouterr().out == "no rank has failed\n"


def test_stop_waits_for_the_last_checkpoint_and_kills_what_does_not_end(
    fake: FakeCluster,
    access: Access,
    job_file: Path,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    assert submit(job_file, access, detach=True) == 0
    name = answer(capsys)["submission_id"]
    threading.Timer(2.0, lambda: fake.end(name, "FAILED", driver_exit_code=11)).start()
    assert commands.stop(access, "tiny", as_json=True) == 0
    assert answer(capsys)["status"] == "failed"
    assert (run_folder / "control/stop").is_file()
    fake.jobs[name]["status"] = "RUNNING"
    monkeypatch.setattr(commands, "STOP_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(ending, "KILL_SECONDS", 1.0)
    assert commands.stop(access, "tiny", as_json=True) == 0
    assert answer(capsys)["status"] == "stopped"


def test_a_job_lost_with_its_head_is_15_and_tells_of_its_checkpoints(
    fake: FakeCluster, access: Access, run_folder: Path, capsys: Any
) -> None:
    (run_folder / "checkpoints/step-00000004.000-a").mkdir(parents=True)
    (run_folder / "checkpoints/step-00000004.000-a/COMPLETE").touch()
    (run_folder / "metrics.jsonl").write_text('{"step": 5}\n')
    assert commands.status(access, "tiny-0123456789ab", as_json=True) == 15
    reason = answer(capsys)["reason"]
    assert "last step 5, newest complete checkpoint step-00000004.000-a" in reason
    assert commands.status(access, "never-was", as_json=True) == 2
    assert "Ray knows no job never-was" in answer(capsys)["reason"]
    assert commands.status(access, as_json=True) == 2
    assert "no jobs since its head started" in answer(capsys)["reason"]
