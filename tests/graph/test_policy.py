# ruff: noqa: E501  tables are read by row
"""The policy pack: each rule passes what is right and names what is wrong; the engine's calls reach the rules."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import empty_pb2, struct_pb2
from pulumi.runtime.proto import analyzer_pb2, analyzer_pb2_grpc
from pulumi_policy import (
    EnforcementLevel,
    PolicyCustomTimeouts,
    PolicyProviderResource,
    PolicyResourceOptions,
    ResourceValidationArgs,
    ResourceValidationPolicy,
)

from infra.ray_cluster import ray_cluster_spec
from policy.pack import policies
from policy.rules import RULES, STACK_RULES, Seen
from tests.graph import graphs

LAUNCH_TEMPLATE = graphs.LAUNCH_TEMPLATE
NODE_GROUP = graphs.NODE_GROUP
INGRESS = "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"
EGRESS = "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule"

TEMPLATE: dict[str, Any] = {
    "metadataOptions": {"httpTokens": "required", "httpPutResponseHopLimit": 1},
    "blockDeviceMappings": [{"deviceName": "/dev/xvda", "ebs": {"encrypted": "true", "volumeType": "gp3"}}],
    "networkInterfaces": [
        {"networkCardIndex": 0, "deviceIndex": 0, "interfaceType": "efa"},
        {"networkCardIndex": 1, "deviceIndex": 1, "interfaceType": "efa-only"},
    ],
}
GROUP: dict[str, Any] = {
    "amiType": "AL2023_x86_64_NVIDIA",
    "taints": [{"key": "nvidia.com/gpu", "effect": "NO_SCHEDULE"}],
    "subnetIds": ["a"],
    "launchTemplate": {"id": "lt"},
}
TAGS = {"project": "efa-finetune", "stack": "dev", "owner": "me"}
BLOCK = dict.fromkeys(
    ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets"), True
)


def _statement(**values: Any) -> str:
    return json.dumps({"Statement": [{"Effect": "Allow", **values}]})


def _ray(**changes: Any) -> dict[str, Any]:
    spec = copy.deepcopy(ray_cluster_spec(graphs.dev_settings()).manifest())
    container = spec["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    pod = spec["workerGroupSpecs"][0]["template"]["spec"]
    for key, value in changes.items():
        match key:
            case "start":
                spec["headGroupSpec"]["rayStartParams"] |= value
            case "pod":
                pod |= value
            case "container":
                container |= value
            case _:
                spec[key] = value
    return {"metadata": {"name": "train"}, "spec": spec}


# rule, type, properties that pass, properties that do not, what the violation says
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    ("no-load-balancer", "kubernetes:core/v1:Service", {"spec": {"type": "ClusterIP"}}, {"spec": {"type": "LoadBalancer"}}, "opens a port"),
    ("no-load-balancer", "kubernetes:core/v1:Service", {}, {"spec": {"type": "NodePort"}}, "use ClusterIP"),
    ("no-open-ingress", INGRESS, {"referencedSecurityGroupId": "sg"}, {"cidrIpv4": "0.0.0.0/0"}, "ingress from 0.0.0.0/0"),
    ("no-open-ingress", INGRESS, {"cidrIpv4": "10.0.0.0/16"}, {"cidrIpv6": "::/0"}, "ingress from ::/0"),
    ("no-open-ingress", "aws:ec2/securityGroup:SecurityGroup", {}, {"ingress": [{"cidrBlocks": ["0.0.0.0/0"]}]}, "0.0.0.0/0"),
    ("closed-endpoint", "eks:index:Cluster", {"endpointPublicAccess": True, "publicAccessCidrs": ["52.1.2.3/32"]}, {"endpointPublicAccess": True}, "open to the world"),
    ("closed-endpoint", "eks:index:Cluster", {"endpointPublicAccess": False}, {"publicAccessCidrs": ["0.0.0.0/0"]}, "set publicAccessCidrs"),
    ("closed-endpoint", "aws:eks/cluster:Cluster", {"vpcConfig": {"endpointPublicAccess": False}}, {"vpcConfig": {}}, "open to the world"),
    ("imds-v2", LAUNCH_TEMPLATE, TEMPLATE, {}, "IMDSv2"),
    ("imds-v2", LAUNCH_TEMPLATE, TEMPLATE, {"metadataOptions": {"httpTokens": "required", "httpPutResponseHopLimit": 2}}, "node's credentials"),
    ("encrypted-disks", LAUNCH_TEMPLATE, TEMPLATE, {}, "20 GiB"),
    ("encrypted-disks", LAUNCH_TEMPLATE, TEMPLATE, {"blockDeviceMappings": [{"ebs": {"volumeType": "gp3"}}]}, "not encrypted"),
    ("encrypted-disks", LAUNCH_TEMPLATE, TEMPLATE, {"blockDeviceMappings": [{"ebs": {"encrypted": "true", "volumeType": "gp2"}}]}, "use gp3"),
    ("efa-interfaces", LAUNCH_TEMPLATE, TEMPLATE, {**TEMPLATE, "vpcSecurityGroupIds": ["sg"]}, "EC2 refuses both"),
    ("efa-interfaces", LAUNCH_TEMPLATE, TEMPLATE, {"networkInterfaces": [{"networkCardIndex": 0, "deviceIndex": 0}] * 2}, "two interfaces on one network card"),
    ("efa-interfaces", LAUNCH_TEMPLATE, TEMPLATE, {"networkInterfaces": [{"networkCardIndex": 0, "deviceIndex": 0, "interfaceType": "efa-only"}]}, "cannot be efa-only"),
    ("efa-interfaces", LAUNCH_TEMPLATE, TEMPLATE, {"networkInterfaces": [{"networkCardIndex": 1, "deviceIndex": 0}]}, "deviceIndex of card 1 must be 1"),
    ("gpu-nodes", NODE_GROUP, GROUP, {**GROUP, "taints": []}, "need the taint nvidia.com/gpu"),
    ("gpu-nodes", NODE_GROUP, {"amiType": "AL2023_x86_64_STANDARD"}, {**GROUP, "subnetIds": ["a", "b"]}, "exactly one subnet"),
    ("gpu-nodes", NODE_GROUP, GROUP, {**GROUP, "launchTemplate": None}, "need a launch template"),
    ("default-tags", "pulumi:providers:aws", {"defaultTags": {"tags": TAGS}}, {"defaultTags": {"tags": {"project": "x"}}}, "lacks stack, owner"),
    ("default-tags", "pulumi:providers:aws", {"defaultTags": json.dumps({"tags": TAGS})}, {}, "lacks project, stack, owner"),
    ("private-bucket", "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock", BLOCK, {**BLOCK, "blockPublicAcls": False}, "blockPublicAcls must be true"),
    ("kept-bucket", "aws:s3/bucket:Bucket", {"forceDestroy": False}, {"forceDestroy": True}, "deletes every checkpoint"),
    ("narrow-iam", "aws:iam/rolePolicy:RolePolicy", {"policy": _statement(Action="s3:GetObject", Resource="arn:b/*")}, {"policy": _statement(Action="s3:*", Resource="arn:b")}, "allows everything"),
    ("narrow-iam", "aws:iam/rolePolicy:RolePolicy", {"policy": _statement(Action=["ec2:DescribeImages"], Resource="*")}, {"policy": _statement(Action=["ec2:RunInstances"], Resource="*")}, "on every resource"),
    ("narrow-iam", "aws:iam/policy:Policy", {"policy": json.dumps({"Statement": [{"Effect": "Deny", "Action": "*", "Resource": "*"}]})}, {"policy": _statement(Action="*", Resource="*")}, "action * allows everything"),
    ("no-admin-policy", "aws:iam/rolePolicyAttachment:RolePolicyAttachment", {"policyArn": "arn:aws:iam::aws:policy/AmazonEKSWorkerNodePolicy"}, {"policyArn": "arn:aws:iam::aws:policy/AmazonS3FullAccess"}, "far more"),
    ("no-dynamic-volume", "kubernetes:core/v1:PersistentVolumeClaim", {"spec": {"storageClassName": ""}}, {"spec": {}}, "no stack knows"),
    ("ray-cluster", graphs.RAY_CLUSTER, _ray(), _ray(start={"dashboard-host": "0.0.0.0"}), "must be 127.0.0.1"),
    ("ray-cluster", graphs.RAY_CLUSTER, _ray(), _ray(authOptions={"mode": "disabled"}), "must be token"),
    ("ray-cluster", graphs.RAY_CLUSTER, _ray(), _ray(rayVersion="2.40.0"), "needs Ray 2.52.0"),
    ("ray-cluster", graphs.RAY_CLUSTER, _ray(), _ray(start={"num-gpus": "1"}), "num-gpus must be 0"),
    ("ray-cluster", graphs.RAY_CLUSTER, _ray(container={"image": "r/i@sha256:0"}), _ray(container={"image": "registry:5000/ray"}), "name a full tag or a digest"),
    ("ray-cluster", graphs.RAY_CLUSTER, _ray(), _ray(container={"image": "ray:latest"}), "ray:latest"),
    ("ray-cluster", graphs.RAY_CLUSTER, _ray(), _ray(container={"securityContext": {"privileged": True}}), "is privileged"),
    ("ray-cluster", graphs.RAY_CLUSTER, _ray(), _ray(container={"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2"}}}), "requests other than limits"),
    ("ray-cluster", graphs.RAY_CLUSTER, _ray(), _ray(pod={"hostNetwork": True}), "node's network"),
    ("ray-cluster", graphs.RAY_CLUSTER, _ray(), _ray(pod={"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}), "node's network or files"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "type_", "right", "wrong", "words"),
    CASES,
    ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)],
)
def test_a_rule(name: str, type_: str, right: dict[str, Any], wrong: dict[str, Any], words: str) -> None:
    rule = next(rule for rule in RULES if rule.name == name)
    assert rule.violations(Seen(type_, "it", right)) == []
    found = rule.violations(Seen(type_, "it", wrong))
    assert any(words in violation for violation in found), found
    assert rule.violations(Seen("random:index:Pet", "it", wrong)) == []


def test_a_default_provider_is_refused() -> None:
    rule = next(rule for rule in RULES if rule.name == "explicit-provider")
    assert rule.violations(Seen("aws:s3/bucket:Bucket", "b", {}, "efa-dev-aws")) == []
    assert rule.violations(Seen("random:index:Pet", "b", {}, "default_4")) == []
    assert "default provider" in rule.violations(Seen("aws:s3/bucket:Bucket", "b", {}, "default_7_51_1"))[0]


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in RULES} == {case[0] for case in CASES} | {"explicit-provider"}


def _rule(type_: str, source: str, protocol: str = "-1") -> Seen:
    props = {"securityGroupId": "sg", "referencedSecurityGroupId": source, "ipProtocol": protocol}
    return Seen(type_, "it", props)


@pytest.mark.parametrize(
    ("rules", "missing"),
    [
        ([_rule(INGRESS, "sg"), _rule(EGRESS, "sg")], []),
        ([_rule(INGRESS, "sg")], ["egress"]),
        ([_rule(EGRESS, "sg")], ["ingress"]),
        ([_rule(INGRESS, "other"), _rule(EGRESS, "sg", "tcp")], ["ingress", "egress"]),
    ],
)
def test_efa_needs_a_group_that_names_itself(rules: list[Seen], missing: list[str]) -> None:
    (rule,) = STACK_RULES
    found = list(rule.check([Seen(LAUNCH_TEMPLATE, "gpu", TEMPLATE), *rules]))
    assert [
        next(d for d in ("ingress", "egress") if f"all {d}" in violation) for violation in found
    ] == missing
    assert list(rule.check(rules)) == [], "without EFA there is nothing to ask for"


def test_the_pack_calls_the_rules() -> None:
    by_name = {policy.name: policy for policy in policies()}
    assert set(by_name) == {rule.name for rule in (*RULES, *STACK_RULES)}
    policy = by_name["explicit-provider"]
    assert isinstance(policy, ResourceValidationPolicy)
    reported: list[str] = []
    arguments = ResourceValidationArgs(
        resource_type="aws:s3/bucket:Bucket",
        props={},
        urn="urn",
        name="bucket",
        opts=PolicyResourceOptions(False, [], None, [], PolicyCustomTimeouts(0, 0, 0), []),
        provider=PolicyProviderResource("pulumi:providers:aws", {}, "urn", "default_7_51_1"),
    )
    policy.validate(arguments, lambda message, urn=None: reported.append(message))
    assert reported == ["bucket: uses a default provider, so another region or another cluster by accident"]
    assert by_name["kept-bucket"].enforcement_level is EnforcementLevel.ADVISORY
    assert by_name["narrow-iam"].enforcement_level is EnforcementLevel.MANDATORY


@pytest.fixture(scope="module")
def analyzer() -> Iterator[analyzer_pb2_grpc.AnalyzerStub]:
    """The pack as the engine starts it: a process that prints its port and is called over gRPC."""
    process = subprocess.Popen(
        [sys.executable, "-u", "policy"], cwd=graphs.REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield analyzer_pb2_grpc.AnalyzerStub(channel)
    finally:
        process.terminate()
        process.wait(timeout=30)


def _analyze(stub: analyzer_pb2_grpc.AnalyzerStub, type_: str, props: dict[str, Any]) -> dict[str, str]:
    properties = struct_pb2.Struct()
    properties.update(props)
    request = analyzer_pb2.AnalyzeRequest(type=type_, properties=properties, urn="urn", name="it")
    return {d.policyName: d.message for d in stub.Analyze(request).diagnostics}


def test_the_engine_learns_of_all_rules(analyzer: analyzer_pb2_grpc.AnalyzerStub) -> None:
    info = analyzer.GetAnalyzerInfo(empty_pb2.Empty())
    assert info.name == "efa-finetune"
    assert {policy.name for policy in info.policies} == {rule.name for rule in (*RULES, *STACK_RULES)}


def test_the_engine_is_told_what_is_wrong(analyzer: analyzer_pb2_grpc.AnalyzerStub) -> None:
    assert _analyze(analyzer, LAUNCH_TEMPLATE, TEMPLATE) == {}
    found = _analyze(analyzer, LAUNCH_TEMPLATE, {**TEMPLATE, "metadataOptions": {"httpTokens": "optional"}})
    assert "IMDSv2" in found["imds-v2"]
    assert _analyze(analyzer, graphs.RAY_CLUSTER, _ray()) == {}
    found = _analyze(analyzer, graphs.RAY_CLUSTER, _ray(start={"dashboard-host": "0.0.0.0"}))
    assert "must be 127.0.0.1" in found["ray-cluster"]


def test_what_a_preview_does_not_know_yet_is_no_violation(analyzer: analyzer_pb2_grpc.AnalyzerStub) -> None:
    unknown = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
    template = copy.deepcopy(TEMPLATE)
    for interface in template["networkInterfaces"]:
        interface["securityGroups"] = [unknown]
    assert _analyze(analyzer, LAUNCH_TEMPLATE, {**template, "placement": {"groupName": unknown}}) == {}


@pytest.mark.parametrize("shape", ["dev", "local", "everything"])
def test_the_shipped_stacks_pass_the_pack_as_the_engine_runs_it(
    analyzer: analyzer_pb2_grpc.AnalyzerStub, shape: str
) -> None:
    graph = {"dev": graphs.dev, "local": graphs.local, "everything": graphs.everything}[shape]()
    for resource in graph.resources:
        if resource.type != graphs.CRD:
            assert _analyze(analyzer, resource.type, dict(resource.inputs)) == {}, resource.name
