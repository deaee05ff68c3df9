"""A stand-in for the eks plugin: registers what pulumi-eks 4.x's Cluster registers for the same inputs.

The list of children, their names and their order were observed on the real component under the real engine; its
kubeconfig is exec-based in the same way. It speaks to the engine directly, so it needs neither Node nor the aws CLI.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import grpc
from pulumi.runtime.proto import provider_pb2 as messages
from pulumi.runtime.proto import resource_pb2, resource_pb2_grpc

from tests.engine.wire import OPTIONS, UNKNOWN, Plugin, decode, encode, fail

VERSION = "4.4.0"
_RESOURCE_SIGNATURE = {"4dabf18193072939515e22adb298388d": "5cf8f73096256a8f31e491e813e4eb8e"}
_CLUSTER_POLICY = "arn:aws:iam::aws:policy/AmazonEKSClusterPolicy"
_TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {"Action": ["sts:AssumeRole"], "Effect": "Allow", "Principal": {"Service": ["eks.amazonaws.com"]}}
    ],
}
# Inputs of eks.Cluster that are understood here. Another one must be taught to this plugin before the stack may use it.
_KNOWN = {
    *(
        "accessEntries",
        "authenticationMode",
        "bootstrapSelfManagedAddons",
        "clusterTags",
        "corednsAddonOptions",
    ),
    *("createOidcProvider", "deletionProtection", "enabledClusterLogTypes", "encryptionConfigKeyArn"),
    *(
        "endpointPrivateAccess",
        "endpointPublicAccess",
        "kubeProxyAddonOptions",
        "kubernetesServiceIpAddressRange",
    ),
    *("name", "privateSubnetIds", "publicAccessCidrs", "publicSubnetIds", "skipDefaultNodeGroup"),
    *(
        "skipDefaultSecurityGroups",
        "tags",
        "upgradePolicy",
        "useDefaultVpcCni",
        "version",
        "vpcCniOptions",
        "vpcId",
    ),
}
_NEEDED = {"skipDefaultNodeGroup": True, "skipDefaultSecurityGroups": True}


@dataclass
class Registered:
    urn: str
    id: str
    outputs: dict[str, Any]

    def reference(self, version: str = "7.51.1") -> dict[str, Any]:
        return {**_RESOURCE_SIGNATURE, "urn": self.urn, "id": self.id, "packageVersion": version}


@dataclass
class Children:
    """Registers resources below a component that is being constructed."""

    monitor: resource_pb2_grpc.ResourceMonitorStub
    provider: str
    parent: str = ""
    all: list[str] = field(default_factory=list)

    def add(
        self,
        token: str,
        name: str,
        properties: dict[str, Any],
        *,
        after: list[str] | None = None,
        parent: str = "",
        component: bool = False,
    ) -> Registered:
        request = resource_pb2.RegisterResourceRequest(
            type=token,
            name=name,
            parent=parent or self.parent,
            custom=not component,
            object=encode(properties),
            dependencies=after or [],
            provider="" if component else self.provider,
            acceptSecrets=False,
            acceptResources=True,
            supportsPartialValues=True,
        )
        answer = self.monitor.RegisterResource(request)
        if component:
            self.monitor.RegisterResourceOutputs(resource_pb2.RegisterResourceOutputsRequest(urn=answer.urn))
        else:
            self.all.append(answer.urn)
        return Registered(answer.urn, answer.id or UNKNOWN, decode(answer.object))


class Eks(Plugin):
    version = VERSION

    def Handshake(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return messages.ProviderHandshakeResponse(accept_secrets=True, accept_resources=True)

    def DiffConfig(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return messages.DiffResponse()

    def Configure(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return messages.ConfigureResponse(acceptSecrets=True, acceptResources=True, supportsPreview=True)

    def Construct(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        if request.type != "eks:index:Cluster":
            fail(
                context, f"the stack has a {request.type}, which the eks plugin of these tests does not know"
            )
        inputs = {key: value for key, value in decode(request.inputs).items() if value is not None}
        unknown = sorted(set(inputs) - _KNOWN)
        if unknown:
            fail(
                context,
                f"eks.Cluster {request.name}: teach tests/engine/eks_plugin.py the inputs {', '.join(unknown)}",
            )
        for name, value in _NEEDED.items():
            if inputs.get(name) is not value:
                fail(
                    context,
                    f"eks.Cluster {request.name}: tests/engine/eks_plugin.py only does {name}={value}",
                )
        needed = {key: list(value.urns) for key, value in request.inputDependencies.items()}
        with grpc.insecure_channel(request.monitorEndpoint, options=OPTIONS) as channel:
            children = Children(
                resource_pb2_grpc.ResourceMonitorStub(channel), request.providers.get("aws", "")
            )
            try:
                return _construct(children, request, inputs, needed)
            except grpc.RpcError as error:
                fail(context, f"eks.Cluster {request.name}: {error.details()}")
                raise


def _construct(children: Children, request: Any, inputs: dict[str, Any], needed: dict[str, list[str]]) -> Any:
    name = request.name
    component = children.monitor.RegisterResource(
        resource_pb2.RegisterResourceRequest(
            type=request.type,
            name=name,
            parent=request.parent,
            custom=False,
            object=encode({}),
            dependencies=list(request.dependencies),
            aliasURNs=[],
        )
    )
    children.parent = component.urn
    tags = inputs.get("tags") or {}
    role = _service_role(children, name, tags)
    cluster = _cluster(children, name, inputs, needed, role)
    _access_entries(children, name, inputs, cluster)
    kube_proxy = inputs.get("kubeProxyAddonOptions") or {}
    if kube_proxy.get("enabled", True):
        _addon(
            children,
            name,
            "kube-proxy",
            kube_proxy.get("version"),
            kube_proxy,
            {},
            cluster,
            tags,
            children.parent,
        )
    if not inputs.get("useDefaultVpcCni"):
        cni = children.add("eks:index:VpcCniAddon", f"{name}-vpc-cni", {}, component=True)
        options = inputs.get("vpcCniOptions") or {}
        values = {"enableNetworkPolicy": "true"} if options.get("enableNetworkPolicy") else {}
        _addon(
            children, name, "vpc-cni", options.get("addonVersion"), options, values, cluster, tags, cni.urn
        )
    state = {
        "eksCluster": cluster.reference(),
        "kubeconfig": _kubeconfig(cluster),
        "kubeconfigJson": json.dumps(_kubeconfig(cluster)),
        "clusterSecurityGroupId": "",
        "nodeSecurityGroupId": "",
        "clusterIngressRuleId": "",
        "autoModeNodeRoleName": "",
        "defaultNodeGroupAsgName": "",
        "fargateProfileId": "",
        "fargateProfileStatus": "",
        "instanceRoles": [],
        "oidcIssuer": "",
        "oidcProviderArn": "",
        "oidcProviderUrl": "",
    }
    children.monitor.RegisterResourceOutputs(
        resource_pb2.RegisterResourceOutputsRequest(urn=component.urn, outputs=encode(state))
    )
    depends = {
        key: messages.ConstructResponse.PropertyDependencies(urns=[cluster.urn])
        for key in ("eksCluster", "kubeconfig", "kubeconfigJson")
    }
    return messages.ConstructResponse(urn=component.urn, state=encode(state), stateDependencies=depends)


def _service_role(children: Children, name: str, tags: dict[str, str]) -> tuple[Registered, list[str]]:
    component = children.add("eks:index:ServiceRole", f"{name}-eksRole", {}, component=True)
    role = children.add(
        "aws:iam/role:Role",
        f"{name}-eksRole-role",
        {
            "description": "Allows EKS to manage clusters on your behalf.",
            "assumeRolePolicy": json.dumps(_TRUST),
            "tags": tags,
        },
        parent=component.urn,
    )
    attachment = children.add(
        "aws:iam/rolePolicyAttachment:RolePolicyAttachment",
        f"{name}-eksRole-4b490823",
        {"policyArn": _CLUSTER_POLICY, "role": role.outputs.get("name", UNKNOWN)},
        after=[role.urn],
        parent=component.urn,
    )
    return role, [role.urn, attachment.urn]


def _cluster(
    children: Children,
    name: str,
    inputs: dict[str, Any],
    needed: dict[str, list[str]],
    role: tuple[Registered, list[str]],
) -> Registered:
    network = {
        "subnetIds": [*(inputs.get("publicSubnetIds") or []), *(inputs.get("privateSubnetIds") or [])],
        "endpointPrivateAccess": inputs.get("endpointPrivateAccess"),
        "endpointPublicAccess": inputs.get("endpointPublicAccess"),
        "publicAccessCidrs": inputs.get("publicAccessCidrs"),
    }
    properties = {
        "name": inputs.get("name"),
        "roleArn": role[0].outputs.get("arn", UNKNOWN),
        "vpcConfig": {key: value for key, value in network.items() if value is not None},
        "version": inputs.get("version"),
        "enabledClusterLogTypes": inputs.get("enabledClusterLogTypes"),
        "defaultAddonsToRemoves": None,
        "tags": {
            "Name": f"{name}-eksCluster",
            **(inputs.get("tags") or {}),
            **(inputs.get("clusterTags") or {}),
        },
        "bootstrapSelfManagedAddons": inputs.get("bootstrapSelfManagedAddons"),
        "deletionProtection": inputs.get("deletionProtection"),
        "upgradePolicy": inputs.get("upgradePolicy"),
    }
    if inputs.get("authenticationMode"):
        properties["accessConfig"] = {
            "authenticationMode": inputs["authenticationMode"],
            "bootstrapClusterCreatorAdminPermissions": True,
        }
    if inputs.get("encryptionConfigKeyArn"):
        properties["encryptionConfig"] = {
            "resources": ["secrets"],
            "provider": {"keyArn": inputs["encryptionConfigKeyArn"]},
        }
    if inputs.get("kubernetesServiceIpAddressRange"):
        properties["kubernetesNetworkConfig"] = {"serviceIpv4Cidr": inputs["kubernetesServiceIpAddressRange"]}
    used = ("publicSubnetIds", "privateSubnetIds", "encryptionConfigKeyArn", "vpcId")
    after = sorted({urn for key in used for urn in needed.get(key, [])} | set(role[1]))
    given = {key: value for key, value in properties.items() if value is not None}
    return children.add("aws:eks/cluster:Cluster", f"{name}-eksCluster", given, after=after)


def _access_entries(children: Children, name: str, inputs: dict[str, Any], cluster: Registered) -> None:
    cluster_name = cluster.outputs.get("name", UNKNOWN)
    for key, entry in (inputs.get("accessEntries") or {}).items():
        properties = {
            "clusterName": cluster_name,
            "principalArn": entry["principalArn"],
            "kubernetesGroups": entry.get("kubernetesGroups"),
            "userName": entry.get("username"),
            "type": entry.get("type"),
            "tags": {**(inputs.get("tags") or {}), **(entry.get("tags") or {})},
        }
        given = {k: v for k, v in properties.items() if v is not None}
        registered = children.add(
            "aws:eks/accessEntry:AccessEntry", f"{name}-{key}", given, after=[cluster.urn]
        )
        for policy, association in (entry.get("accessPolicies") or {}).items():
            children.add(
                "aws:eks/accessPolicyAssociation:AccessPolicyAssociation",
                f"{name}-{key}-{policy}",
                {
                    "clusterName": cluster_name,
                    "principalArn": entry["principalArn"],
                    "policyArn": association["policyArn"],
                    "accessScope": association["accessScope"],
                },
                after=[cluster.urn, registered.urn],
            )


def _addon(
    children: Children,
    name: str,
    addon: str,
    version: str | None,
    options: dict[str, Any],
    values: dict[str, str],
    cluster: Registered,
    tags: dict[str, str],
    parent: str,
) -> None:
    # Without a version the real component asks AWS for the newest: a call at each preview, and drift.
    assert version, f"{addon}: the stack has to pin the version of the add-on"
    properties = {
        "clusterName": cluster.outputs.get("name", UNKNOWN),
        "addonName": addon,
        "addonVersion": version,
        "preserve": addon != "vpc-cni",
        "resolveConflictsOnCreate": options.get("resolveConflictsOnCreate", "OVERWRITE"),
        "resolveConflictsOnUpdate": options.get("resolveConflictsOnUpdate", "OVERWRITE"),
        "tags": tags,
    }
    if values:
        properties["configurationValues"] = json.dumps(values)
    children.add("aws:eks/addon:Addon", f"{name}-{addon}", properties, after=[cluster.urn], parent=parent)


def _kubeconfig(cluster: Registered) -> dict[str, Any]:
    """Exec-based, as the real component's: no token is ever stored."""
    authority = cluster.outputs.get("certificateAuthority", UNKNOWN)
    name = cluster.outputs.get("name", UNKNOWN)
    return {
        "apiVersion": "v1",
        "clusters": [
            {
                "name": "kubernetes",
                "cluster": {
                    "server": cluster.outputs.get("endpoint", UNKNOWN),
                    "certificate-authority-data": authority["data"]
                    if isinstance(authority, dict)
                    else UNKNOWN,
                },
            }
        ],
        "contexts": [{"name": "aws", "context": {"cluster": "kubernetes", "user": "aws"}}],
        "current-context": "aws",
        "kind": "Config",
        "users": [
            {
                "name": "aws",
                "user": {
                    "exec": {
                        "apiVersion": "client.authentication.k8s.io/v1beta1",
                        "command": "aws",
                        "args": ["eks", "get-token", "--cluster-name", name],
                    }
                },
            }
        ],
    }
