"""Tokenizers: byte-level BPE trained on a corpus, or any existing `tokenizer.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.base.log import log
from dtt.base.reading import read_whole
from dtt.config.data import GivenTokenizerConfig, TrainedTokenizerConfig
from dtt.data.text.side_files import tokenizer_content

# Meta's llama3/tokenizer.py, `pat_str`; Qwen2's differs: one digit per token.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
PATTERNS = {
    "llama3": _SPLIT % "{1,3}",
    "qwen2": _SPLIT % "",
    # Marks, such as the vowel signs of Devanagari, stay with their letters.
    "qwen3.5": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def pre_tokenizer(name: str) -> Any:
    """Return the built-in pre-tokenizer `name`: gpt2 (part of `ByteLevel`), or one of PATTERNS."""
    if name == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train_tokenizer(cfg: TrainedTokenizerConfig, texts: Iterable[list[str]]) -> str:
    """Train byte-level BPE on lists of texts; return the content of `tokenizer.json`.

    Ids are assigned to the special tokens first, so the end-of-document token has id 0; then to the
    256 bytes, then to the merges.
    """
    special = cfg.all_special_tokens
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer(cfg.pre_tokenizer)
    if cfg.pre_tokenizer.startswith("qwen"):
        # As those tokenizers do. `AutoTokenizer` does it to models of these types in any case.
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    # It counts pairs in 32 bits, enough for about 40 GB of English: `train_bytes` is 100 MB.
    trainer = trainers.BpeTrainer(
        vocab_size=cfg.vocab_size,
        min_frequency=2,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Uses all cores for the regular expressions: 20 s for 74 MB of novels on two of them.
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
    """Return the content of the `tokenizer.json` that `cfg` names, as `transformers` reads it."""
    return tokenizer_content(find_tokenizer(cfg))


def find_tokenizer(cfg: GivenTokenizerConfig) -> Path:
    """Return the path of the `tokenizer.json` that `cfg` names.

    `cfg.path` is the file itself, a folder that contains it, or a model on the Hub, from which it
    is fetched together with the files next to it. Raises InputError if there is none.
    """
    path = Path(cfg.path).expanduser()
    folder = path.is_dir()
    if folder:
        path /= "tokenizer.json"
    if path.is_file():
        return path
    if not folder and is_hub_id(cfg.path):
        from dtt.data.corpus.hub import fetch_tokenizer  # slow to import

        return fetch_tokenizer(cfg.path, cfg.revision)
    raise InputError(
        f"no tokenizer at {cfg.path}",
        where=path.absolute(),
        why="there is a tokenizer.model, but dtt reads the Hugging Face format: tokenizer.json"
        if (sentencepiece := (path.parent / "tokenizer.model").is_file())
        else None,
        next="in Python, transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW) "
        "converts it; then use NEW"
        if sentencepiece
        else "specify a tokenizer.json, a folder that contains one, or a model on the Hub as "
        "ORG/NAME (without the hf: of init.from)",
    )


def is_hub_id(path: str) -> bool:
    """Return True if a path that does not exist is the id of a model on the Hub."""
    return HUB_ID.fullmatch(path) is not None and not path.endswith(".json")


def open_tokenizer(path: Path) -> Tokenizer:
    """Open a tokenizer.json; see `exact_tokenizer`.

    Raises InputError if the file is missing, DamagedError if it is not a tokenizer.json.
    """
    try:
        return exact_tokenizer(tokenizer_content(path), path)
    except FileNotFoundError:
        raise InputError("the tokenizer is missing", where=path) from None


def exact_tokenizer(content: bytes, where: Path | str) -> Tokenizer:
    """Return the tokenizer in `content` without what makes ids random or drops or adds tokens.

    These are BPE dropout, truncation and padding. Raises the errors of `parse_tokenizer`.
    """
    tokenizer = parse_tokenizer(content, where)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    return tokenizer


def parse_tokenizer(content: bytes, where: Path | str) -> Tokenizer:
    """Return the tokenizer in `content`, a tokenizer.json.

    Raises DamagedError, with `where` as its location, if it is not one.
    """
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # noqa: BLE001 - `tokenizers` raises nothing more specific
        raise DamagedError(
            "this is not a tokenizer.json",
            where=where,
            why=str(error).splitlines()[0],
            next="use a file that `tokenizers` saved; for one that dtt wrote: create it again",
        ) from None


def begin_of_document(tokenizer: Tokenizer, where: object) -> int | None:
    """Return the id that a tokenizer adds before a text, as its post-processor says; None if none.

    Raises ConfigError if it adds several, or any after it: a text that ends with a token such as
    `</s>` cannot be continued, and a document has one end already.
    """
    encoding = tokenizer.encode("a", add_special_tokens=True)
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    before = encoding.special_tokens_mask.index(0) if 0 in encoding.special_tokens_mask else 0
    added = encoding.ids[:before]
    if len(added) > 1 or encoding.ids != [*added, *plain]:
        raise ConfigError(
            "the tokenizer adds other tokens to a text than one before it",
            where=where,
            why=f"'a' becomes {encoding.tokens}",
            next="tokenizer.bos=never adds none",
        )
    return added[0] if added else None


def add_in_front(tokenizer: Tokenizer, begin: int | None) -> Tokenizer:
    """Let the tokenizer add `begin`, and nothing else, to a text; return it.

    What the file says is replaced: a model must be used with what its documents began with.
    """
    if begin is None:
        tokenizer.post_processor = None
    else:
        token = tokenizer.id_to_token(begin)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, begin)]
        )
    return tokenizer


@lru_cache(maxsize=8)
def most_characters(tokenizer: Tokenizer, tokens: int) -> int:
    """Return the length of the longest text that `tokens` tokens can have.

    An unknown token may stand for more: such a text is beyond use.
    """
    return tokens * max(map(len, tokenizer.get_vocab()))


BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
"""Pattern of the tokens for single bytes in SentencePiece's byte fallback."""


def token_bytes(path: Path, vocab_size: int, end_of_document: int) -> npt.NDArray[np.int64] | None:
    """Return the number of UTF-8 bytes of text that each id represents, [vocab_size].

    `path` is a tokenizer.json. Special tokens represent no text. The numbers are exact for
    byte-level BPE, whose tokens have one character per byte. In SentencePiece vocabularies, "▁"
    counts as one space, even where the tokenizer added one before the first word. Returns None for
    other tokenizers, because their tokens do not show how much text was between them.
    """
    facts = json.loads(read_whole(path))
    parts = [*sections(facts.get("decoder")), *sections(facts.get("pre_tokenizer"))]
    byte_level = any(part["type"] == "ByteLevel" for part in parts)
    spaces = any(
        part["type"] == "Metaspace" or part.get("pattern") == {"String": "▁"} for part in parts
    )
    if not (byte_level or spaces):
        return None
    vocabulary = facts["model"]["vocab"]
    entries = (
        vocabulary.items()
        if isinstance(vocabulary, dict)
        else ((token, i) for i, (token, _) in enumerate(vocabulary))  # unigram: (token, score)
    )
    sizes = {
        i: len(token)
        if byte_level
        else 1
        if BYTE_TOKEN.fullmatch(token)
        else len(token.replace("▁", " ").encode())
        for token, i in entries
    }
    for added in facts.get("added_tokens") or ():
        sizes[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    sizes[end_of_document] = 0  # even if it is not marked as special
    return np.array([sizes.get(i, 0) for i in range(vocab_size)], dtype=np.int64)


SEQUENCES = ("decoders", "pretokenizers", "normalizers")


def sections(section: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a section of a tokenizer.json and, if it is a sequence, its parts recursively."""
    if section is not None:
        inner = next((section[name] for name in SEQUENCES if section.get(name)), ())
        yield section
        for part in inner:
            yield from sections(part)
