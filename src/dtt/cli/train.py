"""The command `dtt train`."""

from __future__ import annotations

from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import AllowChange, Config, Json, Quiet, Stage, Trust, argument, option


@cli.command(
    "dtt train -c run.yaml",
    "torchrun --standalone --nproc_per_node 8 -m dtt.main train -c run.yaml",
    "dtt train jobs/run              # resume a job; so does the first line",
    "dtt train --branch jobs/run@3000 schedule.decay=500    # new job: anneal from step 3000",
    "touch jobs/run/control/stop     # save and stop; control/save only saves",
    kept="the saved checkpoints are kept; run the same command to resume",
)
def train(
    job_or_overrides: Annotated[
        list[str] | None, argument("[JOB] [KEY=VALUE]…", "Job directory to resume; config keys.")
    ] = None,
    config: Config = None,
    allow_change: AllowChange = None,
    from_step: Annotated[
        int | None,
        option("Resume from this checkpoint; newer ones are renamed, not deleted.", metavar="N"),
    ] = None,
    branch: Annotated[
        str | None,
        option(
            "Branch a new job from this step, with another schedule.* or length.",
            metavar="JOB@STEP",
        ),
    ] = None,
    trust: Trust = False,
    stage: Stage = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model, or resume a job.

    Reads data/tokens/<name>/, writes jobs/<name>/. After SIGTERM or Ctrl-C it saves and exits with
    75. Outside of torchrun and Slurm, it starts a process on each visible GPU, at most
    launch.gpus_per_node. torchrun exits with 1 after any failure; attempts/<n>/attempt.json in the
    job has the code.
    """
    from dtt.launch import own_gpus
    from dtt.train import run as train

    options = config, job_or_overrides or [], allow_change or [], from_step, branch
    own_gpus.start_training(*options, stage)
    train.run(*options, stage=stage, as_json=json)
