"""`finetune compare`: the same job over EFA and over TCP, both verdicts, and how much faster the one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from infra.outputs import StackOutputs
from training.errors import ExitStatus, UsageError
from training.hardware import hardware_of_stack
from training.job import load_job
from training.report import write_report
from training.storage import LocalStorage
from training.submit import commands
from training.submit.ending import fetch
from training.submit.follow import Limits
from training.submit.job_client import JobClient
from training.submit.session import Access, Output, guarded
from training.submit.submission import with_run_folder
from training.transport.compare import TCP_ENV, CompareError, ComparisonReport, exit_status
from training.transport.compare import compare as compare_runs

COMPARISON_FILE = "comparison.json"
# What a leg may end with and still be compared: the verdict is judged by the comparison itself.
_COMPARABLE = (ExitStatus.SUCCEEDED, ExitStatus.TRANSPORT_OTHER, ExitStatus.TRANSPORT_UNKNOWN)


@dataclass
class ClusterRun:
    """A run folder read through the cluster's head, since its storage may be out of this machine's reach."""

    client: JobClient
    uri: str

    def read_text(self, name: str) -> str:
        content = fetch(self.client, self.uri, [name])[name]
        if content is None:
            raise FileNotFoundError(f"{self.uri}/{name}")
        return content.decode("utf-8")


def compare(
    job_path: Path,
    access: Access,
    *,
    overrides: Sequence[str] = (),
    yes: bool = False,
    as_json: bool = False,
    limits: Limits | None = None,
) -> int:
    """Submits the job twice, one leg after the other, and compares them. 0, 13 or 14 by the legs' transports; a leg
    that fails ends the comparison with its exit status.
    """
    output = Output(as_json)

    def run() -> int:
        target = access.target()
        network_gbps = hardware_of_stack(target).network_gbps if target.instance_type is not None else None
        folders: dict[str, str] = {}
        for leg, more in _legs(job_path, overrides, target).items():
            output.say(f"leg over {leg}", "bold")
            leg_overrides = [*overrides, *more]
            _, folders[leg] = with_run_folder(load_job(job_path, leg_overrides), target)
            status = commands.submit(job_path, access, overrides=leg_overrides, yes=yes, limits=limits)
            if status not in _COMPARABLE:
                output.say(f"the leg over {leg} ended with {status}: there is nothing to compare", "red")
                return status
        with access.client(target, f"finetune compare {job_path} {access.flags()}") as client:
            over_efa, over_tcp = ClusterRun(client, folders["efa"]), ClusterRun(client, folders["tcp"])
            try:
                report = compare_runs(over_efa, over_tcp, network_gbps=network_gbps)
            except CompareError as error:
                raise UsageError(str(error)) from None
            page = _save(over_efa, report, Path.cwd() / "runs" / f"{Path(over_efa.uri).name}-compared")
        output.console.print(table(report))
        for sentence in report.sentences():
            output.say(sentence)
        output.say(f"report: {page}")
        output.emit(report.model_dump(mode="json"))
        return exit_status(report)

    return guarded(output, run)


def _save(run: ClusterRun, report: ComparisonReport, folder: Path) -> Path:
    """The EFA leg's report with the comparison in it, on this machine."""
    storage = LocalStorage(folder)
    for name in ("job.yaml", "summary.json", "metrics.jsonl", "transport.json"):
        storage.write_text(name, run.read_text(name))
    storage.write_text(COMPARISON_FILE, report.model_dump_json())
    write_report(storage)
    return folder / "report.html"


def _legs(job_path: Path, overrides: Sequence[str], target: StackOutputs) -> dict[str, list[str]]:
    """The settings of each leg: a run folder of its own, and for TCP the environment over the stack's."""
    _, base = with_run_folder(load_job(job_path, overrides), target)
    tcp = [f"runtime_env.env.{name}={value}" for name, value in TCP_ENV.items()]
    return {
        "efa": [f"run.path={base}-efa", "run.resume=false"],
        "tcp": [f"run.path={base}-tcp", "run.resume=false", "transport.require=any", *tcp],
    }


def table(report: ComparisonReport) -> Table:
    """Both legs side by side; what the numbers mean stands below, in `ComparisonReport.sentences`."""
    view = Table("", "EFA", "TCP", title="the same job over two networks", title_justify="left")
    for column in view.columns[1:]:
        column.justify = "right"
    for row in report.rows():
        view.add_row(*row)
    return view
