"""`finetune submit`, step by step: plan, wait, check, ask, queue, follow."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.prompt import Confirm, Prompt
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from infra.outputs import StackOutputs
from training.errors import DeadlinePassed, ExitStatus, UsageError
from training.hardware import hardware_of_stack
from training.job import JobSpec, load_job
from training.planning import Prediction
from training.submit.bundle import JOB_FILE, TARGET_FILE, Bundle, build_bundle
from training.submit.checks import (
    PodWentAway,
    check_free,
    check_pods,
    check_resources,
    install_packages,
    local_differences,
)
from training.submit.cluster import ClusterState
from training.submit.ending import STOP_GRACE_SECONDS, fetch, finish, read_log, stop_and_wait
from training.submit.follow import (
    Ending,
    Follower,
    Limits,
    ResourcesNeverCame,
    TerminalView,
    head_was_replaced,
    wait_until_ready,
)
from training.submit.job_client import JobClient, RayJob
from training.submit.outcome import SUMMARY_FILE
from training.submit.plan import Plan, make_plan
from training.submit.session import Access, Output

# A kubelet takes a few seconds to say that a container is gone (2026-12, on the rig).
CHECK_AGAIN_SECONDS = 5.0


@dataclass(frozen=True)
class Submission:
    """One `finetune submit`."""

    job_path: Path
    overrides: tuple[str, ...]
    access: Access
    output: Output
    limits: Limits
    folder: Path
    show_log: bool

    def run(self, *, detach: bool, yes: bool) -> int:
        target = self.access.target()
        job, run_uri = with_run_folder(load_job(self.job_path, self.overrides), target)
        plan = make_plan(job, target, run_uri)
        bundle = build_bundle(job, target_facts(plan), self.folder)
        base = submission_id(job.name, bundle)
        self.output.console.print(plan.table())
        with self.access.client(target, f"finetune status {base} {self.access.flags()}") as client:
            state = wait_until_ready(client.cluster, self.limits.resources, self._tell_waiting)
            check_resources(plan, state)
            name = self._queue(client, plan, bundle, base, yes=yes)
            if detach:
                return self._detached(name, plan, ExitStatus.SUCCEEDED)
            return self._follow(client, name, plan)

    def _queue(self, client: JobClient, plan: Plan, bundle: Bundle, base: str, *, yes: bool) -> str:
        """The submission id of the job that does this work: one that is under way or done, or a new one."""
        earlier = [job for job in client.jobs() if job.metadata.get("submission") == base]
        last = earlier[-1] if earlier else None
        if last is not None and not last.ended:
            self.output.say(f"This job is under way as {last.submission_id}: following it.")
            return last.submission_id
        if last is not None and last.status == "SUCCEEDED" and _has_summary(client, plan.run_uri):
            self.output.say(f"This job has succeeded as {last.submission_id}: nothing is submitted.")
            return last.submission_id
        versions = self._check(client, plan, bundle)
        for difference in local_differences(versions):
            self.output.say(f"note: {difference}", "yellow")
        folder = install_packages(client, bundle, plan.job.runtime_env.pip)
        self._ask(yes)
        check_free(client, base, self.limits.resources, self._tell_busy)
        name = base if last is None else f"{base}-{len(earlier) + 1}"
        metadata = {
            "submission": base,
            "name": plan.job.name,
            "run": plan.run_uri,
            "require": plan.require,
        }
        client.submit(name, folder, entrypoint(plan), runtime_env(plan.job), metadata)
        self.output.say(f"submitted as {name}")
        return name

    def _check(self, client: JobClient, plan: Plan, bundle: Bundle) -> dict[str, str]:
        """The checks in every pod, which give the versions there. Where a pod goes away meanwhile (a replaced head takes
        its workers along), again, once all are ready."""

        def check() -> dict[str, str]:
            state = wait_until_ready(client.cluster, self.limits.resources, self._tell_waiting)
            return check_pods(client, plan, bundle, state)

        again = Retrying(
            retry=retry_if_exception_type(PodWentAway),
            wait=wait_fixed(CHECK_AGAIN_SECONDS),
            stop=stop_after_delay(self.limits.resources),
            before_sleep=lambda _: self.output.say("A pod went away during the checks: they are made again."),
            reraise=True,
        )
        return again(check)

    def _ask(self, yes: bool) -> None:
        if yes:
            return
        if not sys.stdin.isatty():
            raise UsageError("Standard input is no terminal to ask on: --yes submits without a question.")
        if not Confirm.ask("Submit?", console=self.output.console, default=True):
            raise UsageError("Not submitted.")

    def _tell_waiting(self, state: ClusterState) -> None:
        self.output.say(f"waiting for the RayCluster: {state.summary()}")

    def _tell_busy(self, job: RayJob) -> None:
        self.output.say(f"waiting for {job.submission_id} to end")

    def _follow(self, client: JobClient, name: str, plan: Plan) -> int:
        has_gpus = plan.target.gpus_per_worker > 0
        try:
            with TerminalView(self.output.console, self.show_log) as view:
                ending = Follower(client, name, view, self.limits, has_gpus).follow()
        except KeyboardInterrupt:
            return self._interrupted(client, name, plan)
        except ResourcesNeverCame:
            self._stop(client, name, grace=0.0)
            raise
        except DeadlinePassed:
            self._stop(client, name, grace=STOP_GRACE_SECONDS)
            raise
        return finish(client, ending, self.output, self.folder / "runs" / name)

    def _interrupted(self, client: JobClient, name: str, plan: Plan) -> int:
        """Ctrl-C: detach, stop or go on, as answered; without a terminal to answer on, detach."""
        match self._choice() if sys.stdin.isatty() else "detach":
            case "follow":
                return self._follow(client, name, plan)
            case "stop":
                job = self._stop(client, name, grace=STOP_GRACE_SECONDS)
                parser, _ = read_log(client, name)
                return finish(client, Ending(job, parser), self.output, self.folder / "runs" / name)
            case _:
                return self._detached(name, plan, ExitStatus.DETACHED)

    def _choice(self) -> str:
        choices = ["detach", "stop", "follow"]
        try:
            return Prompt.ask(
                "\nLeave the job running, stop it, or go on following?",
                choices=choices,
                default="detach",
                console=self.output.console,
            )
        except (KeyboardInterrupt, EOFError):
            return "detach"

    def _stop(self, client: JobClient, name: str, *, grace: float) -> RayJob:
        job = client.find(name)
        if job is None:
            raise head_was_replaced(name, client.cluster.come_back)
        return job if job.ended else stop_and_wait(client, job, self.output, grace=grace)

    def _detached(self, name: str, plan: Plan, status: ExitStatus) -> int:
        flags = self.access.flags()
        self.output.say(
            f"{name} goes on without this terminal. Come back with:\n  finetune logs {name} --follow {flags}\n  "
            f"finetune status {name} {flags}\n  finetune stop {name} {flags}"
        )
        self.output.emit(
            {
                "name": plan.job.name,
                "submission_id": name,
                "run": plan.run_uri,
                "status": "detached",
                "exit_status": int(status),
                "plan": plan.document(),
            }
        )
        return int(status)


def with_run_folder(job: JobSpec, target: StackOutputs) -> tuple[JobSpec, str]:
    """The job with its run folder on the stack's storage, and that folder. Raises UsageError for a relative one."""
    default = f"{target.storage_uri.rstrip('/')}/runs/{job.name}"
    path = job.run.path or default
    if "://" not in path and not path.startswith("/"):
        raise UsageError(
            f"run.path {path}: a relative folder would be one pod's own, and go with it. Leave run.path out "
            f"({default}), or give s3://bucket/prefix or an absolute path that every pod mounts."
        )
    return job.model_copy(update={"run": job.run.model_copy(update={"path": path})}), path


def target_facts(plan: Plan) -> dict[str, Any]:
    """What the job has to know of its stack, for summary and report. The same from one submit to the next."""
    target = plan.target
    return _speeds(target) | {
        "stack": target.stack,
        "region": target.region,
        "instance_type": target.instance_type,
        "num_workers": target.num_workers,
        "gpus_per_worker": target.gpus_per_worker,
        "efa_per_worker": target.efa_per_worker,
        "gpudirect": target.gpudirect,
        "required_transport": plan.require,
        "hourly_usd": target.hourly_usd,
        "prediction": plan.prediction.document() if isinstance(plan.prediction, Prediction) else None,
    }


def submission_id(name: str, bundle: Bundle) -> str:
    """The same name, code, job and stack give the same id."""
    return f"{name}-{bundle.digest[:12]}"


def _speeds(target: StackOutputs) -> dict[str, Any]:
    """What the layout of the model depends on, for an instance type of the catalog."""
    if target.instance_type is None:
        return {}
    hardware = hardware_of_stack(target)
    return {
        "network_gbps": hardware.network_gbps,
        "in_node_gb_per_second": hardware.in_node_gb_per_second,
    }


def entrypoint(plan: Plan) -> list[str]:
    """The driver's command, in the bundle's folder."""
    command = ["python", "-m", "training.ray_entry", "--job", JOB_FILE, "--run", plan.run_uri]
    return [*command, "--num-workers", str(plan.num_ranks), "--target", TARGET_FILE]


def runtime_env(job: JobSpec) -> dict[str, Any]:
    """Ray's runtime environment: the job's variables, and what makes its log readable. Packages are in the folder."""
    readable = {
        "PYTHONUNBUFFERED": "1",
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # with it, each line that a rank prints comes twice
    }
    return {"env_vars": readable | job.runtime_env.env}


def _has_summary(client: JobClient, run_uri: str) -> bool:
    return fetch(client, run_uri, [SUMMARY_FILE])[SUMMARY_FILE] is not None
