"""Packing of whole conversations over all shards together.

No conversation is divided between bins, and the two conversations of a preference pair are in the
same bin, one after the other. Every bin has at least one target, because conversations
without targets are left out. So every batch has targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dtt.artifacts.manifest import Record
from dtt.base.errors import ConfigError, DamagedError
from dtt.data.samples.packing import Ints, Packed, Packing, best_fit, grouped, least_slack
from dtt.data.samples.token_shards import Shard, TokenFiles
from dtt.data.token_file import Bytes, map_file

LEAST_SLACK_CAPACITY = 4097
"""Largest sample, in tokens, that is filled by minimum bin slack. In larger ones, best fit leaves
less than 0.5 % empty, and minimum bin slack would take minutes for a million conversations."""
VERSION = 1
"""Version of this packing; part of the key of its cache."""

TooLong = Literal["drop", "stop", "whole_turns"]


class PackingCounts(Record):
    """The numbers of conversations in token files, packed into samples, and left out.

    With preference data, pairs are counted instead of conversations.
    """

    pairs: bool = False
    """True if the conversations are preference pairs."""
    conversations: int = 0
    """Number of conversations in the token files."""
    packed: int = 0
    """Number of conversations in samples, including those that were cut."""
    too_long: int = 0
    """Number that were left out because they are longer than a sample."""
    cut: int = 0
    """Number that were cut after the last answer that fits."""
    without_targets: int = 0
    """Number that were left out because none of their tokens is a target."""
    shortest: int = 0
    """Tokens of the shortest conversation."""
    longest: int = 0
    """Tokens of the longest conversation."""
    tokens: int = 0
    """Number of tokens in all samples."""
    targets: int = 0
    """Number of targets in all samples."""

    @property
    def noun(self) -> str:
        """The plural noun for the counted items."""
        return "preference pairs" if self.pairs else "conversations"

    def lines(self, seq_len: int) -> Iterator[str]:
        """Yield a line for each reason why conversations are not used, or only in part."""
        of = f"of {self.conversations:,} {self.noun}"
        longer = f"{of} are longer than train.seq_len = {seq_len}"
        if self.too_long:
            yield f"{self.too_long:,} {longer}: left out"
        if self.cut:
            yield f"{self.cut:,} {longer}: cut after an answer"
        if self.without_targets:
            yield f"{self.without_targets:,} {of} have no trained tokens: left out"


class _Items(NamedTuple):
    """Conversations, or pairs of them, in the order of the token files."""

    start: Ints
    """[items]: first token in the shard, or in the stream of all shards."""
    tokens: Ints
    """[items]: number of tokens in the file."""
    length: Ints
    """[items]: number of tokens to pack: fewer if it is cut after an answer."""
    targets: Ints
    has_targets: npt.NDArray[np.bool_]
    """[items]: True if it has a target, and so has the other conversation of a pair."""
    chosen: Ints
    """[items]: number of tokens of the first conversation: of the chosen one of a pair."""


def pack_conversations(
    files: TokenFiles, capacity: int, too_long: TooLong, how: Packing = "best-fit"
) -> tuple[Packed, Ints, PackingCounts]:
    """Return the packing of all shards, the targets of each bin [bins], and the counts."""
    none = np.empty(0, dtype=np.int64)
    # The empty columns keep concatenate valid without shards.
    found = [_Items(none, none, none, none, none.astype(np.bool_), none)]
    base = 0
    for shard in files.shards:
        items = _items(shard, capacity, too_long, pairs=files.are_pairs)
        # Positions in the stream of all shards: bins mix conversations of different files.
        found.append(items._replace(start=items.start + base))
        base += shard.tokens
    every = _Items(*map(np.concatenate, zip(*found, strict=True)))
    fits = every.length <= capacity
    used = fits & every.has_targets
    whole = _Items(*(column[used] for column in every))  # type: ignore[arg-type]
    if how == "none":
        bins = np.arange(len(whole.length))
    elif capacity <= LEAST_SLACK_CAPACITY:
        bins = least_slack(whole.length, capacity)
    else:
        bins = best_fit(whole.length, capacity)
    packed, order = grouped(whole.start, whole.length, bins)
    targets = np.add.reduceat(whole.targets[order], packed.first[:-1]) if len(order) else none
    longest = int(every.tokens.max(initial=0))
    counts = PackingCounts(
        pairs=files.are_pairs,
        conversations=len(used),
        packed=len(order),
        too_long=int((~fits).sum()),
        cut=int((whole.length < whole.tokens).sum()),
        without_targets=int((fits & ~used).sum()),
        shortest=int(every.tokens.min(initial=longest)),
        longest=longest,
        tokens=int(whole.length.sum()),
        targets=int(whole.targets.sum()),
    )
    if files.are_pairs:  # attention keeps to a conversation, so each of a pair is a piece
        chosen = whole.chosen[order]
        start = np.stack([packed.start, packed.start + chosen], axis=1)
        length = np.stack([chosen, packed.length - chosen], axis=1)
        packed = Packed(2 * packed.first, start.reshape(-1), length.reshape(-1))
    return packed, targets, counts


def _items(shard: Shard, capacity: int, too_long: TooLong, *, pairs: bool) -> _Items:
    """Return the conversations of a shard, or its `pairs`, those too long cut by `whole_turns`.

    Raises ConfigError if `too_long` is `stop` and one does not fit.
    """
    bounds = document_bounds(shard)
    mask = read_mask(shard)
    # Empty documents have no first token to exclude.
    start, tokens = bounds[:-1], np.diff(bounds)
    start, tokens = start[tokens > 0], tokens[tokens > 0]
    targets: Ints = start if not len(start) else np.add.reduceat(mask, start, dtype=np.int64)
    # The first token of a conversation is predicted from another one, so it never counts.
    targets = targets - mask[start]
    has_targets, chosen = targets > 0, tokens
    if pairs:
        # Documents 2i and 2i + 1 are a pair: from here on, one item with the sum of both lengths.
        start, chosen, has_targets = start[::2], tokens[::2], has_targets[::2] & has_targets[1::2]
        tokens, targets = (column.reshape(-1, 2).sum(axis=1) for column in (tokens, targets))
    long = np.flatnonzero(tokens > capacity)
    if len(long) and too_long == "stop":
        noun = PackingCounts(pairs=pairs).noun
        raise ConfigError(
            f"{len(long)} {noun} are longer than train.seq_len = {capacity - 1}",
            where=f"{shard.path}, {noun.removesuffix('s')} {long[0]}",
            why=f"the longest of the file has {tokens.max()} tokens",
            next=f"train.seq_len={tokens.max() - 1}, or chat.too_long=drop"
            + ("" if pairs else ", or whole_turns"),
        )
    length = tokens.copy()
    for i in long.tolist() if too_long == "whole_turns" else ():
        # One token more than fits, to see whether an answer ends exactly at the limit.
        seen = mask[start[i] : start[i] + capacity + 1]
        # Position j is an answer's last target if j + 1 is none.
        ends = np.flatnonzero((seen[1:capacity] != 0) & (seen[2 : capacity + 1] == 0))
        if len(ends):
            length[i] = kept = int(ends[-1]) + 2
            # The first token is excluded here as well.
            targets[i] = int(seen[1:kept].sum())
    return _Items(start, tokens, length, targets, has_targets, chosen)


def document_bounds(shard: Shard) -> Ints:
    """Return the first token of each document, then the number of tokens.

    Raises DamagedError if the documents are not contiguous or do not cover the shard.
    """
    bounds = shard.documents().bounds()
    if bounds[0] != 0 or bounds[-1] != shard.tokens or (np.diff(bounds) < 0).any():
        raise DamagedError(
            "the documents of a token file are not contiguous",
            where=shard.path,
            why="its index does not match it",
        )
    return bounds


def read_mask(shard: Shard) -> Bytes:
    """Return the loss mask of a shard, memory-mapped, uint8 [tokens].

    Raises DamagedError if it does not have one byte per token, each 0 or 1.
    """
    assert shard.mask is not None
    mask = map_file(shard.mask)
    if len(mask) != shard.tokens or (len(mask) and mask.max() > 1):
        raise DamagedError(
            "a loss mask does not match its token file",
            where=shard.mask,
            why=f"{len(mask)} bytes for {shard.tokens} tokens; every byte must be 0 or 1",
            next="create it again: dtt tokenize",
        )
    return mask
