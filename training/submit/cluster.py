"""The RayCluster as Kubernetes sees it: its pods, whether all are ready, and why not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from infra.outputs import StackOutputs
from training.errors import UsageError
from training.submit.kubectl import ExecResult, Kubectl, MissingError, UnreachableError, contact_lost

Json = dict[str, Any]
T = TypeVar("T")

GPU_RESOURCE = "nvidia.com/gpu"
EFA_RESOURCE = "vpc.amazonaws.com/efa"


@dataclass(frozen=True)
class Pod:
    """What of a pod the submitter looks at."""

    name: str
    uid: str
    kind: str  # head or worker
    container: str
    node: str | None
    ip: str | None
    phase: str
    ready: bool
    terminating: bool
    gpus: int
    efa: int
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClusterState:
    """The RayCluster at one moment."""

    name: str
    pods: tuple[Pod, ...]
    desired_workers: int
    suspended: bool = False
    conditions: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def head(self) -> Pod | None:
        heads = [pod for pod in self.pods if pod.kind == "head" and pod.ready and not pod.terminating]
        return heads[0] if len(heads) == 1 else None

    @property
    def workers(self) -> tuple[Pod, ...]:
        """Ready workers."""
        return tuple(pod for pod in self.pods if pod.kind == "worker" and pod.ready and not pod.terminating)

    @property
    def ready(self) -> bool:
        return self.head is not None and len(self.workers) >= self.desired_workers and not self.suspended

    def summary(self) -> str:
        head = "head ready" if self.head is not None else "head not ready"
        return f"{head}, {len(self.workers)} of {self.desired_workers} workers ready"


@dataclass(frozen=True)
class Cluster:
    """The RayCluster of a stack. Calls are repeated while the cluster cannot be reached, up to `contact_seconds`."""

    kubectl: Kubectl
    target: StackOutputs
    contact_seconds: float = 180.0
    come_back: str = "finetune status"

    def state(self) -> ClusterState:
        """Pods and readiness. Raises ContactLost, or UsageError when there is no such RayCluster."""
        return self.retry(self._state)

    def on_head(
        self, command: Sequence[str], *, stdin: bytes | None = None, timeout: float = 60.0
    ) -> ExecResult:
        """Runs a command, which may run twice, on the head; each try looks for the head again. Raises ContactLost."""
        return self.retry(lambda: self._on_head(command, stdin, timeout))

    def on_pod(
        self, pod: Pod, command: Sequence[str], *, stdin: bytes | None = None, timeout: float = 60.0
    ) -> ExecResult:
        """The same on one pod. Raises MissingError when the pod went away, ContactLost."""
        return self.retry(
            lambda: self.kubectl.exec(pod.name, pod.container, command, stdin=stdin, timeout=timeout)
        )

    def retry(self, call: Callable[[], T]) -> T:
        """Repeats `call` while it raises UnreachableError, then raises ContactLost."""
        retrying = Retrying(
            retry=retry_if_exception_type(UnreachableError),
            stop=stop_after_delay(self.contact_seconds),
            wait=wait_exponential_jitter(initial=0.5, max=10.0),
            reraise=True,
        )
        try:
            return retrying(call)
        except UnreachableError as error:
            raise contact_lost(error, self.contact_seconds, self.come_back) from None

    def _on_head(self, command: Sequence[str], stdin: bytes | None, timeout: float) -> ExecResult:
        pods = [_pod(pod) for pod in self._pods()]
        heads = [pod for pod in pods if pod.kind == "head" and pod.ready and not pod.terminating]
        if len(heads) != 1:
            raise UnreachableError(
                f"RayCluster {self.target.ray_cluster} has no ready head pod ({_brief(pods, 'head')})"
            )
        try:
            return self.kubectl.exec(heads[0].name, heads[0].container, command, stdin=stdin, timeout=timeout)
        except MissingError as error:  # it went away between the two calls
            raise UnreachableError(str(error)) from None

    def _pods(self) -> list[Json]:
        return self.kubectl.get("pods", "--selector", f"ray.io/cluster={self.target.ray_cluster}")["items"]

    def _state(self) -> ClusterState:
        name = self.target.ray_cluster
        try:
            cluster = self.kubectl.get("rayclusters.ray.io", name)
        except MissingError:
            raise UsageError(
                f"There is no RayCluster {name} in namespace {self.target.namespace} of cluster "
                f"{self.target.cluster_name}. Run `pulumi up` for the stack; if it expired, `pulumi up` brings its "
                "GPU nodes back."
            ) from None
        return cluster_state(cluster, self._pods())

    def diagnosis(self) -> str:
        """Why the RayCluster is not ready: which pod, which event, what to do."""
        state = self.state()
        events = self.retry(lambda: self.kubectl.get("events"))["items"]
        return explain(state, events, self._cordoned())

    def _cordoned(self) -> list[str]:
        """Nodes that take no pods. Reading nodes is a cluster-wide right that a submitter need not have."""
        try:
            nodes = self.kubectl.get("nodes")["items"]
        except (UsageError, UnreachableError, MissingError):
            return []
        return [node["metadata"]["name"] for node in nodes if node.get("spec", {}).get("unschedulable")]


def cluster_state(cluster: Json, pods: Iterable[Json]) -> ClusterState:
    """From the RayCluster and its pods as the API server gives them."""
    spec = cluster.get("spec", {})
    desired = sum(
        0 if group.get("suspend") else int(group.get("replicas") or 0) * int(group.get("numOfHosts") or 1)
        for group in spec.get("workerGroupSpecs") or []
    )
    conditions = {c["type"]: c.get("status", "") for c in cluster.get("status", {}).get("conditions") or []}
    return ClusterState(
        name=cluster["metadata"]["name"],
        pods=tuple(sorted((_pod(pod) for pod in pods), key=lambda pod: (pod.kind, pod.name))),
        desired_workers=desired,
        suspended=bool(spec.get("suspend")),
        conditions=conditions,
    )


def _pod(pod: Json) -> Pod:
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    limits = spec["containers"][0].get("resources", {}).get("limits") or {}
    return Pod(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        kind=metadata.get("labels", {}).get("ray.io/node-type", ""),
        container=spec["containers"][0]["name"],
        node=spec.get("nodeName"),
        ip=status.get("podIP"),
        phase=status.get("phase", "Unknown"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        terminating="deletionTimestamp" in metadata,
        gpus=int(limits.get(GPU_RESOURCE, 0)),
        efa=int(limits.get(EFA_RESOURCE, 0)),
        problems=tuple(_problems(status, conditions)),
    )


def _problems(status: Json, conditions: Mapping[str, Json]) -> Iterable[str]:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        yield f"not scheduled: {scheduled.get('message') or scheduled.get('reason')}"
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        state = container.get("state", {})
        waiting = state.get("waiting")
        if waiting and waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            yield f"container {container['name']}: {waiting['reason']} {waiting.get('message', '')}".rstrip()
        ended = state.get("terminated") or container.get("lastState", {}).get("terminated") or {}
        if ended.get("exitCode"):
            reason = ended.get("reason", "no reason")
            yield f"container {container['name']} ended with {ended['exitCode']} ({reason})"
        if container["name"].startswith("wait-gcs") and "running" in state:
            yield f"init container {container['name']} still waits for the head"
    if status.get("reason"):
        yield f"{status['reason']}: {status.get('message', '')}".rstrip(": ")


def _brief(pods: Sequence[Pod], kind: str) -> str:
    shown = [
        f"{pod.name}: {'terminating' if pod.terminating else pod.phase}" for pod in pods if pod.kind == kind
    ]
    return ", ".join(shown) or f"no {kind} pod exists"


# What to do about a text of Kubernetes, most specific first.
_ADVICE: tuple[tuple[str, str], ...] = (
    (r"unschedulable", "A node is cordoned: `kubectl uncordon NODE` makes it take pods again."),
    (
        r"Insufficient (nvidia\.com/gpu|vpc\.amazonaws\.com/efa)",
        "Too few GPUs or EFA interfaces: does the node group have all its nodes, do the device plugins run?",
    ),
    (
        r"Insufficient (cpu|memory|ephemeral-storage)",
        "The pods ask for more than a node has left: lower a worker's CPU or memory in the settings.",
    ),
    (
        r"untolerated taint|didn't match Pod's node affinity",
        "No node with the wanted label or taint: see the GPU node group (`kubectl get nodes --show-labels`).",
    ),
    (
        r"ErrImagePull|ImagePullBackOff|InvalidImageName",
        "The image cannot be pulled: see its name, its digest and the nodes' route to the registry.",
    ),
    (r"OOMKilled", "The container ran out of memory: raise its memory in the stack's settings."),
    (r"wait-gcs", "Workers wait for the head: see the head pod, its Service and the network policies."),
    (
        r"InvalidRayCluster",
        "KubeRay refuses the RayCluster's specification: correct the stack's settings and `pulumi up`.",
    ),
    (r"CrashLoopBackOff|ended with", "See its last words: `kubectl logs POD --previous`."),
    (
        r"Evicted|DiskPressure|MemoryPressure",
        "The node ran out of disk or memory: see what fills it, or take larger disks.",
    ),
)


def explain(state: ClusterState, events: Sequence[Json], cordoned: Sequence[str]) -> str:
    """Which pods are not there, their problems and last warning events, and what to do."""
    lines = [f"RayCluster {state.name}: {state.summary()}."]
    if state.suspended:
        lines.append("  It is suspended (spec.suspend): `pulumi up`, or its queue, has to resume it.")
    for pod in state.pods:
        if pod.ready and not pod.terminating:
            continue
        where = f" on node {pod.node}" if pod.node else ""
        what = "terminating" if pod.terminating else pod.phase
        lines.append(f"  {pod.kind} pod {pod.name}: {what}{where}")
        lines += [f"    {problem}" for problem in pod.problems]
        lines += [f"    event {text}" for text in _warnings(events, pod.name)]
    absent = state.desired_workers - sum(pod.kind == "worker" for pod in state.pods)
    if absent > 0:
        lines.append(f"  {absent} worker pod(s) do not exist: KubeRay has not created them")
    if not any(pod.kind == "head" for pod in state.pods):
        lines.append("  no head pod exists: see whether the KubeRay operator runs")
    lines += [f"  event {text}" for text in _warnings(events, state.name)]
    if cordoned:
        lines.append(f"  cordoned nodes: {', '.join(cordoned)}")
    text = "\n".join(lines)
    advice = [what for pattern, what in _ADVICE if re.search(pattern, text)]
    advice = [what.replace("NODE", cordoned[0]) if len(cordoned) == 1 else what for what in advice]
    advice.append(f"All of it: `kubectl describe pods --selector ray.io/cluster={state.name}`.")
    return text + "\nWhat to do:\n" + "\n".join(f"  {what}" for what in advice)


def _warnings(events: Sequence[Json], name: str) -> list[str]:
    """The newest warning of each reason about an object."""
    about = [
        e for e in events if e.get("type") == "Warning" and e.get("involvedObject", {}).get("name") == name
    ]
    newest: dict[str, Json] = {}
    for event in sorted(about, key=lambda e: cast("str", e.get("lastTimestamp") or e.get("eventTime") or "")):
        newest[event.get("reason", "")] = event
    return [f"{reason}: {event.get('message', '').strip()}" for reason, event in newest.items()]
