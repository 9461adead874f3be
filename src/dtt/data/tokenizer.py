"""Tokenizers: byte-level BPE learnt from a corpus, or any given `tokenizer.json`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dtt.config.data import GivenTokenizerConfig, TrainedTokenizerConfig
from dtt.errors import ConfigError, DamagedError, InputError
from dtt.runtime.log import log

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")

# Meta's llama3/tokenizer.py, `pat_str`; Qwen2's tokenizer.json differs in one digit per token.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"llama3": _SPLIT % "{1,3}", "qwen2": _SPLIT % ""}


def pre_tokenizer(name: str) -> Any:
    """The stock pre-tokenizer `name`: gpt2 (built into `ByteLevel`), llama3 or qwen2."""
    if name == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train_tokenizer(cfg: TrainedTokenizerConfig, texts: Iterator[list[str]]) -> str:
    """Learn byte-level BPE; returns the content of `tokenizer.json`.

    Special tokens come first, so the end-of-document token is 0; then the 256 bytes, then merges.
    The same texts give the same content, whatever the number of threads.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer(cfg.pre_tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=cfg.vocab_size,
        min_frequency=2,
        special_tokens=list(cfg.special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size < cfg.vocab_size:
        log.warning(
            "the tokenizer has %d entries, not %d: no pair of tokens repeats in the text any more",
            size,
            cfg.vocab_size,
        )
    return str(tokenizer.to_str(pretty=True))


def given_tokenizer(cfg: GivenTokenizerConfig) -> bytes:
    """The content of the `tokenizer.json` that `cfg` names: a file, a folder's, or the Hub's."""
    path = Path(cfg.path).expanduser()
    if path.is_dir():
        path /= "tokenizer.json"
    if path.is_file():
        return path.read_bytes()
    if _is_hub_id(cfg.path):
        from dtt.data.hub import fetch_tokenizer  # slow to import

        return fetch_tokenizer(cfg.path, cfg.revision).read_bytes()
    raise InputError(
        f"no tokenizer at {cfg.path}",
        where=path.absolute(),
        why=_only_sentencepiece(path.parent),
        next="tokenizer.path=FILE, a folder with a tokenizer.json, or a model on the Hub",
    )


def _is_hub_id(path: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path) is not None and not path.endswith(".json")


def _only_sentencepiece(folder: Path) -> str | None:
    if (folder / "tokenizer.model").is_file():
        return "there is a tokenizer.model, but dtt reads the Hugging Face form: tokenizer.json"
    return None


def open_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer.json of token files or an export; InputError, DamagedError if it is none."""
    try:
        tokenizer = _parse(path.read_bytes(), path)
    except FileNotFoundError:
        raise InputError(
            "the tokenizer is missing", where=path, next="make its folder again, or copy it back"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _parse(content: bytes, where: Path | str) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # noqa: BLE001 - `tokenizers` raises nothing more specific
        raise DamagedError(
            "this is not a tokenizer.json",
            where=where,
            why=str(error).splitlines()[0],
            next="name a file that `tokenizers` saved; for one that dtt wrote: make it again",
        ) from None


class Encoder:
    """Documents to ids, each ended by the end-of-document token.

    Special-token strings in a document are encoded as the text that they are, so no document can
    end itself. Apart from that ids are those of `tokenizers`' `encode(text,
    add_special_tokens=False)`.
    """

    def __init__(self, content: bytes, end_of_document: str | None, where: Path | str) -> None:
        """`content` of a tokenizer.json that came from `where`; see GivenTokenizerConfig.

        Raises DamagedError if it is none, ConfigError if it has no end-of-document token.
        """
        self._tokenizer = tokenizer = _parse(content, where)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        """Largest id + 1."""
        candidates = END_OF_DOCUMENT if end_of_document is None else (end_of_document,)
        name = next((token for token in candidates if token in vocabulary), None)
        if name is None:
            added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
            raise ConfigError(
                f"the tokenizer has no {' or '.join(candidates)} to end documents with",
                where=where,
                why=f"its special tokens: {', '.join(added[:20]) or 'none'}",
                next=f"tokenizer.end_of_document={added[0] if added else 'TOKEN'}",
            )
        # Only tokens that are marked special are left alone by `encode_special_tokens`.
        tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True)])
        tokenizer.encode_special_tokens = True
        self.end_of_document_token = name
        self.end_of_document: int = vocabulary[name]

    def encode(self, texts: list[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Ids of all documents in a row [sum(lengths)], and tokens of each [len(texts)]."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        end = (self.end_of_document,)
        documents = [encoding.ids for encoding in encodings]
        lengths = np.fromiter((len(ids) + 1 for ids in documents), np.int32, len(documents))
        flat = chain.from_iterable(chain(ids, end) for ids in documents)
        return np.fromiter(flat, np.int64, int(lengths.sum(dtype=np.int64))), lengths
