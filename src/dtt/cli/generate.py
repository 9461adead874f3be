"""The command `dtt generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import Ema, Json, MaxNewTokens, Model, Seed, Temperature, TopK, TopP, option


@cli.command(
    "dtt generate jobs/run -p 'def main():'",
    "dtt generate exports/run -p - < prompt.txt",
    "dtt generate exports/run --prompts-file prompts.txt --json",
)
def generate(
    source: Model,
    prompt: Annotated[
        list[str] | None, option("--prompt", "-p", "Prompt to continue; - reads stdin; repeatable.")
    ] = None,
    prompts_file: Annotated[
        Path | None, option("File with one prompt per line.", metavar="FILE")
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    ema: Ema = False,
    batch_size: Annotated[int, option("Number of prompts per batch.", min=1, metavar="N")] = 16,
    json: Json = False,
) -> None:
    """Generate text from prompts with a trained model.

    Reads the newest checkpoint of a job, or an exported folder; writes to stdout. The text does not
    depend on the other prompts of a batch. With --json, prints one line per prompt: prompt, text,
    finish_reason (stop: end of document; length) and the numbers of tokens. If the weights do not
    fit on one GPU, it starts a process on each visible GPU, outside of torchrun and Slurm.
    """
    from dtt.generate import run as generate
    from dtt.launch import own_gpus

    own_gpus.start_generation(source)
    generate.run(
        source,
        prompt or [],
        generate.choose_sampling(source, max_new_tokens, temperature, top_k, top_p, seed),
        prompts_file=prompts_file,
        ema=ema,
        batch_size=batch_size,
        as_json=json,
    )
