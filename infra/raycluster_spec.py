"""Typed RayCluster (ray.io/v1), and the rules that KubeRay applies to it.

Only the fields that this project uses: the API server prunes a misspelt field silently, these classes
refuse it. The operator answers an invalid spec with an event and nothing else, so ``violations`` says the
same before it is sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

MAX_NAME_LENGTH = 53
MIN_RAY_FOR_TOKENS = (2, 52, 0)
RESOURCE_PARAMETERS = ("num-cpus", "num-gpus", "memory", "resources")


class KubeModel(BaseModel):
    """A Kubernetes object in snake_case; ``manifest`` gives it as the API wants it."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    def manifest(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class SecretKey(KubeModel):
    name: str
    key: str


class FieldPath(KubeModel):
    field_path: str


class EnvSource(KubeModel):
    secret_key_ref: SecretKey | None = None
    field_ref: FieldPath | None = None


class EnvVar(KubeModel):
    name: str
    value: str | None = None
    value_from: EnvSource | None = None


class Resources(KubeModel):
    requests: dict[str, str]
    limits: dict[str, str]


class VolumeMount(KubeModel):
    name: str
    mount_path: str


class Port(KubeModel):
    name: str
    container_port: int


class Exec(KubeModel):
    command: tuple[str, ...]


class Handler(KubeModel):
    exec: Exec


class Lifecycle(KubeModel):
    pre_stop: Handler


class SecurityContext(KubeModel):
    allow_privilege_escalation: bool


class Container(KubeModel):
    name: str
    image: str
    image_pull_policy: str
    env: tuple[EnvVar, ...]
    resources: Resources
    volume_mounts: tuple[VolumeMount, ...]
    lifecycle: Lifecycle
    security_context: SecurityContext
    ports: tuple[Port, ...] | None = None


class EmptyDir(KubeModel):
    medium: Literal["Memory"] | None = None
    size_limit: str


class ClaimSource(KubeModel):
    claim_name: str


class Volume(KubeModel):
    name: str
    empty_dir: EmptyDir | None = None
    persistent_volume_claim: ClaimSource | None = None


class Toleration(KubeModel):
    key: str
    operator: Literal["Exists", "Equal"]
    effect: Literal["NoSchedule", "NoExecute", "PreferNoSchedule"]


class LabelSelector(KubeModel):
    match_labels: dict[str, str]


class PodAffinityTerm(KubeModel):
    label_selector: LabelSelector
    topology_key: str


class PodAntiAffinity(KubeModel):
    model_config = ConfigDict(alias_generator=lambda name: f"{name}DuringSchedulingIgnoredDuringExecution")

    required: tuple[PodAffinityTerm, ...]


class Affinity(KubeModel):
    pod_anti_affinity: PodAntiAffinity


class PodSpec(KubeModel):
    containers: tuple[Container, ...]
    volumes: tuple[Volume, ...]
    node_selector: dict[str, str]
    service_account_name: str
    automount_service_account_token: bool
    termination_grace_period_seconds: int
    tolerations: tuple[Toleration, ...] | None = None
    affinity: Affinity | None = None
    restart_policy: Literal["Always", "OnFailure", "Never"] | None = None


class PodMetadata(KubeModel):
    labels: dict[str, str]
    annotations: dict[str, str] | None = None


class PodTemplate(KubeModel):
    metadata: PodMetadata
    spec: PodSpec


class HeadGroup(KubeModel):
    ray_start_params: dict[str, str]
    template: PodTemplate


class WorkerGroup(KubeModel):
    group_name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    ray_start_params: dict[str, str]
    template: PodTemplate


class AuthOptions(KubeModel):
    mode: Literal["token", "disabled"]


class UpgradeStrategy(KubeModel):
    type: Literal["Recreate", "None"]


class AutoscalerOptions(KubeModel):
    version: Literal["v1", "v2"]
    idle_timeout_seconds: int
    resources: Resources


class RayClusterSpec(KubeModel):
    ray_version: str
    head_group_spec: HeadGroup
    worker_group_specs: tuple[WorkerGroup, ...]
    auth_options: AuthOptions
    upgrade_strategy: UpgradeStrategy
    enable_in_tree_autoscaling: bool | None = None
    autoscaler_options: AutoscalerOptions | None = None


def violations(name: str, spec: Mapping[str, Any]) -> list[str]:
    """What KubeRay 1.6 would reject in a RayCluster manifest (``controllers/ray/utils/validation.go``).

    Args:
        name: metadata.name of the RayCluster.
        spec: the manifest's spec, in camelCase.
    """
    return [
        *_name_violations(name),
        *_head_violations(spec),
        *(found for group in spec.get("workerGroupSpecs", ()) for found in _group_violations(spec, group)),
        *_auth_violations(spec),
        *_autoscaler_violations(spec),
        *_upgrade_violations(spec),
    ]


def _name_violations(name: str) -> list[str]:
    found: list[str] = []
    if len(name) > MAX_NAME_LENGTH:
        found.append(f"metadata.name {name!r}: {MAX_NAME_LENGTH} characters at most, it has {len(name)}")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        found.append(f"metadata.name {name!r}: a DNS-1035 label is needed (lower case, a letter first)")
    return found


def _head_violations(spec: Mapping[str, Any]) -> list[str]:
    head = spec["headGroupSpec"]
    containers = _containers(head)
    if not containers:
        return ["headGroupSpec: at least one container is needed"]
    found = _resource_violations("headGroupSpec", head)
    env = {entry["name"]: entry.get("value") for entry in containers[0].get("env", ())}
    start = head.get("rayStartParams", {})
    if "RAY_REDIS_ADDRESS" in env and "gcsFaultToleranceOptions" not in spec:
        found.append("headGroupSpec: RAY_REDIS_ADDRESS needs gcsFaultToleranceOptions")
    if "REDIS_USERNAME" in env or start.get("redis-username"):
        found.append("headGroupSpec: set the Redis user in gcsFaultToleranceOptions.redisUsername")
    if env.get("RAY_enable_autoscaler_v2") in ("1", "true") and not spec.get("enableInTreeAutoscaling"):
        found.append("headGroupSpec: RAY_enable_autoscaler_v2 needs enableInTreeAutoscaling")
    return found


def _group_violations(spec: Mapping[str, Any], group: Mapping[str, Any]) -> list[str]:
    name = f"workerGroupSpecs {group.get('groupName')!r}"
    found = _resource_violations(name, group)
    if not _containers(group):
        found.append(f"{name}: at least one container is needed")
    least, most = group.get("minReplicas"), group.get("maxReplicas")
    if not spec.get("enableInTreeAutoscaling") and (least is None or most is None):
        found.append(f"{name}: minReplicas and maxReplicas are both needed without autoscaling")
    for key, value in (("minReplicas", least), ("maxReplicas", most)):
        if value is not None and value < 0:
            found.append(f"{name}: {key} is {value}, it cannot be negative")
    if least is not None and most is not None and least > most:
        found.append(f"{name}: minReplicas {least} is greater than maxReplicas {most}")
    if group.get("suspend") and spec.get("enableInTreeAutoscaling"):
        found.append(f"{name}: cannot be suspended with autoscaling")
    return found


def _resource_violations(name: str, group: Mapping[str, Any]) -> list[str]:
    start = group.get("rayStartParams", {})
    found: list[str] = []
    if group.get("resources") and any(start.get(key) for key in RESOURCE_PARAMETERS):
        found.append(f"{name}: resources and rayStartParams both set resources, use one of them")
    if "labels" in start:
        found.append(f"{name}: rayStartParams.labels is not supported, use the group's labels")
    return found


def _auth_violations(spec: Mapping[str, Any]) -> list[str]:
    if spec.get("authOptions", {}).get("mode") != "token":
        return []
    version = spec.get("rayVersion", "")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return [f"rayVersion {version!r}: token authentication needs a version such as 2.58.0"]
    if tuple(int(part) for part in version.split(".")) < MIN_RAY_FOR_TOKENS:
        return [f"rayVersion {version}: token authentication needs Ray 2.52.0 or newer"]
    return []


def _autoscaler_violations(spec: Mapping[str, Any]) -> list[str]:
    options = spec.get("autoscalerOptions", {})
    found: list[str] = []
    if options.get("idleTimeoutSeconds", 0) < 0:
        found.append("autoscalerOptions.idleTimeoutSeconds cannot be negative")
    if not spec.get("enableInTreeAutoscaling") or options.get("version", "v2") != "v2":
        return found
    for group in (spec["headGroupSpec"], *spec.get("workerGroupSpecs", ())):
        policy = group["template"]["spec"].get("restartPolicy")
        if policy not in (None, "Never"):
            found.append(f"restartPolicy {policy}: autoscaler v2 needs Never, or none")
    return found


def _upgrade_violations(spec: Mapping[str, Any]) -> list[str]:
    strategy = spec.get("upgradeStrategy", {}).get("type")
    if strategy in (None, "Recreate", "None"):
        return []
    return [f"upgradeStrategy.type {strategy!r}: Recreate or None"]


def _containers(group: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return group.get("template", {}).get("spec", {}).get("containers", ())
