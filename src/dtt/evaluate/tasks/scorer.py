"""Scores of options and greedy answers of a model, distributed over ranks.

A question is a tree: the tokens that all its options begin with, which are computed once, and a
branch for each option. Models whose attention cannot do this compute a row for each option.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn

from dtt.base.errors import Diverged
from dtt.base.targets import IGNORE_INDEX
from dtt.data.conversations.rows import common_length
from dtt.evaluate.validation import evaluating
from dtt.mesh.dist import World
from dtt.model.contract import Model
from dtt.model.decoder import Decoder
from dtt.model.decoding import whole_passes
from dtt.model.generate import generate_batch, make_decoding
from dtt.model.token_context import Context, GivenContext
from dtt.model.tree_attention import PackedTrees, make_tree_attention_fns
from dtt.parallel.apply import autocast
from dtt.parallel.pipelining import Pipeline
from dtt.parallel.sharded_model import whole_copy

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


@dataclass
class OptionBatch:
    """Options to compute together, and what to score in them."""

    rows: list[Ids] = field(default_factory=lambda: [(0,)])
    trees: PackedTrees | None = None
    """Computed instead of `rows`, if there are any."""
    scored: list[tuple[int, int, Ids, Sequence[int]]] = field(default_factory=list)
    """Question and number of each option, its continuation, and the index in the batch, row by row,
    of the token before each of the continuation's."""

    def score(self, question: int, number: int, option: Option, path: Sequence[int]) -> None:
        """Score an option whose tokens have the indices `path`."""
        # The first target is predicted from the last token of the context.
        before = path[len(option.context) - 1 :]
        self.scored.append((question, number, option.continuation, before))


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


GPU_MULTIPLE = 1024
"""Tokens that batches on a GPU are padded to a multiple of: each length is compiled once."""


def never(*_: int) -> bool:
    """Return False: no stop is requested, or no answer is complete."""
    return False


@dataclass(frozen=True)
class Scorer:
    """Scorer of options, distributed over the ranks."""

    model: Model | Pipeline
    """The unwrapped model; with `collective`, its parameters are sharded in place. Data and context
    parallelism need no wrapper, because each rank scores complete sequences."""
    world: World
    _: KW_ONLY
    batch_tokens: int
    """Maximum number of tokens of a batch; no batch has padding in between."""
    multiple: int = 1
    """Number of ranks of tensor parallelism: they score the same batches, whose length is a
    multiple of it."""
    pipeline: int = 1
    """Number of ranks of a pipeline, the outermost dimension: they score the same batches."""
    collective: bool = False
    """True if parameters are sharded: all ranks then make the same number of calls."""
    precision: str = "fp32"

    def score(
        self, questions: Sequence[Sequence[Option]], stop: Callable[[], bool] = never
    ) -> list[list[OptionScore]] | None:
        """Return the scores of all options of all questions, on every rank.

        All ranks call this together with the same questions, at least enough for a batch per rank
        to keep all of them busy. Return None as soon as `stop()`, which every rank calls between
        batches, is true. Batches depend on the questions only, so the number of data-parallel ranks
        does not change a bit of the scores. A model that has diverged has scores that are NaN.
        """
        # dtt's decoder computes the tokens that options share once.
        shares = isinstance(self.model, Decoder | Pipeline)
        batches = list((tree_batches if shares else row_batches)(questions, self.batch_tokens))
        copies = self.world.size // self.pipeline
        replicas = copies // self.multiple
        found: list[tuple[int, int, OptionScore]] = []
        with forward_only(self.model, self.world.device):
            for first in range(0, len(batches), replicas):
                if stop():
                    return None
                mine = first + self.world.rank % copies // self.multiple
                if mine < len(batches):
                    found += self._scores(batches[mine])
                elif self.collective:  # the weights are gathered from all ranks
                    self._scores(OptionBatch(trees=PackedTrees() if shares else None))
        scores = [[OptionScore(0.0, greedy=True)] * len(options) for options in questions]
        for part in self.world.gather(found):
            for question, option, score in part:
                scores[question][option] = score
        return scores

    def _scores(self, batch: OptionBatch) -> list[tuple[int, int, OptionScore]]:
        """Return the question, the option and the score of each option of a batch."""
        device = self.world.device
        context: Context | None = None
        if batch.trees is None:
            tokens_BT = torch.tensor(batch.rows, device=device)
        else:
            batch.trees.pad(self.multiple * (GPU_MULTIPLE if device.type == "cuda" else 1))
            tokens_BT = torch.tensor([batch.trees.tokens], device=device)
            positions_BT = torch.tensor([batch.trees.positions], device=device)
            attention_fns = make_tree_attention_fns(self.model.arch, batch.trees, device)
            context = GivenContext(tokens_BT, positions_BT, attention_fns)
        # Several options may have a target after the same token: a column for each.
        candidates = Counter[int]()
        rows = [place for *_, before in batch.scored for place in before]
        columns = []
        for place in rows:
            columns.append(candidates[place])
            candidates[place] += 1
        width = max(candidates.values(), default=1)
        targets = [target for _, _, continuation, _ in batch.scored for target in continuation]
        targets_NC = torch.full((tokens_BT.numel(), width), IGNORE_INDEX)
        targets_NC[rows, columns] = torch.tensor(targets, dtype=torch.long)
        targets_BTC = targets_NC.view(*tokens_BT.shape, width).to(device)
        with autocast(device, self.precision):
            scores_BTC2 = self.model(tokens_BT, targets_BTC, context=context, reduction="scores")
        # The log-likelihood of each token, and 1.0 if it is the most likely one.
        scores_NC2 = scores_BTC2.flatten(0, 1).cpu()
        each = iter(scores_NC2[rows, columns].tolist())
        found: list[tuple[int, int, OptionScore]] = []
        for question, number, continuation, _ in batch.scored:
            nats, hits = zip(*islice(each, len(continuation)), strict=True)
            found.append((question, number, OptionScore(sum(nats), all(hits))))
        return found


@dataclass(frozen=True)
class Generator:
    """Generator of greedy answers in the dtype of the weights, distributed over the ranks."""

    model: Model | Pipeline
    world: World
    _: KW_ONLY
    batch_tokens: int
    """Maximum number of tokens of the prompts and answers that a rank generates at once."""
    multiple: int = 1
    """Number of ranks of tensor parallelism."""
    collective: bool = False
    """True if parameters are sharded: each rank then generates with a copy of all weights. Where
    memory does not suffice, all ranks generate one answer at a time, without a KV cache."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        until_ids: Collection[int],
        stop: Callable[[], bool] = never,
        complete: Callable[[int, int], bool] = never,
    ) -> list[list[int]] | None:
        """Return the greedy continuation of each prompt, on every rank.

        It ends before the first of `until_ids`, after `max_new_tokens`, at the end of the context,
        or with the token for which `complete(index of the prompt, token)` is true. All ranks call
        this together. Return None as soon as `stop()`, which every rank calls between batches, is
        true. Raise Diverged on every rank if logits are not finite.
        """
        answers: dict[int, list[int]] = {}
        failure: Diverged | None = None
        with forward_only(self.model, self.world.device):
            whole = whole_copy(self.model, self.world) if self.collective else self.model
            # One state for all batches, which share its memory and graphs.
            decoding = (
                whole_passes(self.model, self.multiple, self.world.from_first)
                if whole is None
                else make_decoding(whole)
            )
            batches = list(self._batches(prompts, max_new_tokens, one=whole is None))
            ranks = 1 if whole is None else self.world.size
            for first in range(0, len(batches), ranks):
                if stop():
                    return None
                for batch in batches[first : first + ranks][self.world.rank % ranks :][:1]:
                    found: list[list[int]] = [[] for _ in batch]
                    own = [prompts[i] for i in batch]
                    ended = set[int]()
                    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "decoding": decoding}
                    how |= {"generators": [None] * len(own), "temperature": 0, "ended": ended}
                    try:
                        for i, token in generate_batch(self.model, own, **how):
                            if token in until_ids:
                                ended.add(i)
                                continue
                            found[i].append(token)
                            if complete(batch[i], token):
                                ended.add(i)
                    except Diverged as error:  # the other ranks do not know yet
                        failure = error
                    answers.update(zip(batch, found, strict=True))
        for part, failed in self.world.gather((answers, failure)):
            if failed is not None:
                raise failed
            answers.update(part)
        return [answers[i] for i in range(len(prompts))]

    def _batches(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, one: bool
    ) -> Iterator[list[int]]:
        """Yield the indices of prompts to answer at once, or `one` by one, the longest first."""
        batch: list[int] = []
        for i in sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i)):
            longest = len(prompts[batch[0] if batch else i]) + max_new_tokens
            if batch and (one or (len(batch) + 1) * longest > self.batch_tokens):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch


@contextmanager
def forward_only(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Disable gradients, dropout and, on a CPU, compiled blocks: each batch has its own shapes.

    On a GPU, FlexAttention must be compiled. Afterwards, the model is in the mode it was in.
    """
    stance = "default" if device.type == "cuda" else "force_eager"
    with torch.no_grad(), evaluating(model), torch.compiler.set_stance(stance):
        yield
