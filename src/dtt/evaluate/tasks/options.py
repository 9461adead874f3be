"""Options that a model scores, and batches of them: trees, or rows.

A question is a tree: the tokens that all its options begin with, which are computed once, and a
branch for each option. Models whose attention cannot do this compute a row for each option.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dtt.data.conversations.rows import common_length
from dtt.model.tree_attention import PackedTrees

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Option:
    """A continuation to score, and its context, as token ids; neither is empty."""

    context: Ids
    continuation: Ids

    @property
    def inputs(self) -> Ids:
        """The tokens to compute: the last one is only a target."""
        return (*self.context, *self.continuation[:-1])


@dataclass(frozen=True)
class OptionScore:
    """The score of an option."""

    log_likelihood: float
    """Sum of the log-probabilities of the continuation's tokens, in nats."""
    greedy: bool
    """True if each token of the continuation is the most likely one."""


class ScoredToken(NamedTuple):
    """A token of an option's continuation to score."""

    question: int
    option: int
    place: int
    """Index in the batch, row by row, of the token before it."""
    target: int


@dataclass
class OptionBatch:
    """Options to compute together, and what to score in them."""

    rows: list[Ids] = field(default_factory=lambda: [(0,)])
    trees: PackedTrees | None = None
    """Computed instead of `rows`, if there are any."""
    scored: list[ScoredToken] = field(default_factory=list)

    def score(self, question: int, number: int, option: Option, path: Sequence[int]) -> None:
        """Score an option whose tokens have the indices `path`."""
        # The first target is predicted from the last token of the context.
        before = path[len(option.context) - 1 :]
        for index, target in zip(before, option.continuation, strict=True):
            self.scored.append(ScoredToken(question, number, index, target))


def row_batches(questions: Sequence[Sequence[Option]], batch_tokens: int) -> Iterator[OptionBatch]:
    """Yield batches of at most `batch_tokens` tokens with padding, those of long options first."""
    options = [
        (q, i, option) for q, found in enumerate(questions) for i, option in enumerate(found)
    ]
    # The sort is stable, so batches depend on the questions only.
    options.sort(key=lambda one: -len(one[2].inputs))
    while options:
        width = len(options[0][2].inputs)
        rows = max(1, batch_tokens // width)
        batch = OptionBatch([])
        for row, (question, number, option) in enumerate(options[:rows]):
            inputs = option.inputs
            # What follows the last token of a row does not change what comes before.
            batch.rows.append((*inputs, *(width - len(inputs)) * (0,)))
            start = row * width
            batch.score(question, number, option, range(start, start + len(inputs)))
        yield batch
        options = options[rows:]


def tree_batches(questions: Sequence[Sequence[Option]], batch_tokens: int) -> Iterator[OptionBatch]:
    """Yield batches of at most `batch_tokens` tokens; a longer option is a batch by itself.

    They depend on the questions only.
    """
    trees = PackedTrees()
    batch = OptionBatch(trees=trees)
    for question, options in enumerate(questions):
        for part in _parts(options, range(len(options)), batch_tokens):
            inputs = [options[i].inputs for i in part]
            if batch.scored and len(trees.tokens) + _size(inputs) > batch_tokens:
                yield batch
                trees = PackedTrees()
                batch = OptionBatch(trees=trees)
            shared = _shared(inputs)
            paths = trees.add(inputs[0][:shared], [tokens[shared:] for tokens in inputs])
            for i, path in zip(part, paths, strict=True):
                batch.score(question, i, options[i], path)
    if batch.scored:
        yield batch


def _parts(options: Sequence[Option], numbers: range, batch_tokens: int) -> Iterator[range]:
    """Yield the numbers of the options of each tree: all, or parts if they exceed a batch."""
    half = len(numbers) // 2
    # Halves, until a part fits: the context is then computed once per part.
    if half and _size([options[i].inputs for i in numbers]) > batch_tokens:
        yield from _parts(options, numbers[:half], batch_tokens)
        yield from _parts(options, numbers[half:], batch_tokens)
    elif numbers:
        yield numbers


def _size(inputs: Sequence[Ids]) -> int:
    """Return the number of tokens to compute for options in one tree."""
    shared = _shared(inputs)
    return shared + sum(len(tokens) - shared for tokens in inputs)


def _shared(inputs: Sequence[Ids]) -> int:
    """Return the number of tokens that all sequences begin with."""
    # All lie between the smallest and the largest, so what these two share, all share.
    return common_length(min(inputs), max(inputs))
