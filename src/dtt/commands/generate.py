"""`dtt generate`: a trained model continues a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dtt.config.load import load_job
from dtt.errors import ConfigError, InputError
from dtt.runtime.jobdir import JobDir

if TYPE_CHECKING:
    from dtt.export.read import Trained


def run(
    source: Path,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int | None,
) -> None:
    """Print `prompt` (`-`: standard input) and its continuation by a job's newest checkpoint or an
    exported folder, as it comes. An empty prompt begins a new document."""
    trained = _load(source)

    import torch
    from tokenizers.decoders import DecodeStream

    from dtt.data.tokenizer import open_tokenizer
    from dtt.model.decoder import Decoder
    from dtt.model.generate import generate

    tokenizer = open_tokenizer(trained.tokenizer)
    text = sys.stdin.read() if prompt == "-" else prompt
    ids = tokenizer.encode(text, add_special_tokens=False).ids or [trained.end_of_document]
    if len(ids) >= trained.arch.max_seq_len:
        raise ConfigError(
            f"the prompt is too long: {len(ids)} tokens",
            why=f"prompt and continuation must fit into {trained.arch.max_seq_len} tokens",
            next="give a shorter prompt",
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        model = Decoder(trained.arch)
    state = {name: tensor.to(device) for name, tensor in trained.state.items()}
    model.load_state_dict(state, assign=True)
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    stream = DecodeStream(skip_special_tokens=True)
    sys.stdout.write(text)
    for token in generate(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_id=trained.end_of_document,
        generator=generator,
    ):
        sys.stdout.write(stream.step(tokenizer, token) or "")
        sys.stdout.flush()
    sys.stdout.write("\n")


def _load(source: Path) -> Trained:
    """The model of an exported folder, or of the newest checkpoint of a job."""
    places = JobDir(source)
    exported = (source / "config.json").is_file()
    if not exported and not places.config.is_file():
        raise InputError(
            f"no model in {source}",
            why="it holds neither config.yaml (a job) nor config.json (a Hugging Face folder)",
            next="name a folder such as jobs/quickstart or exports/quickstart",
        )
    from dtt.export.read import find_checkpoint, read_checkpoint, read_hf_folder

    if exported:
        return read_hf_folder(source)
    checkpoint = find_checkpoint(places.checkpoints, None)
    return read_checkpoint(load_job(source), places, checkpoint)
