"""The stages of a run (`dtt download` to `dtt export`), and `dtt pipeline`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtt.cli.app import cli
from dtt.cli.options import (
    Checkpoint,
    Config,
    Dataset,
    Ema,
    Json,
    Overrides,
    Quiet,
    RedoFrom,
    Stage,
    examples,
    resolve,
)
from dtt.mesh.process import command, leave


@cli.command(
    epilog=examples(
        "dtt download -d python-stdlib",
        "dtt download -d ~/books",
        "dtt download -d HuggingFaceFW/fineweb-edu download.name=sample-10BT",
    )
)
def download(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    stage: Stage = None,
    quiet: Quiet = False,
) -> None:
    """Download raw documents.

    Writes data/corpus/<dataset>/. Downloads only missing files, and uses local files in place.
    """
    with command("the downloaded files are kept; run the same command to continue"):
        from dtt.data.corpus import run_download as download

        cfg = resolve(config, overrides, {"download.dataset": dataset}, stage=stage)
        if cfg.eval.tasks:
            from dtt.evaluate.evaluation import fetch_questions

            fetch_questions(cfg.eval)
        if cfg.download.is_named or not cfg.eval.tasks:
            download.run(cfg)


@cli.command(
    epilog=examples(
        "dtt clean -c run.yaml clean.near.threshold=0.8",
        "mpirun -n 8 dtt clean -c run.yaml",
        "dtt clean -c run.yaml --part 3/16    # an independent job, before the line above",
    )
)
def clean(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Only read the part I of N, counted from 0, as a job of its own."
        ),
    ] = None,
    stage: Stage = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose the documents to train on: no duplicates, and none that a filter removes.

    Reads data/corpus/<dataset>/, writes a folder selection-* there; the corpus is not changed. The
    output does not depend on the number of processes. The same command resumes after an
    interruption.
    """
    with command("the finished units are kept; run the same command to continue"):
        from dtt.clean import run as clean

        cfg = resolve(config, overrides, {"download.dataset": dataset}, stage=stage)
        clean.run(cfg, part=part, as_json=json)
    leave()


@cli.command(
    epilog=examples(
        "dtt tokenize -c run.yaml",
        "mpirun -n 8 dtt tokenize -c run.yaml",
        "srun -N 4 -n 64 dtt tokenize -c run.yaml    # no MPI needed",
        "dtt tokenize -c run.yaml --dry-run          # print what would be reused",
    )
)
def tokenize(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace token files made from other text or with other settings."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be reused and why; write nothing.")
    ] = False,
    stage: Stage = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Convert documents to token files, with a given or a newly trained tokenizer.

    Reads data/corpus/<dataset>/, writes data/tokens/<dataset>-<tokenizer>/. The output does not
    depend on the number of processes. The same command resumes after an interruption.
    """
    with command("the finished units are kept; run the same command to continue"):
        from dtt.data.tokenize import run as tokenize

        cfg = resolve(config, overrides, {"download.dataset": dataset}, stage=stage)
        if dry_run:
            tokenize.explain(cfg, as_json=json)
        else:
            tokenize.run(cfg, overwrite=overwrite, as_json=json)
    leave()


@cli.command(
    epilog=examples(
        "dtt train -c run.yaml",
        "torchrun --standalone --nproc_per_node 8 -m dtt.main train -c run.yaml",
        "dtt train jobs/run              # resume a job; so does the first line",
        "dtt train --branch jobs/run@3000 schedule.decay=500    # new job: anneal from step 3000",
        "touch jobs/run/control/stop     # save and stop; control/save only saves",
    )
)
def train(
    job_or_overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[JOB] [KEY=VALUE]…", help="Job directory to resume; config keys."),
    ] = None,
    config: Config = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(help="On resume, allow this key to change what is trained; repeatable."),
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Resume from this checkpoint; newer ones are renamed, not deleted."
        ),
    ] = None,
    branch: Annotated[
        str | None,
        typer.Option(
            metavar="JOB@STEP",
            help="Branch a new job from this step, with another schedule.* or length.",
        ),
    ] = None,
    stage: Stage = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model, or resume a job.

    Reads data/tokens/<name>/, writes jobs/<name>/. After SIGTERM or Ctrl-C it saves and exits with
    75. torchrun exits with 1 after any failure; attempts/<n>/exit.json in the job has the code.
    """
    with command("the saved checkpoints are kept; run the same command to resume"):
        from dtt.train import run as train

        options = config, job_or_overrides or [], allow_change or [], from_step, branch
        train.run(*options, stage=stage, as_json=json)


@cli.command(
    epilog=examples(
        "dtt export jobs/run",
        "dtt export jobs/run@500 --upload org/name --private",
        "dtt export jobs/run@500 --upload org/name --revision step-500",
    )
)
def export(
    source: Checkpoint,
    overrides: Overrides = None,
    ema: Ema = False,
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="Export only the adapter, in the format of PEFT."),
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder to write to.")] = None,
    upload: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Also upload to this Hub repository.")
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="BRANCH", help="Branch of that repository, created if absent; default: main."
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Create a new Hub repository as private.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Export a checkpoint to a Hugging Face folder and verify it with transformers.

    Reads jobs/<name>/checkpoints/, writes exports/<name>/. Replaces an earlier export of the same
    job once the new one is verified.
    """
    with command("the checkpoint is unchanged; run the same command to export it"):
        from dtt.hf import export

        export.run(
            source,
            overrides or [],
            ema=ema,
            adapter=adapter,
            out=out,
            upload=upload,
            revision=revision,
            private=private,
            as_json=json,
        )


@cli.command(
    epilog=examples(
        "dtt pipeline -c quickstart", "dtt pipeline -c quickstart -d ~/books name=books"
    )
)
def pipeline(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    redo_from: RedoFrom = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run download, clean, tokenize, train and export in order.

    If the configuration defines stages of training, trains each of them in turn and exports the
    last. Skips finished work, so the same command resumes after an interruption.
    """
    with command("finished stages are kept; run the same command to continue"):
        from dtt.launch import pipeline

        pipeline.run(config, overrides or [], dataset, redo_from=redo_from, as_json=json)
