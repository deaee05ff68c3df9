"""What nobody but the job and its owner may reach."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from infra.access import network_policies
from infra.recorder import Graph
from policy.rules import RULES, STACK_RULES, Seen
from tests.graph import graphs

SHAPES = {"dev": graphs.dev, "local": graphs.local, "everything": graphs.everything}


def _seen(graph: Graph) -> list[Seen]:
    return [
        Seen(r.type, r.name, r.inputs, r.provider.rpartition("::")[0].rpartition("::")[2])
        for r in graph.resources
        if r.type != graphs.CRD
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_stacks_keep_the_rules_of_the_policy_pack(shape: str) -> None:
    seen = _seen(SHAPES[shape]())
    broken = [found for rule in RULES for resource in seen for found in rule.violations(resource)]
    broken += [found for rule in STACK_RULES for found in rule.check(seen)]
    assert broken == []


def _policies(graph: Graph) -> dict[str, Any]:
    return {r.name: json.loads(r.inputs["policy"]) for r in graph.of_type("aws:iam/rolePolicy:RolePolicy")}


def test_a_job_can_touch_its_bucket_and_nothing_else() -> None:
    policy = _policies(graphs.dev())["efa-dev-job"]
    resources = {
        r
        for s in policy["Statement"]
        for r in ([s["Resource"]] if isinstance(s["Resource"], str) else s["Resource"])
    }
    assert resources == {"arn:aws:s3:::efa-dev-runs-0123456", "arn:aws:s3:::efa-dev-runs-0123456/*"}
    actions = {action for statement in policy["Statement"] for action in statement["Action"]}
    assert not any("*" in action for action in actions)
    role = graphs.dev().named("aws:iam/role:Role", "efa-dev-job").inputs["assumeRolePolicy"]
    (statement,) = json.loads(role)["Statement"]
    assert statement["Principal"] == {"Service": "pods.eks.amazonaws.com"}
    assert statement["Condition"]["StringEquals"] == {
        "aws:RequestTag/eks-cluster-name": "efa-dev",
        "aws:RequestTag/kubernetes-namespace": "ray-train",
        "aws:RequestTag/kubernetes-service-account": "ray-train",
    }


def test_the_expiry_can_scale_one_group_and_nothing_else() -> None:
    policy = _policies(graphs.everything())["efa-full-expiry"]
    (statement,) = policy["Statement"]
    assert statement["Action"] == "eks:UpdateNodegroupConfig"
    assert statement["Resource"].endswith(":nodegroup/efa-full/efa-full-gpu-0123456/uuid")


def test_the_autoscaler_changes_only_groups_of_this_cluster() -> None:
    policy = _policies(graphs.everything())["efa-full-autoscaler"]
    scale = next(s for s in policy["Statement"] if s["Sid"] == "Scale")
    assert scale["Condition"] == {
        "StringEquals": {"aws:ResourceTag/k8s.io/cluster-autoscaler/efa-full": "owned"}
    }


def test_no_security_group_opens_a_port_to_the_internet() -> None:
    graph = graphs.everything()
    for rule in graph.of_type("aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"):
        assert rule.inputs.get("referencedSecurityGroupId"), rule.name
    for subnet in graph.of_type("aws:ec2/subnet:Subnet"):
        assert subnet.inputs["mapPublicIpOnLaunch"] is False


def test_the_bucket_is_closed_versioned_and_encrypted() -> None:
    graph = graphs.dev()
    s3 = {r.type.rpartition(":")[2]: r.inputs for r in graph.resources if r.type.startswith("aws:s3/")}
    assert set(s3) == {
        "Bucket",
        "BucketVersioning",
        "BucketServerSideEncryptionConfiguration",
        "BucketPublicAccessBlock",
        "BucketOwnershipControls",
        "BucketPolicy",
        "BucketLifecycleConfiguration",
    }
    assert s3["Bucket"]["forceDestroy"] is False
    assert s3["BucketVersioning"]["versioningConfiguration"] == {"status": "Enabled"}
    (statement,) = json.loads(s3["BucketPolicy"]["policy"])["Statement"]
    assert statement["Effect"] == "Deny"
    assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    rules = {rule["id"]: rule for rule in s3["BucketLifecycleConfiguration"]["rules"]}
    assert rules["aborted-uploads"]["abortIncompleteMultipartUpload"] == {"daysAfterInitiation": 3}
    assert rules["old-checkpoints"]["noncurrentVersionExpiration"] == {"noncurrentDays": 14}
    assert "old-runs" not in rules


def test_the_control_plane_is_closed_logged_and_by_iam() -> None:
    (cluster,) = graphs.dev().of_type("eks:index:Cluster")
    inputs = cluster.inputs
    assert inputs["authenticationMode"] == "API"
    assert inputs["endpointPrivateAccess"] is True
    assert inputs["publicAccessCidrs"] == ["203.0.113.7/32"]
    assert inputs["skipDefaultNodeGroup"] is True
    assert inputs["createOidcProvider"] is False
    assert len(inputs["enabledClusterLogTypes"]) == 5
    assert inputs["vpcCniOptions"]["enableNetworkPolicy"] is True
    group = graphs.dev().named("aws:cloudwatch/logGroup:LogGroup", "efa-dev-control-plane").inputs
    assert group == {"name": "/aws/eks/efa-dev/cluster", "retentionInDays": 30}


def test_named_principals_get_access_entries() -> None:
    (cluster,) = graphs.everything().of_type("eks:index:Cluster")
    entries = cluster.inputs["accessEntries"]
    admin = entries["admin-123456789012-role-platform-admin"]
    user = entries["user-123456789012-user-researcher"]
    assert admin["principalArn"].endswith("role/platform/admin")
    assert admin["accessPolicies"]["admin"]["accessScope"] == {"type": "cluster"}
    assert user["kubernetesGroups"] == ["finetune-users"]
    assert "accessPolicies" not in user, "people who submit get the role in the namespace, nothing else"


def test_all_addons_are_pinned() -> None:
    graph = graphs.dev()
    versions = {r.inputs["addonName"]: r.inputs["addonVersion"] for r in graph.of_type("aws:eks/addon:Addon")}
    (cluster,) = graph.of_type("eks:index:Cluster")
    versions["vpc-cni"] = cluster.inputs["vpcCniOptions"]["addonVersion"]
    versions["kube-proxy"] = cluster.inputs["kubeProxyAddonOptions"]["version"]
    assert set(versions) == {
        "vpc-cni",
        "kube-proxy",
        "coredns",
        "eks-pod-identity-agent",
        "eks-node-monitoring-agent",
    }
    assert all(re.fullmatch(r"v\d+\.\d+\.\d+-eksbuild\.\d+", version) for version in versions.values())
    for chart in graph.of_type(graphs.RELEASE):
        assert re.fullmatch(r"v?\d+\.\d+\.\d+", chart.inputs["version"]), chart.name


def test_no_secret_in_the_outputs() -> None:
    for recorded in SHAPES.values():
        # The name of a setting, whose value is a boolean.
        text = json.dumps(recorded().outputs).replace("secretsEncryption", "")
        assert not re.search(r"(?i)secret|password|\"token\"|client-key|private", text), text


def test_no_token_in_the_kubernetes_provider() -> None:
    (provider,) = graphs.dev().of_type("pulumi:providers:kubernetes")
    kubeconfig = json.loads(provider.inputs["kubeconfig"])
    (user,) = kubeconfig["users"]
    assert user["user"]["exec"]["command"] == "aws"
    assert user["user"]["exec"]["args"][:4] == ["eks", "get-token", "--cluster-name", "efa-dev"]
    (local,) = graphs.local().of_type("pulumi:providers:kubernetes")
    assert local.inputs["kubeconfig"].endswith("/.kube/config"), "the path, not what is in the file"


def test_network_policies_deny_all_and_open_what_a_job_needs() -> None:
    policies = network_policies(graphs.dev_settings())
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    sources = [rule["from"] for policy in policies.values() for rule in policy.get("ingress", [])]
    ray = {"podSelector": {"matchLabels": {"ray.io/cluster": "train"}}}
    assert sources == [[ray]], "only pods of the same RayCluster come in"
    https = policies["https"]["egress"][0]
    assert https["to"][0]["ipBlock"]["except"] == ["169.254.169.254/32"]


def test_the_store_of_a_local_stack_is_reachable() -> None:
    policies = network_policies(graphs.local_settings())
    assert policies["storage"]["egress"] == [
        {"to": [{"ipBlock": {"cidr": "10.0.0.5/32"}}], "ports": [{"port": 9000, "protocol": "TCP"}]}
    ]
    assert "pod-identity" not in policies


def test_the_namespace_refuses_privileged_pods() -> None:
    namespace = graphs.dev().named("kubernetes:core/v1:Namespace", "efa-dev-namespace")
    assert namespace.inputs["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "baseline"


def test_who_submits_may_exec_and_not_more() -> None:
    role = graphs.dev().named("kubernetes:rbac.authorization.k8s.io/v1:Role", "efa-dev-submit")
    verbs = {verb for rule in role.inputs["rules"] for verb in rule["verbs"]}
    assert verbs == {"get", "list", "watch", "create"}
    assert [rule["resources"] for rule in role.inputs["rules"] if "create" in rule["verbs"]] == [
        ["pods/exec"]
    ]
