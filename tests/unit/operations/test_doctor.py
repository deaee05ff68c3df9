"""Each thing that doctor looks at: well, broken, and out of reach; every line that is not ok names a command."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError, NoCredentialsError

from infra.crds import packaged_crds
from infra.outputs import KubeAccess, StackOutputs
from infra.settings import StackSettings
from infra.versions import KUBERAY_VERSION
from operations import doctor as doctor_module
from operations.checks import Check, Report, ok, run_checks, warn
from operations.doctor import PULUMI, Doctor, Tool, check_hub, check_tool
from operations.doctor_aws import check_aws
from operations.doctor_cluster import _check, check_storage, fields_of
from operations.quotas import QUOTAS, quota_of
from tests.unit.operations.fake_aws import AwsError, FakeAws, quota
from training.errors import UsageError
from training.submit.kubectl import MissingError, UnreachableError

G_QUOTA, STANDARD_QUOTA, G_SPOT_QUOTA = "L-DB2E81BA", "L-1216C47A", "L-3819A6DF"
ENOUGH = {G_QUOTA: 96.0, STANDARD_QUOTA: 32.0, G_SPOT_QUOTA: 96.0}


def by_name(checks: list[Check]) -> dict[str, Check]:
    found = {check.name: check for check in checks}
    assert len(found) == len(checks), "two checks have one name"
    return found


def assert_all_have_a_fix(checks: list[Check]) -> None:
    for check in checks:
        assert check.status == "ok" or check.fix, check


def aws_checks(aws: FakeAws, settings: StackSettings, **change: Any) -> dict[str, Check]:
    if "GetServiceQuota" not in aws.answers:
        aws.answer("GetServiceQuota", quota(ENOUGH))
    if "ListNodegroups" not in aws.answers:
        aws.answer("ListNodegroups", AwsError("ResourceNotFoundException"))
    checks = check_aws(aws.session(), settings.model_copy(update=change))
    assert_all_have_a_fix(checks)
    return by_name(checks)


class TestAws:
    def test_all_well(self, aws: FakeAws, settings: StackSettings) -> None:
        found = aws_checks(aws, settings, account_id="123456789012")

        assert {check.status for check in found.values()} == {"ok"}
        assert found["instance type"].detail == "g6.12xlarge: 48 vCPUs, 4 GPUs, 1 EFA interfaces"
        assert (
            "96 needed for 2 x g6.12xlarge in us-west-2"
            in found["quota Running On-Demand G and VT instances"].detail
        )
        assert found["zones"].detail.startswith("us-west-2a (usw2-az")

    def test_no_credentials_ask_nothing_else(self, aws: FakeAws, settings: StackSettings) -> None:
        aws.answer("GetCallerIdentity", NoCredentialsError())

        found = aws_checks(aws, settings)

        assert list(found) == ["credentials"]
        assert found["credentials"].status == "fail"
        assert found["credentials"].fix.startswith("aws sso login")

    def test_expired_credentials(self, aws: FakeAws, settings: StackSettings) -> None:
        aws.answer("GetCallerIdentity", AwsError("ExpiredToken"))

        found = aws_checks(aws, settings)

        assert found["credentials"].detail == "AWS refuses them: ExpiredToken"

    def test_foreign_account(self, aws: FakeAws, settings: StackSettings) -> None:
        found = aws_checks(aws, settings, account_id="999999999999")

        assert found["account"].status == "fail"
        assert "123456789012" in found["account"].detail
        assert "999999999999" in found["account"].detail
        assert list(found) == ["credentials", "account"]

    def test_unbound_account_is_a_warning(self, aws: FakeAws, settings: StackSettings) -> None:
        found = aws_checks(aws, settings)

        assert found["account"].status == "warn"
        assert found["account"].fix == "pulumi config set accountId 123456789012 --stack dev"

    def test_quota_too_small(self, aws: FakeAws, settings: StackSettings) -> None:
        aws.answer("GetServiceQuota", quota({**ENOUGH, G_QUOTA: 64.0}))

        check = aws_checks(aws, settings)["quota Running On-Demand G and VT instances"]

        assert check.status == "fail"
        assert "64 vCPUs, 0 used by others, 96 needed" in check.detail
        assert "32 too few" in check.detail
        assert "--quota-code L-DB2E81BA --desired-value 96 --region us-west-2" in check.fix

    def test_quota_never_raised_is_the_default_of_aws(self, aws: FakeAws, settings: StackSettings) -> None:
        aws.answer("GetServiceQuota", quota({STANDARD_QUOTA: 5.0}))
        aws.answer("GetAWSDefaultServiceQuota", {"Quota": {"QuotaCode": G_QUOTA, "Value": 0.0}})

        check = aws_checks(aws, settings)["quota Running On-Demand G and VT instances"]

        assert check.status == "fail"
        assert check.detail.startswith("0 vCPUs")

    def test_instances_of_others_use_the_quota_and_our_own_do_not(
        self, aws: FakeAws, settings: StackSettings
    ) -> None:
        ours = {"project": "efa-finetune", "stack": "dev"}
        aws.answer("GetServiceQuota", quota({**ENOUGH, G_QUOTA: 100.0}))
        aws.answer(
            "DescribeInstances",
            {
                "Reservations": [
                    {
                        "Instances": [
                            instance("g6.12xlarge", ours),
                            instance("g5.xlarge", {"project": "other"}),
                            instance("g6.xlarge", {}, lifecycle="spot"),
                            instance("m7i.xlarge", {}),
                        ]
                    }
                ]
            },
        )

        check = aws_checks(aws, settings)["quota Running On-Demand G and VT instances"]

        assert "100 vCPUs, 4 used by others, 96 needed" in check.detail
        assert check.status == "ok"

    def test_spot_counts_against_the_spot_quota(self, aws: FakeAws, settings: StackSettings) -> None:
        found = aws_checks(aws, settings, purchase="spot")

        assert "quota All G and VT Spot Instance Requests" in found
        assert "quota Running On-Demand G and VT instances" not in found

    def test_capacity_block_needs_no_quota(self, aws: FakeAws, settings: StackSettings) -> None:
        aws.answer(
            "DescribeCapacityReservations",
            {"CapacityReservations": [reservation(ReservationType="capacity-block")]},
        )

        found = aws_checks(aws, settings, purchase="capacity-block", reservation_id="cr-0123456789abcdef0")

        assert found["quota of the GPU nodes"].status == "ok"
        assert found["reservation"].status == "ok"

    def test_type_is_not_offered_in_the_zone(self, aws: FakeAws, settings: StackSettings) -> None:
        # moto's us-west-2 offers g5.12xlarge in a, b and c only.
        check = aws_checks(
            aws,
            settings,
            gpu_instance_type="g5.12xlarge",
            gpu_zone="us-west-2d",
            zones=("us-west-2b", "us-west-2d"),
        )["zone offering"]

        assert check.status == "fail"
        assert check.detail == (
            "g5.12xlarge is not offered in us-west-2d: offered in us-west-2a, us-west-2b, us-west-2c"
        )
        assert check.fix == "pulumi config set gpuZone us-west-2b --stack dev"

    def test_zone_without_eks(self, aws: FakeAws, settings: StackSettings) -> None:
        aws.answer(
            "DescribeAvailabilityZones",
            {
                "AvailabilityZones": [
                    {"ZoneName": "us-west-2a", "ZoneId": "use1-az3", "State": "available"},
                    {"ZoneName": "us-west-2b", "ZoneId": "usw2-az1", "State": "available"},
                ]
            },
        )

        check = aws_checks(aws, settings)["zones"]

        assert check.status == "fail"
        assert check.detail.startswith("us-west-2a: not a zone of us-west-2 that EKS can use")

    def test_catalog_that_promises_too_much(self, aws: FakeAws, settings: StackSettings) -> None:
        aws.answer(
            "DescribeInstanceTypes",
            {
                "InstanceTypes": [
                    {
                        "InstanceType": "g6.12xlarge",
                        "VCpuInfo": {"DefaultVCpus": 48},
                        "GpuInfo": {"Gpus": [{"Count": 4}]},
                        "NetworkInfo": {"EfaSupported": False},
                    }
                ]
            },
        )

        check = aws_checks(aws, settings)["instance type"]

        assert check.status == "fail"
        assert "0 EFA interfaces; the catalog 48 vCPUs, 4 GPUs, 1 EFA" in check.detail

    @pytest.mark.parametrize(
        ("change", "status", "words"),
        [
            ({}, "ok", "active, 2 of 2 free"),
            ({"AvailableInstanceCount": 1}, "fail", "1 of 2 free: 2 are needed"),
            ({"State": "scheduled"}, "warn", "scheduled"),
            ({"State": "expired"}, "fail", "no node can start in it"),
            ({"InstanceType": "g6.24xlarge"}, "fail", "its type is g6.24xlarge, the stack wants g6.12xlarge"),
            (
                {"AvailabilityZone": "us-west-2b"},
                "fail",
                "its zone is us-west-2b, the stack wants us-west-2a",
            ),
            ({"ReservationType": "capacity-block"}, "fail", "it is of kind capacity-block"),
            ({"EndDate": datetime(2027, 1, 2, 3, 4, tzinfo=UTC)}, "ok", "ends 2027-01-02 03:04 UTC"),
        ],
    )
    def test_reservation(
        self, aws: FakeAws, settings: StackSettings, change: dict[str, Any], status: str, words: str
    ) -> None:
        aws.answer("DescribeCapacityReservations", {"CapacityReservations": [reservation(**change)]})

        check = aws_checks(aws, settings, purchase="reservation", reservation_id="cr-0123456789abcdef0")[
            "reservation"
        ]

        assert check.status == status
        assert words in check.detail

    def test_instances_in_the_reservation_that_are_our_own(
        self, aws: FakeAws, settings: StackSettings
    ) -> None:
        ours = {"project": "efa-finetune", "stack": "dev"}
        aws.answer(
            "DescribeCapacityReservations", {"CapacityReservations": [reservation(AvailableInstanceCount=0)]}
        )
        aws.answer(
            "DescribeInstances", {"Reservations": [{"Instances": [instance("g6.12xlarge", ours)] * 2}]}
        )

        check = aws_checks(aws, settings, purchase="reservation", reservation_id="cr-0123456789abcdef0")[
            "reservation"
        ]

        assert check.status == "ok"

    def test_no_such_reservation(self, aws: FakeAws, settings: StackSettings) -> None:
        aws.answer("DescribeCapacityReservations", AwsError("InvalidCapacityReservationId.NotFound"))

        check = aws_checks(aws, settings, purchase="reservation", reservation_id="cr-0123456789abcdef0")[
            "reservation"
        ]

        assert check.status == "fail"
        assert "does not exist in us-west-2" in check.detail

    def test_a_call_that_is_not_allowed_is_a_warning(self, aws: FakeAws, settings: StackSettings) -> None:
        aws.answer("GetServiceQuota", AwsError("AccessDeniedException"))

        check = aws_checks(aws, settings)["quota"]

        assert check.status == "warn"
        assert "may not call GetServiceQuota" in check.detail

    def test_no_network_is_a_failure(self, aws: FakeAws, settings: StackSettings) -> None:
        aws.answer("DescribeAvailabilityZones", EndpointConnectionError(endpoint_url="https://ec2"))

        assert aws_checks(aws, settings)["zones"].status == "fail"


class TestNodeGroups:
    def describe(self, aws: FakeAws, **change: Any) -> None:
        aws.answer("ListNodegroups", {"nodegroups": ["efa-dev-gpu-1"]})
        group = {"status": "ACTIVE", "scalingConfig": {"desiredSize": 2}, **change}
        aws.answer("DescribeNodegroup", {"nodegroup": group})

    def test_well(self, aws: FakeAws, settings: StackSettings) -> None:
        self.describe(aws)

        assert aws_checks(aws, settings)["node group efa-dev-gpu-1"].detail == "active, 2 nodes wanted"

    def test_no_capacity(self, aws: FakeAws, settings: StackSettings) -> None:
        issue = {"code": "AsgInstanceLaunchFailures", "message": "InsufficientInstanceCapacity in us-west-2a"}
        self.describe(aws, health={"issues": [issue]}, status="DEGRADED")

        check = aws_checks(aws, settings)["node group efa-dev-gpu-1"]

        assert check.status == "fail"
        assert check.fix.startswith("finetune zones --probe")

    def test_failed_without_a_reason(self, aws: FakeAws, settings: StackSettings) -> None:
        self.describe(aws, status="CREATE_FAILED")

        check = aws_checks(aws, settings)["node group efa-dev-gpu-1"]

        assert check.status == "fail"
        assert check.fix.startswith("aws eks describe-nodegroup --cluster-name efa-dev")


def instance(kind: str, tags: dict[str, str], lifecycle: str | None = None) -> dict[str, Any]:
    return {
        "InstanceId": "i-1",
        "InstanceType": kind,
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
        **({"InstanceLifecycle": lifecycle} if lifecycle else {}),
    }


def reservation(**change: Any) -> dict[str, Any]:
    return {
        "CapacityReservationId": "cr-0123456789abcdef0",
        "InstanceType": "g6.12xlarge",
        "AvailabilityZone": "us-west-2a",
        "State": "active",
        "TotalInstanceCount": 2,
        "AvailableInstanceCount": 2,
        **change,
    }


def test_every_type_of_the_catalog_has_an_on_demand_quota() -> None:
    from infra.instances import INSTANCES, SYSTEM_INSTANCES

    for name in [*INSTANCES, *SYSTEM_INSTANCES]:
        assert sum(quota.counts(name) for quota in QUOTAS["on-demand"]) == 1, name
    with pytest.raises(LookupError, match=r"p6-b200.48xlarge: no spot quota is known"):
        quota_of("p6-b200.48xlarge", "spot")


# --- the cluster


def target(**change: Any) -> StackOutputs:
    return StackOutputs(
        **{
            "stack": "dev",
            "cluster_name": "efa-dev",
            "region": "us-west-2",
            "kube": KubeAccess(
                server="https://api",
                certificate_authority_data="Q0E=",
                exec_command=("aws", "eks", "get-token"),
            ),
            "namespace": "ray-train",
            "service_account": "ray-train",
            "ray_cluster": "train",
            "ray_version": "2.58.0",
            "image": "ray:1",
            "num_workers": 2,
            "gpus_per_worker": 4,
            "efa_per_worker": 1,
            "worker_cpu": "40",
            "worker_memory": "160Gi",
            "storage_uri": "s3://efa-dev-runs-1234567",
            "required_transport": "efa",
            "transport_env": {},
            **change,
        }
    )


def node(name: str, gpus: int = 4, efa: int = 1, *, ready: bool = True) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"role": "gpu"}},
        "status": {
            "allocatable": {"nvidia.com/gpu": str(gpus), "vpc.amazonaws.com/efa": str(efa), "cpu": "47"},
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }


def pod(name: str, kind: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"ray.io/node-type": kind}},
        "spec": {"containers": [{"name": "ray"}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


def operator(version: str = KUBERAY_VERSION, namespace: str = "kuberay-operator") -> dict[str, Any]:
    image = f"quay.io/kuberay/operator:v{version}"
    return {
        "metadata": {"namespace": namespace},
        "spec": {"template": {"spec": {"containers": [{"image": image}]}}},
        "status": {"readyReplicas": 1},
    }


@functools.cache
def released_crds() -> dict[str, Any]:
    """Megabytes to parse, so once."""
    return {crd["metadata"]["name"]: crd for crd in packaged_crds()}


class FakeKubectl:
    """The answers of kubectl, by the first argument of get."""

    def __init__(self, **answers: Any) -> None:
        crds = released_crds()
        self.answers: dict[str, Any] = {
            "nodes": {"items": [node("a"), node("b")]},
            "deployments": {"items": [operator()]},
            "customresourcedefinitions": lambda name: crds[name],
            "rayclusters.ray.io": {
                "metadata": {"name": "train"},
                "spec": {"workerGroupSpecs": [{"replicas": 2}]},
            },
            "pods": {"items": [pod("h", "head"), pod("w1", "worker"), pod("w2", "worker")]},
            "events": {"items": []},
            "--raw": b"ok",
            **answers,
        }

    def get(self, what: str, *args: str, timeout: float = 30.0) -> Any:
        answer = self.answers[what]
        if callable(answer):
            answer = answer(args[0])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self, args: list[str], **_: Any) -> bytes:
        return self.get(args[1])


def cluster_checks(**answers: Any) -> dict[str, Check]:
    kubectl: Any = FakeKubectl(**answers)
    checks = list(_check(kubectl, target(), None))
    assert_all_have_a_fix(checks)
    return by_name(checks)


class TestCluster:
    def test_all_well(self) -> None:
        found = cluster_checks()

        assert {check.status for check in found.values()} == {"ok"}
        assert list(found) == [
            "cluster access",
            "nodes",
            "allocatable nvidia.com/gpu",
            "allocatable vpc.amazonaws.com/efa",
            "KubeRay operator",
            "KubeRay CRDs",
            "RayCluster",
        ]
        assert found["RayCluster"].detail == "train: head ready, 2 of 2 workers ready"

    def test_unreachable_api_says_whose_address_is_allowed(self) -> None:
        found = cluster_checks(**{"--raw": UnreachableError("i/o timeout")})

        assert list(found) == ["cluster access"]
        assert found["cluster access"].status == "fail"
        assert "publicAccessCidrs" in found["cluster access"].fix

    def test_refused(self) -> None:
        found = cluster_checks(**{"--raw": UsageError("Unauthorized")})

        assert "setting users or admins" in found["cluster access"].fix

    def test_sleeping_nodes(self) -> None:
        found = cluster_checks(nodes={"items": []}, pods={"items": [pod("h", "head")]})

        assert found["nodes"].status == "warn"
        assert found["nodes"].fix == "finetune wake --stack dev"
        assert found["RayCluster"].status == "warn"
        assert "allocatable nvidia.com/gpu" not in found

    def test_node_that_is_not_ready(self) -> None:
        check = cluster_checks(nodes={"items": [node("a"), node("b", ready=False)]})["nodes"]

        assert check.status == "fail"
        assert check.detail == "1 of 2 GPU nodes ready; not ready: b"

    def test_plugin_that_gives_no_efa(self) -> None:
        check = cluster_checks(nodes={"items": [node("a"), node("b", efa=0)]})[
            "allocatable vpc.amazonaws.com/efa"
        ]

        assert check.status == "fail"
        assert check.detail == "1 a node are promised, b has 0"
        assert "aws-efa-k8s-device-plugin" in check.fix

    def test_submitter_may_not_read_nodes(self) -> None:
        found = cluster_checks(nodes=UsageError("forbidden"), deployments=UsageError("forbidden"))

        assert found["nodes"].status == found["KubeRay operator"].status == "warn"
        assert found["RayCluster"].status == "ok"

    @pytest.mark.parametrize(
        ("deployments", "status", "words"),
        [
            ([], "fail", "there is none"),
            ([operator(), operator(namespace="default")], "fail", "fight over the same clusters"),
            ([operator("1.2.0")], "warn", "version 1.2.0 runs"),
            ([{**operator(), "status": {}}], "fail", "is not ready"),
        ],
    )
    def test_operator(self, deployments: list[Any], status: str, words: str) -> None:
        check = cluster_checks(deployments={"items": deployments})["KubeRay operator"]

        assert check.status == status
        assert words in check.detail

    def test_old_crds(self) -> None:
        def old(name: str) -> dict[str, Any]:
            crd = next(crd for crd in packaged_crds() if crd["metadata"]["name"] == name)
            for version in crd["spec"]["versions"]:
                version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"].pop("suspend", None)
            return crd

        check = cluster_checks(customresourcedefinitions=old)["KubeRay CRDs"]

        assert check.status == "fail"
        assert "rayclusters.ray.io lacks" in check.detail
        assert "spec.suspend" in check.detail

    def test_missing_crds(self) -> None:
        check = cluster_checks(customresourcedefinitions=MissingError("NotFound"))["KubeRay CRDs"]

        assert check.status == "fail"
        assert "rayclusters.ray.io" in check.detail

    def test_missing_ray_cluster(self) -> None:
        check = cluster_checks(**{"rayclusters.ray.io": MissingError("NotFound")})["RayCluster"]

        assert check.status == "fail"
        assert check.fix == "pulumi up --stack dev"

    def test_fields_of_a_crd_are_counted_through_arrays(self) -> None:
        crd = next(crd for crd in packaged_crds() if crd["metadata"]["name"] == "rayclusters.ray.io")

        assert "v1.spec.workerGroupSpecs.template.spec.containers.image" in fields_of(crd)


class TestStorage:
    def test_bucket(self, aws: FakeAws) -> None:
        session = aws.session()
        session.client("s3").create_bucket(
            Bucket="efa-dev-runs-1234567", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
        )

        assert check_storage(session, target())[0].status == "ok"

    def test_missing_bucket(self, aws: FakeAws) -> None:
        check = check_storage(aws.session(), target())[0]

        assert check.status == "fail"
        assert "does not exist" in check.detail

    def test_forbidden_bucket(self, aws: FakeAws) -> None:
        aws.answer("HeadBucket", AwsError("403"))

        check = check_storage(aws.session(), target())[0]

        assert check.status == "warn"
        assert "(403)" in check.detail

    def test_path(self, aws: FakeAws) -> None:
        checks = check_storage(aws.session(), target(storage_uri="/fsx"))

        assert checks[0].status == "warn"
        assert_all_have_a_fix(checks)


# --- this machine


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a program on the PATH, which has no others."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")

    def put(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return put


class TestTools:
    def test_new_enough(self, program: Callable[[str, str], None]) -> None:
        program("pulumi", "echo v3.274.1")

        check = check_tool(PULUMI)

        assert check.status == "ok"
        assert check.detail.startswith("3.274.1 (")

    def test_too_old(self, program: Callable[[str, str], None]) -> None:
        program("pulumi", "echo v3.99.0")

        check = check_tool(PULUMI)

        assert check.status == "fail"
        assert "3.200 or newer is needed" in check.detail
        assert check.fix == PULUMI.install

    def test_missing(self, program: Callable[[str, str], None]) -> None:
        check = check_tool(Tool("no-such-tool", "nothing", (1,), ("version",), "install it"))

        assert check.status == "fail"
        assert check.fix == "install it"

    def test_broken(self, program: Callable[[str, str], None]) -> None:
        program("pulumi", "echo 'cannot load library' >&2; exit 127")

        check = check_tool(PULUMI)

        assert check.status == "fail"
        assert "exits 127 and says 'cannot load library'" in check.detail


class TestHub:
    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
        import http.server
        import threading

        def serve(status: int) -> None:
            class Handler(http.server.BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    self.send_response(status)
                    self.end_headers()

                def log_message(self, *_: Any) -> None: ...

            server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")

        return serve

    def test_without_token(self, hub: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        hub(200)

        assert "no HF_TOKEN" in check_hub().detail

    def test_refused_token(self, hub: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        hub(401)

        check = check_hub()

        assert check.status == "fail"
        assert "hf_secret" not in check.detail + check.fix

    def test_unreachable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")

        check = check_hub()

        assert check.status == "warn"
        assert "HF_ENDPOINT" in check.fix


class TestDoctor:
    @pytest.fixture(autouse=True)
    def _machine(self, program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
        program("pulumi", "echo v3.274.1")
        program("aws", "echo aws-cli/2.31.0 Python/3.13")
        program("kubectl", "echo Client Version: v1.35.4; exit 0")
        monkeypatch.setattr(doctor_module, "check_hub", lambda: ok("hub", "answers"))

    def run(self, aws: FakeAws, path: Path | None, outputs: StackOutputs | None = None) -> Report:
        aws.answer("GetServiceQuota", quota(ENOUGH))
        aws.answer("ListNodegroups", AwsError("ResourceNotFoundException"))

        def no_outputs(stack: str) -> StackOutputs:
            raise UsageError(f"stack {stack}: no stack selected")

        return Doctor(path, outputs, aws.session, no_outputs).run()

    def test_before_the_first_up(self, aws: FakeAws, settings_file: Path) -> None:
        report = self.run(aws, settings_file)

        found = by_name(list(report.checks))
        assert not report.failed
        assert found["deployment"].fix == "pulumi up --stack dev"
        assert found["tool aws"].detail.startswith("2.31.0")
        assert list(found)[:4] == ["tool kubectl", "tool pulumi", "tool aws", "settings"]
        document = report.to_dict()
        assert set(document["checks"][0]) == {"name", "status", "detail", "fix"}
        assert document["fail"] == 0

    def test_broken_settings(self, aws: FakeAws, tmp_path: Path) -> None:
        path = tmp_path / "Pulumi.dev.yaml"
        path.write_text("config:\n  efa-finetune:gpuCounts: 2\n")

        report = self.run(aws, path)

        assert report.failed
        assert "Did you mean gpuCount?" in by_name(list(report.checks))["settings"].detail

    def test_outputs_alone(self, aws: FakeAws) -> None:
        report = self.run(aws, None, target(kube=KubeAccess(kubeconfig_path="/nowhere/kubeconfig")))

        found = by_name(list(report.checks))
        assert "tool pulumi" not in found
        assert found["cluster access"].status == "fail"
        assert "/nowhere/kubeconfig" in found["cluster access"].detail


def test_report_for_people() -> None:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(Report((ok("a", "well"), warn("b", "so so", "do this"))).view())

    assert capture.get().splitlines() == ["ok   a: well", "warn b: so so", "     fix: do this"]


def test_checks_keep_their_order() -> None:
    jobs: Any = [(str(i), lambda i=i: [ok(str(i), "")]) for i in range(20)]

    assert [check.name for check in run_checks(jobs)] == [str(i) for i in range(20)]


def test_all_calls_of_doctor_are_in_the_security_model(aws: FakeAws, settings: StackSettings) -> None:
    """Whoever writes the IAM policy of a caller reads that table."""
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `finetune doctor` |"))
    aws.answer("GetServiceQuota", quota({}))
    aws.answer("GetAWSDefaultServiceQuota", {"Quota": {"Value": 1000.0}})
    aws.answer("DescribeCapacityReservations", {"CapacityReservations": [reservation()]})
    aws.answer("ListNodegroups", {"nodegroups": ["g"]})
    aws.answer("DescribeNodegroup", {"nodegroup": {"status": "ACTIVE", "scalingConfig": {"desiredSize": 2}}})

    aws_checks(aws, settings, purchase="reservation", reservation_id="cr-0123456789abcdef0")

    called = {operation for operation, _ in aws.calls}
    assert len(called) >= 9
    assert {operation for operation in called if f":{operation}`" not in row} == set()
