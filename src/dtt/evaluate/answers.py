"""Greedy answers to held-out conversations, and the share of them that stop by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

import numpy as np
import torch
from torch import nn

from dtt.base.errors import Diverged
from dtt.base.log import log
from dtt.base.targets import IGNORE_INDEX
from dtt.data.samples.protocol import Source
from dtt.data.samples.token_source import TokenSource
from dtt.mesh.dist import World
from dtt.model.decoder import Decoder
from dtt.model.generate import generate_batch, generate_uncached

Together = tuple[nn.Module, int, Callable[[int], int]]
"""For a sharded model: the module that all ranks must call together, the number that its sequence
lengths must be a multiple of, and a function that broadcasts rank 0's token to all ranks."""


def first_prompts(sources: Sequence[Source], count: int) -> list[list[int]]:
    """Return the prompts of `count` conversations, taken from the sources in turn.

    A prompt is a conversation up to its first target, and so ends with the header of its first
    answer. Sources of text, and conversations without targets, are left out. The choice depends on
    the order of the samples only, which the seed determines.
    """
    rounds = zip_longest(*(_prompts(source, count) for source in sources))
    return list(islice((prompt for prompt in chain.from_iterable(rounds) if prompt), count))


def _prompts(source: Source, count: int) -> Iterator[list[int]]:
    """Yield the prompts of a source until `count` were found."""
    found = 0
    if not (isinstance(source, TokenSource) and source.packing_counts is not None):  # text
        return
    for sample in source.order(0, len(source)):
        rows = source.read(np.array([sample], dtype=np.uint64))
        assert rows.doc_ids is not None
        ids, conversation = rows.ids[0], rows.doc_ids[0]
        targets = np.flatnonzero(rows.targets[0] != IGNORE_INDEX) + 1
        for number in np.unique(conversation[targets]).tolist():
            if found == count:
                return
            first = targets[conversation[targets] == number][0]
            yield ids[:first][conversation[:first] == number].tolist()
            found += 1


@dataclass(frozen=True)
class AnswerEvaluator:
    """Generator of greedy answers to held-out conversations, distributed over the ranks."""

    prompts: Sequence[Sequence[int]]
    stop_tokens: tuple[int, ...]
    max_new_tokens: int
    """Maximum tokens of an answer; a longer one counts as not stopping."""
    batch: int
    """Answers that a rank generates at once."""
    world: World

    def stop_rate(
        self, model: Decoder, stop: Callable[[], bool], together: Together | None = None
    ) -> float | None:
        """Return the share of answers that end with a stop token.

        All ranks call this together. Without `together`, each rank answers some of the prompts with
        a KV cache; a sharded model answers one prompt at a time, without one. Greedy decoding draws
        no random numbers, so training is not affected. Return None as soon as `stop()`, which every
        rank calls between batches, is true.
        """
        stopped = torch.zeros((), dtype=torch.float64, device=self.world.device)
        ranks = self.world.size if together is None else 1
        rows = 1 if together is not None else self.batch * ranks
        # Every token has a different shape, and each would be compiled.
        with torch.compiler.set_stance("force_eager"):
            for start in range(0, len(self.prompts), rows):
                if stop():
                    return None
                chunk = self.prompts[start : start + rows]
                if together is not None:
                    stopped += self._stopped_together(model, chunk[0], together) / self.world.size
                elif own := chunk[self.world.rank :: ranks]:
                    stopped += self._stopped(model, own)
        return float(self.world.sum_(stopped)) / len(self.prompts)

    def _stopped(self, model: Decoder, prompts: Sequence[Sequence[int]]) -> int:
        """Return the number of prompts whose answers stop."""
        lengths = [0] * len(prompts)
        tokens = generate_batch(
            model,
            prompts,
            max_new_tokens=self.max_new_tokens,
            temperature=0,
            stop_ids=self.stop_tokens,
            generators=[None] * len(prompts),
        )
        try:
            for i, _ in tokens:
                lengths[i] += 1
        except Diverged as error:  # the guard decides what to do about it, on all ranks
            log.warning("no answers: %s", error)
            return 0
        limits = [self._limit(model, prompt) for prompt in prompts]
        return sum(length < limit for length, limit in zip(lengths, limits, strict=True))

    def _stopped_together(self, model: Decoder, prompt: Sequence[int], together: Together) -> int:
        """Return 1 if the answer of a sharded model to a prompt stops, else 0."""
        tokens = generate_uncached(
            *together,
            model.arch.max_seq_len,
            prompt,
            max_new_tokens=self.max_new_tokens,
            temperature=0,
            top_p=1.0,
            stop_ids=self.stop_tokens,
            generator=torch.Generator(self.world.device),
        )
        try:
            return int(sum(1 for _ in tokens) < self._limit(model, prompt))
        except Diverged as error:
            log.warning("no answers: %s", error)
            return 0

    def _limit(self, model: Decoder, prompt: Sequence[int]) -> int:
        """Return the number of tokens of an answer that does not stop."""
        return min(self.max_new_tokens, model.arch.max_seq_len - len(prompt))
