"""What a submission will run: where, how much, on which transport; with the memory and time model, for how
long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from infra.outputs import StackOutputs
from training.errors import UsageError
from training.hardware import hardware_of_stack
from training.job import JobSpec
from training.planning import Prediction, predict
from training.shapes import shape_of
from training.submit.follow import duration


@dataclass(frozen=True)
class Plan:
    """One job on one stack. `prediction` is a sentence where the memory and time model cannot tell."""

    job: JobSpec
    target: StackOutputs
    run_uri: str
    num_ranks: int
    require: str
    prediction: Prediction | str

    @property
    def tokens_per_step(self) -> int:
        return self.num_ranks * self.job.batch.tokens_per_gpu

    def document(self) -> dict[str, Any]:
        """The plan as JSON."""
        predicted = {
            key: getattr(self.prediction, key, None)
            for key in ("memory_gib", "step_seconds", "tokens_per_second", "hours", "cost_usd", "limited_by")
        }
        return {
            "name": self.job.name,
            "stack": self.target.stack,
            "ray_cluster": self.target.ray_cluster,
            "instance_type": self.target.instance_type,
            "image": self.target.image,
            "num_workers": self.target.num_workers,
            "gpus_per_worker": self.target.gpus_per_worker,
            "ranks": self.num_ranks,
            "tokens_per_step": self.tokens_per_step,
            "steps": self.job.steps,
            "epochs": self.job.epochs,
            "run": self.run_uri,
            "required_transport": self.require,
            "hourly_usd": self.target.hourly_usd,
            **predicted,
        }

    def table(self) -> Table:
        """The plan for people."""
        table = Table(
            title=f"{self.job.name} on stack {self.target.stack}", show_header=False, title_justify="left"
        )
        for key, value in self._rows():
            table.add_row(key, value)
        return table

    def _rows(self) -> list[tuple[str, str]]:
        target, job, prediction = self.target, self.job, self.prediction
        length = f"{job.steps:,} steps" if job.steps is not None else f"{job.epochs:g} epochs"
        nodes = f"{target.num_workers} x {target.instance_type or 'worker'}"
        rows = [
            ("model", job.model.source or f"{_architecture(job)} with random weights"),
            ("data", ", ".join(source.source for source in job.data.sources())),
            ("runs on", f"{nodes}, {self.num_ranks} ranks, {target.image}"),
            ("length", f"{length}, {self.tokens_per_step:,} tokens a step"),
            ("transport", "EFA is required" if self.require == "efa" else "any is accepted"),
            ("run folder", self.run_uri),
        ]
        if job.runtime_env.pip:
            rows.append(("packages added", ", ".join(job.runtime_env.pip)))
        rows += _predicted_rows(prediction)
        price = "unknown" if target.hourly_usd is None else f"{target.hourly_usd:.2f} USD an hour"
        rows.append(("price of the stack", price + (f", until {target.expires}" if target.expires else "")))
        return rows


def make_plan(job: JobSpec, target: StackOutputs, run_uri: str) -> Plan:
    """The plan of a job on a stack. Raises UsageError where the job can never fit."""
    ranks = num_ranks(job, target)
    require = job.transport.require or target.required_transport
    if require == "efa" and target.num_workers > 1 and target.efa_per_worker == 0:
        raise UsageError(
            f"The job requires EFA, and the workers of stack {target.stack} have no EFA interface (efa_per_worker "
            "0). Use a stack with EFA, or accept another transport: --require-transport any."
        )
    return Plan(job, target, run_uri, ranks, require, predict_on(job, target))


def num_ranks(job: JobSpec, target: StackOutputs) -> int:
    """Ranks of the job: one per GPU of the stack (per worker without GPUs) unless the job says fewer."""
    available = target.num_workers * max(target.gpus_per_worker, 1)
    wanted = job.parallel.num_workers or available
    if wanted > available or available == 0:
        unit = "GPUs" if target.gpus_per_worker else "workers"
        raise UsageError(
            f"parallel.num_workers {wanted}: stack {target.stack} has {available} {unit} ({target.num_workers} "
            f"workers x {target.gpus_per_worker}). Lower it, or raise the stack's number of nodes."
        )
    return wanted


def predict_on(job: JobSpec, target: StackOutputs) -> Prediction | str:
    """Memory, time and price of the job on the stack's nodes, or why they cannot be predicted."""
    if target.instance_type is None:
        return "the stack names no instance type"
    try:
        return predict(job, shape_of(job), hardware_of_stack(target))
    except UsageError as error:
        return str(error)


def _architecture(job: JobSpec) -> str:
    shape = job.model.architecture
    assert shape is not None
    return f"{shape.family}, {shape.num_layers} layers of {shape.hidden_size}"


def _predicted_rows(prediction: Prediction | str) -> list[tuple[str, str]]:
    if isinstance(prediction, str):
        return [("expected memory and time", f"unknown: {prediction}")]
    of = f"{prediction.memory_gib:.1f} of {prediction.gpu_memory_gib:.0f} GiB per GPU"
    speed = f"{prediction.step_seconds:.2f} s a step, {prediction.tokens_per_second:,.0f} tokens/s"
    rows = [
        ("expected memory", of if prediction.fits else f"{of}: IT WILL NOT FIT"),
        ("expected speed", f"{speed}, limited by {prediction.limited_by}"),
    ]
    if prediction.hours is not None:
        rows.append(("expected time", duration(prediction.hours * 3600)))
    if prediction.cost_usd is not None:
        rows.append(("expected price", f"{prediction.cost_usd:.2f} USD"))
    return rows
