"""`finetune probe`: the bus bandwidth of all-gather and reduce-scatter in and across the nodes of a stack."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from training.errors import ExitStatus, FinetuneError
from training.hardware import hardware_of_stack
from training.submit.ending import code_bundle, read_log
from training.submit.follow import Follower, Limits, TerminalView, wait_until_ready
from training.submit.session import Access, Output, guarded
from training.transport.probe import ProbeResult


class ProbeFailed(FinetuneError):
    """The probe ended without a result."""


def probe(
    access: Access, *, sizes: tuple[int, ...] = (), as_json: bool = False, limits: Limits | None = None
) -> int:
    """Runs the probe on every rank of the stack. 0 where the bandwidth passes or cannot be judged, 13 below it."""
    output = Output(as_json)
    limits = limits or Limits()

    def run() -> int:
        target = access.target()
        command = ["python", "-m", "training.probe_entry", "--num-workers", str(_ranks(target))]
        if target.instance_type is not None:
            hardware = hardware_of_stack(target)
            command += ["--instance-type", target.instance_type, "--network-gbps", str(hardware.network_gbps)]
        if sizes:
            command += ["--sizes", *map(str, sizes)]
        name = f"probe-{uuid.uuid4().hex[:8]}"
        with access.client(target, f"finetune logs {name} {access.flags()}") as client:
            wait_until_ready(client.cluster, limits.resources, lambda state: output.say(state.summary()))
            folder = client.push(code_bundle())
            client.submit(name, folder, command, {"env_vars": {"PYTHONUNBUFFERED": "1"}}, {"name": "probe"})
            with TerminalView(output.console, False) as view:
                ending = Follower(client, name, view, limits, target.gpus_per_worker > 0).follow()
            result = _result(read_log(client, name)[1])
        if result is None:
            failure = ending.parser.first_failure()
            raise ProbeFailed(
                f"probe {name} ended {ending.job.status} without a result"
                + (
                    f": {failure.headline()}"
                    if failure
                    else f"; finetune logs {name} {access.flags()} says why"
                )
            )
        output.console.print(_table(result))
        output.emit(result.model_dump(mode="json"))
        return int(ExitStatus.TRANSPORT_OTHER if result.verdict == "failed" else ExitStatus.SUCCEEDED)

    return guarded(output, run)


def _ranks(target: Any) -> int:
    return target.num_workers * max(target.gpus_per_worker, 1)


def _result(lines: list[Any]) -> ProbeResult | None:
    events: list[Mapping[str, Any]] = [line.event for line in lines if line.event is not None]
    found = [event["result"] for event in events if event.get("event") == "probe"]
    return ProbeResult.model_validate(found[-1]) if found else None


def _table(result: ProbeResult) -> Table:
    header = ("collective", "ranks", "MiB", "ms", "bus GB/s", "over rounds")
    table = Table(*header, title=f"{result.verdict}: {result.reason}", title_justify="left")
    for row in result.rows():
        table.add_row(*row)
    return table
