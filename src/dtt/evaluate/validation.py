"""Validation loss and samples. Evaluation leaves the model unchanged."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from dtt.base.errors import Diverged
from dtt.base.log import log
from dtt.config.train import SAMPLE_TEMPERATURE, TrainConfig
from dtt.data.samples.dataset import Dataset
from dtt.data.samples.loader import BatchReader, MicroBatch
from dtt.data.samples.protocol import SampleSource
from dtt.data.text.continuation import Continuation
from dtt.mesh.mesh import LOSS, Mesh
from dtt.model.contract import Model
from dtt.model.decoding import whole_passes
from dtt.model.generate import generate, in_eval_mode
from dtt.model.output import TEXT_BYTES, Output
from dtt.optim.ema import Ema
from dtt.parallel.apply import release
from dtt.track.base import Record

Together = tuple[nn.Module, int, Callable[[list[int]], list[int]]]
"""For a sharded model: the module that all ranks must call together, the number that its sequence
lengths must be a multiple of, and a function that broadcasts rank 0's token to all ranks."""


@dataclass(frozen=True)
class HeldOut:
    """The held-out samples of one source."""

    source: SampleSource
    count: int
    """Number of samples to evaluate, from the start of the source."""
    terms: int
    """Number of terms of their loss: targets, or preference pairs."""
    share: float
    """Weight of the source in the overall loss; the shares of all sources sum to 1."""


def held_out(dataset: Dataset, count: int) -> list[HeldOut]:
    """Divide `count` samples equally among the sources that have held-out text.

    A source without targets in its samples is left out, with a warning: it has no mean loss.
    The share of a source is its share of the samples of the whole run, at every step: overall
    losses of different steps can be compared although mixture weights change in between.
    """
    shares = dataset.shares()
    sources = [s for s in dataset.validation if s is not None and shares[s.name] > 0]
    # Equal numbers, whatever the weights: each source's loss has about the same precision.
    each = max(1, count // max(1, len(sources)))
    parts = []
    for source in sources:
        samples = np.arange(min(each, len(source)), dtype=np.uint64)
        terms = source.counts(samples).terms
        if terms:
            parts.append(HeldOut(source, len(samples), terms, shares[source.name]))
        else:
            log.warning("no validation of %s: its held-out samples have no targets", source.name)
    total = sum(part.share for part in parts)
    return [replace(part, share=part.share / total) for part in parts]


@dataclass(frozen=True)
class Evaluator:
    """Mean losses and metrics of the held-out samples of every source, measured by all ranks."""

    parts: Sequence[HeldOut]
    reader: BatchReader
    module: nn.Module
    """The module that `measure` evaluates."""
    measure: Callable[[MicroBatch], Output]
    """Function that returns the losses and metrics of a micro-batch, as sums over its terms."""
    mesh: Mesh = field(default_factory=Mesh)
    in_pairs: bool = False
    """True if the loss is a mean over preference pairs, which has no bits per byte."""

    def record(self, step: int, stop: Callable[[], bool], ema: Ema | None = None) -> Record | None:
        """Return the `eval` record of a step: means per term, weighted by source.

        With several sources, `losses` has the loss of each; with `ema`, `ema_loss` is the loss of
        the averaged weights. Return None as soon as `stop()`, which every rank calls between
        batches, is true.
        """
        means = self._means(stop)
        if means is None:
            return None
        record: Record = {"kind": "eval", "step": step, **self._overall(means)}
        if len(self.parts) > 1:
            losses = zip(self.parts, means, strict=True)
            record["losses"] = {part.source.name: mean["loss"] for part, mean in losses}
        # The same samples with averaged weights; they are exchanged back before training continues.
        if ema is not None:
            with ema.swapped():
                averaged = self._means(stop)
            if averaged is None:
                return None
            record["ema_loss"] = self._overall(averaged)["loss"]
        return record

    def _means(self, stop: Callable[[], bool]) -> list[dict[str, float]] | None:
        """Return the means of each source by name; None as soon as `stop()` is true."""
        # fp64: sums of millions of losses in fp32 would lose the digits in which steps differ.
        sums: list[dict[str, Tensor]] = [{} for _ in self.parts]
        rows = self.reader.micro_batch * self.reader.size
        with evaluating(self.module):
            for total, part in zip(sums, self.parts, strict=True):
                # One micro-batch per rank at a time.
                for first in range(0, part.count, rows):
                    samples = np.arange(first, min(first + rows, part.count), dtype=np.uint64)
                    # All ranks get the same answer, so all leave in the same iteration.
                    if stop():
                        return None
                    # A rank without rows of its own gets a sample without targets: FSDP2 needs
                    # every rank in each forward pass.
                    for micro_batch in self.reader.read_on_all(part.source, samples):
                        for name, value in self.measure(micro_batch).named().items():
                            total[name] = total.get(name, 0.0) + value.double()
        names = list(sums[0])
        # One all-reduce for all sources, at the end. Ranks that share a sequence have parts of its
        # values.
        stacked = torch.stack([torch.stack([total[name] for name in names]) for total in sums])
        return [
            # A mean over terms, not of batch means: batches have different numbers of them.
            {name: value / part.terms for name, value in zip(names, row, strict=True)}
            for part, row in zip(self.parts, self.mesh.sum(stacked, LOSS).tolist(), strict=True)
        ]

    def _overall(self, means: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
        """Return the means over all sources by name, with `bits_per_byte` if it is known."""
        overall: dict[str, float | None] = {
            name: self._mean([one[name] for one in means])
            for name in means[0]
            if name != TEXT_BYTES
        }
        loss = self._mean([one["loss"] for one in means])
        # Without a table of bytes per token, use the mean over the source's text.
        text = [
            one.get(TEXT_BYTES) or part.source.bytes_per_token or 0.0
            for one, part in zip(means, self.parts, strict=True)
        ]
        known = all(text) and not self.in_pairs
        # The ratio of the two means: a mean of the sources' ratios would weigh them differently.
        bits_per_byte = loss / math.log(2) / self._mean(text) if known else None
        return overall | {"bits_per_byte": bits_per_byte}

    def _mean(self, values: Sequence[float]) -> float:
        """Return the mean of the values of all sources, weighted by their shares."""
        return sum(part.share * value for part, value in zip(self.parts, values, strict=True))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout inside the context; afterwards, free the weights that FSDP has gathered.

    The next forward pass must gather again, because EMA may have replaced the weights.
    """
    try:
        with in_eval_mode(model):
            yield
    finally:
        # FSDP2 leaves the root gathered after a forward pass, and EMA changes the shards behind it.
        release(model)


@dataclass(frozen=True)
class Sampler:
    """Generator of continuations of a prompt, during training.

    The text depends on the weights, the seed and the step only.
    """

    config: TrainConfig
    tokenizer: Tokenizer
    prompt: Sequence[int]
    """Token ids of the prompt, at least one."""
    shown: str
    """Text of the prompt in the record."""
    stop_tokens: tuple[int, ...]
    """Ids that end a sample."""
    seed: int

    def record(
        self,
        model: Model,
        step: int,
        together: Together | None = None,
    ) -> Record:
        """Generate and return the `sample` record; the prompt alone if the model has diverged.

        `together` is required for a sharded model, and None otherwise.
        """
        device = next(model.parameters()).device
        how: dict[str, Any] = {
            "max_new_tokens": self.config.sample_tokens,
            "temperature": SAMPLE_TEMPERATURE,
            "top_p": 0.95,
            # The step is in the seed: the sample does not depend on how often a run was resumed.
            "generator": torch.Generator(device).manual_seed((self.seed + step) % 2**63),
        }
        if together is not None:
            how["decoding"] = whole_passes(*together)
        tokens = generate(model, self.prompt, **how)
        reply = Continuation(self.tokenizer, list(self.prompt), self.stop_tokens)
        called = model if together is None else together[0]
        # Every token has a different shape, and each would be compiled.
        with in_eval_mode(called), torch.compiler.set_stance("force_eager"):
            try:
                text = "".join(reply.stream(tokens))
            except Diverged as error:  # the guard decides what to do about it, on all ranks
                log.warning("no sample: %s", error)
                text = ""
        return {
            "kind": "sample",
            "step": step,
            "temperature": SAMPLE_TEMPERATURE,
            "prompt": self.shown,
            "text": self.shown + text,
        }


PROMPT = re.compile(r"(?:\S+ +){0,4}\S+")
"""The first five words of a line."""
MAX_PROMPT = 32
"""Maximum number of characters of a prompt from held-out text: it must fit in a command line."""

MIN_LETTERS = 6
"""Minimum number of letters and digits of such a prompt; a line of dashes has none."""


def first_words(sources: Sequence[SampleSource], tokenizer: Tokenizer, end: int) -> str:
    """Return the first words of a document, as the prompt of samples; "" if there are none.

    It is the first document with printable text in the first samples of the sources, so it does
    not change during a run or when a run resumes. `end` is the end-of-document token.
    """
    for source in sources:
        for number in range(min(8, len(source))):
            ids = source.read(np.array([number], dtype=np.uint64)).ids[0]
            ids = ids[ids >= 0]  # without padding
            starts = [0] if number == 0 else []
            starts += [int(i) + 1 for i in np.flatnonzero(ids == end)]
            for start in starts:
                following = ids[start : start + 64].tolist()
                document = following[: following.index(end)] if end in following else following
                if prompt := _opening(tokenizer.decode(document)):
                    return prompt
    return ""


def _opening(text: str) -> str:
    """Return the first words of the first line with some text; "" if there is none."""
    text = text.split("\ufffd")[0]  # the tokens may end inside of a character
    for line in text.splitlines():
        found = PROMPT.match(line.strip())
        words = found.group() if found is not None else ""
        if len(words) > MAX_PROMPT:
            words = words[: MAX_PROMPT + 1].rpartition(" ")[0].rstrip() or words[:MAX_PROMPT]
        if words.isprintable() and sum(map(str.isalnum, words)) >= MIN_LETTERS:
            return words
    return ""
