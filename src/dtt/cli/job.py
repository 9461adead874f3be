"""Commands of `dtt job`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dtt.cli.app import cli
from dtt.cli.options import Job, Json
from dtt.cli.parser import Commands

job_cli = Commands(help="List, inspect and control jobs.")
cli.add_typer(job_cli, name="job")

Wait = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="Time to wait for the job to acknowledge the request; NFS may hide it for a minute.",
    ),
]


@job_cli.command("dtt job ls", "dtt job ls jobs/lr --json", name="ls")
def job_ls(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Folder that contains the jobs.")
    ] = Path("jobs"),
    tree: Annotated[
        bool, typer.Option("--tree", help="Show branches below their parent job.")
    ] = False,
    json: Json = False,
) -> None:
    """List the jobs in a folder with their state, the most recently changed first.

    Shows step, loss, tokens, tokens per second and the time left. Includes the trials of sweeps.
    Reads job files and queries Slurm if there is one.
    """
    from dtt.jobs import listing as job_listing

    job_listing.ls(folder, as_json=json, tree=tree)


@job_cli.command("dtt job status jobs/run", name="status")
def job_status(job: Job, json: Json = False) -> None:
    """Show the state of a job: progress, losses, Slurm state, and why it ended.

    Reads its files and queries Slurm if there is one.
    """
    from dtt.jobs import listing as job_listing

    job_listing.status(job, as_json=json)


@job_cli.command("dtt job stop jobs/run", name="stop")
def job_stop(
    job: Job,
    wait: Wait = 90.0,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Also cancel a job that is queued.")
    ] = False,
) -> None:
    """Stop a running job after it has saved a checkpoint.

    Writes a request to its control/, for which write permission suffices. With -y, cancels a queued
    job.
    """
    from dtt.launch import job as body

    body.stop(job, yes=yes, wait=wait)


@job_cli.command("dtt job save jobs/run", name="save")
def job_save(job: Job, wait: Wait = 90.0) -> None:
    """Ask a running job to save a checkpoint now and continue.

    Writes a request to its control/.
    """
    from dtt.launch import job as body

    body.save(job, wait=wait)


@job_cli.command("dtt job profile jobs/run", name="profile")
def job_profile(
    job: Job,
    kind: Annotated[
        Literal["torch", "memory", "nsys"] | None,
        typer.Option(help="Profiler to use; default: profile.kind."),
    ] = None,
    wait: Wait = 90.0,
) -> None:
    """Profile the next three steps of a running job.

    Writes a request to its control/; the job writes the profile to its profiles/.
    """
    from dtt.launch import job as body

    body.profile(job, kind=kind, wait=wait)


@job_cli.command("dtt job resume jobs/run", name="resume")
def job_resume(job: Job) -> None:
    """Resume a stopped job.

    Submits its script to Slurm again; without Slurm, prints the command that resumes it.
    """
    from dtt.launch import job as body

    body.resume(job)


@job_cli.command("dtt job rm jobs/run -y", name="rm")
def job_rm(
    job: Job,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a job directory with all of its checkpoints.

    Fails while the job is running or queued.
    """
    from dtt.launch import job as body

    body.rm(job, yes=yes)


@job_cli.command("dtt job logs jobs/run -f", "dtt job logs jobs/run --node n2", name="logs")
def job_logs(
    job: Job,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines as they appear.")
    ] = False,
    node: Annotated[
        str | None, typer.Option(help="Node; slurm: the job script. Default: the first node.")
    ] = None,
    lines: Annotated[
        int,
        typer.Option("--lines", "-n", min=0, metavar="N", help="Number of lines to print first."),
    ] = 50,
) -> None:
    """Print the last lines of the newest attempt's log."""
    from dtt.launch import job as body

    body.logs(job, follow=follow, node=node, lines=lines)
