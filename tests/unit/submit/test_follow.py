from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
from rich.console import Console

from tests.unit.submit.fake_cluster import FakeCluster, pod
from training.errors import ContactLost, DeadlinePassed
from training.submit.follow import (
    Follower,
    Limits,
    ResourcesNeverCame,
    TerminalView,
    wait_until_ready,
)
from training.submit.job_client import JobClient
from training.submit.log_lines import Line


class Time:
    """A clock that moves when somebody sleeps, and calls what was planned for a moment."""

    def __init__(self) -> None:
        self.now = 0.0
        self.plan: list[tuple[float, Callable[[], None]]] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [item for item in self.plan if item[0] <= self.now]
        self.plan = [item for item in self.plan if item[0] > self.now]
        for _, action in due:
            action()


class View:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.statuses: list[str] = []
        self.nodes_seen = 0

    def line(self, line: Line) -> None:
        self.lines.append(line.text)

    def status(self, status: str) -> None:
        self.statuses.append(status)

    def nodes(self, nodes: object) -> None:
        self.nodes_seen += 1


def event(**fields: object) -> str:
    return "@finetune " + json.dumps(fields)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def running(fake: FakeCluster) -> FakeCluster:
    fake.jobs["tiny-1"] = {"submission_id": "tiny-1", "status": "RUNNING", "start_time": 1, "metadata": {}}
    return fake


def follower(client: JobClient, view: View, time: Time, **limits: float) -> Follower:
    return Follower(client, "tiny-1", view, Limits(**limits), clock=lambda: time.now, sleep=time.sleep)


@pytest.mark.parametrize("faults", [(), ("lost", "half-answered"), ("none", "no-status", "refused", "lost")])
def test_every_line_comes_once_whatever_is_cut(
    client: JobClient, running: FakeCluster, time: Time, faults: tuple[str, ...]
) -> None:
    view = View()
    running.say("tiny-1", "one", "two")
    time.plan = [
        (3.0, lambda: running.say("tiny-1", "thr", end="")),
        (6.0, lambda: running.say("tiny-1", "ee", "four")),
        (9.0, lambda: running.end("tiny-1", "SUCCEEDED", driver_exit_code=0)),
    ]
    running.faults(*faults)
    ending = follower(client, view, time).follow()
    assert ending.job.status == "SUCCEEDED"
    assert view.lines == ["one", "two", "three", "four"]


def test_the_log_is_read_to_its_end_though_the_job_has_ended(
    client: JobClient, running: FakeCluster, time: Time
) -> None:
    view = View()
    running.say("tiny-1", *(f"line {i} {'x' * 400}" for i in range(1500)), "last without line end")
    running.end("tiny-1", "FAILED")
    assert follower(client, view, time).follow().job.status == "FAILED"
    assert len(view.lines) == 1501


def test_a_replaced_head_is_contact_lost_and_says_what_to_do(
    client: JobClient, running: FakeCluster, time: Time
) -> None:
    time.plan = [(3.0, running.replace_head)]
    with pytest.raises(ContactLost, match=r"(?s)head was replaced.*same `finetune submit` again"):
        follower(client, View(), time).follow()


def test_a_deadline_of_the_whole_job(client: JobClient, running: FakeCluster, time: Time) -> None:
    with pytest.raises(DeadlinePassed, match="within --deadline 10 s"):
        follower(client, View(), time, deadline=10.0).follow()


def test_pods_that_stay_away_while_nothing_moves_end_it(
    client: JobClient, running: FakeCluster, time: Time
) -> None:
    running.objects["pods"][2] = pod("worker-1", "worker", ready=False)
    running.save()
    with pytest.raises(ResourcesNeverCame, match=r"(?s)did not come within 60 s.*worker-1: Pending"):
        follower(client, View(), time, resources=60.0, poll=15.0).follow()
    assert 60.0 < time.now < 120.0


def test_a_job_that_moves_without_a_pod_goes_on(client: JobClient, running: FakeCluster, time: Time) -> None:
    running.objects["pods"][2] = pod("worker-1", "worker", ready=False)
    running.save()
    for moment in range(15, 150, 15):
        time.plan.append((moment, lambda: running.say("tiny-1", event(event="progress", step=1, steps=9))))
    time.plan.append((150, lambda: running.end("tiny-1", "SUCCEEDED")))
    assert follower(client, View(), time, resources=60.0, poll=15.0).follow().job.status == "SUCCEEDED"


def test_a_raycluster_deleted_under_the_job_is_contact_lost(
    client: JobClient, running: FakeCluster, time: Time
) -> None:
    running.objects["rayclusters.ray.io"] = []
    running.save()
    with pytest.raises(ContactLost, match="no RayCluster"):
        follower(client, View(), time).follow()


def test_waiting_for_the_cluster_tells_and_ends_with_the_diagnosis(
    client: JobClient, fake: FakeCluster, time: Time
) -> None:
    ready = fake.objects["pods"][2]
    fake.objects["pods"][2] = pod("worker-1", "worker", ready=False)
    fake.save()
    told: list[str] = []

    def come() -> None:
        fake.objects["pods"][2] = ready
        fake.save()

    time.plan = [(9.0, come)]
    state = wait_until_ready(
        client.cluster, 60.0, lambda s: told.append(s.summary()), lambda: time.now, time.sleep
    )
    assert state.ready
    assert told == ["head ready, 1 of 2 workers ready"] * 3
    fake.objects["pods"][2] = pod("worker-1", "worker", ready=False)
    fake.save()
    with pytest.raises(ResourcesNeverCame, match="worker-1"):
        wait_until_ready(client.cluster, 10.0, lambda _: None, lambda: time.now, time.sleep)


def show(*lines: Line, show_log: bool = False) -> str:
    text = io.StringIO()
    with TerminalView(Console(file=text, width=120), show_log) as view:
        for line in lines:
            view.line(line)
        view.status("RUNNING")
        gpu = {"utilizationGpu": 93, "memoryUsed": 20480, "memoryTotal": 23034}
        view.nodes([{"host": "w0", "memory": [10, 5, 50.0, 5], "gpus": [gpu]}])
    return text.getvalue()


def test_events_are_told_in_words_and_the_log_only_on_request() -> None:
    events = [
        Line(
            "", event={"event": "attempt", "world_size": 2, "nodes": 2, "steps": 9, "resumed_from": "step-4"}
        ),
        Line(
            "",
            event={"event": "progress", "step": 5, "steps": 9, "loss": 2.3144, "tokens_per_second": 1234.5},
        ),
        Line("", event={"event": "failure", "rank": 1, "host": "w1", "error": "ValueError: row 7 is empty"}),
        Line("noise", pid=3, actor="RayTrainWorker"),
    ]
    text = show(*events)
    assert "resumes from checkpoint step-4: 2 ranks on 2 nodes" in text
    assert "step 5/9" in text
    assert "rank 1 on w1 failed: ValueError: row 7" in text
    assert "job running" in text
    assert "w0: GPU 93 % 20.0/22 GiB · memory 50.0 %" in text
    assert "noise" not in text
    assert "noise" in show(*events, show_log=True)
