"""`dtt generate`: continue prompts with a trained model."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from secrets import randbits
from typing import TYPE_CHECKING, Any

from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.base.log import log
from dtt.base.ranks import Ranks
from dtt.base.reading import is_kind
from dtt.base.terminal import Verbatim
from dtt.hf.model_source import find_folder, load_model, on_device, on_first

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from dtt.data.text.continuation import Continuation
    from dtt.hf.read import LoadedModel
    from dtt.model.contract import Model
    from dtt.model.decoding import ReaderDecoding


RECOMMENDED = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0,
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
}  # fmt: skip
"""Options of sampling in a generation_config.json, and the values that ask for nothing."""


@dataclass(frozen=True)
class Sampling:
    """Options of token sampling, and the maximum number of new tokens."""

    max_tokens: int
    temperature: float
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of `dtt.model.generate` that are the same for all prompts."""
        names = ("temperature", "top_k", "top_p")
        return {"max_new_tokens": self.max_tokens} | {name: getattr(self, name) for name in names}

    def generator(self, device: torch.device, ids: list[int]) -> torch.Generator:
        """Return the random generator of a prompt; its seed is random without `seed`.

        It depends on `seed` and the prompt's ids only, so a prompt gets the same draws in any
        batch, and different prompts get different ones.
        """
        import torch

        seed = randbits(63)
        if self.seed is not None:
            seed = int.from_bytes(hashlib.sha256(f"{self.seed}:{ids}".encode()).digest()[:7])
        return torch.Generator(device).manual_seed(seed)


def choose_sampling(
    source: str,
    max_tokens: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
) -> Sampling:
    """Return the options that the user gave, and else those that the model recommends.

    As in transformers, these are in generation_config.json with `do_sample: true`. They are logged,
    and so is what dtt does not have. Without them, the temperature is 0.8.
    """
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    found = _recommended(source)
    unknown = {name: found.pop(name) for name in [*found] if name not in given}
    used = {name: value for name, value in found.items() if given[name] is None}
    for level, said, options in (
        (logging.INFO, "sampling as generation_config.json says", used),
        (logging.WARNING, "generation_config.json says what dtt does not have", unknown),
    ):
        if options:
            listed = ", ".join(f"{name} {value}" for name, value in options.items())
            log.log(level, "%s: %s", said, listed)
    chosen = {"temperature": 0.8, "top_k": None, "top_p": 1.0} | used
    chosen |= {name: value for name, value in given.items() if value is not None}
    return Sampling(max_tokens, seed=seed, **chosen)


def _recommended(source: str) -> dict[str, Any]:
    """Return the options of sampling in the generation_config.json of a Hugging Face folder.

    Values that ask for nothing are left out. Raises DamagedError for values that are no options.
    """
    folder = find_folder(source)
    path = None if folder is None else folder / "generation_config.json"
    if path is None or not path.is_file():
        return {}
    from dtt.hf.chat_format import read_config

    config = read_config(path)
    if config.get("do_sample") is not True:
        return {}
    found = {name: config.get(name, neutral) for name, neutral in RECOMMENDED.items()}
    for name, value in found.items():
        if not is_kind(value, float) or not 0 <= value < 2**31 or (name == "top_p" and value > 1):
            raise DamagedError(f"{name} is {value!r}", where=path, next=f"correct {name} there")
    chosen = {name: value for name, value in found.items() if value != RECOMMENDED[name]}
    chosen["temperature"] = found["temperature"]  # 1.0 without one
    return chosen | {"top_k": int(chosen["top_k"])} if "top_k" in chosen else chosen


def run(
    source: str,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    prompts_file: Path | None = None,
    ema: bool = False,
    batch_size: int = 16,
    as_json: bool = False,
) -> None:
    """Print prompts and the text that a model generates for them.

    `load_model` describes `source` and `ema`. The prompt `-` is read from standard input; an empty
    prompt starts a new document. The text of a single prompt is streamed; several are printed in
    order, one batch at a time. The continuation of a prompt does not depend on the other prompts,
    even with a seed. Several ranks divide the weights among them, and rank 0 prints.
    """
    from dtt.evaluate.evaluation import all_ranks
    from dtt.jobs.stop import Requests

    ranks = Ranks.detect()
    with nullcontext() if ranks.size == 1 else all_ranks(ranks, Requests()) as world:
        # One process reads: the others share its standard input.
        texts = on_first(world, lambda: _read_prompts(prompts, prompts_file))
        trained = load_model(source, ema=ema, world=world)
        every = _replies(texts, trained)
        decoding: ReaderDecoding | None = None
        if world is not None:
            from dtt.parallel.sharded_model import load_sharded

            model, decoding = load_sharded(trained, world)
        else:
            model = on_own_device(trained)
        streamed = len(texts) == 1 and not as_json
        for start in range(0, len(texts), batch_size):
            replies = every[start : start + batch_size]
            pieces = _texts(model, replies, sampling, decoding)
            if not ranks.first:
                deque(pieces, maxlen=0)
                continue
            if streamed:
                sys.stdout.write(Verbatim(texts[0]))
            for text in pieces:
                if streamed:
                    sys.stdout.write(Verbatim(text))
                    sys.stdout.flush()
            for number, reply in enumerate(replies, start):
                heading = f"==> {number + 1} of {len(texts)} <==\n" if len(texts) > 1 else ""
                whole = "" if streamed else f"{heading}{texts[number]}{reply.content}"
                if as_json:
                    record = {
                        "prompt": texts[number],
                        "text": reply.content,
                        "finish_reason": reply.finish_reason,
                        "prompt_tokens": len(reply.prompt_ids),
                        "completion_tokens": len(reply.ids),
                    }
                    whole = json.dumps(record, ensure_ascii=False)
                print(Verbatim(whole), flush=True)


def continuations(
    source: str, prompts: Sequence[str], sampling: Sampling, batch_size: int = 16
) -> list[str]:
    """Return the text that a model generates for each prompt, as `run` would print it."""
    trained = load_model(source, ema=False)
    replies = _replies(prompts, trained)
    model = on_own_device(trained)
    for start in range(0, len(replies), batch_size):
        deque(_texts(model, replies[start : start + batch_size], sampling), maxlen=0)
    return [reply.content for reply in replies]


def _replies(texts: Sequence[str], trained: LoadedModel) -> list[Continuation]:
    """Return the empty continuations of prompts, with the errors of `encode_prompt`."""
    from dtt.data.text.continuation import Continuation

    tokenizer, stops = trained.open_tokenizer(), trained.stop_tokens()
    names = [f"prompt {n}" for n in range(1, len(texts) + 1)] if len(texts) > 1 else ["the prompt"]
    return [
        Continuation(tokenizer, encode_prompt(text, tokenizer, trained, name), stops)
        for text, name in zip(texts, names, strict=True)
    ]


def on_own_device(trained: LoadedModel) -> Model:
    """Return the model on the GPU of this process, or on the CPU without one."""
    import torch

    return on_device(trained, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _texts(
    model: Model,
    replies: Sequence[Continuation],
    sampling: Sampling,
    decoding: ReaderDecoding | None = None,
) -> Iterator[str]:
    """Generate a batch of replies; yield each text as it is appended to one of them."""
    from dtt.model.generate import generate_batch

    ended = set[int]()
    prompts, device = [reply.prompt_ids for reply in replies], model.head_weight().device
    generators = [sampling.generator(device, ids) for ids in prompts]
    how = sampling.options | {"generators": generators, "ended": ended, "decoding": decoding}
    tokens = generate_batch(model, prompts, **how)
    for row, token in tokens:
        yield replies[row].add(token)
        if replies[row].stopped:
            ended.add(row)
    for reply in replies:
        yield reply.end()


def _read_prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    """Return the prompts of the command line, then the lines of `file`; one empty prompt if none.

    Raises InputError for text that is not UTF-8 and for a file without lines.
    """
    try:
        texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
        "".join(texts).encode()  # invalid UTF-8 arrives as surrogates, or raises on read
    except UnicodeError as error:
        raise InputError(
            "a prompt is not UTF-8 text",
            why=str(error),
            next="convert it to UTF-8, for example with iconv",
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
            next="use a text file with one prompt per line",
        ) from None
    if not texts:
        raise InputError(f"{file} has no prompts")
    return texts


def encode_prompt(text: str, tokenizer: Tokenizer, trained: LoadedModel, name: str) -> list[int]:
    """Return the token ids of a prompt; an empty prompt becomes the token that begins a
    document, or else the end-of-document token.

    Raises ConfigError if the ids leave no room for a continuation, if the model has no row for one
    of them, or if the prompt is empty and the model has no end-of-document token; Unencodable if
    the tokenizer cannot encode it.
    """
    from dtt.data.text.tokenizer import most_characters
    from dtt.data.text.unencodable import encoding

    context = trained.arch.max_seq_len
    long = len(text) > most_characters(tokenizer, context)  # before it takes seconds to encode it
    # A batch, because `encode` alone keeps the lock of Python: all others would wait.
    with encoding(trained.tokenizer):
        [encoded] = tokenizer.encode_batch(["" if long else text], add_special_tokens=True)
    ids: list[int] = encoded.ids
    if long or len(ids) >= context:
        size = f"{len(text)} characters" if long else f"{len(ids)} tokens"
        raise ConfigError(
            f"{name} is too long: {size}",
            why=f"prompt and continuation must fit into {context} tokens",
        )
    if not ids:
        if trained.end_of_document is None:
            raise ConfigError(
                f"{name} is empty",
                why="the model has no end-of-document token with which to start a new document",
            )
        ids = [trained.end_of_document]
    trained.check_ids(ids, name)
    return ids
