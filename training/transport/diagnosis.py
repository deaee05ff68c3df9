"""Why a job did not run over EFA: known symptoms in the logs, what they mean and what to change.

The symptoms and their causes come from public reports; the thread is named beside each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from pydantic import BaseModel, ConfigDict

from training.transport.evidence import Evidence


class Diagnosis(BaseModel):
    """One cause: what was seen, where (file and line, or host), and what to change."""

    model_config = ConfigDict(frozen=True)

    kind: str
    seen: str
    where: str
    change: str


@dataclass(frozen=True, slots=True)
class _Symptom:
    kind: str
    #: Text that every match of the pattern holds one of; looked for first, as it costs little.
    needles: tuple[bytes, ...]
    pattern: bytes
    seen: str
    change: str
    #: A healthy start prints this too; it counts only for a process that ended up without the EFA provider.
    harmless_with_efa: bool = False


_SYMPTOMS = (
    # The dynamic loader prints this for a plugin built against a newer C library than the image has.
    _Symptom(
        "plugin-glibc",
        (b"GLIBC_",),
        rb"version .?GLIBC_[\d.]+.? not found",
        "the NCCL network plugin was found but cannot be loaded: it needs a newer C library than the image "
        "has",
        "use an image whose EFA installer matches its operating system (the AWS Ray Train image does), and "
        "mount no plugin of the host into the container",
    ),
    # aws/aws-ofi-nccl#67, NVIDIA/nccl#959; spelling by NCCL version in src/plugin/plugin_open.cc.
    _Symptom(
        "plugin-not-found",
        (b"NET/Plugin", b"Plugin load"),
        rb"NET/Plugin ?: (?:No plugin found|Could not find: ?lib|Could not find: ?ofi)"
        rb"|Plugin load \(\S+\) returned 2\b",
        "NCCL found no network plugin, so it used its own sockets",
        "use an image with the EFA installer (aws-ofi-nccl), keep /opt/amazon/ofi-nccl/lib64 on "
        "LD_LIBRARY_PATH and set NCCL_NET_PLUGIN=ofi",
        harmless_with_efa=True,
    ),
    # awslabs reports of EFA settings left from a TCP run; NCCL prints what it read from the environment.
    _Symptom(
        "plugin-disabled",
        (b"NCCL_NET_PLUGIN set",),
        rb"NCCL_NET_PLUGIN set by environment to none",
        "NCCL_NET_PLUGIN=none keeps NCCL from loading the EFA plugin",
        "set NCCL_NET_PLUGIN=ofi, or drop it from the job's runtime_env",
    ),
    _Symptom(
        "network-forced",
        (b"NCCL_NET set",),
        rb"NCCL_NET set by environment to (?i:socket|ib)\b",
        "NCCL_NET names another network than the EFA plugin's",
        "set NCCL_NET=Libfabric, which also makes a fallback fail instead of crawl",
    ),
    # src/plugin/net.cc: with NCCL_NET set, a plugin that does not start is an error and not a fallback.
    _Symptom(
        "no-network",
        (b"any NET plugin", b"Error: network"),
        rb"Failed to initialize any NET plugin|Error: network \S.* not found",
        "no network of the name in NCCL_NET started, so NCCL refused to run over another one",
        "the cause is the plugin's own message above this line; NCCL_NET must be Libfabric (AWS Libfabric "
        "with aws-ofi-nccl before 1.13)",
    ),
    # aws/aws-ofi-nccl#889, #1020; aws-samples/aws-do-eks PR #63.
    _Symptom(
        "device-not-mounted",
        (b"empty list", b"No data available", b"/dev/infiniband", b"No EFA device"),
        rb"provider efa output empty list|fi_getinfo\S* .*No data available|/dev/infiniband|No EFA devices? "
        rb"found",
        "libfabric sees no EFA device inside the container",
        "request the device in the worker pod (resources.limits: vpc.amazonaws.com/efa), one per "
        "interface, and do not mount /dev/infiniband by hostPath",
    ),
    _Symptom(
        "no-eligible-provider",
        (b"No eligible",),
        rb"No eligible providers were found",
        "the plugin found no libfabric provider that it can use",
        "check that the pod has the EFA device, that FI_PROVIDER is efa or unset, and that the image has "
        "one libfabric only (fi_info -p efa inside the pod)",
        harmless_with_efa=True,
    ),
    # aws/deep-learning-containers#2675.
    _Symptom(
        "only-efa-supported",
        (b"Only EFA",),
        rb"Only EFA provider is supported",
        "the plugin was built for EFA alone and did not find it",
        "request vpc.amazonaws.com/efa in the worker pod and leave FI_PROVIDER at efa",
    ),
    _Symptom(
        "libfabric-too-old",
        (b"requires at least",),
        rb"EFA provider requires at least libfabric version",
        "the plugin found a libfabric older than it needs",
        "keep one EFA installation in the image, the one of its plugin, first on LD_LIBRARY_PATH",
    ),
    # aws/aws-ofi-nccl#663, gardener/gardener-extension-provider-aws#1832.
    _Symptom(
        "security-group",
        (b"address vector", b"Unresponsive", b"handshake"),
        rb"Unable to insert remote address into address vector|Unresponsive receiver|handshake failed",
        "the EFA device works but the other node does not answer: the security group drops EFA traffic",
        "give the nodes' security group a rule for all traffic to itself and from itself; egress to "
        "0.0.0.0/0 does not match EFA",
    ),
    # aws-samples/aws-do-eks PR #54.
    _Symptom(
        "wrong-interface",
        (b"pod-id-link0", b"169.254."),
        rb"(?:NET/Socket|Bootstrap) ?: Using .*(?:pod-id-link0|169\.254\.\d+\.\d+)",
        "NCCL uses the link of the EKS Pod Identity agent, which reaches no other node",
        "set NCCL_SOCKET_IFNAME=eth0",
    ),
    _Symptom(
        "no-interface",
        (b"interface found",),
        rb"[Nn]o (?:usable listening|socket) interface found",
        "NCCL found no interface of the name in NCCL_SOCKET_IFNAME",
        "set NCCL_SOCKET_IFNAME=eth0 in a pod; on other machines use its exclusion form (^docker0,lo)",
    ),
    # aws/aws-ofi-nccl#69, #141, #179; ofiwg/libfabric#9739.
    _Symptom(
        "memlock",
        (b"-12", b"Cannot allocate", b"register memory", b"4112"),
        rb"(?:RC|ret)[:=] ?-12\b|Cannot allocate memory|[Uu]nable to register "
        rb"memory|\b4112\b.*(?:memory|locked)",
        "memory could not be registered with the device: the limit on locked memory or the huge pages are "
        "used up",
        "raise memlock to unlimited on the node, and set FI_EFA_USE_HUGE_PAGE=0 where processes fork",
    ),
    _Symptom(
        "plugin-failed",
        (b"initialization failed", b"Unable to find a protocol", b"Failed to initialize NET"),
        rb"aws-ofi-nccl initialization failed|Unable to find a protocol that worked|Failed to initialize "
        rb"NET plugin"
        rb" (?i:libfabric|aws libfabric|ofi)",
        "the EFA plugin was loaded but did not start",
        "the plugin's message just above this line names the step that failed; run fi_info -p efa inside "
        "the pod",
    ),
)

_BY_KIND = {symptom.kind: symptom for symptom in _SYMPTOMS}
_PATTERNS = tuple((symptom.kind, symptom.needles, re.compile(symptom.pattern)) for symptom in _SYMPTOMS)


@lru_cache(maxsize=4096)  # the same few messages come from every rank and communicator
def symptom_of(message: bytes) -> str | None:
    """The kind of symptom that a log message is, None for the great majority that are none."""
    for kind, needles, pattern in _PATTERNS:
        for needle in needles:
            if needle in message:
                if pattern.search(message):
                    return kind
                break
    return None


def explain(kind: str, evidence: Evidence) -> Diagnosis:
    """The sentences for a symptom that a log showed."""
    symptom = _BY_KIND[kind]
    return Diagnosis(
        kind=kind,
        seen=f"{symptom.seen}: {evidence.text}",
        where=f"{evidence.file}:{evidence.line}",
        change=symptom.change,
    )


def harmless_with_efa(kind: str) -> bool:
    """Whether a process that then selected the EFA provider prints this symptom as well."""
    return _BY_KIND[kind].harmless_with_efa


def provider_forced(provider: str, evidence: Evidence) -> Diagnosis:
    """The plugin runs, but on a libfabric provider that is no EFA."""
    return Diagnosis(
        kind="provider-forced",
        seen=f"the plugin runs on the libfabric provider {provider}, which is not EFA: {evidence.text}",
        where=f"{evidence.file}:{evidence.line}",
        change="set FI_PROVIDER=efa (or leave it unset on EC2), and request the EFA device in the worker pod",
    )


def no_log(rank: int, host: str, pid: int) -> Diagnosis:
    """A rank that left no NCCL line at all."""
    return Diagnosis(
        kind="no-log",
        seen=f"rank {rank} left no NCCL log",
        where=f"{host} pid {pid}",
        change="NCCL_DEBUG must be INFO and NCCL_DEBUG_SUBSYS hold INIT and NET before the process starts "
        "NCCL; the job's runtime_env must not change them",
    )


def no_device(host: str) -> Diagnosis:
    """A host whose worker pod shows no EFA device to read counters of."""
    return Diagnosis(
        kind="no-efa-device",
        seen="no EFA device is visible in /sys/class/infiniband",
        where=host,
        change="use an instance type with EFA, attach an EFA interface in the launch template, and request "
        "vpc.amazonaws.com/efa in the worker pod",
    )
