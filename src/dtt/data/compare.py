"""How a tokenizer fares beside another on the documents that were held out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dtt.artifacts import TokensManifest, shard_stem
from dtt.data.tokenfile import TokenFile
from dtt.data.tokenizer import open_tokenizer
from dtt.errors import InputError

ENOUGH_BYTES = 2 * 10**6


class Comparison(NamedTuple):
    """UTF-8 bytes of held-out text, and the tokens that it takes; ends of documents count."""

    text_bytes: int
    tokens: int
    other_tokens: int


def compare(out: Path, other: Path) -> Comparison:
    """The tokenizer of the token files in `out` beside `other`, a tokenizer.json.

    On about 2 MB. The text comes back from the token files, as byte-level BPE loses nothing.
    """
    ours, theirs = open_tokenizer(out / "tokenizer.json"), open_tokenizer(other)
    theirs.encode_special_tokens = True  # as text, as in the token files
    total = Comparison(0, 0, 0)
    for ids in _held_out(out):
        text = ours.decode(ids[:-1].tolist(), skip_special_tokens=False)
        again = theirs.encode(text, add_special_tokens=False)
        total = Comparison(
            total.text_bytes + len(text.encode()),
            total.tokens + len(ids),
            total.other_tokens + len(again.ids) + 1,
        )
        if total.text_bytes >= ENOUGH_BYTES:
            break
    return total


def _held_out(out: Path) -> Iterator[npt.NDArray[np.generic]]:
    """Documents of the validation split that lie on disks this node sees."""
    for shard in TokensManifest.read(out).shards:
        if shard.split == "validation":
            try:
                file = TokenFile(shard_stem(out, shard))
            except InputError:
                continue
            for index in range(len(file)):
                yield file[index]
