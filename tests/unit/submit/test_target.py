from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.outputs import KubeAccess
from tests.unit.submit.fake_cluster import FakeCluster
from training.errors import UsageError
from training.submit.target import connect, load_target, parse_outputs


def test_outputs_are_read_from_a_file_in_both_shapes(fake: FakeCluster, tmp_path: Path) -> None:
    outputs = fake.outputs()
    path = tmp_path / "outputs.json"
    for text in (
        outputs.model_dump_json(),
        json.dumps({"training": outputs.model_dump(mode="json"), "other": 1}),
    ):
        path.write_text(text)
        assert load_target(outputs=path) == outputs


def test_outputs_are_read_from_pulumi(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    pulumi = fake.root / "bin/pulumi"
    pulumi.write_text(f'#!/bin/sh\necho "$@" > {fake.root}/asked\ncat {fake.root}/outputs.json\n')
    pulumi.chmod(0o755)
    (fake.root / "outputs.json").write_text(fake.outputs().model_dump_json())
    monkeypatch.setenv("PATH", f"{fake.root}/bin", prepend=":")
    assert load_target(stack="dev") == fake.outputs()
    assert (fake.root / "asked").read_text().split() == [
        *("stack", "output", "training", "--json", "--stack", "dev", "--non-interactive")
    ]


@pytest.mark.parametrize(
    ("said", "step"),
    [
        ("error: no stack named 'nope' found", "To make it: pulumi stack init nope"),
        (
            "error: PULUMI_ACCESS_TOKEN must be set for login during non-interactive CLI sessions",
            "pulumi login --local",
        ),
        (
            "error: current stack does not have output property 'training'",
            "has not been deployed: pulumi up --stack nope",
        ),
        ("error: something else", "something else"),
    ],
)
def test_pulumis_own_words_are_passed_on_with_the_next_step(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch, said: str, step: str
) -> None:
    pulumi = fake.root / "bin/pulumi"
    pulumi.write_text(f'#!/bin/sh\necho "{said}" >&2; exit 255\n')
    pulumi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.root}/bin", prepend=":")
    with pytest.raises(UsageError) as refused:
        load_target(stack="nope")
    assert said in str(refused.value)
    assert step in str(refused.value)


def test_without_pulumi_the_other_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="--outputs FILE"):
        load_target(stack="dev")


@pytest.mark.parametrize("given", [{}, {"stack": "dev", "outputs": Path("x")}])
def test_exactly_one_way_is_given(given: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="exactly one of --stack NAME and --outputs FILE"):
        load_target(**given)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[]", "no output 'training'"),
        ('{"schema_version": 9}', "schema version 9, this finetune reads 1"),
        (
            '{"training": {"schema_version": 1}}',
            "(?s)not the outputs of a stack.*cluster_name: Field required",
        ),
    ],
)
def test_other_files_are_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_outputs(text, "outputs.json")


def test_an_exec_kubeconfig_is_private_and_goes_away(fake: FakeCluster) -> None:
    access = KubeAccess(
        server="https://x", certificate_authority_data="Q0E=", exec_command=("sh", "-c", "token")
    )
    with connect(fake.outputs(kube=access)) as kubectl:
        path = Path(kubectl.command[kubectl.command.index("--kubeconfig") + 1])
        assert path.stat().st_mode & 0o077 == 0
        assert json.loads(path.read_text())["users"][0]["user"]["exec"]["command"] == "sh"
    assert not path.exists()


def test_an_absent_credential_command_is_named(fake: FakeCluster) -> None:
    access = KubeAccess(
        server="https://x", certificate_authority_data="Q0E=", exec_command=("no-aws", "token")
    )
    with pytest.raises(UsageError, match="no-aws: no such program"), connect(fake.outputs(kube=access)):
        pass


def test_an_absent_kubeconfig_is_named(fake: FakeCluster) -> None:
    access = KubeAccess(kubeconfig_path="/no/kubeconfig", context="rig")
    with pytest.raises(UsageError, match="/no/kubeconfig"), connect(fake.outputs(kube=access)):
        pass
