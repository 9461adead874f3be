"""Inspection of token files of conversations: trained tokens, common mistakes, and lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dtt.artifacts.manifests import ChatFacts, TokensManifest
from dtt.data.inspect.report import Sample, spread
from dtt.data.samples.packed_conversations import read_mask
from dtt.data.samples.token_shards import Shard, TokenFiles
from dtt.data.token_file import map_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BEGIN, END = "⟦", "⟧"
"""Marks around trained text."""
MAX_TOKENS = 2**27
"""Maximum number of tokens that are read; of larger data, evenly spread shards."""
SEQ_LENS = tuple(2**k for k in range(8, 18))
PERCENTILES = (50, 90, 99)


class ConversationReport:
    """The findings on token files of conversations."""

    def __init__(
        self,
        files: TokenFiles,
        broken: set[Path],
        tokenizer: Tokenizer | None,
    ) -> None:
        """Read ids and masks, except for shards whose `.bin` is in `broken`."""
        assert files.manifest is not None
        assert files.manifest.chat is not None
        self._manifest: TokensManifest = files.manifest
        self._chat: ChatFacts = files.manifest.chat
        self._tokenizer = tokenizer
        shards = [shard for shard in files.shards if shard.path not in broken]
        step = -(-sum(shard.tokens for shard in shards) // MAX_TOKENS) or 1
        self._shards = shards[::step]
        special = () if tokenizer is None else tokenizer.get_added_tokens_decoder().items()
        self._special = np.array([i for i, token in special if token.special], dtype=np.int64)
        # Numbers of conversations without targets, and of those that start with the same special
        # token twice; of runs of trained tokens, and of those without a stop token.
        self._without_targets = self._doubled_start = 0
        self._answers = self._unstopped = 0
        lengths = [self._read(shard) for shard in self._shards]
        self._lengths = np.sort(np.concatenate([np.empty(0, np.int64), *lengths]))

    def _read(self, shard: Shard) -> npt.NDArray[np.int64]:
        """Count the conversations of a shard; return their lengths."""
        bounds = shard.documents().bounds()
        ids = map_file(shard.path).view(shard.dtype)
        mask = read_mask(shard)
        start, length = bounds[:-1], np.diff(bounds)
        if not len(ids):
            return length
        self._without_targets += int((np.add.reduceat(mask, start, dtype=np.int64) == 0).sum())
        two = start[length > 1]
        same = two[ids[two] == ids[two + 1]]
        self._doubled_start += int(np.isin(ids[same], self._special).sum())
        is_last = np.zeros(len(ids), dtype=np.bool_)
        is_last[bounds[1:] - 1] = True
        ends = np.flatnonzero((mask != 0) & (is_last | (np.append(mask[1:], 0) == 0)))
        self._answers += len(ends)
        self._unstopped += int((~np.isin(ids[ends], self._chat.stop_tokens)).sum())
        return length

    def facts(self) -> dict[str, object]:
        """Return the lines of the report: trained tokens, stop tokens, and lengths."""
        counts = [shard.counts for shard in self._manifest.shards]
        tokens, trained = sum(c.tokens for c in counts), sum(c.trained or 0 for c in counts)
        some = self._lengths
        percentiles = {
            f"{p} %": int(np.percentile(some, p, method="higher")) for p in PERCENTILES if len(some)
        }
        fits = {
            f"{seq_len:,}": f"{np.searchsorted(some, seq_len + 1, side='right') / len(some):.1%}"
            for seq_len in SEQ_LENS
            if len(some) and some[0] <= seq_len + 1 and seq_len <= 2 * some[-1]
        }
        return {
            "trained_tokens": f"{trained:,} ({trained / max(tokens, 1):.1%})",
            "stop_tokens": ", ".join(map(self._token, self._chat.stop_tokens)),
            "template": self._chat.template_sha256[:16],
            "lengths up to": percentiles,
            "fit in seq_len": fits,
            "refused": sum(self._manifest.refused.values()) or None,
            "keys not used": self._manifest.unread or None,
        }

    def oddities(self) -> Iterator[str]:
        """Yield a line for each mistake that fine-tuned models commonly suffer from."""
        options = self._manifest.key_parts.get("chat", {})
        if self._without_targets:
            yield f"conversations without trained tokens, left out: {self._without_targets:,}"
        if self._doubled_start:
            yield (
                f"conversations that start with the same special token twice: "
                f"{self._doubled_start:,}; the chat template and the tokenizer both add it"
            )
        if self._unstopped and options.get("train_on") != "all":
            yield (
                f"answers that do not end with a stop token: {self._unstopped:,} of "
                f"{self._answers:,}; the model would not learn to end them"
            )
        if self._manifest.nulls:
            yield f"rows whose tools have keys with null: {self._manifest.nulls:,}"
        for why, count in self._manifest.refused.items():
            yield f"refused rows: {count:,}: {why}"

    def samples(self, count: int, decode: Callable[[list[int]], str]) -> list[Sample]:
        """Return the text of the first conversations of up to `count` shards.

        Trained text is between BEGIN and END.
        """
        found = []
        for shard in spread([shard for shard in self._shards if shard.tokens], count):
            ((length, trained, parts),) = read_conversations(shard, 1, decode)
            text = "".join(f"{BEGIN}{part}{END}" if trains else part for part, trains in parts)
            where = f"{shard.path.name}, conversation 0: {length} tokens, {trained} trained"
            found.append({"where": where, "text": text})
        return found

    def _token(self, token: int) -> str:
        name = None if self._tokenizer is None else self._tokenizer.id_to_token(token)
        return str(token) if name is None else f"{name} ({token})"


def read_conversations(
    shard: Shard, most: int, decode: Callable[[list[int]], str]
) -> Iterator[tuple[int, int, list[tuple[str, bool]]]]:
    """Yield up to `most` conversations from the start of a shard.

    Each is its number of tokens, the number of its targets, and its text in parts: (text, True if
    these tokens are targets).
    """
    bounds = shard.documents().bounds()[: most + 1].tolist()
    ids = map_file(shard.path).view(shard.dtype)
    all_masks = read_mask(shard)
    for start, stop in pairwise(bounds):
        mask = all_masks[start:stop] != 0
        changes = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), stop - start]
        parts = [
            (decode(ids[start + first : start + last].tolist()), bool(mask[first]))
            for first, last in pairwise(changes)
        ]
        yield stop - start, int(mask.sum()), parts
