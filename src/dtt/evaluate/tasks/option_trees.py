"""Batches of options as token trees, so that tokens which options share are computed once.

A question is a tree: the tokens that all its options begin with, and a branch for each option.
Questions that begin alike, as with a fixed few-shot prompt, are branches of a common tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat

from dtt.evaluate.tasks.options import Option
from dtt.model.tree_attention import TokenTree

SHARED = 32
"""Tokens that questions must have in common to become branches of a common tree."""


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
    prefix: tuple[int, ...]
    """The tokens that all options begin with."""
    branches: tuple[tuple[int, ...], ...]
    """The other tokens of each option."""

    @property
    def size(self) -> int:
        """Number of tokens to compute."""
        return len(self.prefix) + sum(map(len, self.branches))


@dataclass
class TreeBatch:
    """Trees to compute together, and what to score in them."""

    trees: list[TokenTree] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    size: int = 0
    """Number of tokens of the trees."""

    def add(self, rows: Sequence[OptionTree], shared: int) -> None:
        """Add questions; if there are several, as branches of one tree of `shared` tokens."""
        # A single question has nothing to share.
        if len(rows) < 2:
            shared = 0
        root = range(self.size, self.size + shared)
        self.size += shared
        trees = [self._add(row, root) for row in rows]
        self.trees += [TokenTree(rows[0].prefix[:shared], trees)] if shared else trees

    def _add(self, row: OptionTree, root: range) -> TokenTree:
        """Return the tree of a question below the tokens at `root`; add what to score in it."""
        prefix = row.prefix[len(root) :]
        own = range(self.size, self.size + len(prefix))
        self.size += len(prefix)
        for i, (option, branch) in enumerate(
            zip(row.options, row.branches, strict=True), row.first
        ):
            # Indices in the packed batch of all tokens of this option, shared ones included.
            path = [*root, *own, *range(self.size, self.size + len(branch))]
            self.size += len(branch)
            # The first target is predicted from the last token of the context.
            before = path[len(option.context) - 1 :]
            self.scored += map(
                ScoredToken, repeat(row.question), repeat(i), before, option.continuation
            )
        # An option of one token is scored from the prefix and has no branch.
        return TokenTree(prefix, [TokenTree(branch) for branch in row.branches if branch])


def tree_batches(questions: Sequence[Sequence[Option]], batch_tokens: int) -> Iterator[TreeBatch]:
    """Yield batches of at most `batch_tokens` tokens; a longer option is a batch by itself.

    They depend on the questions only. Questions are sorted by their tokens, so that those that
    begin alike are neighbours; a beginning that several batches share is computed in each.
    """
    batch = TreeBatch()
    rows = (
        row
        for i, options in enumerate(questions)
        if options
        for row in _trees(i, 0, options, batch_tokens)
    )
    # Sorting brings equal beginnings together, for any order of the questions.
    for shared, group in _groups(sorted(rows, key=lambda row: row.prefix)):
        members, size = list[OptionTree](), 0
        for row in group:
            # The first member pays for the shared tokens, each further one only for its own.
            if batch.size + size + row.size - (shared if members else 0) > batch_tokens:
                batch.add(members, shared)
                if batch.trees:
                    yield batch
                    batch = TreeBatch()
                members, size = [], 0
            size += row.size - (shared if members else 0)
            members.append(row)
        batch.add(members, shared)
    if batch.trees:
        yield batch


def _trees(
    question: int, first: int, options: Sequence[Option], batch_tokens: int
) -> Iterator[OptionTree]:
    """Yield the tree of a question, or trees of parts of its options if it exceeds a batch."""
    # Halves, until a part fits: the context is then computed once per part.
    tree, half = _tree(question, first, options), len(options) // 2
    if tree.size <= batch_tokens or half == 0:
        yield tree
    else:
        yield from _trees(question, first, options[:half], batch_tokens)
        yield from _trees(question, first + half, options[half:], batch_tokens)


def _tree(question: int, first: int, options: Sequence[Option]) -> OptionTree:
    # The last token of an option is only a target, so it is no input.
    inputs = [(*option.context, *option.continuation[:-1]) for option in options]
    # All sorted sequences lie between the smallest and the largest, so what these two share, all
    # share.
    common = _common(min(inputs), max(inputs))
    branches = tuple(tokens[common:] for tokens in inputs)
    return OptionTree(question, first, options, inputs[0][:common], branches)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of tokens that two sequences begin with in common."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _groups(rows: Sequence[OptionTree]) -> Iterator[tuple[int, list[OptionTree]]]:
    """Yield sorted rows in groups, with the number of tokens that a group has in common."""
    group, shared = list(rows[:1]), 0
    for row, following in pairwise(rows):
        common = _common(row.prefix, following.prefix)
        if common < SHARED:
            yield shared, group
            group, shared = [following], 0
        else:
            # A group shares what its least similar neighbours share.
            shared = min(shared or common, common)
            group.append(following)
    if group:
        yield shared, group
