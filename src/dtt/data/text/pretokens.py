"""The built-in pre-tokenizers, and counting of the pre-tokens that they split text into.

BPE never merges across pre-tokens, so their counts are all that its training needs, and the counts
of several ranks can be summed.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tokenizers import Regex, pre_tokenizers

from dtt.mesh.comm import Comm

# Meta's llama3/tokenizer.py, `pat_str`; Qwen2's differs: one digit per token.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"llama3": _SPLIT % "{1,3}", "qwen2": _SPLIT % ""}

HELD_CHARACTERS = 2**26
"""Maximum characters of pieces kept before they are split into pre-tokens.

This bounds memory for scripts without spaces, which produce long pieces that do not repeat.
"""
LONGEST_PIECE = 2**20
"""Maximum characters split per call, which holds the GIL and so delays the heartbeat thread."""

_BYTES = np.arange(256)
_VISIBLE = (ord(" ") < _BYTES) & (_BYTES < 127)
_LETTER = np.isin(_BYTES & ~32, np.arange(ord("A"), ord("Z") + 1))
_NO_LETTER = (_BYTES < 128) & ~_LETTER


def pre_tokenizer(name: str) -> Any:
    """Return the built-in pre-tokenizer `name`: gpt2 (part of `ByteLevel`), llama3 or qwen2."""
    if name == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def count_pre_tokens(name: str, documents: Iterable[list[bytes]]) -> Counter[str]:
    """Count the pre-tokens in `documents`; they are in the alphabet of `ByteLevel`.

    The regular expressions are slow. So text is first cut into pieces at positions where all of
    them split regardless of the context. Pieces repeat, and each distinct one is split only once. A
    piece longer than LONGEST_PIECE, which occurs in scripts without spaces, is cut there as well.
    """
    split = pre_tokenizer(name).pre_tokenize_str
    pre_tokens: Counter[str] = Counter()
    pieces: Counter[str] = Counter()

    def split_pieces() -> None:
        for piece, count in pieces.items():
            for start in range(0, len(piece), LONGEST_PIECE):
                for pre_token, _ in split(piece[start : start + LONGEST_PIECE]):
                    pre_tokens[pre_token] += count
        pieces.clear()

    held = 0
    for batch in documents:
        found = _count_pieces(batch)
        pieces.update(found)
        held += sum(map(len, found))
        if held > HELD_CHARACTERS:
            split_pieces()
            held = 0
    split_pieces()
    return pre_tokens


def sum_over_ranks(counts: Counter[str], comm: Comm, folder: Path) -> Counter[str]:
    """Sum the counts of all ranks on rank 0, through files in `folder`; collective.

    Other ranks get their own counts back.
    """
    path = folder / f".pre-tokens-{secrets.token_hex(8)}.tmp"
    if comm.rank > 0:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(counts))
    names = comm.gather(path.name)
    if comm.rank == 0:
        for name in names[1:]:
            counts.update(json.loads((folder / name).read_text()))
            (folder / name).unlink()
    return counts


def _count_pieces(texts: list[bytes]) -> dict[str, int]:
    """Return the pieces of `texts` and their counts."""
    if not texts:
        return {}
    content = b"".join(texts)
    cuts = _cuts(np.frombuffer(content, np.uint8))
    cuts[np.cumsum([0, *map(len, texts)])] = True
    offsets = np.flatnonzero(cuts)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    pieces = pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)
    values, counts = pieces.value_counts().flatten()
    return dict(zip(values.to_pylist(), counts.to_pylist(), strict=True))


def _cuts(text: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return a mask [n + 1] of the positions in `text` [n] where all pre-tokenizers here split.

    True at i means a split before byte i; n is the end of the text. Only ASCII is considered, on
    which all versions of Unicode agree. There is a split between a letter and a following ASCII
    character that is not a letter, before a space that follows a visible character, and before a
    visible character that follows a visible character and a single line feed.
    """
    cuts = np.zeros(len(text) + 1, np.bool_)
    letter, visible = _LETTER[text], _VISIBLE[text]
    cuts[1:-1] = letter[:-1] & _NO_LETTER[text[1:]]
    cuts[1:-1] |= visible[:-1] & (text[1:] == ord(" "))
    cuts[2:-1] |= visible[:-2] & (text[1:-1] == ord("\n")) & visible[2:]
    return cuts
