"""Comparison of two tokenizers by their number of tokens for the held-out documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dtt.artifacts.manifests import TokensManifest
from dtt.artifacts.shard_files import shard_stem
from dtt.base.errors import InputError
from dtt.data.text.encoding_errors import encoding
from dtt.data.text.tokenizer import open_tokenizer
from dtt.data.token_file import TokenFile

ENOUGH_BYTES = 2 * 10**6
"""Bytes of held-out text after which the comparison stops."""


def compare(out: Path, other: Path) -> tuple[int, int, int]:
    """Return UTF-8 bytes of held-out text in `out`, its tokens, and those by the tokenizer `other`.

    Uses about 2 MB (ENOUGH_BYTES) of text. The text is decoded from the token files, which is exact
    because byte-level BPE is lossless.
    """
    ours, theirs = open_tokenizer(out / "tokenizer.json"), open_tokenizer(other)
    theirs.encode_special_tokens = True  # encode them as text, as `dtt tokenize` does
    text_bytes = tokens = other_tokens = 0
    for ids in _held_out(out):
        text = ours.decode(ids[:-1].tolist(), skip_special_tokens=False)
        text_bytes += len(text.encode())
        tokens += len(ids)
        with encoding(other):
            other_tokens += len(theirs.encode(text, add_special_tokens=False).ids) + 1
        if text_bytes >= ENOUGH_BYTES:
            break
    return text_bytes, tokens, other_tokens


def _held_out(out: Path) -> Iterator[npt.NDArray[np.generic]]:
    """Yield the documents of the validation split, except for shards this node cannot reach."""
    for shard in TokensManifest.read(out).shards:
        if shard.split == "validation":
            try:
                file = TokenFile(shard_stem(out, shard))
            except InputError:
                continue
            for index in range(len(file)):
                yield file[index]
