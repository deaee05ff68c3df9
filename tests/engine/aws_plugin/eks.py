"""EKS: cluster, node groups, add-ons, access, pod identity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from botocore.exceptions import ClientError

from .base import Cloud, FailedError, Resource, Values, is_gone, pick, register, wait

_GONE = ("ResourceNotFoundException",)


class _Tagged(Resource):
    gone = _GONE

    def retag(self, cloud: Cloud, id: str, state: Values, removed: list[str], added: dict[str, str]) -> None:
        if removed:
            cloud.eks.untag_resource(resourceArn=self.arn(id, state), tagKeys=removed)
        if added:
            cloud.eks.tag_resource(resourceArn=self.arn(id, state), tags=added)

    def arn(self, id: str, state: Values) -> str:
        return state["arn"]


def _vpc_config(inputs: Values) -> dict[str, Any]:
    return pick(
        inputs["vpcConfig"],
        *(
            "subnetIds",
            "securityGroupIds",
            "endpointPrivateAccess",
            "endpointPublicAccess",
            "publicAccessCidrs",
        ),
    )


_LOG_TYPES = ["api", "audit", "authenticator", "controllerManager", "scheduler"]


def _logging(inputs: Values) -> dict[str, Any]:
    enabled = inputs.get("enabledClusterLogTypes") or []
    disabled = [one for one in _LOG_TYPES if one not in enabled]
    entries = [{"types": types, "enabled": on} for types, on in ((enabled, True), (disabled, False)) if types]
    return {"clusterLogging": entries}


@register
class Cluster(_Tagged):
    token = "aws:eks/cluster:Cluster"
    replace_on = (
        *("name", "roleArn", "bootstrapSelfManagedAddons", "kubernetesNetworkConfig", "outpostConfig"),
        "accessConfig.bootstrapClusterCreatorAdminPermissions",
    )
    name_property = "name"
    name_limit = 100
    defaults: ClassVar[Mapping[str, Any]] = {"bootstrapSelfManagedAddons": True}

    def replaced(self, old: Values, new: Values) -> list[str]:
        # Encryption can be turned on for a cluster that lives, and never off.
        off = ["encryptionConfig"] if old.get("encryptionConfig") and not new.get("encryptionConfig") else []
        return [*super().replaced(old, new), *off]

    def create(self, cloud: Cloud, inputs: Values) -> str:
        arguments = pick(
            inputs, "name", "roleArn", "version", "accessConfig", "upgradePolicy", "deletionProtection"
        )
        arguments |= pick(inputs, "kubernetesNetworkConfig", "bootstrapSelfManagedAddons")
        encryption = inputs.get("encryptionConfig")
        if encryption:
            arguments["encryptionConfig"] = [encryption]
        cloud.eks.create_cluster(
            **arguments,
            resourcesVpcConfig=_vpc_config(inputs),
            logging=_logging(inputs),
            tags=inputs.get("tagsAll") or {},
        )
        return inputs["name"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        wait(lambda: self._describe(cloud, id), lambda one: one["status"] == "ACTIVE", f"EKS cluster {id}")

    def _describe(self, cloud: Cloud, id: str) -> Any:
        return cloud.eks.describe_cluster(name=id)["cluster"]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = self._describe(cloud, id)
        network = found["resourcesVpcConfig"]
        return {
            "arn": found["arn"],
            "name": found["name"],
            "version": found["version"],
            "status": found["status"],
            "endpoint": found["endpoint"],
            "platformVersion": found["platformVersion"],
            "createdAt": found["createdAt"].isoformat(),
            "certificateAuthority": {"data": found["certificateAuthority"]["data"]},
            "identities": [{"oidcs": [{"issuer": found["identity"]["oidc"]["issuer"]}]}],
            "accessConfig": found["accessConfig"],
            "kubernetesNetworkConfig": found["kubernetesNetworkConfig"],
            "upgradePolicy": found["upgradePolicy"],
            "deletionProtection": found["deletionProtection"],
            "vpcConfig": {
                **inputs["vpcConfig"],
                **pick(
                    network,
                    *("clusterSecurityGroupId", "vpcId", "subnetIds", "securityGroupIds"),
                    *("endpointPrivateAccess", "endpointPublicAccess", "publicAccessCidrs"),
                ),
            },
        }

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        if old.get("version") != new.get("version") and new.get("version"):
            self._await(cloud, id, cloud.eks.update_cluster_version(name=id, version=new["version"]))
        if (old.get("accessConfig") or {}) != (new.get("accessConfig") or {}):
            mode = pick(new.get("accessConfig") or {}, "authenticationMode")
            self._await(cloud, id, cloud.eks.update_cluster_config(name=id, accessConfig=mode))
        if old.get("vpcConfig") != new.get("vpcConfig"):
            self._await(
                cloud, id, cloud.eks.update_cluster_config(name=id, resourcesVpcConfig=_vpc_config(new))
            )
        if old.get("enabledClusterLogTypes") != new.get("enabledClusterLogTypes"):
            self._await(cloud, id, cloud.eks.update_cluster_config(name=id, logging=_logging(new)))
        if new.get("encryptionConfig") and not old.get("encryptionConfig"):
            config = [new["encryptionConfig"]]
            self._await(
                cloud, id, cloud.eks.associate_encryption_config(clusterName=id, encryptionConfig=config)
            )
        for key in ("upgradePolicy", "deletionProtection"):
            if old.get(key) != new.get(key) and new.get(key) is not None:
                self._await(cloud, id, cloud.eks.update_cluster_config(name=id, **{key: new[key]}))

    def _await(self, cloud: Cloud, id: str, answer: Any) -> None:
        update = answer["update"]["id"]
        wait(
            lambda: cloud.eks.describe_update(name=id, updateId=update)["update"],
            lambda one: one["status"] == "Successful",
            f"EKS cluster {id} update {update}",
        )

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.eks.delete_cluster(name=id)
        _until_gone(lambda: self._describe(cloud, id), f"deletion of EKS cluster {id}")


def _until_gone(describe: Any, what: str) -> None:
    def found() -> bool:
        try:
            describe()
        except ClientError as error:
            if is_gone(error, _GONE):
                return False
            raise
        return True

    wait(found, lambda there: not there, what)


@register
class NodeGroup(_Tagged):
    token = "aws:eks/nodeGroup:NodeGroup"
    replace_on = (
        *("amiType", "capacityType", "clusterName", "diskSize", "instanceTypes", "nodeGroupName"),
        *(
            "nodeGroupNamePrefix",
            "nodeRoleArn",
            "remoteAccess",
            "subnetIds",
            "launchTemplate.id",
            "launchTemplate.name",
        ),
    )
    name_property = "nodeGroupName"
    name_limit = 63

    def create(self, cloud: Cloud, inputs: Values) -> str:
        cloud.eks.create_nodegroup(
            clusterName=inputs["clusterName"],
            nodegroupName=inputs["nodeGroupName"],
            scalingConfig=_numbers(inputs["scalingConfig"]),
            subnets=inputs["subnetIds"],
            nodeRole=inputs["nodeRoleArn"],
            tags=inputs.get("tagsAll") or {},
            **pick(inputs, "amiType", "capacityType", "instanceTypes", "labels", "version", "releaseVersion"),
            **pick(inputs, "taints", "nodeRepairConfig", "diskSize"),
            **({"launchTemplate": _template(inputs)} if inputs.get("launchTemplate") else {}),
            **({"updateConfig": _numbers(inputs["updateConfig"])} if inputs.get("updateConfig") else {}),
        )
        return f"{inputs['clusterName']}:{inputs['nodeGroupName']}"

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        self._settle(cloud, id)

    def _settle(self, cloud: Cloud, id: str) -> None:
        found = wait(
            lambda: self._describe(cloud, id),
            lambda one: one["status"] not in ("CREATING", "UPDATING"),
            f"EKS node group {id}",
        )
        if found["status"] != "ACTIVE":
            issue = found["health"]["issues"][0]
            raise FailedError(
                f"waiting for EKS Node Group ({id}) create: unexpected state '{found['status']}', wanted target "
                f"'ACTIVE'. last error: {', '.join(issue['resourceIds'])}: {issue['code']}: {issue['message']}"
            )

    def _describe(self, cloud: Cloud, id: str) -> Any:
        cluster, name = id.split(":")
        return cloud.eks.describe_nodegroup(clusterName=cluster, nodegroupName=name)["nodegroup"]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = self._describe(cloud, id)
        return {
            "arn": found["nodegroupArn"],
            "nodeGroupName": found["nodegroupName"],
            "clusterName": found["clusterName"],
            "status": found["status"],
            "amiType": found["amiType"],
            "capacityType": found["capacityType"],
            "version": found["version"],
            "releaseVersion": found["releaseVersion"],
            "instanceTypes": found["instanceTypes"],
            "scalingConfig": pick(found["scalingConfig"], "minSize", "maxSize", "desiredSize"),
            "resources": [
                {
                    "autoscalingGroups": [
                        {"name": one["name"]} for one in found["resources"]["autoScalingGroups"]
                    ],
                    "remoteAccessSecurityGroupId": "",
                }
            ],
            "updateConfig": pick(
                found["updateConfig"], "maxUnavailable", "maxUnavailablePercentage", "updateStrategy"
            ),
            "nodeRepairConfig": found.get("nodeRepairConfig") or {"enabled": False},
            "diskSize": found.get("diskSize") or 20,
        }

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        cluster, name = id.split(":")
        config: dict[str, Any] = {}
        for key in ("scalingConfig", "updateConfig", "nodeRepairConfig"):
            if old.get(key) != new.get(key) and new.get(key):
                config[key] = _numbers(new[key])
        if old.get("labels") != new.get("labels"):
            before, after = old.get("labels") or {}, new.get("labels") or {}
            config["labels"] = {
                "addOrUpdateLabels": {key: value for key, value in after.items() if before.get(key) != value},
                "removeLabels": [key for key in before if key not in after],
            }
        if old.get("taints") != new.get("taints"):
            before, after = old.get("taints") or [], new.get("taints") or []
            config["taints"] = {
                "addOrUpdateTaints": [one for one in after if one not in before],
                "removeTaints": [one for one in before if one not in after],
            }
        if config:
            answer = cloud.eks.update_nodegroup_config(clusterName=cluster, nodegroupName=name, **config)
            self._await(cloud, id, answer)
        version: dict[str, Any] = {}
        for key in ("version", "releaseVersion"):
            if old.get(key) != new.get(key) and new.get(key):
                version[key] = new[key]
        if old.get("launchTemplate") != new.get("launchTemplate"):
            version["launchTemplate"] = _template(new)
        if version:
            answer = cloud.eks.update_nodegroup_version(clusterName=cluster, nodegroupName=name, **version)
            self._await(cloud, id, answer)

    def _await(self, cloud: Cloud, id: str, answer: Any) -> None:
        cluster, name = id.split(":")
        update = answer["update"]["id"]
        wait(
            lambda: cloud.eks.describe_update(name=cluster, nodegroupName=name, updateId=update)["update"],
            lambda one: one["status"] == "Successful",
            f"EKS node group {id} update {update}",
        )
        self._settle(cloud, id)

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cluster, name = id.split(":")
        cloud.eks.delete_nodegroup(clusterName=cluster, nodegroupName=name)
        _until_gone(lambda: self._describe(cloud, id), f"deletion of EKS node group {id}")


def _numbers(values: Values) -> dict[str, Any]:
    return {key: int(value) if isinstance(value, float) else value for key, value in values.items()}


def _template(inputs: Values) -> dict[str, str]:
    wanted = inputs["launchTemplate"]
    return {key: str(wanted[key]) for key in ("id", "name", "version") if wanted.get(key)}


@register
class Addon(_Tagged):
    token = "aws:eks/addon:Addon"
    replace_on = ("addonName", "clusterName")

    def create(self, cloud: Cloud, inputs: Values) -> str:
        conflicts = inputs.get("resolveConflictsOnCreate") or inputs.get("resolveConflicts")
        cloud.eks.create_addon(
            clusterName=inputs["clusterName"],
            addonName=inputs["addonName"],
            tags=inputs.get("tagsAll") or {},
            **pick(inputs, "addonVersion", "configurationValues", "serviceAccountRoleArn"),
            **({"podIdentityAssociations": p} if (p := inputs.get("podIdentityAssociations")) else {}),
            **({"resolveConflicts": conflicts} if conflicts else {}),
        )
        return f"{inputs['clusterName']}:{inputs['addonName']}"

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        wait(lambda: self._describe(cloud, id), lambda one: one["status"] == "ACTIVE", f"EKS add-on {id}")

    def _describe(self, cloud: Cloud, id: str) -> Any:
        cluster, name = id.split(":")
        return cloud.eks.describe_addon(clusterName=cluster, addonName=name)["addon"]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = self._describe(cloud, id)
        return {
            "arn": found["addonArn"],
            "addonVersion": found["addonVersion"] or "v1.0.0-eksbuild.1",
            "configurationValues": found.get("configurationValues") or "",
            "createdAt": found["createdAt"].isoformat(),
            "modifiedAt": found["modifiedAt"].isoformat(),
        }

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        watched = ("addonVersion", "configurationValues", "serviceAccountRoleArn", "podIdentityAssociations")
        if any(old.get(key) != new.get(key) for key in watched):
            conflicts = new.get("resolveConflictsOnUpdate")
            cloud.eks.update_addon(
                clusterName=new["clusterName"],
                addonName=new["addonName"],
                **pick(new, *watched),
                **({"resolveConflicts": conflicts} if conflicts else {}),
            )

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cluster, name = id.split(":")
        cloud.eks.delete_addon(clusterName=cluster, addonName=name, preserve=bool(state.get("preserve")))
        _until_gone(lambda: self._describe(cloud, id), f"deletion of EKS add-on {id}")


@register
class AccessEntry(_Tagged):
    token = "aws:eks/accessEntry:AccessEntry"
    replace_on = ("clusterName", "principalArn", "type")
    defaults: ClassVar[Mapping[str, Any]] = {"type": "STANDARD"}

    def create(self, cloud: Cloud, inputs: Values) -> str:
        cloud.eks.create_access_entry(
            clusterName=inputs["clusterName"],
            principalArn=inputs["principalArn"],
            type=inputs["type"],
            tags=inputs.get("tagsAll") or {},
            **pick(inputs, "kubernetesGroups"),
            **({"username": inputs["userName"]} if inputs.get("userName") else {}),
        )
        return f"{inputs['clusterName']}:{inputs['principalArn']}"

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        cluster, principal = id.split(":", 1)
        found = cloud.eks.describe_access_entry(clusterName=cluster, principalArn=principal)["accessEntry"]
        return {
            "accessEntryArn": found["accessEntryArn"],
            "createdAt": found["createdAt"].isoformat(),
            "modifiedAt": found["modifiedAt"].isoformat(),
            "kubernetesGroups": found["kubernetesGroups"],
            "userName": found["username"] or principal,
        }

    def arn(self, id: str, state: Values) -> str:
        return state["accessEntryArn"]

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        if old.get("kubernetesGroups") != new.get("kubernetesGroups"):
            cloud.eks.update_access_entry(
                clusterName=new["clusterName"],
                principalArn=new["principalArn"],
                kubernetesGroups=new.get("kubernetesGroups") or [],
            )

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.eks.delete_access_entry(clusterName=state["clusterName"], principalArn=state["principalArn"])


@register
class AccessPolicyAssociation(Resource):
    token = "aws:eks/accessPolicyAssociation:AccessPolicyAssociation"
    replace_on = ("clusterName", "principalArn", "policyArn", "accessScope")
    gone = _GONE

    def create(self, cloud: Cloud, inputs: Values) -> str:
        cloud.eks.associate_access_policy(
            clusterName=inputs["clusterName"],
            principalArn=inputs["principalArn"],
            policyArn=inputs["policyArn"],
            accessScope=pick(inputs["accessScope"], "type", "namespaces"),
        )
        return f"{inputs['clusterName']}#{inputs['principalArn']}#{inputs['policyArn']}"

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values | None:
        listed = cloud.eks.list_associated_access_policies(
            clusterName=inputs["clusterName"], principalArn=inputs["principalArn"]
        )
        for one in listed["associatedAccessPolicies"]:
            if one["policyArn"] == inputs["policyArn"]:
                return {
                    "associatedAt": one["associatedAt"].isoformat(),
                    "modifiedAt": one["modifiedAt"].isoformat(),
                }
        return None

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.eks.disassociate_access_policy(
            clusterName=state["clusterName"], principalArn=state["principalArn"], policyArn=state["policyArn"]
        )


@register
class PodIdentityAssociation(_Tagged):
    token = "aws:eks/podIdentityAssociation:PodIdentityAssociation"
    replace_on = ("clusterName", "namespace", "serviceAccount")

    def create(self, cloud: Cloud, inputs: Values) -> str:
        answer = cloud.eks.create_pod_identity_association(
            **pick(inputs, "clusterName", "namespace", "serviceAccount", "roleArn"),
            tags=inputs.get("tagsAll") or {},
        )
        return answer["association"]["associationId"]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = cloud.eks.describe_pod_identity_association(
            clusterName=inputs["clusterName"], associationId=id
        )
        arn = found["association"]["associationArn"]
        return {"associationArn": arn, "associationId": id, "disableSessionTags": False}

    def arn(self, id: str, state: Values) -> str:
        return state["associationArn"]

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        if old.get("roleArn") != new.get("roleArn"):
            cloud.eks.update_pod_identity_association(
                clusterName=new["clusterName"], associationId=id, roleArn=new["roleArn"]
            )

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.eks.delete_pod_identity_association(clusterName=state["clusterName"], associationId=id)
