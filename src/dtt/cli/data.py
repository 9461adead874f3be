"""Commands of `dtt data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtt.cli.app import cli
from dtt.cli.options import Config, Json, Overrides, Stage, Trust, resolve
from dtt.cli.parser import Commands

data_cli = Commands(help="Inspect text and tokens, before and after training.")
cli.add_typer(data_cli, name="data")


@data_cli.command(
    "dtt data inspect ~/books",
    "dtt data inspect data/tokens/TinyStories-train-bpe8192 --verify",
    "dtt data inspect megatron/pile_text_document --tokenizer tokenizer.json",
    name="inspect",
)
def data_inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="Corpus, file or folder of documents, token folder, .bin/.idx, .ds, .bin or .npy.",
        ),
    ],
    samples: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of documents to show the start of.")
    ] = 3,
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify the sha256 of every file.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Read all data, not only evenly spread parts.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json that decodes the ids; default: the one next to them."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Type of raw ids: uint16, uint32, int32 or int64.")
    ] = "uint16",
    json: Json = False,
) -> None:
    """Summarize text or tokens: counts, lengths of documents, samples, anomalies.

    Reads evenly spread parts of large data. Exits with 65 if a file is damaged.
    """
    from dtt.data.inspect import run as body

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
    "dtt data mix -c run.yaml",
    "dtt data mix -c run.yaml train.steps=20000",
    "dtt data mix -c run.yaml --write data/mix",
    name="mix",
)
def data_mix(
    overrides: Overrides = None,
    config: Config = None,
    stage: Stage = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the mixture into a folder: links to the token files, their statistics, "
            "and the list of weights and prefixes for Megatron's --data-path.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show the share, tokens, epochs and exhaustion step of each data source of a run.

    Reads the sizes of the token files. Needs no GPU.
    """
    from dtt.data.inspect import run as body

    body.mix(resolve(config, overrides, {}, stage=stage), write, as_json=json)


@data_cli.command(
    "dtt data at-step jobs/run 1200",
    "dtt data at-step jobs/run@1200 --rank 3 --of 8 --full",
    name="at-step",
)
def data_at_step(
    source: Annotated[
        str, typer.Argument(metavar="JOB[@STEP]", help="Job directory, with the step or before it.")
    ],
    step: Annotated[
        int | None, typer.Argument(metavar="[N]", help="Step, as in metrics.jsonl and JOB@STEP.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, metavar="R", help="Show one rank; requires --of.")
    ] = None,
    of: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of ranks for --rank.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Maximum number of samples to show.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show complete texts.")] = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Show the documents that a step trained on: file, number, offset and text.

    Reads the token files, and exits with 65 if metrics.jsonl records other samples.
    """
    from dtt.train import samples_of_step as body

    body.at_step(source, step, rank=rank, ranks=of, limit=samples, full=full, as_json=json)
