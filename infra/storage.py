"""Where data, checkpoints and reports live: a bucket, a role for the jobs, and FSx for Lustre in front of
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.cluster import Cluster
from infra.iam import document, pod_trust
from infra.network import Network
from infra.settings import StackSettings

FSX_MOUNT_PATH = "/fsx"
# MB/s per TiB: the smallest of the persistent kind, 150 MB/s with 1200 GiB.
FSX_THROUGHPUT_PER_TIB = 125


@dataclass(frozen=True)
class LustreMount:
    """What a pod needs to mount the file system."""

    file_system_id: pulumi.Output[str]
    dns_name: pulumi.Output[str]
    mount_name: pulumi.Output[str]
    capacity_gib: int


class Storage(pulumi.ComponentResource):
    """Bucket (versioned, encrypted, private, TLS only) and the Pod Identity role that can touch it and
    nothing else."""

    bucket: aws.s3.Bucket
    uri: pulumi.Output[str]
    lustre: LustreMount | None

    def __init__(
        self,
        name: str,
        settings: StackSettings,
        cluster: Cluster,
        network: Network,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("efa:infra:Storage", name, None, opts)
        self._name = name
        self._settings = settings
        self._child = pulumi.ResourceOptions(parent=self)
        self.bucket = self._create_bucket()
        self._create_job_role(cluster)
        self.lustre = self._create_lustre(cluster, network) if settings.fsx else None
        self.uri = self.bucket.bucket.apply(_uri(settings.fsx))
        self.register_outputs({"uri": self.uri})

    def _create_bucket(self) -> aws.s3.Bucket:
        name, child = f"{self._name}-runs", self._child
        bucket = aws.s3.Bucket(name, force_destroy=self._settings.force_destroy, opts=child)
        versioning = aws.s3.BucketVersioning(
            name,
            bucket=bucket.id,
            versioning_configuration=aws.s3.BucketVersioningVersioningConfigurationArgs(status="Enabled"),
            opts=child,
        )
        encryption = aws.s3.BucketServerSideEncryptionConfigurationRuleApplyServerSideEncryptionByDefaultArgs(
            sse_algorithm="AES256"
        )
        aws.s3.BucketServerSideEncryptionConfiguration(
            name,
            bucket=bucket.id,
            rules=[
                aws.s3.BucketServerSideEncryptionConfigurationRuleArgs(
                    apply_server_side_encryption_by_default=encryption
                )
            ],
            opts=child,
        )
        no_public_access = aws.s3.BucketPublicAccessBlock(
            name,
            bucket=bucket.id,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=child,
        )
        aws.s3.BucketOwnershipControls(
            name,
            bucket=bucket.id,
            rule=aws.s3.BucketOwnershipControlsRuleArgs(object_ownership="BucketOwnerEnforced"),
            opts=child,
        )
        aws.s3.BucketPolicy(
            name,
            bucket=bucket.id,
            policy=bucket.arn.apply(_tls_only),
            # Two changes of a bucket's access at once conflict in S3.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[no_public_access]),
        )
        aws.s3.BucketLifecycleConfiguration(
            name,
            bucket=bucket.id,
            rules=self._lifecycle(),
            # Rules for old versions are refused while versioning is off.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[versioning]),
        )
        return bucket

    def _lifecycle(self) -> list[aws.s3.BucketLifecycleConfigurationRuleArgs]:
        everything = aws.s3.BucketLifecycleConfigurationRuleFilterArgs(prefix="")
        rules = [
            aws.s3.BucketLifecycleConfigurationRuleArgs(
                id="aborted-uploads",
                status="Enabled",
                filter=everything,
                abort_incomplete_multipart_upload=(
                    aws.s3.BucketLifecycleConfigurationRuleAbortIncompleteMultipartUploadArgs(
                        days_after_initiation=3
                    )
                ),
            ),
            # A job keeps its newest checkpoints and deletes older ones: these are what is left of them.
            aws.s3.BucketLifecycleConfigurationRuleArgs(
                id="old-checkpoints",
                status="Enabled",
                filter=everything,
                noncurrent_version_expiration=(
                    aws.s3.BucketLifecycleConfigurationRuleNoncurrentVersionExpirationArgs(
                        noncurrent_days=self._settings.checkpoint_retention_days
                    )
                ),
                expiration=aws.s3.BucketLifecycleConfigurationRuleExpirationArgs(
                    expired_object_delete_marker=True
                ),
            ),
        ]
        if self._settings.run_retention_days:
            rules.append(
                aws.s3.BucketLifecycleConfigurationRuleArgs(
                    id="old-runs",
                    status="Enabled",
                    filter=aws.s3.BucketLifecycleConfigurationRuleFilterArgs(prefix="runs/"),
                    expiration=aws.s3.BucketLifecycleConfigurationRuleExpirationArgs(
                        days=self._settings.run_retention_days
                    ),
                )
            )
        return rules

    def _create_job_role(self, cluster: Cluster) -> None:
        settings = self._settings
        role = aws.iam.Role(
            f"{self._name}-job",
            assume_role_policy=pod_trust(settings.name, settings.namespace, settings.service_account),
            opts=self._child,
        )
        policy = aws.iam.RolePolicy(
            f"{self._name}-job",
            role=role.name,
            policy=self.bucket.arn.apply(_bucket_access),
            opts=self._child,
        )
        self.pod_identity = aws.eks.PodIdentityAssociation(
            f"{self._name}-job",
            cluster_name=cluster.name,
            namespace=settings.namespace,
            service_account=settings.service_account,
            role_arn=role.arn,
            # Credentials must be there before the first pod starts: pods do not ask a second time.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[policy, cluster.control_plane]),
        )

    def _create_lustre(self, cluster: Cluster, network: Network) -> LustreMount:
        settings = self._settings
        group = aws.ec2.SecurityGroup(
            f"{self._name}-fsx",
            vpc_id=network.vpc_id,
            description="Lustre between the nodes and the file system",
            tags={"Name": f"{self._name}-fsx"},
            opts=pulumi.ResourceOptions(parent=self, custom_timeouts=pulumi.CustomTimeouts(delete="30m")),
        )
        for role, source in (("nodes", cluster.security_group_id), ("servers", group.id)):
            for first, last in ((988, 988), (1018, 1023)):
                aws.vpc.SecurityGroupIngressRule(
                    f"{self._name}-fsx-{role}-{first}",
                    security_group_id=group.id,
                    referenced_security_group_id=source,
                    ip_protocol="tcp",
                    from_port=first,
                    to_port=last,
                    opts=self._child,
                )
        aws.vpc.SecurityGroupEgressRule(
            f"{self._name}-fsx-egress",
            security_group_id=group.id,
            cidr_ipv4=settings.vpc_cidr,
            ip_protocol="-1",
            opts=self._child,
        )
        file_system = aws.fsx.LustreFileSystem(
            f"{self._name}-fsx",
            subnet_ids=network.private_subnet_ids[settings.gpu_zone],
            deployment_type="PERSISTENT_2",
            storage_type="SSD",
            storage_capacity=settings.fsx_capacity_gib,
            per_unit_storage_throughput=FSX_THROUGHPUT_PER_TIB,
            data_compression_type="LZ4",
            security_group_ids=[group.id],
            # The bucket is the copy that stays.
            automatic_backup_retention_days=0,
            skip_final_backup=True,
            tags={"Name": f"{self._name}-fsx"},
            opts=self._child,
        )
        events = ["NEW", "CHANGED", "DELETED"]
        aws.fsx.DataRepositoryAssociation(
            f"{self._name}-fsx",
            file_system_id=file_system.id,
            file_system_path="/",
            data_repository_path=self.bucket.bucket.apply(lambda bucket: f"s3://{bucket}"),
            batch_import_meta_data_on_create=True,
            s3=aws.fsx.DataRepositoryAssociationS3Args(
                auto_import_policy=aws.fsx.DataRepositoryAssociationS3AutoImportPolicyArgs(events=events),
                auto_export_policy=aws.fsx.DataRepositoryAssociationS3AutoExportPolicyArgs(events=events),
            ),
            opts=self._child,
        )
        return LustreMount(
            file_system.id, file_system.dns_name, file_system.mount_name, settings.fsx_capacity_gib
        )


def _uri(fsx: bool) -> Callable[[str], str]:
    return lambda bucket: FSX_MOUNT_PATH if fsx else f"s3://{bucket}"


def _tls_only(bucket_arn: str) -> str:
    return document(
        [
            {
                "Sid": "TlsOnly",
                "Effect": "Deny",
                "Principal": "*",
                "Action": "s3:*",
                "Resource": [bucket_arn, f"{bucket_arn}/*"],
                "Condition": {"Bool": {"aws:SecureTransport": "false"}},
            }
        ]
    )


def _bucket_access(bucket_arn: str) -> str:
    return document(
        [
            {
                "Sid": "List",
                "Effect": "Allow",
                "Action": ["s3:ListBucket", "s3:GetBucketLocation", "s3:ListBucketMultipartUploads"],
                "Resource": bucket_arn,
            },
            {
                "Sid": "ReadWrite",
                "Effect": "Allow",
                "Action": [
                    "s3:GetObject",
                    "s3:PutObject",
                    "s3:DeleteObject",
                    "s3:AbortMultipartUpload",
                    "s3:ListMultipartUploadParts",
                ],
                "Resource": f"{bucket_arn}/*",
            },
        ]
    )
