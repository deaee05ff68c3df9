"""The command line. Each command is thin: it reads its options, calls the module that does the work, shows the result.

Modules are imported inside the commands, so that `finetune --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from training.errors import ExitStatus, FinetuneError, UsageError

if TYPE_CHECKING:
    from training.console import Output

app = typer.Typer(
    name="finetune",
    help="Fine-tune with FSDP on a laptop or on an EFA cluster on AWS, and prove which network carried the job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="job file, such as training/jobs/demo.yaml")]
JobName = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="submission id or job name; default: the newest")
]
RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="run folder: a path or s3://BUCKET/PREFIX")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a field of the job file")
]
Json = Annotated[
    bool, typer.Option("--json", help="one JSON object on standard output, all else on standard error")
]
Stack = Annotated[
    str | None,
    typer.Option("--stack", metavar="NAME", help="Pulumi stack whose outputs say where the cluster is"),
]
OutputsFile = Annotated[
    Path | None,
    typer.Option("--outputs", metavar="FILE", help="the stack's outputs as JSON, instead of --stack"),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask after the plan")]
SettingsFile = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="settings file; default: Pulumi.dev.yaml")
]
RequireTransport = Annotated[
    str | None,
    typer.Option("--require-transport", metavar="efa|any", help="default: the job's, else the stack's"),
]


@app.command()
def local(job_file: JobFile, overrides: Set = None, as_json: Json = False) -> None:
    """Run a job on this machine with a local Ray."""
    from training.console import summary_table
    from training.job import load_job
    from training.local import report_path, run_local

    with _output(as_json) as output:
        job = load_job(job_file, overrides or ())
        with output.progress() as progress:
            summary = run_local(job, progress.event)
        output.result(summary, summary_table(summary, report_path(summary)))
    raise typer.Exit(int(summary["exit_status"]))


@app.command()
def submit(
    job_file: JobFile,
    stack: Stack = None,
    outputs: OutputsFile = None,
    overrides: Set = None,
    require_transport: RequireTransport = None,
    detach: Annotated[bool, typer.Option("--detach", help="return as soon as the job is queued")] = False,
    yes: Yes = False,
    deadline: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="end the job with 12 when it takes longer")
    ] = None,
    resources: Annotated[
        float, typer.Option(metavar="SECONDS", help="how long pods may take to be ready")
    ] = 900.0,
    show_log: Annotated[
        bool, typer.Option("--show-log", help="print the job's log besides the progress")
    ] = False,
    then: Annotated[
        str | None, typer.Option("--then", metavar="sleep", help="when the job has ended, GPU nodes to zero")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a job on a stack's cluster, follow it, and exit with what became of it."""
    from training.submit import commands
    from training.submit.follow import Limits

    _check_choice("--require-transport", require_transport, ("efa", "any"))
    _check_choice("--then", then, ("sleep",))
    if then and detach:
        raise UsageError("--then sleep waits for the end of the job, --detach does not: give one of the two")
    access = _access(stack, outputs)
    status = commands.submit(
        job_file,
        access,
        overrides=overrides or (),
        require_transport=require_transport,  # pyright: ignore[reportArgumentType]
        detach=detach,
        yes=yes,
        as_json=as_json,
        show_log=show_log,
        limits=Limits(deadline=deadline, resources=resources),
    )
    if then:
        from operations.switch import sleep_after

        sleep_after(access, status)
    raise typer.Exit(status)


@app.command()
def status(
    name: JobName = None, stack: Stack = None, outputs: OutputsFile = None, as_json: Json = False
) -> None:
    """One look at a job: its progress, or its summary and exit status where it has ended."""
    from training.submit import commands

    raise typer.Exit(commands.status(_access(stack, outputs), name, as_json=as_json))


@app.command()
def logs(
    name: JobName = None,
    stack: Stack = None,
    outputs: OutputsFile = None,
    rank: Annotated[int | None, typer.Option(help="only what this rank said")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on to the end of the job")] = False,
    first_failure: Annotated[
        bool, typer.Option("--first-failure", help="only the failure that came first")
    ] = False,
    as_json: Json = False,
) -> None:
    """The log of a job."""
    from training.submit import commands

    raise typer.Exit(
        commands.logs(
            _access(stack, outputs),
            name,
            rank=rank,
            follow=follow,
            first_failure=first_failure,
            as_json=as_json,
        )
    )


@app.command()
def stop(
    name: JobName = None,
    stack: Stack = None,
    outputs: OutputsFile = None,
    now: Annotated[bool, typer.Option("--now", help="without a last checkpoint")] = False,
    as_json: Json = False,
) -> None:
    """Stop a job after a last checkpoint."""
    from training.submit import commands

    raise typer.Exit(commands.stop(_access(stack, outputs), name, now=now, as_json=as_json))


@app.command("list")
def list_jobs(stack: Stack = None, outputs: OutputsFile = None, as_json: Json = False) -> None:
    """The jobs of a stack's cluster."""
    from training.submit import commands

    raise typer.Exit(commands.list_jobs(_access(stack, outputs), as_json=as_json))


@app.command()
def compare(
    job_file: JobFile,
    stack: Stack = None,
    outputs: OutputsFile = None,
    overrides: Set = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Run a job over EFA and over TCP, check both verdicts, and say how much faster EFA was."""
    from training.submit.compare import compare as compare_legs

    raise typer.Exit(
        compare_legs(job_file, _access(stack, outputs), overrides=overrides or (), yes=yes, as_json=as_json)
    )


@app.command()
def probe(
    stack: Stack = None,
    outputs: OutputsFile = None,
    sizes: Annotated[
        list[int] | None,
        typer.Option(
            "--size", metavar="MIB", min=1, help="A payload in MiB; once for each. Default: 1 to 1024."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the bus bandwidth in and across the nodes of a stack against the floor of its instance type."""
    from training.submit.probe import probe as probe_stack

    payloads = tuple(size * 2**20 for size in sizes or ())
    raise typer.Exit(probe_stack(_access(stack, outputs), sizes=payloads, as_json=as_json))


@app.command()
def audit(
    settings: SettingsFile = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """List what a stack has left in the account and still bills, with the command that removes each. 10 if any."""
    from operations.account import audit_settings_file

    with _output(as_json) as output:
        found = audit_settings_file(_settings_file(settings, stack))
        output.result(found.to_dict(), found.render())
    raise typer.Exit(int(ExitStatus.SUCCEEDED if found.clean else ExitStatus.JOB_FAILED))


@app.command()
def doctor(
    settings: SettingsFile = None, stack: Stack = None, outputs: OutputsFile = None, as_json: Json = False
) -> None:
    """Check tools, credentials, quota, zone, reservation, cluster and storage, with the command that mends each."""
    from operations.examine import examine

    with _output(as_json) as output:
        only_outputs = outputs is not None and settings is None
        path = None if only_outputs else _settings_file(settings, stack)
        found = examine(path, _access(None, outputs).target() if outputs is not None else None)
        output.result(found.to_dict(), found.view())
    raise typer.Exit(int(ExitStatus.USAGE if found.failed else ExitStatus.SUCCEEDED))


@app.command()
def zones(
    instance: Annotated[str, typer.Option(metavar="TYPE", help="EC2 instance type")] = "g6.12xlarge",
    nodes: Annotated[int, typer.Option(min=1, help="GPU nodes")] = 2,
    regions: Annotated[
        list[str] | None,
        typer.Option("--region", metavar="NAME", help="look there alone; may be repeated"),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="try for real: reserve the nodes for a moment, after asking")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask before --probe")] = False,
    as_json: Json = False,
) -> None:
    """Regions and zones that offer an instance type: quota, spot score, price, and with --probe free capacity."""
    from operations.examine import look_for_zones

    with _output(as_json) as output:
        found = look_for_zones(instance, nodes, regions or (), probe_capacity=probe, yes=yes)
        output.result(found.to_dict(), found.view())
    raise typer.Exit(int(ExitStatus.SUCCEEDED if found.best else ExitStatus.USAGE))


@app.command()
def sleep(
    stack: Stack = None,
    outputs: OutputsFile = None,
    now: Annotated[bool, typer.Option("--now", help="even while a job runs: it is cut off")] = False,
    as_json: Json = False,
) -> None:
    """Scale the GPU nodes of a stack to zero; the rest of it stays."""
    from operations.switch import put_to_sleep

    with _output(as_json) as output:
        done = put_to_sleep(_access(stack, outputs), now=now)
        output.result(done.to_dict(), done.render())


@app.command()
def wake(stack: Stack = None, outputs: OutputsFile = None, as_json: Json = False) -> None:
    """Scale the GPU nodes of a stack back to their full number."""
    from operations.switch import wake_up

    with _output(as_json) as output:
        done = wake_up(_access(stack, outputs))
        output.result(done.to_dict(), done.render())


@app.command()
def extend(
    hours: Annotated[
        float, typer.Option("--hours", help="from the old expiry, or from now if it has passed")
    ],
    settings: SettingsFile = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Move the time at which the GPU nodes go by themselves, at once and in the settings file."""
    from operations.switch import extend_settings_file

    with _output(as_json) as output:
        done = extend_settings_file(_settings_file(settings, stack), hours)
        output.result(done.to_dict(), done.render())


@app.command()
def image(settings: SettingsFile = None, stack: Stack = None, as_json: Json = False) -> None:
    """Ask the registry for the digest behind the image's tag, and print the setting that pins it."""
    from operations.image import resolve_settings_file

    with _output(as_json) as output:
        found = resolve_settings_file(_settings_file(settings, stack))
        output.result(found.to_dict(), found.render())


@app.command()
def report(run: RunFolder, as_json: Json = False) -> None:
    """Write report.html of a run folder again."""
    from training.report import write_report
    from training.storage import open_storage

    with _output(as_json) as output:
        storage = open_storage(run)
        try:
            write_report(storage)
        except FileNotFoundError:
            raise UsageError(
                f"{run}: no run folder is there (job.yaml, metrics.jsonl, summary.json)"
            ) from None
        output.result({"report": f"{storage.uri}/report.html"})


@app.command()
def transport(run: RunFolder, require: RequireTransport = None, as_json: Json = False) -> None:
    """Judge the logs and counters of a run folder again: which network carried it."""
    from training.storage import open_storage
    from training.summary import judge_last_attempt
    from training.transport.verdict import exit_status

    with _output(as_json) as output:
        _check_choice("--require-transport", require, ("efa", "any"))
        verdict = judge_last_attempt(open_storage(run), require=require)  # pyright: ignore[reportArgumentType]
        output.result(verdict)
    raise typer.Exit(exit_status(verdict, verdict.required))


@app.command()
def cost(settings: SettingsFile = None, stack: Stack = None, as_json: Json = False) -> None:
    """What a stack costs per hour, part by part. No cloud access is needed."""
    from infra.cost import UnknownPriceError, cost_of_settings_file
    from infra.settings import SettingsError
    from training.console import cost_table

    with _output(as_json) as output:
        try:
            costs = cost_of_settings_file(_settings_file(settings, stack)).to_dict()
        except (UnknownPriceError, SettingsError) as error:
            raise UsageError(str(error)) from None
        output.result(costs, cost_table(costs))


@app.command()
def plan(
    job_file: JobFile,
    overrides: Set = None,
    instance: Annotated[str, typer.Option(metavar="TYPE", help="EC2 instance type")] = "g6.12xlarge",
    nodes: Annotated[int, typer.Option(min=1, help="GPU nodes")] = 2,
    steps: Annotated[
        int | None, typer.Option(min=1, help="optimizer steps, where the job counts epochs")
    ] = None,
    stack: Stack = None,
    outputs: OutputsFile = None,
    as_json: Json = False,
) -> None:
    """Predict memory, time and price of a job on any instance type of the catalog, and what limits it."""
    from training.console import plan_tables
    from training.hardware import hardware_of_instance, hardware_of_stack
    from training.job import load_job
    from training.planning import predict
    from training.shapes import shape_of

    with _output(as_json) as output:
        job = load_job(job_file, overrides or ())
        if stack is not None or outputs is not None:
            hardware = hardware_of_stack(_access(stack, outputs).target())
        else:
            hardware = hardware_of_instance(instance, nodes)
        prediction = predict(job, shape_of(job), hardware, steps)
        output.result(prediction.document(), plan_tables(job, hardware, prediction))


@contextmanager
def _output(as_json: bool) -> Generator[Output]:
    """The streams of a command; an error for people is shown and becomes its exit status."""
    from training.console import Output

    with Output(json_mode=as_json) as output:
        try:
            yield output
        except FinetuneError as error:
            raise typer.Exit(int(output.error(error))) from None


def _access(stack: str | None, outputs: Path | None) -> Any:
    from training.submit.session import Access

    return Access(stack=stack, outputs=outputs)


def _settings_file(settings: Path | None, stack: str | None) -> Path:
    path = settings or Path(f"Pulumi.{stack or 'dev'}.yaml")
    if not path.is_file():
        raise UsageError(f"{path}: no such settings file; give one, such as Pulumi.dev.yaml, or --stack NAME")
    return path


def _check_choice(option: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise UsageError(f"{option} {value}: allowed are {', '.join(allowed)}")


def main() -> None:
    """Entry point of `finetune`: an error for people is one message on standard error, and its exit status."""
    try:
        app()
    except FinetuneError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(int(error.status))
    except KeyboardInterrupt:
        sys.exit(int(ExitStatus.DETACHED))


if __name__ == "__main__":
    main()
