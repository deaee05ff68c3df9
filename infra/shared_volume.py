"""The Lustre file system as a volume that head and workers mount."""

from __future__ import annotations

import pulumi
import pulumi_kubernetes as k8s

from infra.device_plugins import release
from infra.ray_cluster import FSX_CLAIM
from infra.settings import StackSettings
from infra.storage import LustreMount
from infra.versions import FSX_CSI_DRIVER_REPOSITORY, FSX_CSI_DRIVER_VERSION
from infra.workload import ClusterTarget


class SharedVolume(pulumi.ComponentResource):
    """FSx CSI driver, and a volume and claim for the file system that this stack made.

    The volume is bound by name: nothing is provisioned dynamically, so a destroy leaves no file system
    behind.
    """

    ready: list[pulumi.Resource]

    def __init__(
        self,
        name: str,
        settings: StackSettings,
        target: ClusterTarget,
        mount: LustreMount,
        namespace: list[pulumi.Resource],
    ) -> None:
        super().__init__("efa:infra:SharedVolume", name, None, target.component())
        driver = release(
            self,
            target,
            f"{name}-fsx-csi-driver",
            chart="aws-fsx-csi-driver",
            version=FSX_CSI_DRIVER_VERSION,
            repository=FSX_CSI_DRIVER_REPOSITORY,
            namespace="kube-system",
            values={"node": {"tolerateAllTaints": True}},
        )
        capacity = {"storage": f"{mount.capacity_gib}Gi"}
        volume = k8s.core.v1.PersistentVolume(
            f"{name}-fsx",
            metadata=k8s.meta.v1.ObjectMetaArgs(name=f"{settings.name}-fsx"),
            spec=k8s.core.v1.PersistentVolumeSpecArgs(
                capacity=capacity,
                access_modes=["ReadWriteMany"],
                persistent_volume_reclaim_policy="Retain",
                storage_class_name="",
                mount_options=["flock"],
                csi=k8s.core.v1.CSIPersistentVolumeSourceArgs(
                    driver="fsx.csi.aws.com",
                    volume_handle=mount.file_system_id,
                    volume_attributes={"dnsname": mount.dns_name, "mountname": mount.mount_name},
                ),
            ),
            opts=target.child(self, [*target.ready, driver]),
        )
        claim = k8s.core.v1.PersistentVolumeClaim(
            f"{name}-fsx",
            metadata=k8s.meta.v1.ObjectMetaArgs(name=FSX_CLAIM, namespace=settings.namespace),
            spec=k8s.core.v1.PersistentVolumeClaimSpecArgs(
                access_modes=["ReadWriteMany"],
                storage_class_name="",
                volume_name=f"{settings.name}-fsx",
                resources=k8s.core.v1.VolumeResourceRequirementsArgs(requests=capacity),
            ),
            opts=target.child(self, [*namespace, volume]),
        )
        self.ready = [claim]
        self.register_outputs({})
