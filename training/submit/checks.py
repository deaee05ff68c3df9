"""What has to hold before a job is queued: each failure is a message for people, with what to do."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from training.errors import DeadlinePassed, UsageError
from training.submit.bundle import JOB_FILE, Bundle
from training.submit.cluster import ClusterState, Pod
from training.submit.job_client import JobClient, RayJob
from training.submit.kubectl import ExecResult, MissingError, UnreachableError
from training.submit.plan import Plan

PROBE_TIMEOUT_SECONDS = (
    240.0  # first import of Ray's and boto3's packages on a cold node (2026-12: 60 s on two cores)
)
INSTALL_TIMEOUT_SECONDS = 600.0
PARALLEL_PROBES = 8


class PodWentAway(UsageError):
    """A pod that was ready is gone or starts anew: once all are ready again, the same check may pass."""


@dataclass(frozen=True)
class PodFacts:
    """What one pod says of itself."""

    pod: str
    versions: Mapping[str, str]
    problems: tuple[str, ...] = field(default=())


def check_resources(plan: Plan, state: ClusterState) -> None:
    """GPUs and EFA interfaces of the running workers against the plan. Raises UsageError."""
    target = plan.target
    for pod in state.workers:
        for what, found, promised in (
            ("GPUs", pod.gpus, target.gpus_per_worker),
            ("EFA interfaces", pod.efa, target.efa_per_worker),
        ):
            if found != promised:
                raise UsageError(
                    f"Worker pod {pod.name} has {found} {what}, the stack's outputs say {promised}: the stack was "
                    "changed since they were read. Run `pulumi up` and give the outputs again."
                )


def check_free(client: JobClient, submission_id: str, seconds: float, wait: Callable[[RayJob], None]) -> None:
    """No other job holds the GPUs. Calls `wait` while one does, for `seconds` at most; then raises DeadlinePassed."""
    started = time.monotonic()
    while True:
        others = [job for job in client.jobs() if not job.ended and job.submission_id != submission_id]
        if not others:
            return
        if time.monotonic() - started > seconds:
            name = others[0].submission_id
            raise DeadlinePassed(
                f"Job {name} runs on this RayCluster and holds its GPUs; it did not end within {seconds:.0f} s. Wait "
                f"for it (`finetune logs {name} --follow`), stop it (`finetune stop {name}`), or allow more time "
                "with --wait."
            )
        wait(others[0])
        time.sleep(5.0)


def check_pods(client: JobClient, plan: Plan, bundle: Bundle, state: ClusterState) -> dict[str, str]:
    """Versions are equal, storage is writable, model and data are readable, on every worker. Returns the versions.

    Raises UsageError with every problem, each once with the pods that have it.
    """
    head = state.head
    assert head is not None, "readiness comes first"
    with ThreadPoolExecutor(PARALLEL_PROBES) as pool:
        first = pool.submit(_probe, client, bundle, head, ["versions"])
        # A cluster that scales from zero has no worker yet; its head has the same image, role and storage.
        pods = state.workers or (head,)
        others = [pool.submit(_probe, client, bundle, pod, ["check", JOB_FILE, plan.run_uri]) for pod in pods]
        facts = [first.result(), *(other.result() for other in others)]
    problems = [*version_problems(facts, plan.target.ray_version), *_grouped(facts)]
    if problems:
        raise UsageError(
            "The cluster cannot run this job:\n" + "\n".join(f"  {problem}" for problem in problems)
        )
    return dict(facts[0].versions)


def install_packages(client: JobClient, bundle: Bundle, requirements: Sequence[str]) -> str:
    """The folder on the head that holds the bundle with these packages. Raises UsageError in pip's own words."""
    folder = client.push(bundle)
    if not requirements:
        return folder
    with_packages = f"{folder}-packages"
    answer = ask_inside(
        client, bundle, ["install", with_packages, *requirements], timeout=INSTALL_TIMEOUT_SECONDS
    )
    if answer["error"] is not None:
        raise UsageError(
            f"runtime_env.pip cannot be installed on the cluster, so nothing was queued:\n{answer['error']}\n"
            "Pin versions that exist for the image's Python, and see that the pods reach the package index."
        )
    return with_packages


def version_problems(facts: list[PodFacts], ray_version: str) -> list[str]:
    """Different versions among the pods, or another Ray than the stack says."""
    problems: list[str] = []
    for package in facts[0].versions:
        found = {fact.pod: fact.versions.get(package, "absent") for fact in facts}
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{value} on {pod}" for pod, value in found.items())
            problems.append(
                f"{package} differs among the pods: {shown}. Give all groups the same image (by digest)."
            )
    ray = facts[0].versions.get("ray", "absent")
    if ray != ray_version:
        problems.append(
            f"the pods run Ray {ray}, the stack says {ray_version}: set rayVersion and image together."
        )
    return problems


def local_differences(versions: Mapping[str, str]) -> list[str]:
    """Packages of another version on this machine than in the cluster: a local run then proves less."""
    differences: list[str] = []
    for package in ("ray", "torch", "transformers"):
        try:
            here = _plain(version(package))
        except PackageNotFoundError:
            continue
        there = _plain(versions.get(package, here))
        if here != there:
            differences.append(f"{package} {here} here, {there} in the cluster")
    return differences


def _plain(text: str) -> str:
    return re.sub(r"\+.*", "", text)


def _grouped(facts: list[PodFacts]) -> list[str]:
    pods_of: dict[str, list[str]] = {}
    for fact in facts:
        for problem in fact.problems:
            pods_of.setdefault(problem, []).append(fact.pod)
    return [f"{problem} (pod {', '.join(pods)})" for problem, pods in pods_of.items()]


def _probe(client: JobClient, bundle: Bundle, pod: Pod, arguments: list[str]) -> PodFacts:
    try:
        answer = ask_inside(client, bundle, arguments, pod)
    except MissingError as error:
        raise PodWentAway(f"Pod {pod.name} went away during the checks: {error}. Submit again.") from None
    return PodFacts(pod.name, answer["versions"], tuple(answer.get("problems", ())))


def ask_inside(
    client: JobClient,
    bundle: Bundle,
    arguments: list[str],
    pod: Pod | None = None,
    timeout: float = PROBE_TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """Runs training/submit/inside.py in a pod (the head where none is given) and returns what it prints."""
    folder = client.push(bundle, pod)
    command = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", folder]
    command += ["python", "-m", "training.submit.inside", *arguments]

    def ask() -> dict[str, Any]:
        result: ExecResult
        if pod is None:
            result = client.cluster.on_head(command, timeout=timeout)
        else:
            result = client.cluster.on_pod(pod, command, timeout=timeout)
        if result.status != 0:
            where = "the head" if pod is None else pod.name
            raise UsageError(
                f"`training.submit.inside {' '.join(arguments)}` failed on {where} with exit status "
                f"{result.status}:\n{result.stderr.strip()[-3000:]}"
            )
        try:
            return cast("dict[str, Any]", json.loads(result.stdout))
        except ValueError:
            raise UnreachableError(f"the answer of {len(result.stdout)} bytes is not JSON") from None

    return client.cluster.retry(ask)
