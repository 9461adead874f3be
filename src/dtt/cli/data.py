"""Commands of `dtt data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from dtt.cli.app import cli
from dtt.cli.options import Config, Json, Overrides, Stage, Trust, argument, option, resolve

data_cli = cli.group("data", "Inspect text and tokens, before and after training.")


@data_cli.command(
    "dtt data inspect ~/books",
    "dtt data inspect data/tokens/TinyStories-train-bpe8192 --verify",
    "dtt data inspect megatron/pile_text_document --tokenizer tokenizer.json",
)
def data_inspect(
    path: Annotated[
        Path,
        argument(
            "PATH",
            "Corpus, file or folder of documents, token folder, .bin/.idx, .ds, .bin or .npy.",
        ),
    ],
    samples: Annotated[
        int, option("Number of documents to show the start of.", min=0, metavar="N")
    ] = 3,
    verify: Annotated[bool, option("--verify", "Verify the sha256 of every file.")] = False,
    everything: Annotated[
        bool, option("--all", "Read all data, not only evenly spread parts.")
    ] = False,
    tokenizer: Annotated[
        Path | None, option("tokenizer.json that decodes the ids; default: the one next to them.")
    ] = None,
    dtype: Annotated[
        Literal["uint16", "uint32", "int32", "int64"],
        option("Type of raw ids: uint16, uint32, int32 or int64."),
    ] = "uint16",
    json: Json = False,
) -> None:
    """Summarize text or tokens: counts, lengths of documents, samples, anomalies.

    Reads evenly spread parts of large data. Exits with 65 if a file is damaged.
    """
    from dtt.data.inspect import run as body
    from dtt.data.inspect.report import InspectOptions

    options = InspectOptions(
        samples=samples, everything=everything, hashes=verify, tokenizer=tokenizer, dtype=dtype
    )
    body.inspect(path, options, as_json=json)


@data_cli.command(
    "dtt data mix -c run.yaml",
    "dtt data mix -c run.yaml train.steps=20000",
)
def data_mix(
    overrides: Overrides = None,
    config: Config = None,
    stage: Stage = None,
) -> None:
    """Show the share, the tokens and the epochs of each data source of a run, and its steps.

    Reads the sizes of the token files, and says what the run leaves out. Needs no GPU.
    """
    from dtt.data.inspect import run as body

    body.mix(resolve(config, overrides, {}, stage=stage))


@data_cli.command(
    "dtt data at-step jobs/run 1200",
    "dtt data at-step jobs/run@1200 --rank 3 --of 8 --full",
)
def data_at_step(
    source: Annotated[str, argument("JOB[@STEP]", "Job directory, with the step or before it.")],
    step: Annotated[int | None, argument("[N]", "Step, as in metrics.jsonl and JOB@STEP.")] = None,
    rank: Annotated[int | None, option("Show one rank; requires --of.", min=0, metavar="R")] = None,
    of: Annotated[int | None, option("Number of ranks for --rank.", min=1, metavar="N")] = None,
    samples: Annotated[
        int | None, option("Maximum number of samples to show.", min=1, metavar="N")
    ] = None,
    full: Annotated[bool, option("--full", "Show complete texts.")] = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Show the documents that a step trained on: file, number, offset and text.

    Reads the token files, and exits with 65 if metrics.jsonl records other samples.
    """
    from dtt.train import samples_of_step as body

    body.at_step(source, step, rank=rank, ranks=of, limit=samples, full=full, as_json=json)
