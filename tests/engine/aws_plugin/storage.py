"""S3, KMS and FSx for Lustre."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from botocore.exceptions import ClientError

from .base import Cloud, FailedError, Resource, Values, is_gone, register, tag_list, upper, wait

_NO_BUCKET = ("NoSuchBucket", "404")


@register
class Bucket(Resource):
    token = "aws:s3/bucket:Bucket"
    replace_on = ("bucket", "bucketPrefix", "objectLockEnabled")
    name_property = "bucket"
    name_limit = 63
    defaults: ClassVar[Mapping[str, Any]] = {"forceDestroy": False}
    gone = _NO_BUCKET

    def create(self, cloud: Cloud, inputs: Values) -> str:
        place = {} if cloud.region == "us-east-1" else {"LocationConstraint": cloud.region}
        cloud.s3.create_bucket(
            Bucket=inputs["bucket"], **({"CreateBucketConfiguration": place} if place else {})
        )
        return inputs["bucket"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        cloud.s3.head_bucket(Bucket=id)
        if inputs.get("tagsAll"):
            cloud.s3.put_bucket_tagging(Bucket=id, Tagging={"TagSet": tag_list(inputs["tagsAll"])})

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        cloud.s3.head_bucket(Bucket=id)
        return {
            "arn": f"arn:aws:s3:::{id}",
            "bucketDomainName": f"{id}.s3.amazonaws.com",
            "bucketRegionalDomainName": f"{id}.s3.{cloud.region}.amazonaws.com",
            "bucketRegion": cloud.region,
            "hostedZoneId": "Z3BJ6K6RIION7M",
            "requestPayer": "BucketOwner",
        }

    def retag(self, cloud: Cloud, id: str, state: Values, removed: list[str], added: dict[str, str]) -> None:
        kept = {key: value for key, value in (state.get("tagsAll") or {}).items() if key not in removed}
        cloud.s3.put_bucket_tagging(Bucket=id, Tagging={"TagSet": tag_list({**kept, **added})})

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        try:
            cloud.s3.delete_bucket(Bucket=id)
        except ClientError as error:
            if not is_gone(error, ("BucketNotEmpty",)) or not state.get("forceDestroy"):
                raise
            _empty(cloud, id)
            cloud.s3.delete_bucket(Bucket=id)


def _empty(cloud: Cloud, bucket: str) -> None:
    while True:
        listed = cloud.s3.list_object_versions(Bucket=bucket)
        found = [*listed.get("Versions", []), *listed.get("DeleteMarkers", [])]
        if not found:
            return
        objects = [{"Key": one["Key"], "VersionId": one["VersionId"]} for one in found]
        cloud.s3.delete_objects(Bucket=bucket, Delete={"Objects": objects, "Quiet": True})


class _BucketPart(Resource):
    """A configuration of a bucket that is a resource of its own: put, get, delete."""

    replace_on = ("bucket", "expectedBucketOwner")
    put: ClassVar[str]
    get: ClassVar[str]
    remove: ClassVar[str | None] = None
    gone = (
        *_NO_BUCKET,
        *("NoSuchBucketPolicy", "NoSuchLifecycleConfiguration", "NoSuchPublicAccessBlockConfiguration"),
        *("ServerSideEncryptionConfigurationNotFoundError", "OwnershipControlsNotFoundError"),
    )

    def configuration(self, inputs: Values) -> dict[str, Any]:
        raise NotImplementedError

    def create(self, cloud: Cloud, inputs: Values) -> str:
        getattr(cloud.s3, self.put)(Bucket=inputs["bucket"], **self.configuration(inputs))
        return inputs["bucket"]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        getattr(cloud.s3, self.get)(Bucket=id)
        return {}

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        getattr(cloud.s3, self.put)(Bucket=id, **self.configuration(new))

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        if self.remove:
            getattr(cloud.s3, self.remove)(Bucket=id)


@register
class BucketVersioning(_BucketPart):
    token = "aws:s3/bucketVersioning:BucketVersioning"
    put, get = "put_bucket_versioning", "get_bucket_versioning"

    def configuration(self, inputs: Values) -> dict[str, Any]:
        return {"VersioningConfiguration": {"Status": inputs["versioningConfiguration"]["status"]}}

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.s3.put_bucket_versioning(Bucket=id, VersioningConfiguration={"Status": "Suspended"})


@register
class BucketEncryption(_BucketPart):
    token = "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration"
    put, get, remove = "put_bucket_encryption", "get_bucket_encryption", "delete_bucket_encryption"

    def configuration(self, inputs: Values) -> dict[str, Any]:
        rules = []
        for rule in inputs["rules"]:
            default = rule.get("applyServerSideEncryptionByDefault")
            chosen = (
                {
                    "SSEAlgorithm": default["sseAlgorithm"],
                    **(
                        {"KMSMasterKeyID": default["kmsMasterKeyId"]} if default.get("kmsMasterKeyId") else {}
                    ),
                }
                if default
                else None
            )
            rules.append(
                {
                    **({"ApplyServerSideEncryptionByDefault": chosen} if chosen else {}),
                    **({"BucketKeyEnabled": rule["bucketKeyEnabled"]} if "bucketKeyEnabled" in rule else {}),
                }
            )
        return {"ServerSideEncryptionConfiguration": {"Rules": rules}}


@register
class BucketPublicAccessBlock(_BucketPart):
    token = "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock"
    put, get, remove = "put_public_access_block", "get_public_access_block", "delete_public_access_block"

    def configuration(self, inputs: Values) -> dict[str, Any]:
        names = ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets")
        return {"PublicAccessBlockConfiguration": upper({name: inputs.get(name, False) for name in names})}


@register
class BucketOwnershipControls(_BucketPart):
    token = "aws:s3/bucketOwnershipControls:BucketOwnershipControls"
    put, get, remove = (
        "put_bucket_ownership_controls",
        "get_bucket_ownership_controls",
        "delete_bucket_ownership_controls",
    )

    def configuration(self, inputs: Values) -> dict[str, Any]:
        return {"OwnershipControls": {"Rules": [upper(inputs["rule"])]}}


@register
class BucketPolicy(_BucketPart):
    token = "aws:s3/bucketPolicy:BucketPolicy"
    put, get, remove = "put_bucket_policy", "get_bucket_policy", "delete_bucket_policy"

    def configuration(self, inputs: Values) -> dict[str, Any]:
        policy = inputs["policy"]
        return {"Policy": policy if isinstance(policy, str) else json.dumps(policy)}


@register
class BucketLifecycle(_BucketPart):
    token = "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration"
    put, get, remove = (
        "put_bucket_lifecycle_configuration",
        "get_bucket_lifecycle_configuration",
        "delete_bucket_lifecycle",
    )

    def configuration(self, inputs: Values) -> dict[str, Any]:
        rules = []
        for rule in inputs["rules"]:
            one: dict[str, Any] = {"ID": rule["id"], "Status": rule["status"]}
            where = rule.get("filter") or {}
            both = where.get("and")
            if both:
                tags = {"Tags": tag_list(both["tags"])} if both.get("tags") else {}
                prefix = {"Prefix": both["prefix"]} if both.get("prefix") else {}
                one["Filter"] = {"And": {**prefix, **tags}}
            elif where.get("tag"):
                one["Filter"] = {"Tag": {"Key": where["tag"]["key"], "Value": where["tag"]["value"]}}
            else:
                one["Filter"] = {"Prefix": where.get("prefix") or ""}
            for key in ("expiration", "noncurrentVersionExpiration", "abortIncompleteMultipartUpload"):
                if rule.get(key):
                    one[key[0].upper() + key[1:]] = _integers(upper(rule[key]))
            for key in ("transitions", "noncurrentVersionTransitions"):
                if rule.get(key):
                    one[key[0].upper() + key[1:]] = [_integers(upper(entry)) for entry in rule[key]]
            rules.append(one)
        return {"LifecycleConfiguration": {"Rules": rules}}


def _integers(values: dict[str, Any]) -> dict[str, Any]:
    return {key: int(value) if isinstance(value, float) else value for key, value in values.items()}


@register
class Key(Resource):
    token = "aws:kms/key:Key"
    replace_on = ("customerMasterKeySpec", "keyUsage", "multiRegion")
    defaults: ClassVar[Mapping[str, Any]] = {
        "customerMasterKeySpec": "SYMMETRIC_DEFAULT",
        "keyUsage": "ENCRYPT_DECRYPT",
        "isEnabled": True,
        "enableKeyRotation": False,
    }
    gone = ("NotFoundException",)

    def create(self, cloud: Cloud, inputs: Values) -> str:
        tags = [{"TagKey": key, "TagValue": value} for key, value in (inputs.get("tagsAll") or {}).items()]
        answer = cloud.kms.create_key(
            Description=inputs.get("description") or "",
            KeySpec=inputs["customerMasterKeySpec"],
            KeyUsage=inputs["keyUsage"],
            Tags=tags,
            **({"Policy": inputs["policy"]} if inputs.get("policy") else {}),
        )
        return answer["KeyMetadata"]["KeyId"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        if inputs.get("enableKeyRotation"):
            cloud.kms.enable_key_rotation(KeyId=id)

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values | None:
        found = cloud.kms.describe_key(KeyId=id)["KeyMetadata"]
        if found["KeyState"] == "PendingDeletion":
            return None
        policy = cloud.kms.get_key_policy(KeyId=id, PolicyName="default")["Policy"]
        return {"arn": found["Arn"], "keyId": id, "policy": policy}

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        if old.get("policy") != new.get("policy") and new.get("policy"):
            cloud.kms.put_key_policy(KeyId=id, PolicyName="default", Policy=new["policy"])
        if old.get("description") != new.get("description"):
            cloud.kms.update_key_description(KeyId=id, Description=new.get("description") or "")

    def retag(self, cloud: Cloud, id: str, state: Values, removed: list[str], added: dict[str, str]) -> None:
        if removed:
            cloud.kms.untag_resource(KeyId=id, TagKeys=removed)
        if added:
            cloud.kms.tag_resource(
                KeyId=id, Tags=[{"TagKey": key, "TagValue": value} for key, value in added.items()]
            )

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        days = int(state.get("deletionWindowInDays") or 30)
        cloud.kms.schedule_key_deletion(KeyId=id, PendingWindowInDays=days)


@register
class Alias(Resource):
    token = "aws:kms/alias:Alias"
    replace_on = ("name", "namePrefix")
    name_property = "name"
    gone = ("NotFoundException",)

    def create(self, cloud: Cloud, inputs: Values) -> str:
        cloud.kms.create_alias(AliasName=inputs["name"], TargetKeyId=inputs["targetKeyId"])
        return inputs["name"]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values | None:
        for one in cloud.kms.list_aliases()["Aliases"]:
            if one["AliasName"] == id:
                return {
                    "arn": one["AliasArn"],
                    "targetKeyArn": cloud.arn("kms", f"key/{one['TargetKeyId']}"),
                    "targetKeyId": inputs["targetKeyId"],
                }
        return None

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        cloud.kms.update_alias(AliasName=id, TargetKeyId=new["targetKeyId"])

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.kms.delete_alias(AliasName=id)


@register
class LustreFileSystem(Resource):
    token = "aws:fsx/lustreFileSystem:LustreFileSystem"
    replace_on = (
        *(
            "deploymentType",
            "storageType",
            "subnetIds",
            "securityGroupIds",
            "kmsKeyId",
            "importPath",
            "exportPath",
        ),
        *("copyTagsToBackups", "driveCacheType", "efaEnabled", "backupId"),
    )
    gone = ("FileSystemNotFound",)

    def create(self, cloud: Cloud, inputs: Values) -> str:
        lustre: dict[str, Any] = {}
        for ours, theirs in (
            ("deploymentType", "DeploymentType"),
            ("perUnitStorageThroughput", "PerUnitStorageThroughput"),
            ("dataCompressionType", "DataCompressionType"),
            ("automaticBackupRetentionDays", "AutomaticBackupRetentionDays"),
            ("efaEnabled", "EfaEnabled"),
            ("weeklyMaintenanceStartTime", "WeeklyMaintenanceStartTime"),
        ):
            if inputs.get(ours) is not None:
                lustre[theirs] = int(inputs[ours]) if isinstance(inputs[ours], float) else inputs[ours]
        answer = cloud.fsx.create_file_system(
            FileSystemType="LUSTRE",
            StorageCapacity=int(inputs["storageCapacity"]),
            SubnetIds=[inputs["subnetIds"]],
            SecurityGroupIds=inputs.get("securityGroupIds") or [],
            Tags=tag_list(inputs.get("tagsAll") or {}) or [{"Key": "managed", "Value": "pulumi"}],
            LustreConfiguration=lustre,
            **({"FileSystemTypeVersion": v} if (v := inputs.get("fileSystemTypeVersion")) else {}),
            **({"StorageType": v} if (v := inputs.get("storageType")) else {}),
        )
        return answer["FileSystem"]["FileSystemId"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        found = wait(lambda: self._describe(cloud, id), lambda one: one["Lifecycle"] != "CREATING", id)
        if found["Lifecycle"] != "AVAILABLE":
            raise FailedError(f"FSx for Lustre file system ({id}): unexpected state '{found['Lifecycle']}'")

    def _describe(self, cloud: Cloud, id: str) -> Any:
        return cloud.fsx.describe_file_systems(FileSystemIds=[id])["FileSystems"][0]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = self._describe(cloud, id)
        return {
            "arn": found["ResourceARN"],
            "dnsName": found.get("DNSName") or f"{id}.fsx.{cloud.region}.amazonaws.com",
            "mountName": found.get("LustreConfiguration", {}).get("MountName") or "fsx",
            "networkInterfaceIds": found.get("NetworkInterfaceIds") or [],
            "ownerId": cloud.account,
            "vpcId": found.get("VpcId") or "",
        }

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        if old.get("storageCapacity") != new.get("storageCapacity"):
            cloud.fsx.update_file_system(FileSystemId=id, StorageCapacity=int(new["storageCapacity"]))

    def retag(self, cloud: Cloud, id: str, state: Values, removed: list[str], added: dict[str, str]) -> None:
        if removed:
            cloud.fsx.untag_resource(ResourceARN=state["arn"], TagKeys=removed)
        if added:
            cloud.fsx.tag_resource(ResourceARN=state["arn"], Tags=tag_list(added))

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.fsx.delete_file_system(FileSystemId=id)


@register
class DataRepositoryAssociation(Resource):
    token = "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation"
    replace_on = ("fileSystemId", "fileSystemPath", "dataRepositoryPath")
    gone = ("DataRepositoryAssociationNotFound", "FileSystemNotFound")

    def create(self, cloud: Cloud, inputs: Values) -> str:
        policies = upper(inputs.get("s3") or {})
        answer = cloud.fsx.create_data_repository_association(
            FileSystemId=inputs["fileSystemId"],
            FileSystemPath=inputs["fileSystemPath"],
            DataRepositoryPath=inputs["dataRepositoryPath"],
            BatchImportMetaDataOnCreate=bool(inputs.get("batchImportMetaDataOnCreate")),
            Tags=tag_list(inputs.get("tagsAll") or {}) or [{"Key": "managed", "Value": "pulumi"}],
            **({"S3": policies} if policies else {}),
        )
        return answer["Association"]["AssociationId"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        wait(lambda: self._describe(cloud, id), lambda one: one["Lifecycle"] == "AVAILABLE", id)

    def _describe(self, cloud: Cloud, id: str) -> Any:
        return cloud.fsx.describe_data_repository_associations(AssociationIds=[id])["Associations"][0]

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        found = self._describe(cloud, id)
        return {"arn": found["ResourceARN"], "associationId": id}

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        cloud.fsx.delete_data_repository_association(
            AssociationId=id, DeleteDataInFileSystem=bool(state.get("deleteDataInFilesystem"))
        )
