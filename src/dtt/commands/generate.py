"""`dtt generate`: continue prompts with a trained model."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from secrets import randbits
from typing import TYPE_CHECKING

from dtt.config.load import load_job
from dtt.errors import ConfigError, InputError
from dtt.runtime.jobdir import JobDir

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from dtt.export.read import Trained
    from dtt.model.decoder import Decoder


def run(
    source: Path,
    prompts: Sequence[str],
    *,
    prompts_file: Path | None = None,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int | None,
    ema: bool = False,
    batch_size: int = 16,
    stream: bool | None = None,
    as_json: bool = False,
) -> None:
    """Print prompts and their continuations by a model.

    `source` is a job directory, whose newest checkpoint is used (with `ema`: its averaged weights),
    or an exported folder. The prompt `-` is read from standard input; an empty prompt starts a new
    document. The text of a single prompt is streamed; several are printed in order, one batch at a
    time. The continuation of a prompt does not depend on the other prompts, also with a seed.
    """
    texts = _read_prompts(prompts, prompts_file)
    if stream and (as_json or len(texts) > 1):
        raise ConfigError(
            "only the text of a single prompt can be streamed",
            why="--json was asked for" if as_json else f"there are {len(texts)} prompts",
            next="leave out --stream",
        )
    trained = _load(source, ema)

    import torch

    from dtt.data.tokenizer import open_tokenizer
    from dtt.model.generate import generate_batch

    tokenizer = open_tokenizer(trained.tokenizer)
    prompt_ids = [
        _encode(text, tokenizer, trained, f"prompt {number}" if len(texts) > 1 else "the prompt")
        for number, text in enumerate(texts, 1)
    ]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _model(trained, device)

    def answer(batch: Sequence[list[int]]) -> Iterator[tuple[int, int]]:
        return generate_batch(
            model,
            batch,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_id=trained.end_of_document,
            generators=[torch.Generator(device).manual_seed(_draws(seed, ids)) for ids in batch],
        )

    if len(texts) == 1 and not as_json and stream is not False:
        sys.stdout.write(texts[0])
        for piece in _pieces(tokenizer, (token for _, token in answer(prompt_ids))):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        return
    for start in range(0, len(texts), batch_size):
        batch = prompt_ids[start : start + batch_size]
        replies: list[list[int]] = [[] for _ in batch]
        for row, token in answer(batch):
            replies[row].append(token)
        for number, (ids, reply) in enumerate(zip(batch, replies, strict=True), start):
            text = "".join(_pieces(tokenizer, reply))
            if as_json:
                full = len(reply) == max_new_tokens or len(ids + reply) == trained.arch.max_seq_len
                print(_record(texts[number], text, ids, reply, full), flush=True)
            else:
                heading = f"==> {number + 1} of {len(texts)} <==\n" if len(texts) > 1 else ""
                print(f"{heading}{texts[number]}{text}", flush=True)


def _record(prompt: str, text: str, ids: list[int], reply: list[int], full: bool) -> str:
    """Return a line of JSON; `full`: the reply reached a length limit, not the document's end."""
    record = {
        "prompt": prompt,
        "text": text,
        "finish_reason": "length" if full else "stop",
        "prompt_tokens": len(ids),
        "completion_tokens": len(reply),
    }
    return json.dumps(record, ensure_ascii=False)


def _read_prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    """Return the prompts of the command line, then the lines of `file`; one empty prompt if none.

    Raises InputError for text that is not UTF-8 and for a file without lines.
    """
    try:
        texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
        "".join(texts).encode()  # invalid UTF-8 arrives as surrogates, or raises on read
    except UnicodeError as error:
        raise InputError(
            "a prompt is not UTF-8 text", why=str(error), next="convert it, as with iconv"
        ) from None
    if file is None:
        return texts or [""]
    try:
        with file.open(encoding="utf-8") as lines:
            texts += [line.removesuffix("\n") for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(
            f"cannot read prompts from {file}",
            why=why,
            next="name a text file, a prompt in each line",
        ) from None
    if not texts:
        raise InputError(f"{file} holds no prompt", next="put a prompt in each line")
    return texts


def _encode(text: str, tokenizer: Tokenizer, trained: Trained, name: str) -> list[int]:
    """Return the token ids of a prompt; an empty prompt becomes the end-of-document token.

    Raises ConfigError if the ids leave no room for a continuation, or if the prompt is empty and
    the model has no end-of-document token.
    """
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) >= trained.arch.max_seq_len:
        raise ConfigError(
            f"{name} is too long: {len(ids)} tokens",
            why=f"prompt and continuation must fit into {trained.arch.max_seq_len} tokens",
            next="give a shorter prompt",
        )
    if ids:
        return ids
    if trained.end_of_document is None:
        raise ConfigError(
            f"{name} is empty",
            why="the model names no token that ends a document, with which another could begin",
            next="give a prompt with -p",
        )
    return [trained.end_of_document]


def _draws(seed: int | None, ids: list[int]) -> int:
    """Return the seed of the random generator of a prompt; a random one if `seed` is None.

    It depends on `seed` and the prompt's ids only, so a prompt gets the same draws in any batch,
    and different prompts get different ones.
    """
    if seed is None:
        return randbits(63)
    return int.from_bytes(hashlib.sha256(f"{seed}:{ids}".encode()).digest()[:7])


def _pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens piece by piece; no piece ends within a UTF-8 character."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)
    for token in tokens:
        yield stream.step(tokenizer, token) or ""


def _model(trained: Trained, device: torch.device) -> Decoder:
    import torch

    from dtt.model.decoder import Decoder

    with torch.device("meta"):
        model = Decoder(trained.arch)
    state = {name: tensor.to(device) for name, tensor in trained.state.items()}
    model.load_state_dict(state, assign=True)
    return model


def _load(source: Path, ema: bool) -> Trained:
    """Read the model of an exported folder, or of the newest checkpoint of a job.

    With `ema`, reads the averaged weights of the checkpoint. Raises InputError if there is no model
    in `source`, and ConfigError for `ema` with an exported folder.
    """
    places = JobDir(source)
    exported = (source / "config.json").is_file()
    if not exported and not places.config.is_file():
        raise InputError(
            f"no model in {source}",
            why="it holds neither config.yaml (a job) nor config.json (a Hugging Face folder)",
            next="name a folder such as jobs/quickstart or exports/quickstart",
        )
    from dtt.export.read import find_checkpoint, read_checkpoint, read_hf_folder

    if exported and ema:
        raise ConfigError(
            f"--ema is for jobs, and {source} is an exported folder",
            why="it holds one set of weights",
            next="dtt export JOB --ema makes one of the average; name it without --ema",
        )
    if exported:
        return read_hf_folder(source)
    checkpoint = find_checkpoint(places.checkpoints, None)
    return read_checkpoint(load_job(source), places, checkpoint, ema=ema)
