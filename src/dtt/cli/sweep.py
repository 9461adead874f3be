"""Commands of `dtt sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import After, Cluster, Json, Yes, argument, option

sweep_cli = cli.group("sweep", "Run and evaluate hyperparameter sweeps.")

SweepName = Annotated[str, argument("SWEEP", "Folder, name or file of a sweep.")]


Trials = Annotated[list[str] | None, argument("[TRIAL]…", "Ids of trials; default: all.")]


Local = Annotated[
    int | None, option("Run on this machine, N trials at a time.", min=1, metavar="N")
]


@sweep_cli.command(
    "dtt sweep submit lr.yaml --dry-run      # print the plan",
    "dtt sweep submit lr.yaml --local 2      # on this machine, two at a time",
    "dtt sweep submit lr.yaml --cluster generic",
)
def sweep_submit(
    file: Annotated[
        Path,
        argument("FILE", "A .yaml or .json file, or name of a shipped sweep (quickstart-lr)."),
    ],
    local: Local = None,
    cluster: Cluster = None,
    after: After = None,
    yes: Yes = False,
    dry_run: Annotated[bool, option("--dry-run", "Print the plan; start nothing.")] = False,
    json: Json = False,
) -> None:
    """Create the trials of a sweep and start the new ones.

    Writes jobs/<sweep>/<trial>/ and jobs/<sweep>/manifest.json. With Slurm, submits an array, or
    separate jobs if the trials request different resources. Without Slurm, or with --local, trains
    on this machine and waits; Ctrl-C saves and stops all trials.
    """
    from dtt.launch.sweep import run as sweep

    how: dict[str, bool] = {"yes": yes, "dry_run": dry_run, "as_json": json}
    sweep.submit(file, local, cluster=cluster, after=after or [], **how)


@sweep_cli.command()
def sweep_status(name: SweepName, json: Json = False) -> None:
    """Show the state and progress of each trial.

    Reads the files of the trials and queries Slurm if there is one.
    """
    from dtt.launch.sweep import run as sweep

    sweep.status(name, as_json=json)


@sweep_cli.command()
def sweep_cancel(name: SweepName, trials: Trials = None, json: Json = False) -> None:
    """Stop running trials after they have saved, and cancel queued ones."""
    from dtt.launch.sweep import run as sweep

    sweep.cancel(name, trials or [], as_json=json)


@sweep_cli.command()
def sweep_retry(
    name: SweepName, trials: Trials = None, local: Local = None, json: Json = False
) -> None:
    """Restart trials that are neither done nor active; each resumes from its checkpoint."""
    from dtt.launch.sweep import run as sweep

    sweep.retry(name, trials or [], local, as_json=json)


@sweep_cli.command()
def sweep_results(
    name: SweepName,
    plot: Annotated[
        bool, option("--plot", "Write PNG files instead: the metric over each key, and all curves.")
    ] = False,
    json: Json = False,
) -> None:
    """Print the metric of each combination, best first: mean and standard error over seeds.

    Reads metrics.jsonl of the trials. With --plot, writes to jobs/<sweep>/plots/.
    """
    from dtt.launch.sweep import run as sweep

    sweep.results(name, as_plots=plot, as_json=json)
