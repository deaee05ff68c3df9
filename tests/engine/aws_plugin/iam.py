"""IAM: roles and their policies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from .base import Cloud, Resource, Values, register, tag_list

_GONE = ("NoSuchEntity",)


@register
class Role(Resource):
    token = "aws:iam/role:Role"
    replace_on = ("name", "namePrefix", "path")
    name_property = "name"
    name_limit = 64
    defaults: ClassVar[Mapping[str, Any]] = {
        "path": "/",
        "maxSessionDuration": 3600,
        "forceDetachPolicies": False,
    }
    gone = _GONE

    def create(self, cloud: Cloud, inputs: Values) -> str:
        cloud.iam.create_role(
            RoleName=inputs["name"],
            AssumeRolePolicyDocument=inputs["assumeRolePolicy"],
            Path=inputs["path"],
            MaxSessionDuration=int(inputs["maxSessionDuration"]),
            Tags=tag_list(inputs.get("tagsAll") or {}),
            **({"Description": inputs["description"]} if inputs.get("description") else {}),
            **({"PermissionsBoundary": p} if (p := inputs.get("permissionsBoundary")) else {}),
        )
        return inputs["name"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        for arn in inputs.get("managedPolicyArns") or []:
            cloud.iam.attach_role_policy(RoleName=id, PolicyArn=arn)
        for policy in inputs.get("inlinePolicies") or []:
            cloud.iam.put_role_policy(RoleName=id, PolicyName=policy["name"], PolicyDocument=policy["policy"])

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = cloud.iam.get_role(RoleName=id)["Role"]
        return {
            "arn": found["Arn"],
            "uniqueId": found["RoleId"],
            "createDate": found["CreateDate"].isoformat(),
            "managedPolicyArns": inputs.get("managedPolicyArns") or [],
        }

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        if old.get("assumeRolePolicy") != new.get("assumeRolePolicy"):
            cloud.iam.update_assume_role_policy(RoleName=id, PolicyDocument=new["assumeRolePolicy"])
        if any(old.get(key) != new.get(key) for key in ("description", "maxSessionDuration")):
            cloud.iam.update_role(
                RoleName=id,
                Description=new.get("description") or "",
                MaxSessionDuration=int(new["maxSessionDuration"]),
            )
        for arn in set(old.get("managedPolicyArns") or []) - set(new.get("managedPolicyArns") or []):
            cloud.iam.detach_role_policy(RoleName=id, PolicyArn=arn)

    def retag(self, cloud: Cloud, id: str, state: Values, removed: list[str], added: dict[str, str]) -> None:
        if removed:
            cloud.iam.untag_role(RoleName=id, TagKeys=removed)
        if added:
            cloud.iam.tag_role(RoleName=id, Tags=tag_list(added))

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        # Like the real provider: instance profiles are left first, and with forceDetachPolicies the policies too.
        cloud.iam.list_instance_profiles_for_role(RoleName=id)
        if state.get("forceDetachPolicies") or state.get("managedPolicyArns"):
            for one in cloud.iam.list_attached_role_policies(RoleName=id)["AttachedPolicies"]:
                cloud.iam.detach_role_policy(RoleName=id, PolicyArn=one["PolicyArn"])
        if state.get("forceDetachPolicies") or state.get("inlinePolicies"):
            for name in cloud.iam.list_role_policies(RoleName=id)["PolicyNames"]:
                cloud.iam.delete_role_policy(RoleName=id, PolicyName=name)
        cloud.iam.delete_role(RoleName=id)


@register
class RolePolicy(Resource):
    token = "aws:iam/rolePolicy:RolePolicy"
    replace_on = ("name", "namePrefix", "role")
    name_property = "name"
    name_limit = 128
    gone = _GONE

    def create(self, cloud: Cloud, inputs: Values) -> str:
        self._put(cloud, inputs)
        return f"{inputs['role']}:{inputs['name']}"

    def _put(self, cloud: Cloud, inputs: Values) -> None:
        policy = inputs["policy"] if isinstance(inputs["policy"], str) else json.dumps(inputs["policy"])
        cloud.iam.put_role_policy(RoleName=inputs["role"], PolicyName=inputs["name"], PolicyDocument=policy)

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        role, name = id.split(":", 1)
        cloud.iam.get_role_policy(RoleName=role, PolicyName=name)
        return {}

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        self._put(cloud, new)

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        role, name = id.split(":", 1)
        cloud.iam.delete_role_policy(RoleName=role, PolicyName=name)


@register
class RolePolicyAttachment(Resource):
    token = "aws:iam/rolePolicyAttachment:RolePolicyAttachment"
    replace_on = ("role", "policyArn")
    gone = _GONE

    def create(self, cloud: Cloud, inputs: Values) -> str:
        cloud.iam.attach_role_policy(RoleName=inputs["role"], PolicyArn=inputs["policyArn"])
        return f"{inputs['role']}/{inputs['policyArn']}"

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values | None:
        listed = cloud.iam.list_attached_role_policies(RoleName=inputs["role"])["AttachedPolicies"]
        return {} if any(one["PolicyArn"] == inputs["policyArn"] for one in listed) else None

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.iam.detach_role_policy(RoleName=state["role"], PolicyArn=state["policyArn"])


@register
class Policy(Resource):
    token = "aws:iam/policy:Policy"
    replace_on = ("name", "namePrefix", "path", "description")
    name_property = "name"
    name_limit = 128
    defaults: ClassVar[Mapping[str, Any]] = {"path": "/"}
    gone = _GONE

    def create(self, cloud: Cloud, inputs: Values) -> str:
        answer = cloud.iam.create_policy(
            PolicyName=inputs["name"],
            PolicyDocument=inputs["policy"],
            Path=inputs["path"],
            Tags=tag_list(inputs.get("tagsAll") or {}),
            **({"Description": inputs["description"]} if inputs.get("description") else {}),
        )
        return answer["Policy"]["Arn"]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = cloud.iam.get_policy(PolicyArn=id)["Policy"]
        return {
            "arn": found["Arn"],
            "policyId": found["PolicyId"],
            "attachmentCount": found["AttachmentCount"],
        }

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        if old.get("policy") != new.get("policy"):
            versions = cloud.iam.list_policy_versions(PolicyArn=id)["Versions"]
            spare = [one["VersionId"] for one in versions if not one["IsDefaultVersion"]]
            if len(versions) >= 5:
                cloud.iam.delete_policy_version(PolicyArn=id, VersionId=spare[-1])
            cloud.iam.create_policy_version(PolicyArn=id, PolicyDocument=new["policy"], SetAsDefault=True)

    def retag(self, cloud: Cloud, id: str, state: Values, removed: list[str], added: dict[str, str]) -> None:
        if removed:
            cloud.iam.untag_policy(PolicyArn=id, TagKeys=removed)
        if added:
            cloud.iam.tag_policy(PolicyArn=id, Tags=tag_list(added))

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        for one in cloud.iam.list_policy_versions(PolicyArn=id)["Versions"]:
            if not one["IsDefaultVersion"]:
                cloud.iam.delete_policy_version(PolicyArn=id, VersionId=one["VersionId"])
        cloud.iam.delete_policy(PolicyArn=id)


@register
class InstanceProfile(Resource):
    token = "aws:iam/instanceProfile:InstanceProfile"
    replace_on = ("name", "namePrefix", "path")
    name_property = "name"
    name_limit = 128
    gone = _GONE

    def create(self, cloud: Cloud, inputs: Values) -> str:
        cloud.iam.create_instance_profile(
            InstanceProfileName=inputs["name"], Tags=tag_list(inputs.get("tagsAll") or {})
        )
        return inputs["name"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        present = cloud.iam.get_instance_profile(InstanceProfileName=id)["InstanceProfile"]["Roles"]
        if inputs.get("role") and not present:
            cloud.iam.add_role_to_instance_profile(InstanceProfileName=id, RoleName=inputs["role"])

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = cloud.iam.get_instance_profile(InstanceProfileName=id)["InstanceProfile"]
        return {
            "arn": found["Arn"],
            "uniqueId": found["InstanceProfileId"],
            "createDate": "2026-01-01T00:00:00Z",
        }

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        if state.get("role"):
            cloud.iam.remove_role_from_instance_profile(InstanceProfileName=id, RoleName=state["role"])
        cloud.iam.delete_instance_profile(InstanceProfileName=id)
