"""Pinned versions, in one place. A change here is an upgrade: see docs/operations.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The chart and the CRDs in infra/crds are of the same release; a test compares them.
KUBERAY_VERSION = "1.6.2"
KUBERAY_REPOSITORY = "https://ray-project.github.io/kuberay-helm/"

# The newest frozen tag of the AWS Ray Train image (2026-09-01): Ray 2.58.0, PyTorch 2.13.0, CUDA 13.0, EFA
# 1.49.0.
RAY_IMAGE = "public.ecr.aws/deep-learning-containers/ray"
RAY_IMAGE_TAG = "train-ml-cuda-v1.1.0"
RAY_VERSION = "2.58.0"

NVIDIA_DEVICE_PLUGIN_VERSION = "0.20.0"
NVIDIA_DEVICE_PLUGIN_REPOSITORY = "https://nvidia.github.io/k8s-device-plugin"
# 0.5.30 is the first whose manifest mounts /dev/infiniband and lists the g6 and p6 types.
EFA_DEVICE_PLUGIN_VERSION = "v0.5.30"
EKS_CHARTS_REPOSITORY = "https://aws.github.io/eks-charts"
FSX_CSI_DRIVER_VERSION = "1.9.0"
FSX_CSI_DRIVER_REPOSITORY = "https://kubernetes-sigs.github.io/aws-fsx-csi-driver"
CLUSTER_AUTOSCALER_VERSION = "9.50.1"
CLUSTER_AUTOSCALER_REPOSITORY = "https://kubernetes.github.io/autoscaler"
# The pair that AWS's ai-on-eks runs beside GPUs and EFA (2026-12-01).
KUBE_PROMETHEUS_STACK_VERSION = "82.16.0"
KUBE_PROMETHEUS_STACK_REPOSITORY = "https://prometheus-community.github.io/helm-charts"
DCGM_EXPORTER_VERSION = "4.8.1"
DCGM_EXPORTER_REPOSITORY = "https://nvidia.github.io/dcgm-exporter/helm-charts"
EFA_COUNTERS_IMAGE = "public.ecr.aws/docker/library/busybox:1.37.0"


@dataclass(frozen=True)
class Addons:
    """Versions of the EKS add-ons that go with one Kubernetes version."""

    vpc_cni: str
    kube_proxy: str
    coredns: str
    pod_identity_agent: str
    node_monitoring_agent: str
    cloudwatch_observability: str


# Pinned because pulumi-eks and EKS take "the most recent" otherwise: an extra call and a diff at every
# preview. Newer ones: aws eks describe-addon-versions --kubernetes-version 1.35 --addon-name coredns
ADDONS: Mapping[str, Addons] = {
    "1.33": Addons(
        "v1.21.1-eksbuild.8",
        "v1.33.5-eksbuild.2",
        "v1.12.4-eksbuild.1",
        "v1.3.10-eksbuild.3",
        "v1.6.4-eksbuild.1",
        "v6.6.0-eksbuild.1",
    ),
    "1.34": Addons(
        "v1.21.1-eksbuild.8",
        "v1.34.1-eksbuild.2",
        "v1.12.4-eksbuild.1",
        "v1.3.10-eksbuild.3",
        "v1.6.4-eksbuild.1",
        "v6.6.0-eksbuild.1",
    ),
    "1.35": Addons(
        "v1.21.1-eksbuild.8",
        "v1.35.3-eksbuild.5",
        "v1.14.2-eksbuild.4",
        "v1.3.10-eksbuild.3",
        "v1.6.4-eksbuild.1",
        "v6.6.0-eksbuild.1",
    ),
}
KUBERNETES_VERSIONS = tuple(ADDONS)
