"""Batches of options: token trees, so that tokens which options share are computed once, or rows.

A question is a tree: the tokens that all its options begin with, and a branch for each option.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dtt.evaluate.tasks.options import Option
from dtt.model.tree_attention import PackedTrees


@dataclass(frozen=True)
class ScoredToken:
    """A token of an option's continuation to score."""

    question: int
    option: int
    index: int
    """Index in the packed batch of the token before it."""
    target: int


@dataclass(frozen=True)
class OptionTree:
    """The input tokens of options of a question: of each all but the last, only a target."""

    question: int
    first: int
    """Index of the first of `options` in the question."""
    options: Sequence[Option]
    prefix: Sequence[int]
    """The tokens that all options begin with."""
    branches: Sequence[Sequence[int]]
    """The other tokens of each option; none for an option of one token."""

    @property
    def size(self) -> int:
        """Number of tokens to compute."""
        return len(self.prefix) + sum(map(len, self.branches))


@dataclass
class TreeBatch:
    """Trees to compute together, and what to score in them."""

    packed: PackedTrees = field(default_factory=PackedTrees)
    scored: list[ScoredToken] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of tokens of the trees."""
        return len(self.packed.tokens)

    def add(self, tree: OptionTree) -> None:
        """Add options of a question."""
        paths = self.packed.add(tree.prefix, tree.branches)
        for i, (option, path) in enumerate(zip(tree.options, paths, strict=True), tree.first):
            # The first target is predicted from the last token of the context.
            before = path[len(option.context) - 1 :]
            self.scored += [
                ScoredToken(tree.question, i, index, target)
                for index, target in zip(before, option.continuation, strict=True)
            ]


@dataclass
class RowBatch:
    """Options with a row each, for a model that cannot compute what they share once."""

    rows: list[Sequence[int]] = field(default_factory=lambda: [(0,)])
    scored: list[ScoredToken] = field(default_factory=list)

    @classmethod
    def of(cls, options: Sequence[tuple[int, int, Option]]) -> RowBatch:
        """Return a batch of options, each with the numbers of its question and of itself."""
        inputs = [(*option.context, *option.continuation[:-1]) for _, _, option in options]
        width = max(map(len, inputs))
        # What follows the last token of a row does not change what comes before.
        rows: list[Sequence[int]] = [(*row, *(width - len(row)) * (0,)) for row in inputs]
        scored = [
            ScoredToken(question, number, row * width + len(option.context) - 1 + i, target)
            for row, (question, number, option) in enumerate(options)
            for i, target in enumerate(option.continuation)
        ]
        return cls(rows, scored)


def row_batches(questions: Sequence[Sequence[Option]], batch_tokens: int) -> Iterator[RowBatch]:
    """Yield batches of at most `batch_tokens` tokens with padding, those of long options first."""
    options = [
        (q, i, option) for q, found in enumerate(questions) for i, option in enumerate(found)
    ]
    # The sort is stable, so batches depend on the questions only.
    options.sort(key=lambda one: -_length(one[2]))
    while options:
        rows = max(1, batch_tokens // _length(options[0][2]))
        yield RowBatch.of(options[:rows])
        options = options[rows:]


def _length(option: Option) -> int:
    """Return the number of input tokens: the last one is only a target."""
    return len(option.context) + len(option.continuation) - 1


def tree_batches(questions: Sequence[Sequence[Option]], batch_tokens: int) -> Iterator[TreeBatch]:
    """Yield batches of at most `batch_tokens` tokens; a longer option is a batch by itself.

    They depend on the questions only.
    """
    batch = TreeBatch()
    for i, options in enumerate(questions):
        for tree in _trees(i, 0, options, batch_tokens):
            if batch.scored and batch.size + tree.size > batch_tokens:
                yield batch
                batch = TreeBatch()
            batch.add(tree)
    if batch.scored:
        yield batch


def _trees(
    question: int, first: int, options: Sequence[Option], batch_tokens: int
) -> Iterator[OptionTree]:
    """Yield the tree of a question, or trees of parts of its options if it exceeds a batch."""
    if not options:
        return
    # The last token of an option is only a target, so it is no input.
    inputs = [(*option.context, *option.continuation[:-1]) for option in options]
    # All sorted sequences lie between the smallest and the largest, so what these two share, all
    # share.
    shared = _common(min(inputs), max(inputs))
    branches = [tokens[shared:] for tokens in inputs]
    tree, half = (
        OptionTree(question, first, options, inputs[0][:shared], branches),
        len(inputs) // 2,
    )
    # Halves, until a part fits: the context is then computed once per part.
    if tree.size <= batch_tokens or half == 0:
        yield tree
    else:
        yield from _trees(question, first, options[:half], batch_tokens)
        yield from _trees(question, first + half, options[half:], batch_tokens)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of tokens that two sequences begin with in common."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
