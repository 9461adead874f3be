"""The command `dtt submit`."""

from __future__ import annotations

from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import (
    After,
    AllowChange,
    Cluster,
    Config,
    Json,
    Yes,
    argument,
    option,
)


@cli.command(
    "dtt submit train -c run.yaml --cluster lumi launch.nodes=4",
    "dtt submit train jobs/run           # resume a job",
    "dtt submit eval jobs/run eval.tasks=[arc_easy]   # each checkpoint as it appears",
    "dtt submit tokenize -c run.yaml --print-script",
    "dtt submit pipeline -c run.yaml --cluster generic --dry-run",
)
def submit(
    what: Annotated[
        str,
        argument("COMMAND", "Command: download, clean, tokenize, train, eval, export or pipeline."),
    ],
    job_or_overrides: Annotated[
        list[str] | None,
        argument("[JOB] [KEY=VALUE]…", "Job directory (train, eval, export); config keys."),
    ] = None,
    config: Config = None,
    cluster: Cluster = None,
    allow_change: AllowChange = None,
    after: After = None,
    dry_run: Annotated[
        bool, option("--dry-run", "Check and print the plan; submit nothing.")
    ] = False,
    print_script: Annotated[bool, option("--print-script", "Print only the job script.")] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Submit a command to Slurm, as a job that resumes after its time limit.

    Checks the configuration on the login node, writes jobs/<name>/ (for commands other than train:
    jobs/<name>-<command>/) and submits its slurm.sh. `sbatch` with that file submits it again. A
    pipeline is one job per step, each of which waits for the one before.
    """
    from dtt.launch import submit as launch

    options = launch.SubmitOptions(
        cluster=cluster,
        allow_change=allow_change or (),
        after=after or (),
        dry_run=dry_run,
        print_script=print_script,
        yes=yes,
        as_json=json,
    )
    if what == "pipeline":
        from dtt.launch import chain  # with all that a pipeline may need

        chain.run(config, job_or_overrides or [], options)
    else:
        launch.run(what, config, job_or_overrides or [], options)
