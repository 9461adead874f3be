"""The whole command line: every command, its options, what it reads and writes.

`dtt`, `python -m dtt.main` and `torchrun -m dtt.main train` all enter here. Nothing slow is
imported before a command's body runs.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dtt.runtime.process import command, leave
from dtt.runtime.usage import Commands

if TYPE_CHECKING:
    from dtt.config.load import ModelOf
    from dtt.config.run import RunConfig

cli = Commands(
    name="dtt",
    help="Distributed Transformer Training: raw text to a released checkpoint.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_cli = Commands(help="Look at the configuration.")
cli.add_typer(config_cli, name="config")
job_cli = Commands(help="See what jobs do, and ask them to stop.")
cli.add_typer(job_cli, name="job")
ckpt_cli = Commands(help="Look after the checkpoints of a job.")
cli.add_typer(ckpt_cli, name="ckpt")
sweep_cli = Commands(help="Train one configuration with many values.")
cli.add_typer(sweep_cli, name="sweep")
data_cli = Commands(help="Look at text and tokens, before training and after.")
cli.add_typer(data_cli, name="data")
mup_cli = Commands(help="See whether what is tuned on a small model holds on large ones.")
cli.add_typer(mup_cli, name="mup")

Config = Annotated[
    str | None,
    typer.Option("--config", "-c", help="Config file, or the name of a shipped one (quickstart)."),
]
Cluster = Annotated[
    str | None, typer.Option(help="Cluster profile: a name in configs/clusters/, or a file.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]…", help="Config keys, as train.steps=500."),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        "-d",
        help="A name in configs/datasets/, a Hugging Face id (org/name), a local file or "
        "folder, or python-stdlib.",
    ),
]


def _examples(*lines: str) -> str:
    """Return a help epilog of examples that keeps its line breaks."""
    return "\b\nExamples:\n  " + "\n  ".join(lines)


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def _quiet(wanted: bool) -> bool:
    if wanted:
        os.environ["DTT_QUIET"] = "1"  # before `command` sets up logging; for stages, too
    return wanted


Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", callback=_quiet, help="Log warnings and errors, no progress."),
]


@cli.command(
    epilog=_examples(
        "dtt download -d python-stdlib",
        "dtt download -d ~/books",
        "dtt download -d HuggingFaceFW/fineweb-edu --name sample-10BT",
    )
)
def download(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    name: Annotated[str | None, typer.Option(help="Subset of a Hub dataset.")] = None,
    split: Annotated[str | None, typer.Option(help="Split to take.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the corpus.")] = None,
    quiet: Quiet = False,
) -> None:
    """Get raw documents.

    Writes data/corpus/<dataset>/; local files stay where they are. Fetches only what is missing.
    """
    with command():
        from dtt.commands import download

        options = {
            "download.dataset": dataset,
            "download.name": name,
            "download.split": split,
            "download.revision": revision,
            "download.out": out,
        }
        download.run(_resolve(config, overrides, options))


@cli.command(
    epilog=_examples(
        "dtt tokenize -c run.yaml",
        "mpirun -n 8 dtt tokenize -c run.yaml",
        "srun -N 4 -n 64 dtt tokenize -c run.yaml    # no MPI needed",
        "dtt tokenize -c run.yaml --explain          # what would be reused, and why",
    )
)
def tokenize(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    overwrite: Annotated[bool, typer.Option(help="Replace token files made otherwise.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what would be reused and why; do nothing.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn documents into token files, training a tokenizer first if the config says so.

    Reads data/corpus/<dataset>/, writes data/tokens/<dataset>-<tokenizer>/: the same bytes for any
    number of processes. Interrupted, it goes on where it was.
    """
    with command():
        from dtt.commands import tokenize

        cfg = _resolve(config, overrides, {"download.dataset": dataset})
        if explain:
            tokenize.explain(cfg, as_json=json)
        else:
            tokenize.run(cfg, overwrite=overwrite, as_json=json)
    leave()


@cli.command(
    epilog=_examples(
        "dtt train -c run.yaml",
        "torchrun --standalone --nproc_per_node 8 -m dtt.main train -c run.yaml",
        "dtt train jobs/run              # go on after a stop; so does the first line",
        "dtt train --branch jobs/run@3000 schedule.decay=500    # anneal from there, as a new job",
        "touch jobs/run/control/stop     # save and stop; control/save only saves",
    )
)
def train(
    job_or_overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB] [KEY=VALUE]…", help="A job directory to resume; config keys."
        ),
    ] = None,
    config: Config = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(help="On resume, let this key change what is trained; repeatable."),
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option(help="Go on from this checkpoint; newer ones are set aside, not deleted."),
    ] = None,
    branch: Annotated[
        str | None,
        typer.Option(
            metavar="JOB@STEP",
            help="Begin a child job there that goes on with another schedule.* or length.",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train, or go on where the job stopped.

    Reads data/tokens/<name>/, writes jobs/<name>/. SIGTERM and Ctrl-C save, then exit with 75;
    torchrun says 1 for everything, attempts/<n>/exit.json in the job has the code.
    """
    with command():
        from dtt.commands import train

        options = config, job_or_overrides or [], allow_change or [], from_step, branch
        train.run(*options, as_json=json)


@cli.command(
    epilog=_examples(
        "dtt export jobs/run", "dtt export jobs/run --step 500 --upload org/name --private"
    )
)
def export(
    job: Annotated[Path, typer.Argument(help="Job directory, as jobs/quickstart.")],
    overrides: Overrides = None,
    step: Annotated[
        int | None, typer.Option(help="Checkpoint to export; the newest if absent.")
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="Export the average of the weights (train.ema_decay).")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write.")] = None,
    upload: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Upload to the Hugging Face Hub as well.")
    ] = None,
    private: Annotated[bool, typer.Option(help="Make a new Hub repository private.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a Hugging Face folder, and check it with transformers before saying so.

    Reads jobs/<name>/checkpoints/, writes exports/<name>/; an earlier export of the same job gives
    way once the new one is verified.
    """
    with command():
        from dtt.commands import export

        export.run(
            job,
            overrides or [],
            step=step,
            ema=ema,
            out=out,
            upload=upload,
            private=private,
            as_json=json,
        )


@cli.command(
    epilog=_examples(
        "dtt generate jobs/run -p 'def main():'",
        "dtt generate exports/run -p - < prompt.txt",
        "dtt generate exports/run --prompts-file prompts.txt --json",
    )
)
def generate(
    source: Annotated[Path, typer.Argument(help="Job directory or exported folder.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Text to go on with; - reads stdin; repeatable."),
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help="A file with a prompt in each line.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 always takes the likeliest.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Only the K likeliest.")] = None,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Only the likeliest with this mass.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="With the average of the weights (train.ema_decay).")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="So many prompts at a time.")] = 16,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream", help="Print the text as it comes, as a single prompt's is."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Continue prompts with a trained model, each as if it were alone; the text goes to stdout.

    Reads the newest checkpoint of a job, or an exported folder. With --json a line for each prompt:
    prompt, text, finish_reason (stop: the document ended; length), and how many tokens.
    """
    with command():
        from dtt.commands import generate

        generate.run(
            source,
            prompt or [],
            prompts_file=prompts_file,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            ema=ema,
            batch_size=batch_size,
            stream=stream,
            as_json=json,
        )


@cli.command(
    epilog=_examples(
        "dtt pipeline -c quickstart", "dtt pipeline -c quickstart -d ~/books name=books"
    )
)
def pipeline(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Do it all: download, tokenize, train, export.

    Finished stages are skipped; after an interruption the same command goes on.
    """
    with command():
        from dtt.commands import pipeline

        pipeline.run(config, overrides or [], dataset, as_json=json)


@cli.command(
    epilog=_examples(
        "dtt doctor",
        "dtt doctor --processes 8 --path jobs",
        "torchrun --standalone --nproc_per_node 8 -m dtt.main doctor",
        "MASTER_ADDR=n1 MASTER_PORT=29500 srun dtt doctor --path jobs",
    )
)
def doctor(
    path: Annotated[Path, typer.Option(help="Folder that jobs are to write to.")] = Path("jobs"),
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Start N here, and let them exchange.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json: Json = False,
) -> None:
    """Check that this machine, or all nodes of a job, are fit to train on.

    Versions, devices, the disk, and, of several processes, every exchange that training makes:
    whether its answer is right and how long it takes. Names what is bad or slow; exits with 78.
    """
    with command():
        from dtt.commands import doctor

        doctor.run(path, device=device, processes=processes, as_json=json)


@cli.command(
    epilog=_examples(
        "dtt plan -c run.yaml",
        "dtt plan -c run.yaml --gpu H100 --nodes 8 --gpus-per-node 8 --price 2.5",
        "dtt plan -c run.yaml --gpu cpu --probe     # measure three steps, and compare",
    )
)
def plan(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="As H100 or A100-40; cpu: this machine. A wrong name lists all."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="launch.nodes if absent.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="launch.gpus_per_node if absent.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0.0, help="Of a device for an hour.")] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Train three steps here, and tell the plan's error.")
    ] = False,
    json: Json = False,
) -> None:
    """Tell what a run will take: memory and whether it fits, time, communication, disk, cost.

    Arithmetic: needs no GPU, and no token files, which it reads the sizes of if they are there.
    """
    with command():
        from dtt.commands import plan as body
        from dtt.commands.begin import model_of

        if config is None and dataset is None and not overrides:
            raise body.nothing_to_plan()
        options = {"download.dataset": dataset}
        cfg = _resolve(config, overrides, options, model_of=model_of)
        body.run(cfg, gpu, nodes, gpus_per_node, price, probe=probe, as_json=json)


Job = Annotated[Path, typer.Argument(metavar="JOB", help="Job directory, as jobs/quickstart.")]


@ckpt_cli.command("ls")
def ckpt_ls(job: Job, json: Json = False) -> None:
    """List the checkpoints, oldest first."""
    with command():
        from dtt.commands import ckpt

        ckpt.ls(job, as_json=json)


@ckpt_cli.command("verify")
def ckpt_verify(
    job: Job,
    step: Annotated[int | None, typer.Option(help="Only this one.")] = None,
    json: Json = False,
) -> None:
    """Read every file of every checkpoint; exits with 65 if one differs from what was written."""
    with command():
        from dtt.commands import ckpt

        ckpt.verify(job, step, as_json=json)


@ckpt_cli.command(
    "prune", epilog=_examples("dtt ckpt prune jobs/run checkpoint.keep_last=1 --dry-run")
)
def ckpt_prune(
    job: Job,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option(help="Only say what would go.")] = False,
) -> None:
    """Delete checkpoints that the job's rules do not keep, and superseded ones.

    The newest that is whole always stays, as does the newest from before the last divergence.
    """
    with command():
        from dtt.commands import ckpt

        ckpt.prune(job, overrides or [], dry_run=dry_run)


@ckpt_cli.command("diff", epilog=_examples("dtt ckpt diff jobs/run@500 jobs/run@1000"))
def ckpt_diff(
    one: Annotated[str, typer.Argument(metavar="JOB[@STEP]", help="The newest if no step.")],
    other: Annotated[str, typer.Argument(metavar="JOB[@STEP]", help="To compare it with.")],
    json: Json = False,
) -> None:
    """Tell what differs between two checkpoints: position, weights, optimizer state."""
    with command():
        from dtt.commands import ckpt

        ckpt.diff(one, other, as_json=json)


@cli.command(
    epilog=_examples(
        "dtt submit train -c run.yaml --cluster lumi launch.nodes=4",
        "dtt submit train jobs/run           # go on with a job",
        "dtt submit tokenize -c run.yaml --print-script",
    )
)
def submit(
    what: Annotated[
        str, typer.Argument(metavar="COMMAND", help="download, tokenize, train, export, pipeline.")
    ],
    job_or_overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB] [KEY=VALUE]…", help="A job directory (train, export); config keys."
        ),
    ] = None,
    config: Config = None,
    cluster: Cluster = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(help="When a job goes on, let this key change what is trained; repeatable."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and show the plan; write and submit nothing.")
    ] = False,
    print_script: Annotated[
        bool, typer.Option("--print-script", help="Print the job script and nothing else.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
    code_copy: Annotated[
        bool, typer.Option("--code-copy", help="Copy dtt's code into the job, and run that.")
    ] = False,
) -> None:
    """Run a command as a Slurm job, which goes on after its time limit.

    Checks all a login node can know, writes jobs/<name>/ (jobs/<name>-<command>/ but for train) and
    submits jobs/<name>/slurm.sh; `sbatch` with that file does it again.
    """
    with command():
        from dtt.commands import submit

        submit.run(
            what,
            config,
            job_or_overrides or [],
            cluster=cluster,
            allow_change=allow_change or [],
            dry_run=dry_run,
            print_script=print_script,
            yes=yes,
            as_json=json,
            code_copy=code_copy,
        )


Wait = Annotated[
    float, typer.Option(min=0.0, help="Seconds to wait for the job to say that it has heard.")
]


@job_cli.command("ls", epilog=_examples("dtt job ls", "dtt job ls jobs/lr --json"))
def job_ls(
    folder: Annotated[Path, typer.Argument(help="Folder of jobs.")] = Path("jobs"),
    tree: Annotated[
        bool, typer.Option("--tree", help="Branches below the job they began from.")
    ] = False,
    json: Json = False,
) -> None:
    """Tell the state of every job in a folder, the trials of sweeps too, the newest first.

    Asks the jobs' own files, then Slurm where there is one; accounting is not needed.
    """
    with command():
        from dtt.commands import job as body

        body.ls(folder, as_json=json, tree=tree)


@job_cli.command("status", epilog=_examples("dtt job status jobs/run"))
def job_status(job: Job, json: Json = False) -> None:
    """Tell all that is known of a job: how far it is, what it waits for, why it ended."""
    with command():
        from dtt.commands import job as body

        body.status(job, as_json=json)


@job_cli.command("stop", epilog=_examples("dtt job stop jobs/run"))
def job_stop(
    job: Job,
    wait: Wait = 30.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Cancel it if it is queued.")] = False,
) -> None:
    """Ask a running job to save and stop: whoever may write to its control/ can.

    One that only waits in the queue is cancelled, with -y.
    """
    with command():
        from dtt.commands import job as body

        body.stop(job, yes=yes, wait=wait)


@job_cli.command("save", epilog=_examples("dtt job save jobs/run"))
def job_save(job: Job, wait: Wait = 30.0) -> None:
    """Ask a running job for a checkpoint now; it goes on."""
    with command():
        from dtt.commands import job as body

        body.save(job, wait=wait)


@job_cli.command("profile", epilog=_examples("dtt job profile jobs/run"))
def job_profile(
    job: Job,
    kind: Annotated[
        Literal["torch", "memory", "nsys"] | None,
        typer.Option(help="What to record, where the job has a GPU; as profile.kind says."),
    ] = None,
    wait: Wait = 30.0,
) -> None:
    """Ask a running job for a profile of its next three steps, into its folder profiles/."""
    with command():
        from dtt.commands import job as body

        body.profile(job, kind=kind, wait=wait)


@job_cli.command("resume", epilog=_examples("dtt job resume jobs/run"))
def job_resume(job: Job) -> None:
    """Submit a job again, to go on where it stopped; without Slurm, print the command for that."""
    with command():
        from dtt.commands import job as body

        body.resume(job)


@job_cli.command("rm", epilog=_examples("dtt job rm jobs/run -y"))
def job_rm(
    job: Job,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """Delete a job directory with all of its checkpoints; not while the job runs or is queued."""
    with command():
        from dtt.commands import job as body

        body.rm(job, yes=yes)


@job_cli.command(
    "logs", epilog=_examples("dtt job logs jobs/run -f", "dtt job logs jobs/run --node n2")
)
def job_logs(
    job: Job,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print what comes, too.")] = False,
    node: Annotated[
        str | None, typer.Option(help="Name of a node; slurm: what the job script said.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="So many at first.")] = 50,
) -> None:
    """Print the end of the newest attempt's log, by default that of the first node."""
    with command():
        from dtt.commands import job as body

        body.logs(job, follow=follow, node=node, lines=lines)


@data_cli.command(
    "inspect",
    epilog=_examples(
        "dtt data inspect ~/books",
        "dtt data inspect data/tokens/TinyStories-train-bpe8192 --verify",
        "dtt data inspect megatron/pile_text_document --tokenizer tokenizer.json",
    ),
)
def data_inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="Corpus, file or folder of documents, token folder, .bin/.idx, .ds, .bin, .npy.",
        ),
    ],
    samples: Annotated[
        int, typer.Option(min=0, metavar="N", help="Documents to show the beginning of.")
    ] = 3,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare every file with its sha256."),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Read all of it, not only places spread over it.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json, for ids that have none beside them.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of raw ids: uint16, uint32, int32 or int64.")
    ] = "uint16",
    json: Json = False,
) -> None:
    """Tell what a body of text or tokens is: counts, lengths of documents, samples, oddities.

    Of what is large it reads places that are spread evenly. Exits with 65 if a file is damaged.
    """
    with command():
        from dtt.commands import data as body

        body.inspect(
            path,
            samples=samples,
            everything=everything,
            hashes=verify,
            tokenizer=tokenizer,
            dtype=dtype,
            as_json=json,
        )


@data_cli.command(
    "mix",
    epilog=_examples("dtt data mix -c run.yaml", "dtt data mix -c run.yaml train.steps=20000"),
)
def data_mix(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    json: Json = False,
) -> None:
    """Tell what each source of a run will give: share, tokens, epochs, and when it is exhausted.

    Reads the sizes of the token files; needs no GPU.
    """
    with command():
        from dtt.commands import data as body

        body.mix(_resolve(config, overrides, {"download.dataset": dataset}), as_json=json)


@data_cli.command(
    "at-step",
    epilog=_examples(
        "dtt data at-step jobs/run 1200",
        "dtt data at-step jobs/run 1200 --rank 3 --of 8 --full",
    ),
)
def data_at_step(
    job: Job,
    step: Annotated[int, typer.Argument(metavar="N", help="Step, as in metrics.jsonl.")],
    rank: Annotated[int | None, typer.Option(min=0, help="Only the samples of this rank …")] = None,
    of: Annotated[int | None, typer.Option(min=1, help="… of so many.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="At most so many samples.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Whole texts, not their beginnings.")
    ] = False,
    json: Json = False,
) -> None:
    """Name the documents that a step trained on: file, number, offset and text.

    Checks against metrics.jsonl that these are the samples; exits with 65 if not.
    """
    with command():
        from dtt.commands import data as body

        body.at_step(job, step, rank=rank, ranks=of, limit=limit, full=full, as_json=json)


Compare = Annotated[
    bool, typer.Option(help="The standard parametrization beside it, to see what it would do.")
]
Tolerance = Annotated[
    float,
    typer.Option(min=0.0, help="Largest power of the width that passes; wrong rules give 0.5."),
]
MupOut = Annotated[Path, typer.Option(help="Folder of the numbers and the picture.")]


@mup_cli.command(
    "coord-check",
    epilog=_examples(
        "dtt mup coord-check -c run.yaml",
        "dtt mup coord-check -c run.yaml --widths 128,256,512 optim.type=adamw",
    ),
)
def mup_coord_check(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    widths: Annotated[str, typer.Option(help="Values of model.dim.")] = "64,128,256,512",
    steps: Annotated[int, typer.Option(min=1, help="Steps at each width.")] = 5,
    tolerance: Tolerance = 0.35,
    compare: Compare = True,
    out: MupOut = Path("mup"),
    json: Json = False,
) -> None:
    """Train small models of several widths, to see that no activation depends on the width.

    Reads the token files of the run, writes mup/coord-check.png and .json. Exits with 76 if muP
    fails. The base is scaling.base_dim, or the narrowest.
    """
    with command():
        from dtt.commands import mup

        # It trains at peak rates, without a warm-up: that of the run may be longer than `steps`.
        options = {"download.dataset": dataset, "train.steps": steps, "schedule.warmup": 0}
        cfg = _resolve(config, overrides, options)
        mup.coord_check(cfg, widths, tolerance=tolerance, compare=compare, out=out, as_json=json)


@mup_cli.command(
    "transfer",
    epilog=_examples(
        "dtt mup transfer -c run.yaml",
        "dtt mup transfer -c run.yaml --lrs 1e-3,2e-3,4e-3,8e-3 --steps 200 --seeds 3",
    ),
)
def mup_transfer(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    widths: Annotated[str, typer.Option(help="Values of model.dim.")] = "64,128,256",
    lrs: Annotated[
        str | None,
        typer.Option(help="Values of optim.lr; 1/8 to 8 times that of the config if absent."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 60,
    seeds: Annotated[int, typer.Option(min=1, help="Runs at each width and rate.")] = 1,
    tolerance: Tolerance = 0.35,
    compare: Compare = True,
    out: MupOut = Path("mup"),
    json: Json = False,
) -> None:
    """Find the best learning rate at several widths, to see that it is the same at all.

    Trains a small model for each width and rate, one after the other, other rates in proportion.
    Writes mup/transfer.png and .json. Exits with 76 if muP fails.
    """
    with command():
        from dtt.commands import mup

        options = {"download.dataset": dataset, "train.steps": steps}
        asked = _resolve(config, overrides, {"download.dataset": dataset})
        options |= mup.short_warmup(asked, steps)
        mup.transfer(
            _resolve(config, overrides, options),
            widths,
            lrs,
            seeds=seeds,
            tolerance=tolerance,
            compare=compare,
            out=out,
            as_json=json,
        )


@config_cli.command()
def show(overrides: Overrides = None, config: Config = None, dataset: Dataset = None) -> None:
    """Print the resolved configuration as YAML, each value with where it came from."""
    with command():
        from dtt.commands import config as body

        body.show(config, overrides or [], dataset)


@config_cli.command()
def explain(
    key: Annotated[str, typer.Argument(help="Dotted key or section; all sections if absent.")] = "",
    config: Config = None,
) -> None:
    """Tell what a key means, takes and holds."""
    with command():
        from dtt.commands import config as body

        body.explain(key, config)


@config_cli.command()
def schema() -> None:
    """Print the JSON schema of a config file, for editors."""
    with command():
        from dtt.commands import config as body

        body.schema()


SweepName = Annotated[
    str, typer.Argument(metavar="SWEEP", help="Folder, name or file of the sweep.")
]
Trials = Annotated[
    list[str] | None, typer.Argument(metavar="[TRIAL]…", help="Trials by id; all if absent.")
]
Local = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="On this machine, N trials at a time.")
]
Array = Annotated[bool, typer.Option("--array", help="As one Slurm array, where there is Slurm.")]
Separate = Annotated[bool, typer.Option("--separate", help="As a Slurm job for each trial.")]
Cap = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="At most N trials of the array at a time.")
]


@sweep_cli.command(
    name="submit",
    epilog=_examples(
        "dtt sweep submit lr.yaml --dry-run      # what it comes to",
        "dtt sweep submit lr.yaml --local 2      # here, two at a time",
        "dtt sweep submit lr.yaml --cap 4        # as a Slurm array, four at a time",
        "dtt sweep submit lr.yaml --cluster generic",
    ),
)
def sweep_submit(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A .yaml, .json, .toml or .py file, or a shipped sweep by name (quickstart-lr).",
        ),
    ],
    local: Local = None,
    array: Array = False,
    separate: Separate = False,
    cap: Cap = None,
    cluster: Cluster = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, no more.")] = False,
    json: Json = False,
) -> None:
    """Plan a sweep, make a job directory for each trial, and start those that never were.

    Writes jobs/<sweep>/<trial>/ and jobs/<sweep>/manifest.json. Without Slurm, or with --local, it
    trains here and waits; Ctrl-C saves and stops all.
    """
    with command():
        from dtt.commands import sweep

        how = sweep.How.chosen(local, array, separate, cap)
        sweep.submit(file, how, cluster=cluster, yes=yes, dry_run=dry_run, as_json=json)


@sweep_cli.command(name="status")
def sweep_status(name: SweepName, json: Json = False) -> None:
    """Tell how far each trial is, by its own files."""
    with command():
        from dtt.commands import sweep

        sweep.status(name, as_json=json)


@sweep_cli.command(name="cancel")
def sweep_cancel(name: SweepName, trials: Trials = None, json: Json = False) -> None:
    """Let running trials save and stop; let waiting ones not begin."""
    with command():
        from dtt.commands import sweep

        sweep.cancel(name, trials or [], as_json=json)


@sweep_cli.command(name="retry")
def sweep_retry(
    name: SweepName,
    trials: Trials = None,
    local: Local = None,
    array: Array = False,
    separate: Separate = False,
    cap: Cap = None,
    json: Json = False,
) -> None:
    """Start what is neither done nor under way; each trial goes on from its checkpoint."""
    with command():
        from dtt.commands import sweep

        how = sweep.How.chosen(local, array, separate, cap)
        sweep.retry(name, trials or [], how, as_json=json)


@sweep_cli.command(name="results")
def sweep_results(
    name: SweepName,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    json: Json = False,
) -> None:
    """Print each combination's metric, best first: mean and standard error over its seeds."""
    with command():
        from dtt.commands import sweep

        sweep.results(name, as_csv=csv, as_json=json)


@sweep_cli.command(name="plot")
def sweep_plot(
    name: SweepName,
    key: Annotated[str | None, typer.Option(help="Only the metric against this key.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the pictures; jobs/<sweep>/plots if absent.")
    ] = None,
) -> None:
    """Draw the metric against each key, and the curves of all trials, as PNG."""
    with command():
        from dtt.commands import sweep

        sweep.plot(name, key, out)


def _resolve(
    config: str | None,
    overrides: list[str] | None,
    options: Mapping[str, object],
    *,
    model_of: ModelOf | None = None,
) -> RunConfig:
    from dtt.config.load import resolve

    named = {key: value for key, value in options.items() if value is not None}
    return resolve(config, overrides or [], named, model_of=model_of).config


def _version(wanted: bool) -> None:
    if wanted:
        from dtt import __version__

        typer.echo(f"dtt {__version__}")
        raise typer.Exit


@cli.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    # Imports make many objects and no garbage: to look for it takes a tenth of the start.
    gc.set_threshold(50_000)
    _forget_others(sys.argv[1:2])
    cli(prog_name="dtt")


def _forget_others(name: list[str]) -> None:
    """Keep only the command of this `name`, if there is one: Typer makes a parser of all it has."""
    commands = [
        command
        for command in cli.registered_commands
        if command.callback is not None and [command.callback.__name__] == name
    ]
    groups = [group for group in cli.registered_groups if [group.name] == name]
    if commands or groups:
        cli.registered_commands, cli.registered_groups = commands, groups


if __name__ == "__main__":
    main()
