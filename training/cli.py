"""The command line. Each command is thin: it reads its options, calls the module that does the work, prints the result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from training.errors import ExitStatus, FinetuneError

app = typer.Typer(
    name="finetune",
    help="Fine-tune with FSDP on a laptop or an EFA cluster on AWS, and prove which network carried the job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="job file, such as training/jobs/demo.yaml")]
Overrides = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="override a field of the job file")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on standard output, all else on standard error")]


@app.command()
def local(job_file: JobFile, overrides: Overrides = [], as_json: Json = False) -> None:  # noqa: B006
    """Run a job on this machine with a local Ray."""
    from training.console import LocalConsole
    from training.job import load_job
    from training.local import run_local

    job = load_job(job_file, overrides)
    with LocalConsole(job, as_json=as_json) as console:
        summary = run_local(job, console.event)
    _finish(summary, as_json)


def _finish(summary: dict[str, Any], as_json: bool) -> None:
    from training.console import print_summary

    print_summary(summary, stderr=as_json)
    if as_json:
        _print_json(summary)
    raise typer.Exit(int(summary["exit_status"]))


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Entry point of `finetune`: an error for people is one message on standard error, and its exit status."""
    try:
        app()
    except FinetuneError as error:
        sys.stderr.write(f"finetune: {error}\n")
        sys.exit(int(error.status))
    except KeyboardInterrupt:
        sys.exit(int(ExitStatus.DETACHED))


if __name__ == "__main__":
    main()
