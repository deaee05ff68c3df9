"""The program as a whole: what it exports, that it needs nothing while it runs, that names fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pulumi
import pytest
import yaml
from pydantic import ValidationError

from infra.outputs import OUTPUT_NAME, KubeAccess, StackOutputs
from infra.program import program
from infra.recorder import record, record_program
from infra.settings import MAX_CLUSTER_NAME, PROJECT
from tests.graph import graphs

# Longest names that AWS takes, by type; Pulumi appends eight characters to a name that is not given.
LIMITS = {
    "aws:iam/role:Role": 64,
    "aws:iam/rolePolicy:RolePolicy": 128,
    "aws:s3/bucket:Bucket": 63,
    "aws:eks/nodeGroup:NodeGroup": 63,
    "aws:ec2/launchTemplate:LaunchTemplate": 128,
    "aws:ec2/placementGroup:PlacementGroup": 255,
    "aws:ec2/securityGroup:SecurityGroup": 255,
    "aws:scheduler/schedule:Schedule": 64,
    "aws:budgets/budget:Budget": 100,
    "aws:cloudwatch/logGroup:LogGroup": 512,
}


def _config(path: Path, **changes: str) -> dict[str, str]:
    """The stack's configuration as the engine hands it to a program: everything is text."""
    defaults = yaml.safe_load((graphs.REPOSITORY / "Pulumi.yaml").read_text())["config"]
    values = {f"{PROJECT}:{key}": declared["default"] for key, declared in defaults.items()}
    values |= yaml.safe_load(path.read_text())["config"] | {
        f"{PROJECT}:{key}": value for key, value in changes.items()
    }
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}


def test_the_dev_stack_as_pulumi_runs_it() -> None:
    graph = record_program(program, "dev", config=_config(graphs.DEV_FILE), preview=True)
    assert {r.urn for r in graph.resources} == {r.urn for r in graphs.dev().resources}
    assert graph.outputs["hourly_cost_usd"] == pytest.approx(9.55, rel=0.02)
    assert sum(graph.outputs["hourly_cost_parts"].values()) == pytest.approx(
        graph.outputs["hourly_cost_usd"], abs=1e-3
    )
    assert graph.outputs["prices_of"] == "us-west-2, 2026-07-20"


def test_an_update_refuses_the_addresses_of_the_example() -> None:
    with pytest.raises(pulumi.RunError, match=r"203\.0\.113\.7/32.*reserved for documentation"):
        record_program(program, "dev", config=_config(graphs.DEV_FILE), preview=False)


def test_the_outputs_are_what_the_cli_reads() -> None:
    config = _config(
        graphs.DEV_FILE, publicCidrs='["52.1.2.3/32"]', accountId="123456789012", kuberay="false"
    )
    graph = record_program(program, "dev", config=config)
    outputs = StackOutputs.model_validate(graph.outputs[OUTPUT_NAME])
    assert outputs.cluster_name == "efa-dev"
    assert outputs.storage_uri == "s3://efa-dev-runs-0123456"
    assert (outputs.num_workers, outputs.gpus_per_worker, outputs.efa_per_worker) == (2, 4, 1)
    assert outputs.required_transport == "efa"
    assert outputs.transport_env["NCCL_NET"] == "Libfabric"
    assert (outputs.worker_cpu, outputs.worker_memory) == ("40000m", "163840Mi")
    assert outputs.hourly_usd == pytest.approx(9.55, rel=0.02)
    assert outputs.gpudirect is False
    kubeconfig = outputs.kube.kubeconfig("efa-dev")
    assert kubeconfig is not None
    assert kubeconfig["users"][0]["user"]["exec"]["args"][3] == "efa-dev"
    assert graph.outputs["kubectl"] == "aws eks update-kubeconfig --name efa-dev --region us-west-2"


def test_the_outputs_of_a_local_stack() -> None:
    graph = record_program(program, "local", config=_config(graphs.LOCAL_FILE, kuberay="false"))
    outputs = StackOutputs.model_validate(graph.outputs[OUTPUT_NAME])
    assert outputs.kube.context == "kind-efa"
    assert outputs.kube.kubeconfig("x") is None
    assert (outputs.storage_uri, outputs.storage_endpoint_url) == ("s3://runs", "http://10.0.0.5:9000")
    assert outputs.required_transport == "any"
    assert outputs.hourly_usd is None
    assert "hourly_cost_usd" not in graph.outputs
    assert graph.outputs["kubectl"].startswith("kubectl --kubeconfig ~/.kube/config --context kind-efa")


def test_an_unknown_price_leaves_the_output_out_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = _config(graphs.DEV_FILE, purchase="spot", kuberay="false")
    graph = record_program(program, "dev", config=config, preview=True)
    assert "hourly_cost_usd" not in graph.outputs
    assert "g6.12xlarge as spot" in caplog.text


def test_mistakes_stop_the_program_before_its_first_resource() -> None:
    config = _config(graphs.DEV_FILE, gpuCount="0", zones='["us-west-2a"]')
    registered: list[str] = []

    def counting() -> None:
        try:
            program()
        finally:
            registered.extend(str(r) for r in pulumi.runtime.get_root_resource()._childResources)  # type: ignore[union-attr]

    with pytest.raises(pulumi.RunError, match=r"2 mistake\(s\)"):
        record_program(counting, "dev", config=config, preview=True)
    assert registered == []


def test_an_unknown_key_is_a_mistake() -> None:
    config = _config(graphs.DEV_FILE, gpuCont="2")
    with pytest.raises(pulumi.RunError, match="Did you mean gpuCount"):
        record_program(program, "dev", config=config, preview=True)


def test_a_preview_does_not_trip_over_what_is_not_known_yet() -> None:
    settings = graphs.settings(kuberay=False)
    assert len(record(settings, preview=True).resources) == len(graphs.graph().resources)


@pytest.mark.parametrize("stack", ["d", "d" * (MAX_CLUSTER_NAME - len("efa-"))])
def test_names_fit_what_aws_takes(stack: str) -> None:
    values = {**graphs.EVERYTHING, "kuberay": False}
    graph = record(graphs.settings(stack, **values))
    for resource in graph.resources:
        limit = LIMITS.get(resource.type)
        if limit and not resource.inputs.get("name"):
            assert len(resource.name) + len("-0123456") <= limit, resource.name
    (cluster,) = graph.of_type("eks:index:Cluster")
    assert len(f"{cluster.name}-eksRole-role-0123456") <= 64
    assert len(cluster.inputs["name"]) <= 100


def test_names_of_one_type_are_unique() -> None:
    urns = [r.urn for r in graphs.everything().resources]
    assert len(urns) == len(set(urns))


def test_default_tags_are_on_everything() -> None:
    (provider,) = graphs.everything().of_type("pulumi:providers:aws")
    assert json.loads(provider.inputs["defaultTags"])["tags"] == {
        "project": PROJECT,
        "stack": "full",
        "owner": "team",
        "expires": "2100-01-01T00:00:00+00:00",
    }
    assert json.loads(provider.inputs["allowedAccountIds"]) == ["123456789012"]
    for template in graphs.everything().of_type(graphs.LAUNCH_TEMPLATE):
        kinds = {spec["resourceType"] for spec in template.inputs["tagSpecifications"]}
        assert kinds == {"instance", "volume", "network-interface"}


def test_at_its_expiry_the_gpu_group_goes_to_zero() -> None:
    graph = graphs.everything()
    (schedule,) = graph.of_type("aws:scheduler/schedule:Schedule")
    assert schedule.inputs["scheduleExpression"] == "at(2100-01-01T00:00:00)"
    assert schedule.inputs["target"]["arn"] == "arn:aws:scheduler:::aws-sdk:eks:updateNodegroupConfig"
    assert json.loads(schedule.inputs["target"]["input"]) == {
        "ClusterName": "efa-full",
        "NodegroupName": "efa-full-gpu-0123456",
        "ScalingConfig": {"MinSize": 0, "MaxSize": 2, "DesiredSize": 0},
    }
    assert graphs.dev().of_type("aws:scheduler/schedule:Schedule") == []


def test_the_parameters_of_the_expiry_are_those_of_the_api() -> None:
    import boto3
    from botocore.validate import validate_parameters

    eks = boto3.client("eks", region_name="us-west-2", aws_access_key_id="x", aws_secret_access_key="x")
    shape = eks.meta.service_model.operation_model("UpdateNodegroupConfig").input_shape
    (schedule,) = graphs.everything().of_type("aws:scheduler/schedule:Schedule")
    document = json.loads(schedule.inputs["target"]["input"])

    def api_names(value: Any) -> Any:
        if isinstance(value, dict):
            return {key[0].lower() + key[1:]: api_names(item) for key, item in value.items()}
        return value

    validate_parameters(api_names(document), shape)


def test_the_budget_warns_before_it_is_spent() -> None:
    (budget,) = graphs.everything().of_type("aws:budgets/budget:Budget")
    assert budget.inputs["limitAmount"] == "500"
    assert [(n["notificationType"], n["threshold"]) for n in budget.inputs["notifications"]] == [
        ("ACTUAL", 80),
        ("ACTUAL", 100),
        ("FORECASTED", 100),
    ]


def test_one_nat_gateway_in_the_gpu_zone_or_one_per_zone() -> None:
    assert [r.name for r in graphs.dev().of_type("aws:ec2/natGateway:NatGateway")] == [
        "efa-dev-nat-us-west-2a"
    ]
    assert len(graphs.everything().of_type("aws:ec2/natGateway:NatGateway")) == 2


def test_s3_does_not_go_through_nat() -> None:
    (endpoint,) = graphs.dev().of_type("aws:ec2/vpcEndpoint:VpcEndpoint")
    assert endpoint.inputs["vpcEndpointType"] == "Gateway"
    assert len(endpoint.inputs["routeTableIds"]) == 2


def test_the_entry_point_fits_on_one_screen() -> None:
    assert len((graphs.REPOSITORY / "infra" / "__main__.py").read_text().splitlines()) < 30


@pytest.mark.parametrize(
    "module", ["infra.outputs", "infra.instances", "infra.settings", "infra.versions", "infra.cost"]
)
def test_what_the_cli_imports_needs_no_pulumi(module: str) -> None:
    code = f"import sys, {module}; sys.exit('pulumi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=graphs.REPOSITORY, check=False).returncode == 0


def test_nothing_happens_at_import() -> None:
    """No credentials, no network: what would be refused here fails the import."""
    code = (
        "import socket\n"
        "def refuse(*a, **k): raise AssertionError('network at import')\n"
        "socket.socket.connect = refuse\n"
        "import infra.program, policy.pack\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    subprocess.run([sys.executable, "-c", code], cwd=graphs.REPOSITORY, env=environment, check=True)


@pytest.mark.parametrize(
    "values",
    [
        {"server": "https://x"},
        {
            "server": "https://x",
            "certificate_authority_data": "Q0E=",
            "exec_command": ["aws"],
            "kubeconfig_path": "x",
        },
    ],
)
def test_access_is_by_one_way(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"give"):
        KubeAccess.model_validate(values)


def test_another_version_of_the_outputs_is_refused() -> None:
    plain = graphs.dev().outputs[OUTPUT_NAME]
    with pytest.raises(ValidationError, match="schema_version"):
        StackOutputs.model_validate({**plain, "schema_version": 2})
    with pytest.raises(ValidationError, match="extra"):
        StackOutputs.model_validate({**plain, "token": "x"})
