from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.submit.fake_cluster import FakeCluster
from training.errors import ContactLost, UsageError
from training.submit.bundle import Bundle
from training.submit.cluster import Cluster
from training.submit.job_client import JobClient

BUNDLE = Bundle({"job.yaml": b"name: tiny\n", "training/x.py": b"x = 1\n" * 5000})


def submit(client: JobClient, submission_id: str = "tiny-1") -> None:
    client.submit(
        submission_id,
        client.push(BUNDLE),
        ["python", "-m", "training.ray_entry"],
        {"env_vars": {}},
        {"name": "tiny"},
    )


def test_a_submitted_job_runs_from_the_bundle(client: JobClient, fake: FakeCluster) -> None:
    submit(client)
    job = fake.jobs["tiny-1"]
    assert job["entrypoint"] == "python -m training.ray_entry"
    assert (Path(job["working_dir"]) / "job.yaml").read_bytes() == b"name: tiny\n"
    assert job["metadata"] == {"name": "tiny"}


@pytest.mark.parametrize(
    ("fault", "call"),
    [
        ("refused", 0),
        ("half-sent", 1),
        ("half-answered", 2),
        ("no-status", 3),
        ("lost", 3),
        ("half-answered", 4),
    ],
)
def test_whatever_call_is_cut_the_job_is_queued_once(
    client: JobClient, fake: FakeCluster, fault: str, call: int
) -> None:
    fake.faults(*["none"] * call, fault)
    submit(client)
    assert list(fake.jobs) == ["tiny-1"]
    assert (Path(fake.jobs["tiny-1"]["working_dir"]) / "training/x.py").read_bytes() == BUNDLE.files[
        "training/x.py"
    ]


def test_the_same_id_twice_is_one_job(client: JobClient, fake: FakeCluster) -> None:
    submit(client)
    fake.jobs["tiny-1"]["mark"] = "first"
    submit(client)
    assert fake.jobs["tiny-1"]["mark"] == "first"


def test_what_ray_refuses_is_said(client: JobClient, fake: FakeCluster) -> None:
    (fake.root / "bin/ray").write_text(
        "#!/bin/sh\necho 'ValueError: entrypoint resources are invalid' >&2; exit 1\n"
    )
    with pytest.raises(UsageError, match=r"(?s)Ray refuses the job tiny-1.*entrypoint resources are invalid"):
        submit(client)


def test_success_of_ray_job_submit_alone_is_not_believed(client: JobClient, fake: FakeCluster) -> None:
    (fake.root / "bin/ray").write_text("#!/bin/sh\necho submitted\n")
    impatient = replace(client, cluster=replace(client.cluster, contact_seconds=1.0))
    with pytest.raises(ContactLost, match="Ray knows no job tiny-1"):
        submit(impatient)


def test_a_poll_brings_status_and_the_log_from_an_offset(client: JobClient, fake: FakeCluster) -> None:
    submit(client)
    fake.say("tiny-1", "one", "two")
    poll = client.poll("tiny-1", offset=4)
    assert poll.job is not None
    assert (poll.job.status, poll.log, poll.log_size) == ("RUNNING", b"two\n", 8)
    assert client.poll("tiny-1", offset=8).log == b""


def test_an_unknown_job_is_none(client: JobClient) -> None:
    assert client.find("nope") is None


def test_rays_token_is_taken_from_the_pods_environment(
    client: JobClient, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake.token = "s3cret"
    with pytest.raises(UsageError, match="RAY_AUTH_TOKEN"):
        client.jobs()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "s3cret")
    assert client.jobs() == []
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    (tmp_path / "token").write_text("s3cret\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert client.jobs() == []
    assert "s3cret" not in json.dumps(fake.calls())


def test_jobs_are_listed_oldest_first_and_drivers_without_submission_left_out(
    client: JobClient, fake: FakeCluster
) -> None:
    submit(client, "b-1")
    submit(client, "a-2")
    fake.jobs["driver"] = {"submission_id": None, "status": "RUNNING", "type": "DRIVER"}
    assert [job.submission_id for job in client.jobs()] == ["b-1", "a-2"]


def test_nodes_come_with_a_poll_where_asked_for(client: JobClient, fake: FakeCluster) -> None:
    submit(client)
    assert client.poll("tiny-1", 0).nodes == ()
    assert client.poll("tiny-1", 0, nodes=True).nodes[0]["gpus"][0]["utilizationGpu"] == 93


def test_the_head_is_looked_for_again_on_each_try(client: JobClient, fake: FakeCluster) -> None:
    submit(client)
    fake.replace_head()
    assert client.find("tiny-1") is None


def test_no_head_is_contact_lost(client: JobClient, fake: FakeCluster) -> None:
    fake.objects["pods"][0]["status"]["conditions"][0]["status"] = "False"
    fake.save()
    lost = JobClient(Cluster(fake.kubectl, fake.outputs(), contact_seconds=0.2))
    with pytest.raises(ContactLost, match=r"no ready head pod \(head-0: Running\)"):
        lost.find("tiny-1")
