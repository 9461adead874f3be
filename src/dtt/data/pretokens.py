"""Pre-tokens: what the stock pre-tokenizers split text into, and how often each occurs.

Nothing is ever merged across pre-tokens, so their counts are all that BPE learns from, and the
counts of many ranks add up.
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

from dtt.runtime.comm import Comm

# Meta's llama3/tokenizer.py, `pat_str`; Qwen2's tokenizer.json differs in one digit per token.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"llama3": _SPLIT % "{1,3}", "qwen2": _SPLIT % ""}

HELD_CHARACTERS = 2**26
"""Of pieces to be split; scripts without spaces make long ones that do not repeat."""
LONGEST_PIECE = 2**20
"""Characters that are split at once. No other thread runs meanwhile: that of the signs of life."""

_BYTES = np.arange(256)
_VISIBLE = (ord(" ") < _BYTES) & (_BYTES < 127)
_LETTER = np.isin(_BYTES & ~32, np.arange(ord("A"), ord("Z") + 1))
_NO_LETTER = (_BYTES < 128) & ~_LETTER


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


def count_pre_tokens(name: str, documents: Iterable[list[bytes]]) -> Counter[str]:
    """How often each pre-token occurs in `documents`, in the alphabet of `ByteLevel`.

    The regular expressions are slow. So text is first cut where each of them would, whatever stands
    around; pieces repeat, and each is split but once. One that is longer than LONGEST_PIECE, as
    scripts without spaces may give, is cut there too.
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
    """The counts of all ranks together, on rank 0; they meet in `folder`."""
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
    """The pieces of `texts`, and how often each occurs."""
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
    """Before which bytes of `text` [n] (and its end) every pre-tokenizer here cuts: [n + 1].

    Only ASCII decides, of which all versions of Unicode say the same: a run of letters ends where
    something else follows; a space after something visible begins the next pre-token; and what is
    visible begins one after a single line end.
    """
    cuts = np.zeros(len(text) + 1, np.bool_)
    letter, visible = _LETTER[text], _VISIBLE[text]
    cuts[1:-1] = letter[:-1] & _NO_LETTER[text[1:]]
    cuts[1:-1] |= visible[:-1] & (text[1:] == ord(" "))
    cuts[2:-1] |= visible[:-2] & (text[1:-1] == ord("\n")) & visible[2:]
    return cuts
