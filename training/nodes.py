"""Nodes that fail again and again: found while the job runs, and left out when the worker group starts the next time.

Runs in Ray Train's controller, by its callbacks (ray 2.58, train/v2/_internal/execution/callback.py). Where an attempt's
failure points at one node, the node gets a fault; with `resilience.exclude_node_after` of them it is left out, by a label
selector on `ray.io/node-id`. A selector is fixed for a trainer, so the controller is ended and the driver starts another.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

from training.errors import FinetuneError
from training.failures import cause_among, failures_of, is_consequence
from training.hangs import FOLDER as HANGS
from training.hangs import diagnose, read_reports
from training.storage import Storage, open_storage

NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class Node:
    """Where a rank runs. host: in Kubernetes the name of the pod."""

    node_id: str
    host: str


@dataclass(frozen=True)
class Fault:
    """One failure of the job that a node is to blame for."""

    node_id: str
    host: str
    rank: int
    reason: str
    time: float = field(default_factory=time.time)


@dataclass
class Record:
    """What the controllers of one launch saw, in `control/nodes-<launch>.json`."""

    failures: int = 0
    """Failures that count against resilience.max_failures: not those of nodes that were taken away with a notice."""
    faults: list[Fault] = field(default_factory=list[Fault])
    excluded: list[str] = field(default_factory=list[str])
    """Ids of the nodes that are left out."""

    def faults_of(self, node_id: str) -> list[Fault]:
        return [fault for fault in self.faults if fault.node_id == node_id]

    def told(self) -> list[dict[str, Any]]:
        """The nodes that are left out, for the summary."""
        return [
            {
                "node_id": node_id,
                "host": self.faults_of(node_id)[-1].host,
                "reasons": [fault.reason for fault in self.faults_of(node_id)],
            }
            for node_id in self.excluded
        ]


def record_name(launch_id: str) -> str:
    return f"control/nodes-{launch_id}.json"


def read_record(storage: Storage, launch_id: str) -> Record:
    if not storage.exists(record_name(launch_id)):
        return Record()
    content = json.loads(storage.read_text(record_name(launch_id)))
    return Record(content["failures"], [Fault(**one) for one in content["faults"]], content["excluded"])


class NodesExcluded(FinetuneError):
    """Ends a controller: its worker group must start again without some nodes."""


class TooFewNodes(FinetuneError):
    """Without the excluded nodes the job cannot go on."""


class NodeWatch(ControllerCallback, WorkerGroupCallback):
    """Lives in the controller of one trainer."""

    def __init__(self, run_uri: str, launch_id: str, limit: int, resource: str) -> None:
        self.run_uri = run_uri
        self.launch_id = launch_id
        self.limit = limit
        self.resource = resource
        self.nodes: dict[int, Node] = {}
        self.seen: set[str] = set()

    def after_controller_start(self, train_run_context: Any) -> None:  # noqa: ARG002
        storage = open_storage(self.run_uri)
        self.seen = {*storage.list(HANGS), *(_key(one) for one in failures_of(storage, self.launch_id))}

    def after_worker_group_start(self, worker_group: Any) -> None:
        self.nodes = {
            rank: Node(worker.metadata.node_id, worker.metadata.hostname)
            for rank, worker in enumerate(worker_group.get_workers())
        }

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        errors: dict[int, Exception] = worker_group_status.errors
        if not errors or worker_group_status.get_preemption_info() is not None:
            return
        if any(_preempted(error) for error in errors.values()):
            return
        storage = open_storage(self.run_uri)
        record = read_record(storage, self.launch_id)
        record.failures += 1
        fault = self._attribute(storage, errors)
        if fault is not None:
            record.faults.append(fault)
        self._write(storage, record)

    def on_controller_start_worker_group(
        self,
        *,
        scaling_config: Any,  # noqa: ARG002
        num_workers: int,  # noqa: ARG002
    ) -> None:
        """Ends this controller where a node has to be left out from now on. Raises NodesExcluded."""
        storage = open_storage(self.run_uri)
        record = read_record(storage, self.launch_id)
        due = nodes_to_exclude(record, self.limit, usable_nodes(self.resource))
        if due:
            record.excluded += due
            self._write(storage, record)
            raise NodesExcluded(f"nodes {', '.join(due)} failed {self.limit} times")

    def _attribute(self, storage: Storage, errors: Mapping[int, Exception]) -> Fault | None:
        new_hangs = [name for name in storage.list(HANGS) if name not in self.seen]
        new_failures = [one for one in failures_of(storage, self.launch_id) if _key(one) not in self.seen]
        self.seen |= {*new_hangs, *(_key(one) for one in new_failures)}
        hung: tuple[int, str] | None = None
        if new_hangs:
            attempt = new_hangs[-1].split("/")[1]
            hosts = {rank: node.host for rank, node in self.nodes.items()}
            diagnosis = diagnose(read_reports(storage, attempt), hosts)
            if diagnosis is None or diagnosis.rank is None:
                return None
            hung = diagnosis.rank, diagnosis.message.splitlines()[0]
        return attribute(errors, self.nodes, hung, new_failures)

    def _write(self, storage: Storage, record: Record) -> None:
        storage.write_text(record_name(self.launch_id), json.dumps(asdict(record)))


def attribute(
    errors: Mapping[int, Exception],
    nodes: Mapping[int, Node],
    hung: tuple[int, str] | None,
    failures: Sequence[Mapping[str, Any]],
) -> Fault | None:
    """The node that the end of one attempt points at; None where it points at none, or at several.

    errors: by rank, as Ray saw them. hung: the rank all others waited for, and what is known of it. failures: what the
    ranks wrote down. In this order: a hang; processes of one node that ended without a word; the first exception that a
    machine can be to blame for.
    """
    if hung is not None:
        rank, reason = hung
        return _fault(rank, nodes, reason)
    told = {int(failure["rank"]) for failure in failures}
    dead = sorted(rank for rank, error in errors.items() if _died(error) and rank not in told)
    if dead:
        if len({nodes[rank].node_id for rank in dead}) > 1:
            return None
        return _fault(dead[0], nodes, f"the process of rank {dead[0]} ended without an exception")
    cause = cause_among(failures)
    if cause is None or not cause["may_be_the_nodes"]:
        return None
    text = f"{cause['type']}: {cause['message']}"
    return None if is_consequence(text) else _fault(int(cause["rank"]), nodes, text.splitlines()[0])


def _fault(rank: int, nodes: Mapping[int, Node], reason: str) -> Fault | None:
    node = nodes.get(rank)
    return None if node is None else Fault(node.node_id, node.host, rank, reason)


def _died(error: Exception) -> bool:
    return isinstance(error, WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError | RayActorError)


def _preempted(error: Exception) -> bool:
    inner = error.health_check_failure if isinstance(error, WorkerHealthCheckFailedError) else error
    return isinstance(inner, RayActorError) and inner.preempted


def _key(failure: Mapping[str, Any]) -> str:
    return f"{failure['attempt']}/{failure['rank']}"


def usable_nodes(resource: str) -> dict[str, int]:
    """By node id, how many workers each living node has room for. resource: GPU or CPU, one per worker."""
    import ray

    room = {
        str(node["NodeID"]): int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]
    }
    return {node_id: workers for node_id, workers in room.items() if workers}


def nodes_to_exclude(record: Record, limit: int, usable: Iterable[str]) -> list[str]:
    """Nodes whose faults have reached the limit. Never the last one: with one node there is nothing to choose."""
    counts = Counter(fault.node_id for fault in record.faults)
    due = [node_id for node_id, count in counts.items() if count >= limit and node_id not in record.excluded]
    return due if set(usable) - set(due) - set(record.excluded) else []


def selector(excluded: Sequence[str]) -> dict[str, str] | None:
    """The label selector that keeps workers off these nodes."""
    return {NODE_LABEL: f"!in({','.join(excluded)})"} if excluded else None


def workers_left(
    record: Record,
    usable: Mapping[str, int],
    num_workers: int,
    min_workers: int | None,
    last_failure: str | None,
) -> int:
    """How many workers the nodes that are left have room for, at most num_workers.

    Raises TooFewNodes where that is less than the job needs: what was left out, why, and what can be done.
    """
    room = min(sum(workers for node, workers in usable.items() if node not in record.excluded), num_workers)
    if room >= (num_workers if min_workers is None else min_workers):
        return room
    nodes = record.told()
    named = "; ".join(
        f"{node['host']} (Ray node {node['node_id']}) after {len(node['reasons'])} failures: "
        + " / ".join(dict.fromkeys(node["reasons"]))
        for node in nodes
    )
    pods = " ".join(str(node["host"]) for node in nodes)
    needs = (
        f"{num_workers} (to go on with fewer, set parallel.min_workers)"
        if min_workers is None
        else f"at least {min_workers} (parallel.min_workers)"
    )
    raise TooFewNodes(
        f"excluded: {named}. The nodes that are left have room for {room} workers, and the job needs {needs}. Replace the "
        f"machine: kubectl get pod -o wide {pods} names it; kubectl cordon MACHINE; kubectl delete pod {pods}. Then start the "
        "job again: it goes on from its newest checkpoint. If the job is to blame and not the machine, set "
        "resilience.exclude_node_after: null"
        + (f". The last failure: {last_failure}" if last_failure else "")
    )
