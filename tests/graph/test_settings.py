# ruff: noqa: E501  tables are read by row
"""Every mistake in the settings is found before a resource exists, all at once, in words that help."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import string
from pathlib import Path
from typing import Any

import pulumi
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic.alias_generators import to_camel

from infra.fixed import changed_settings, deployed_outputs, fixed_settings
from infra.instances import INSTANCES
from infra.settings import (
    PROJECT,
    SettingsError,
    StackSettings,
    parse_settings,
    private_subnets,
    public_subnets,
    read_settings_file,
    undeployable,
)
from infra.versions import KUBERAY_VERSION, KUBERNETES_VERSIONS
from tests.graph import graphs
from tests.graph.graphs import LOCAL_FILE, MINIMAL

# key, other values, what the message must say: value, allowed, fix.
MISTAKES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("zones", {"zones": ["us-west-2a"]}, ['["us-west-2a"]', "two different zones", "Add a second zone"]),
    ("zones", {"zones": ["us-west-2a", "us-west-2a"]}, ["two different zones"]),
    ("zones", {"zones": ["us-east-1a", "us-east-1b"], "gpuZone": "us-east-1a"}, ["zones of region us-west-2"]),
    ("gpuZone", {"gpuZone": "us-west-2d"}, ['"us-west-2d"', "one of zones: us-west-2a, us-west-2b"]),
    ("vpcCidr", {"vpcCidr": "10.0.0.0/24"}, ['"10.0.0.0/24"', "from /16 to /20"]),
    ("vpcCidr", {"vpcCidr": "10.0.0.0/8"}, ["from /16 to /20"]),
    ("vpcCidr", {"vpcCidr": "10.0.0.1/16"}, ["host bits set"]),
    ("vpcCidr", {"vpcCidr": "10.0.0.0/20", "gpuCount": 16}, ["507 addresses", "need 1020"]),
    ("vpcCidr", {"vpcCidr": "172.20.0.0/16"}, ["no overlap with serviceCidr 172.20.0.0/16"]),
    ("vpcCidr", {"peeredCidrs": ["10.0.128.0/20"]}, ["no overlap with peeredCidrs 10.0.128.0/20"]),
    ("serviceCidr", {"serviceCidr": "8.8.0.0/16"}, ["a private network"]),
    ("gpuInstanceType", {"gpuInstanceType": "g6.12xlrge"}, ['"g6.12xlrge"', "one of g5.xlarge", "Did you mean g6.12xlarge?"]),
    ("gpuInstanceType", {"gpuInstanceType": "g6.xlarge"}, ["a type with EFA: g5.8xlarge", "requireEfa to false"]),
    ("systemInstanceType", {"systemInstanceType": "t3.nano"}, ["one of m7i.large", "Use m7i.xlarge"]),
    ("gpuCount", {"gpuCount": 0}, ["gpuCount = 0", "greater than or equal to 1"]),
    ("gpuCount", {"gpuCount": -2}, ["gpuCount = -2", "greater than or equal to 1"]),
    ("gpuCount", {"gpuCount": "two"}, ['"two"', "valid integer"]),
    ("reservationId", {"purchase": "spot", "reservationId": "cr-0123456789abcdef0"}, ["no reservation with purchase spot"]),
    ("reservationId", {"purchase": "capacity-block"}, ["the id of the capacity-block, cr-..., is needed"]),
    ("reservationId", {"purchase": "reservation"}, ["the id of the reservation"]),
    ("reservationId", {"purchase": "reservation", "reservationId": "r-1"}, ["an id such as cr-0123456789abcdef0"]),
    ("purchase", {"purchase": "cheap"}, ['"cheap"', "one of on-demand, reservation, capacity-block, spot"]),
    ("purchase", {"gpuInstanceType": "p5e.48xlarge"}, ["does not sell p5e.48xlarge on demand"]),
    ("headMemoryGib", {"headMemoryGib": 16}, ["headMemoryGib = 16", "m7i.xlarge leaves 12.6 GiB", "larger systemInstanceType"]),
    ("headCpu", {"headCpu": 4}, ["m7i.xlarge leaves 3.22 cores"]),
    ("headCpu", {"headCpu": 3, "autoscaling": True}, ["m7i.xlarge leaves 2.72 cores"]),
    (
        "kuberayVersion",
        {"kuberayVersion": "1.7.0"},
        [f"{KUBERAY_VERSION}, the release of the CRDs", "set kuberayCrds to a folder with those of 1.7.0"],
    ),
    ("workerMemoryGib", {"workerMemoryGib": 190}, ["g6.12xlarge leaves 164.3 GiB", "set it to 0"]),
    ("workerCpu", {"workerCpu": 48}, ["g6.12xlarge leaves 47.51 cores"]),
    ("workerScratchGib", {"workerScratchGib": 180}, ["130 GiB at most of a disk of 200 GiB", "raise gpuDiskGib"]),
    ("gpusPerWorker", {"gpusPerWorker": 8}, ["-1 on AWS"]),
    ("imageDigest", {"imageDigest": "sha256:abc"}, ['"sha256:abc"', "64 hexadecimal digits"]),
    ("kubernetesVersion", {"kubernetesVersion": "1.29"}, ['"1.29"', "one of 1.33, 1.34, 1.35", "Use 1.35"]),
    ("amiRelease", {"amiRelease": "1.34.2-20260714"}, ["a release of Kubernetes 1.35"]),
    ("expires", {"expires": "2020-01-01T00:00:00+00:00"}, ["2020-01-01", "still to come", "finetune extend"]),
    ("expires", {"expires": "2100-01-01T00:00:00"}, ["a time with its offset"]),
    ("expires", {"expires": "tomorrow"}, ['"tomorrow"']),
    ("publicCidrs", {"publicCidrs": ["0.0.0.0/0"]}, ["no 0.0.0.0/0 without an explicit yes", "allowAnyAddress"]),
    ("publicCidrs", {"publicCidrs": []}, ["at least one network", "ADDRESS/32"]),
    ("publicCidrs", {"publicEndpoint": False}, ["empty while publicEndpoint is false"]),
    ("clusterName", {"clusterName": "a" * 44}, ["43 characters at most", "limited to 64", "shorter clusterName"]),
    ("clusterName", {"clusterName": "My_Cluster"}, ["lower-case letters"]),
    ("rayCluster", {"rayCluster": "r" * 54}, ["53 characters at most (KubeRay)"]),
    ("owner", {"owner": ""}, ["Say who answers for the bill"]),
    ("admins", {"admins": ["admin"]}, ["the ARN of an IAM role or user"]),
    ("gpuMinCount", {"gpuMinCount": 1}, ["0 without autoscaling"]),
    ("gpuMinCount", {"gpuMinCount": 3, "autoscaling": True}, ["gpuCount (2) at most"]),
    ("autoscaling", {"autoscaling": True, "purchase": "capacity-block", "reservationId": "cr-0123456789abcdef0"}, ["no autoscaling with a capacity block"]),
    ("fsxCapacityGib", {"fsx": True, "fsxCapacityGib": 1300}, ["1200 or a multiple of 2400"]),
    ("budgetEmails", {"budgetMonthlyUsd": 100}, ["a limit and at least one address"]),
    ("budgetEmails", {"budgetMonthlyUsd": 100, "budgetEmails": ["me"]}, ["e-mail addresses"]),
    ("logRetentionDays", {"logRetentionDays": 31}, ["one of 1, 3, 5"]),
    ("kubeconfig", {"kubeconfig": "~/.kube/config"}, ["empty with target aws"]),
    ("gpuInstanceTyp", {"gpuInstanceTyp": "g6.12xlarge"}, ["not a setting", "Did you mean gpuInstanceType?"]),
    ("zones", {"zones": "us-west-2a"}, ["a list such as"]),
    ("zones", {"zones": ""}, ["two different zones"]),
    ("jobSecrets", {"jobSecrets": ["WANDB_API_KEY"]}, ["VARIABLE=SECRET"]),
    ("jobSecrets", {"jobSecrets": ["WANDB_API_KEY=abcdefab" + "0123456789abcdef" * 2]}, ["the name of a Kubernetes Secret and not its content"]),
    ("jobSecrets", {"jobSecrets": ["1A=trackers"]}, ["the environment variable"]),
    ("jobSecrets", {"jobSecrets": ["A=one", "A=two"]}, ["each variable once"]),
    ("jobSecrets", {"jobSecrets": ["HF_TOKEN=other"], "hubSecret": "hub"}, ["hubSecret sets it already"]),
    ("workerCpu", {"workerCpu": 0.01}, ["0, or 0.1 at least"]),
    ("headCpu", {"headCpu": 1e300}, ["less than or equal to 1024"]),
]  # fmt: skip


def problems(**values: Any) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        parse_settings({**MINIMAL, **values}, "test")
    return caught.value


@pytest.mark.parametrize(
    ("key", "values", "words"), MISTAKES, ids=[f"{m[0]}-{i}" for i, m in enumerate(MISTAKES)]
)
def test_a_mistake_is_named(key: str, values: dict[str, Any], words: list[str]) -> None:
    error = problems(**values)
    lines = [line for line in str(error).splitlines() if line.startswith(f"  - {key} = ")]
    assert lines, str(error)
    assert all(any(word in line for line in lines) for word in words), str(error)
    if key != "gpuInstanceTyp":
        assert re.search(rf"pulumi config set (--path ')?{key}.* VALUE --stack test", lines[0])


def test_all_mistakes_come_at_once() -> None:
    error = problems(
        zones=["us-west-2a"], gpuCount=0, imageDigest="x", kubernetesVersion="1.1", headMemoryGib=99, owner=""
    )
    assert {p.key for p in error.problems} == {
        "zones",
        "gpuCount",
        "imageDigest",
        "kubernetesVersion",
        "headMemoryGib",
        "owner",
    }
    assert str(error).startswith("6 mistake(s) in the settings of stack test")


def test_a_mistake_in_a_file_is_found_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "Pulumi.mine.yaml"
    path.write_text(
        "config:\n"
        "  efa-finetune:owner: me\n"
        '  efa-finetune:publicCidrs: ["198.51.100.7/32"]\n'
        "  # too few\n"
        "  efa-finetune:gpuCount: 0\n"
        "  efa-finetune:kubernetesVersion: 1.2\n"
    )
    with pytest.raises(SettingsError) as caught:
        read_settings_file(path)
    assert f"({path}:5)" in str(caught.value)
    assert f"({path}:6)" in str(caught.value)
    assert "stack mine" in str(caught.value)


@pytest.mark.parametrize("text", ["", "config:\n", "[1, 2]", "a: ["])
def test_a_file_that_is_no_stack_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "Pulumi.mine.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"Pulumi\.mine\.yaml"):
        read_settings_file(path)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_settings_file(tmp_path / "Pulumi.none.yaml")


def test_construction_in_python_is_checked_as_well() -> None:
    with pytest.raises(SettingsError, match="gpuZone"):
        StackSettings(stack="test", owner="me", public_cidrs=("198.51.100.7/32",), gpu_zone="us-west-2z")


LOCAL = {
    key.removeprefix(f"{PROJECT}:"): value
    for key, value in yaml.safe_load(LOCAL_FILE.read_text())["config"].items()
}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kubeconfig": ""}, "a kubeconfig is needed"),
        ({"storageUri": "bucket"}, "s3://bucket"),
        ({"storageEndpointUrl": "10.0.0.5:9000"}, "an http or https URL"),
        ({"fsx": True}, "only with target aws"),
        ({"requireEfa": True}, "while EFA is required"),
        ({"expires": "2100-01-01T00:00:00+00:00"}, "only with target aws"),
    ],
)
def test_mistakes_of_an_existing_cluster(values: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings({**LOCAL, **values}, "local")
    assert words in str(caught.value)


def test_the_sizes_of_a_local_cluster_are_free() -> None:
    settings = parse_settings({**LOCAL, "headCpu": "0.5", "headMemoryGib": "3", "gpusPerWorker": 4}, "local")
    assert settings.head_cpu_millis == 500
    assert settings.gpus == 4
    assert settings.required_transport == "any"


def test_texts_of_pulumi_and_values_of_yaml_are_the_same() -> None:
    as_yaml = {"gpuCount": 3, "natPerZone": True, "zones": ["us-west-2a", "us-west-2b"], "headCpu": 1.5}
    as_text = {
        "gpuCount": "3",
        "natPerZone": "true",
        "zones": '["us-west-2a", "us-west-2b"]',
        "headCpu": "1.5",
    }
    assert graphs.settings(**as_yaml) == graphs.settings(**as_text)
    assert graphs.settings(expires="", imageDigest="") == graphs.settings()


def test_the_example_file_is_refused_by_an_update_only() -> None:
    account, address = undeployable(graphs.dev_settings())
    assert account.key == "accountId"
    assert "aws sts get-caller-identity" in account.fix
    assert address.key == "publicCidrs"
    assert "ADDRESS/32" in address.fix
    assert undeployable(graphs.settings(publicCidrs=["52.1.2.3/32"], accountId="123456789012")) == []


def test_what_holds_for_the_life_of_a_stack() -> None:
    deployed = fixed_settings(graphs.settings(vpcCidr="10.0.0.0/16", secretsEncryption=False))
    wanted = fixed_settings(
        graphs.settings(vpcCidr="10.8.0.0/16", secretsEncryption=True, accountId="123456789012")
    )
    assert changed_settings(deployed, wanted) == [
        "vpcCidr: this stack was deployed with 10.0.0.0/16, and the settings now say 10.8.0.0/16"
    ]
    assert changed_settings(wanted, deployed)[1:] == [
        "vpcCidr: this stack was deployed with 10.8.0.0/16, and the settings now say 10.0.0.0/16",
        "secretsEncryption: this stack was deployed with true, and the settings now say false",
    ]
    assert changed_settings({}, wanted) == []


BEING_WRITTEN = "invoke of pulumi:pulumi:readStackOutputs failed: failed to load checkpoint: EOF"


@pytest.mark.parametrize(
    ("failures", "found"),
    [
        ([BEING_WRITTEN] * 3, {"fixed_settings": {"vpcCidr": "10.0.0.0/16"}}),
        ([BEING_WRITTEN] * 9, BEING_WRITTEN),
        (["no stack named 'o/p/s' found"], "no stack named 'o/p/s' found"),
    ],
)
def test_a_state_that_is_being_written_is_read_again(
    monkeypatch: pytest.MonkeyPatch, failures: list[str], found: dict[str, Any] | str
) -> None:
    left = list(failures)

    async def invoke(token: str, arguments: dict[str, str]) -> dict[str, Any]:
        assert (token, arguments) == ("pulumi:pulumi:readStackOutputs", {"name": "o/p/s"})
        if left:
            raise Exception(left.pop())  # what Pulumi raises
        return {"outputs": found}

    monkeypatch.setattr(pulumi.runtime, "invoke_async", invoke)
    if isinstance(found, str):
        with pytest.raises(Exception, match=re.escape(found)):
            asyncio.run(deployed_outputs("o/p/s"))
    else:
        assert asyncio.run(deployed_outputs("o/p/s")) == found


@pytest.mark.parametrize(
    ("deployed", "wanted", "step"),
    [
        ("1.33", "1.35", "set 1.34, run pulumi up, then the next"),
        ("1.35", "1.34", "leave it"),
        ("1.34", "1.33", "set 1.35, run pulumi up, then the next"),
    ],
)
def test_kubernetes_goes_up_by_one_minor_version(deployed: str, wanted: str, step: str) -> None:
    def fixed(version: str) -> dict[str, Any]:
        return fixed_settings(graphs.settings(kubernetesVersion=version))

    (refused,) = changed_settings(fixed(deployed), fixed(wanted))
    assert refused == (
        f"kubernetesVersion: this stack was deployed with {deployed}, and the settings now say {wanted}. "
        f"EKS goes up by one minor version at a time and never back: {step}"
    )
    assert changed_settings(fixed("1.34"), fixed("1.35")) == []
    assert changed_settings(fixed("1.33"), fixed("1.34")) == []


@pytest.mark.parametrize(
    ("tag", "digest", "warned"),
    [
        ("train-ml-cuda-v1.1.0", "", False),
        ("train-ml-cuda-v1.1", "", True),
        ("train-ml-cuda-v1", "", True),
        ("train-ml-cuda", "", True),
        ("latest", "", True),
        ("train-ml-cuda-v1.1", "sha256:" + "0" * 64, False),
    ],
)
def test_a_tag_that_moves_is_warned_of(tag: str, digest: str, warned: bool) -> None:
    settings = graphs.settings(imageTag=tag, imageDigest=digest)
    assert any("imageTag" in warning for warning in settings.warnings) == warned


def test_a_digest_wins_and_the_tag_stays_readable() -> None:
    digest = "sha256:" + "a" * 64
    reference = graphs.settings(imageDigest=digest).image_reference
    assert reference == f"public.ecr.aws/deep-learning-containers/ray:train-ml-cuda-v1.1.0@{digest}"


cidrs = st.builds(
    lambda second, third, prefix: str(
        ipaddress.IPv4Network((f"10.{second}.{third}.0", prefix), strict=False)
    ),
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(8, 28),
)


@given(cidr=cidrs, count=st.integers(1, 256), zones=st.integers(2, 6))
def test_subnets_are_inside_of_the_vpc_and_apart(cidr: str, count: int, zones: int) -> None:
    names = [f"us-west-2{letter}" for letter in string.ascii_lowercase[:zones]]
    try:
        settings = graphs.settings(vpcCidr=cidr, gpuCount=count, zones=names)
    except SettingsError:
        prefix = ipaddress.IPv4Network(cidr).prefixlen
        too_small = 2 ** (32 - prefix - 3) - 5 < (count + 1) * 60
        assert prefix < 16 or prefix > 20 or too_small, f"{cidr} should hold {count} nodes"
        return
    subnets = private_subnets(settings) + public_subnets(settings)
    assert len(subnets) == 2 * zones
    vpc = ipaddress.IPv4Network(cidr)
    assert all(subnet.subnet_of(vpc) for subnet in subnets)
    assert not any(a.overlaps(b) for i, a in enumerate(subnets) for b in subnets[:i])
    assert all(16 <= subnet.prefixlen <= 28 for subnet in subnets), "what AWS takes"
    assert private_subnets(settings)[0].num_addresses > (count + 1) * 60


KEYS = [to_camel(name) for name in StackSettings.model_fields if name != "stack"]
anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text()), st.dictionaries(st.text(), st.text())
)  # fmt: skip


@given(values=st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text()), anything, max_size=6))
def test_whatever_the_file_says_the_answer_is_settings_or_all_mistakes(values: dict[str, Any]) -> None:
    try:
        settings = parse_settings({**MINIMAL, **values}, "test")
    except SettingsError as error:
        mistakes = error.problems
    else:
        assert settings.worker_cpu_millis > 0
        return
    assert mistakes
    assert all(problem.allowed and problem.fix for problem in mistakes)


@given(
    instance=st.sampled_from(sorted(INSTANCES)),
    purchase=st.sampled_from(["on-demand", "reservation", "capacity-block", "spot"]),
    reservation=st.sampled_from(["", "cr-0123456789abcdef0"]),
    require_efa=st.booleans(),
    autoscaling=st.booleans(),
)
def test_what_is_accepted_is_possible(
    instance: str, purchase: str, reservation: str, require_efa: bool, autoscaling: bool
) -> None:
    try:
        settings = graphs.settings(
            gpuInstanceType=instance,
            purchase=purchase,
            reservationId=reservation,
            requireEfa=require_efa,
            autoscaling=autoscaling,
        )
    except SettingsError:
        return
    assert settings.efa or not require_efa
    assert bool(settings.reservation_id) == (purchase in ("reservation", "capacity-block"))
    assert not (autoscaling and purchase == "capacity-block")
    assert settings.worker_memory_mib < settings.instance.allocatable_memory_mib


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_offered_version_has_pinned_addons(version: str) -> None:
    assert graphs.settings(kubernetesVersion=version).kubernetes_version == version
