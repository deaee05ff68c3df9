"""Catalog of EC2 instance types: what a node is made of, what of it a pod can have, what it costs.

Sources
- vCPUs, memory, network speed and number of EFA interfaces: EC2 ``DescribeInstanceTypes`` as generated into
  Karpenter's instance-type reference; network cards and kinds: EC2 user guide "efa-acc-inst-types".
- Prices: Linux on-demand, USD an hour, read on ``PRICE_TABLE_DATE`` from the AWS price list as generated into
  Karpenter's pricing tables and the SkyPilot catalog. A region that is not in the table has no known price.
- Peak FLOP/s: NVIDIA data sheets, bf16 tensor cores with fp32 accumulation, dense (half of the "with
  sparsity" figure).
- Pods per node: ``misc/eni-max-pods.txt`` of amazon-vpc-cni-k8s.

This module imports nothing of Pulumi: the planner of ``finetune`` reads it as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

PRICE_TABLE_DATE = "2026-07-20"

# 5128 pages of 2 MiB (EKS user guide, "node-efa").
HUGE_PAGES_MIB = 5128 * 2
# aws-node, kube-proxy, pod identity agent, monitoring agent and the two device plugins of a GPU node together.
DAEMONS_CPU_MILLIS = 300
DAEMONS_MEMORY_MIB = 400


@dataclass(frozen=True)
class EfaInterface:
    """One EFA interface of a node: the network card it sits on and its EC2 interface type.

    ``efa`` carries IP traffic beside the EFA device; ``efa-only`` has no IP address and is never the
    primary one.
    """

    card: int
    kind: Literal["efa", "efa-only"]

    @property
    def device_index(self) -> int:
        """0 for the primary interface of the node, 1 for the interface of any further card (an EC2 rule)."""
        return 0 if self.card == 0 else 1


@dataclass(frozen=True)
class Gpu:
    """One GPU: memory in GiB, dense bf16 TFLOP/s, memory bandwidth in GB/s."""

    name: str
    memory_gib: float
    peak_bf16_tflops: float
    memory_bandwidth_gbps: float


@dataclass(frozen=True)
class Interconnect:
    """How the GPUs of one node reach each other; GB/s in one direction and per GPU."""

    kind: Literal["pcie", "nvlink"]
    gb_per_second: float


@dataclass(frozen=True)
class NodeShape:
    """vCPUs, memory and price of any node, and what Kubernetes lets pods have of it."""

    name: str
    vcpu: int
    memory_gib: int
    max_pods: int
    price_usd_per_hour: Mapping[str, float]

    @property
    def allocatable_cpu_millis(self) -> int:
        """CPU that pods can request, in millicores: kubelet reserves 6 % of the first core, 1 % of the
        second, 0.5 % of the next two and 0.25 % of the rest on EKS nodes."""
        reserved = 60.0
        reserved += 10.0 if self.vcpu > 1 else 0.0
        reserved += 5.0 * min(max(self.vcpu - 2, 0), 2)
        reserved += 2.5 * max(self.vcpu - 4, 0)
        return int(self.vcpu * 1000 - reserved)

    @property
    def allocatable_memory_mib(self) -> int:
        """Memory that pods can request, in MiB: the machine's, less 7.5 % for firmware and kernel (the margin
        Karpenter uses), less kubelet's 255 MiB + 11 MiB a pod, less the 100 MiB eviction threshold."""
        return int(self.memory_gib * 1024 * 0.925 - 255 - 11 * self.max_pods - 100)


@dataclass(frozen=True)
class InstanceType(NodeShape):
    """A GPU node type. ``network_gbps`` is the whole node's speed in Gb/s, all cards together."""

    gpus: int
    gpu: Gpu
    efa_interfaces: tuple[EfaInterface, ...]
    network_gbps: float
    gpudirect: bool
    interconnect: Interconnect
    nvme_gb: int
    capacity_block_only: bool = field(default=False, kw_only=True)

    @property
    def gpu_name(self) -> str:
        return self.gpu.name

    @property
    def gpu_memory_gib(self) -> float:
        return self.gpu.memory_gib

    @property
    def peak_bf16_tflops(self) -> float:
        return self.gpu.peak_bf16_tflops

    @property
    def memory_bandwidth_gbps(self) -> float:
        return self.gpu.memory_bandwidth_gbps

    @property
    def efa(self) -> int:
        """Number of EFA interfaces of a node, which is what a worker pod requests."""
        return len(self.efa_interfaces)

    @property
    def huge_pages_mib(self) -> int:
        """Memory that the EKS image sets aside as huge pages where there is EFA; pods do not get it as memory."""
        return HUGE_PAGES_MIB if self.efa_interfaces else 0

    @property
    def family(self) -> str:
        return self.name.partition(".")[0]

    @property
    def worker_cpu(self) -> int:
        """Cores that the Ray worker of this node requests: five sixths, the rest is for kubelet and daemons."""
        return max(1, self.vcpu * 5 // 6)

    @property
    def worker_memory_gib(self) -> int:
        """GiB that the Ray worker of this node requests: five sixths, or what huge pages and daemons leave."""
        left = self.allocatable_memory_mib - self.huge_pages_mib - DAEMONS_MEMORY_MIB
        return min(self.memory_gib * 5 // 6, left // 1024)


# Usable memory as EC2 reports it (MiB per GPU / 1024), not the name-plate figure.
A10G = Gpu("NVIDIA A10G", 22.35, 70.0, 600.0)
L4 = Gpu("NVIDIA L4", 22.35, 121.0, 300.0)
L40S = Gpu("NVIDIA L40S", 44.70, 362.0, 864.0)
A100_40 = Gpu("NVIDIA A100-SXM4-40GB", 40.0, 312.0, 1555.0)
A100_80 = Gpu("NVIDIA A100-SXM4-80GB", 80.0, 312.0, 2039.0)
H100 = Gpu("NVIDIA H100", 80.0, 989.4, 3350.0)
H200 = Gpu("NVIDIA H200", 141.0, 989.4, 4800.0)
B200 = Gpu("NVIDIA B200", 179.06, 2250.0, 8000.0)

PCIE_4 = Interconnect("pcie", 32.0)
NVLINK_3 = Interconnect("nvlink", 300.0)
NVLINK_4 = Interconnect("nvlink", 450.0)
NVLINK_5 = Interconnect("nvlink", 900.0)


def _efa(cards: int) -> tuple[EfaInterface, ...]:
    """The primary card as ``efa``, all further cards as ``efa-only``: 32 cards would use 32 addresses
    otherwise."""
    return tuple(EfaInterface(card, "efa" if card == 0 else "efa-only") for card in range(cards))


def _everywhere(price: float) -> dict[str, float]:
    """The three regions in which AWS lists the same price for these types."""
    return {"us-east-1": price, "us-east-2": price, "us-west-2": price}


_G6_12XLARGE_PRICES = {
    **_everywhere(4.6016),
    "ca-central-1": 5.10933,
    "eu-north-1": 4.88062,
    "eu-south-2": 4.8486,
    "eu-central-1": 5.75429,
    "eu-west-2": 5.8412,
    "eu-west-3": 5.8412,
    "ap-northeast-1": 6.67369,
    "ap-northeast-2": 5.65823,
    "ap-south-1": 5.52558,
    "ap-southeast-2": 5.98299,
}


def _both(price: float) -> dict[str, float]:
    return {"us-east-1": price, "us-west-2": price}


def _east(price: float) -> dict[str, float]:
    return {"us-east-1": price}


_CATALOG = (
    # name, vcpu, memory_gib, max_pods, prices, gpus, gpu, efa, network_gbps, gpudirect, interconnect, nvme_gb
    InstanceType("g5.xlarge", 4, 16, 58, _east(1.006), 1, A10G, (), 10, False, PCIE_4, 250),
    InstanceType("g5.8xlarge", 32, 128, 234, _east(2.448), 1, A10G, _efa(1), 25, False, PCIE_4, 900),
    InstanceType("g5.12xlarge", 48, 192, 737, _east(5.672), 4, A10G, _efa(1), 40, False, PCIE_4, 3800),
    InstanceType("g5.24xlarge", 96, 384, 737, _east(8.144), 4, A10G, _efa(1), 50, False, PCIE_4, 3800),
    InstanceType("g5.48xlarge", 192, 768, 737, _both(16.288), 8, A10G, _efa(1), 100, False, PCIE_4, 7600),
    InstanceType("g6.xlarge", 4, 16, 58, _east(0.8048), 1, L4, (), 10, False, PCIE_4, 250),
    InstanceType("g6.8xlarge", 32, 128, 234, _east(2.0144), 1, L4, _efa(1), 25, False, PCIE_4, 900),
    InstanceType("g6.12xlarge", 48, 192, 234, _G6_12XLARGE_PRICES, 4, L4, _efa(1), 40, False, PCIE_4, 3760),
    InstanceType("g6.16xlarge", 64, 256, 737, _east(3.3968), 1, L4, _efa(1), 25, False, PCIE_4, 1880),
    InstanceType("g6.24xlarge", 96, 384, 737, _east(6.6752), 4, L4, _efa(1), 50, False, PCIE_4, 3760),
    InstanceType("g6.48xlarge", 192, 768, 737, _east(13.3504), 8, L4, _efa(1), 100, False, PCIE_4, 7520),
    InstanceType("g6e.xlarge", 4, 32, 58, _east(1.861), 1, L40S, (), 20, False, PCIE_4, 250),
    InstanceType("g6e.12xlarge", 48, 384, 737, _east(10.49264), 4, L40S, _efa(1), 100, False, PCIE_4, 3800),
    InstanceType("g6e.24xlarge", 96, 768, 737, _east(15.06559), 4, L40S, _efa(2), 200, False, PCIE_4, 3800),
    InstanceType("g6e.48xlarge", 192, 1536, 737, _east(30.13118), 8, L40S, _efa(4), 400, False, PCIE_4, 7600),
    InstanceType(
        "p4d.24xlarge", 96, 1152, 737, _east(21.957642), 8, A100_40, _efa(4), 400, True, NVLINK_3, 8000
    ),
    InstanceType(
        "p4de.24xlarge", 96, 1152, 737, _both(27.44705), 8, A100_80, _efa(4), 400, True, NVLINK_3, 8000
    ),
    InstanceType("p5.48xlarge", 192, 2048, 100, _both(55.04), 8, H100, _efa(32), 3200, True, NVLINK_4, 30720),
    InstanceType(
        "p5e.48xlarge",
        192,
        2048,
        100,
        {},
        8,
        H200,
        _efa(32),
        3200,
        True,
        NVLINK_4,
        30720,
        capacity_block_only=True,
    ),
    InstanceType(
        "p5en.48xlarge", 192, 2048, 198, _both(63.296), 8, H200, _efa(16), 3200, True, NVLINK_4, 30720
    ),
    InstanceType(
        "p6-b200.48xlarge", 192, 2048, 198, _both(113.9328), 8, B200, _efa(8), 3200, True, NVLINK_5, 30720
    ),
)

INSTANCES: Mapping[str, InstanceType] = {instance.name: instance for instance in _CATALOG}

# Nodes without GPUs, for the Ray head, CoreDNS and the operator.
SYSTEM_INSTANCES: Mapping[str, NodeShape] = {
    shape.name: shape
    for shape in (
        NodeShape("m7i.large", 2, 8, 29, _everywhere(0.1008)),
        NodeShape("m7i.xlarge", 4, 16, 58, _everywhere(0.2016)),
        NodeShape("m7i.2xlarge", 8, 32, 58, _everywhere(0.4032)),
        NodeShape("m7i.4xlarge", 16, 64, 234, _everywhere(0.8064)),
    )
}
