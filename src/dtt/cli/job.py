"""Commands of `dtt job`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from dtt.cli.app import cli
from dtt.cli.options import Job, Json, Yes, argument, option

job_cli = cli.group("job", "List, inspect and control jobs.")

Wait = Annotated[
    float,
    option(
        "Time to wait for the job to acknowledge the request; NFS may hide it for a minute.",
        min=0.0,
        metavar="SECONDS",
    ),
]


@job_cli.command("dtt job ls", "dtt job ls jobs/lr --json")
def job_ls(
    folder: Annotated[Path, argument("[FOLDER]", "Folder that contains the jobs.")] = Path("jobs"),
    json: Json = False,
) -> None:
    """List the jobs in a folder with their state, the most recently changed first.

    Shows step, loss, tokens, tokens per second and the time left. Includes the trials of sweeps.
    Reads job files and queries Slurm if there is one.
    """
    from dtt.jobs import listing as job_listing

    job_listing.ls(folder, as_json=json)


@job_cli.command("dtt job status jobs/run")
def job_status(job: Job, json: Json = False) -> None:
    """Show the state of a job: progress, losses, Slurm state, and why it ended.

    Reads its files and queries Slurm if there is one.
    """
    from dtt.jobs import listing as job_listing

    job_listing.status(job, as_json=json)


@job_cli.command("dtt job stop jobs/run")
def job_stop(
    job: Job,
    wait: Wait = 90.0,
    yes: Annotated[bool, option("--yes", "-y", "Also cancel a job that is queued.")] = False,
) -> None:
    """Stop a running job after it has saved a checkpoint.

    Writes a request to its control/, for which write permission suffices. With -y, cancels a queued
    job.
    """
    from dtt.launch import job as body

    body.stop(job, yes=yes, wait=wait)


@job_cli.command("dtt job save jobs/run")
def job_save(job: Job, wait: Wait = 90.0) -> None:
    """Ask a running job to save a checkpoint now and continue.

    Writes a request to its control/.
    """
    from dtt.launch import job as body

    body.ask(job, "save", wait=wait)


@job_cli.command("dtt job profile jobs/run")
def job_profile(
    job: Job,
    kind: Annotated[
        Literal["torch", "memory", "nsys"] | None, option("Profiler to use; default: profile.kind.")
    ] = None,
    wait: Wait = 90.0,
) -> None:
    """Profile the next three steps of a running job.

    Writes a request to its control/; the job writes the profile to its profiles/.
    """
    from dtt.launch import job as body

    body.ask(job, "profile", wait=wait, more=kind or "")


@job_cli.command("dtt job resume jobs/run")
def job_resume(job: Job) -> None:
    """Resume a stopped job.

    Submits its script to Slurm again; without Slurm, prints the command that resumes it.
    """
    from dtt.launch import job as body

    body.resume(job)


@job_cli.command("dtt job rm jobs/run -y")
def job_rm(
    job: Job,
    yes: Yes = False,
) -> None:
    """Delete a job directory with all of its checkpoints.

    Fails while the job is running or queued.
    """
    from dtt.launch import job as body

    body.rm(job, yes=yes)


@job_cli.command("dtt job logs jobs/run -f", "dtt job logs jobs/run --node n2")
def job_logs(
    job: Job,
    follow: Annotated[bool, option("--follow", "-f", "Print new lines as they appear.")] = False,
    node: Annotated[
        str | None, option("Node; slurm: the job script. Default: the first node.")
    ] = None,
    lines: Annotated[
        int, option("--lines", "-n", "Number of lines to print first.", min=0, metavar="N")
    ] = 50,
) -> None:
    """Print the last lines of the newest attempt's log."""
    from dtt.launch import job as body

    body.logs(job, follow=follow, node=node, lines=lines)
