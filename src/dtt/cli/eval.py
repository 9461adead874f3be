"""The command `dtt eval`."""

from __future__ import annotations

from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import Ema, Json, argument, option


@cli.command(
    "dtt eval jobs/run --tasks hellaswag,lambada_openai",
    "dtt eval jobs/run --step all --tasks arc_easy eval.limit=500",
    "CUDA_VISIBLE_DEVICES=0 dtt eval exports/run --tasks arc_easy   # one GPU; else all",
    "dtt eval compare jobs/run@500 jobs/run@1000               # paired differences",
    "dtt eval jobs/run --tasks arc_easy --watch                # while it trains",
    kept="the finished results are kept; run the same command to continue",
)
def eval_(
    arguments: Annotated[
        list[str],
        argument(
            "SOURCE [KEY=VALUE]…",
            "JOB, JOB@STEP, an exported folder, hf:FOLDER or hf:ORG/NAME; or compare and two "
            "of these. Config keys, such as eval.limit=500.",
        ),
    ],
    tasks: Annotated[
        str,
        # Typer 0.27 names an option after a metavar that spells the parameter: --TASKS.
        option(
            "--tasks", "Tasks or suites, separated by commas: names or YAML files.", metavar="TASKS"
        ),
    ] = "",
    step: Annotated[
        str | None, option("Step of the job, as in JOB@STEP; or all.", metavar="N|all")
    ] = None,
    ema: Ema = False,
    chat: Annotated[bool, option("--chat", "Ask in the model's conversation format.")] = False,
    watch: Annotated[
        bool, option("--watch", "Evaluate each checkpoint of a job as it appears.")
    ] = False,
    json: Json = False,
) -> None:
    """Evaluate models on benchmark tasks, or compare the results of two.

    Prints each metric with its standard error, and its noise: the relative standard deviation over
    the newest evaluated checkpoints. Every answer is recorded in a result file: what was evaluated
    before is not computed again, and an evaluation that was interrupted continues. Defaults are
    the keys of the job's section `eval`. With --json, prints one object per task.
    """
    from dtt.evaluate import evaluation
    from dtt.evaluate import watch as eval_watch
    from dtt.launch import own_gpus

    names = tuple(filter(None, tasks.split(",")))
    sources, keys = evaluation.with_keys(arguments, names)
    if not watch and sources[:1] != ["compare"]:
        # A watch runs beside a training, which has the other GPUs.
        own_gpus.start_evaluation()
    start = eval_watch.run if watch else evaluation.run
    start(sources, step=step, ema=ema, chat=chat, as_json=json, **keys)
