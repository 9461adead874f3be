"""Validation loss and samples. Evaluation leaves the model unchanged."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from dtt.base.errors import Diverged
from dtt.base.log import log
from dtt.base.targets import IGNORE_INDEX
from dtt.config.train import TrainConfig
from dtt.data.samples.dataset import Dataset
from dtt.data.samples.loader import BatchReader, MicroBatch
from dtt.data.samples.protocol import Samples, Source
from dtt.evaluate.answers import Together
from dtt.mesh.dist import World
from dtt.mesh.mesh import DATA, LOSS, Mesh
from dtt.model.decoder import Decoder
from dtt.model.generate import generate, generate_uncached
from dtt.optim.ema import Ema
from dtt.parallel.apply import autocast, release
from dtt.track.base import Record


@dataclass(frozen=True)
class HeldOut:
    """The held-out text of one source."""

    source: Source
    count: int
    """Number of samples to evaluate, from the start of the source."""
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
    counts = {source.name: min(each, len(source)) for source in sources}
    evaluated = []
    for source in sources:
        if source.targets(np.arange(counts[source.name], dtype=np.uint64)):
            evaluated.append(source)
        else:
            log.warning("no validation of %s: its held-out samples have no targets", source.name)
    total = sum(shares[source.name] for source in evaluated)
    return [HeldOut(s, counts[s.name], shares[s.name] / total) for s in evaluated]


@dataclass(frozen=True)
class Means:
    """Means over the held-out samples of a run."""

    overall: Mapping[str, float | None]
    """The loss and other metrics by name, over all sources."""
    losses: Sequence[float]
    """Loss of each source."""


def eval_record(
    parts: Sequence[HeldOut], step: int, measure: Callable[[], Means | None], ema: Ema | None
) -> Record | None:
    """Evaluate with `measure` and return the `eval` record.

    With several sources, `losses` has the loss of each; with `ema`, `ema_loss` is the loss of the
    averaged weights. Return None as soon as `measure` does: the evaluation was stopped, as every
    rank finds between batches.
    """
    means = measure()
    if means is None:
        return None
    record: Record = {"kind": "eval", "step": step, **means.overall}
    if len(parts) > 1:
        names = [part.source.name for part in parts]
        record["losses"] = dict(zip(names, means.losses, strict=True))
    # The same samples with averaged weights; they are exchanged back before training continues.
    if ema is not None:
        with ema.swapped():
            averaged = measure()
        if averaged is None:
            return None
        record["ema_loss"] = averaged.overall["loss"]
    return record


@dataclass(frozen=True)
class Evaluator:
    """Validation loss over the held-out text of every source, distributed over the ranks."""

    parts: Sequence[HeldOut]
    reader: BatchReader
    precision: str
    world: World
    mesh: Mesh = field(default_factory=Mesh)
    token_bytes: npt.NDArray[np.int64] | None = None
    """[vocab_size]: bytes of text of each token id; None if unknown."""

    def record(
        self, model: nn.Module, step: int, stop: Callable[[], bool], ema: Ema | None = None
    ) -> Record | None:
        """Return the record of mean loss, in nats per token and in bits per byte; `eval_record`."""
        return eval_record(self.parts, step, lambda: self._means(model, stop), ema)

    @cached_property
    def _token_bytes(self) -> Tensor | None:
        """`token_bytes` as a tensor on the device."""
        if self.token_bytes is None:
            return None
        return torch.from_numpy(self.token_bytes).to(self.world.device)

    @torch.no_grad()
    def _means(self, model: nn.Module, stop: Callable[[], bool]) -> Means | None:
        """Measure each source; return None as soon as `stop()` is true."""
        # fp64: sums of millions of losses in fp32 would lose the digits in which steps differ.
        totals = torch.zeros(len(self.parts), 3, device=self.world.device, dtype=torch.float64)
        with evaluating(model):
            for total, part in zip(totals, self.parts, strict=True):
                for samples in chunks(self.reader, part.count):
                    # All ranks get the same answer, so all leave in the same iteration.
                    if stop():
                        return None
                    # A rank without rows of its own gets a sample without targets: FSDP2 needs
                    # every rank in each forward pass.
                    for micro_batch in self.reader.read_on_all(part.source, samples):
                        total += self._loss(model, micro_batch)
        losses, bytes_per_token = [], []
        # For all sources together, at the end. Ranks that share a sequence have parts of its loss,
        # but all of its targets.
        sums = self.mesh.sum(totals[:, 0].clone(), LOSS), self.mesh.sum(totals[:, 1:].clone(), DATA)
        for part, loss, (tokens, text_bytes) in zip(
            self.parts, *(found.tolist() for found in sums), strict=True
        ):
            # A mean over tokens, not of batch means: batches have different numbers of targets.
            losses.append(loss / tokens)
            # Without a table of bytes per token, use the mean over the source's text.
            known = part.source.bytes_per_token if self.token_bytes is None else text_bytes / tokens
            bytes_per_token.append(known)
        return Means(self._overall(losses, bytes_per_token), losses)

    def _loss(self, model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        """Return [3]: the summed loss, the number of targets, and the bytes of their text."""
        targets = micro_batch.targets
        with autocast(self.world.device, self.precision):
            loss = model(micro_batch.tokens, targets, doc_ids_BT=micro_batch.doc_ids)
        counted = targets != IGNORE_INDEX
        text_bytes = targets.new_zeros(())
        if self._token_bytes is not None:
            # Not `targets[counted]`: its shape depends on the data, so a GPU would synchronise.
            text_bytes = (self._token_bytes[targets.clamp(min=0)] * counted).sum()
        counts = torch.stack([counted.sum(), text_bytes])
        return torch.cat([loss.double()[None], counts.double()])

    def _overall(
        self, losses: Sequence[float], bytes_per_token: Sequence[float | None]
    ) -> dict[str, float | None]:
        shares = [part.share for part in self.parts]
        loss = sum(share * one for share, one in zip(shares, losses, strict=True))
        bits_per_byte = None
        # The ratio of the two means: a mean of the sources' ratios would weigh them differently.
        if all(bytes_per_token):
            mean = sum(s * (b or 0) for s, b in zip(shares, bytes_per_token, strict=True))
            bits_per_byte = loss / math.log(2) / mean
        return {"loss": loss, "bits_per_byte": bits_per_byte}


def chunks(reader: BatchReader, count: int) -> Iterator[Samples]:
    """Yield the first `count` samples in chunks of one micro-batch per rank."""
    rows = reader.micro_batch * reader.size
    for first in range(0, count, rows):
        yield np.arange(first, min(first + rows, count), dtype=np.uint64)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout inside the context; afterwards, free the weights that FSDP has gathered.

    The next forward pass must gather again, because EMA may have replaced the weights.
    """
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
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
        model: Decoder,
        step: int,
        together: Together | None = None,
    ) -> Record:
        """Generate and return the `sample` record; the prompt alone if the model has diverged.

        `together` is required for a sharded model, and None otherwise.
        """
        device = next(model.parameters()).device
        how: dict[str, Any] = {
            "max_new_tokens": self.config.sample_tokens,
            "temperature": 0.8,
            "top_p": 0.95,
            "stop_ids": self.stop_tokens,
            # The step is in the seed: the sample does not depend on how often a run was resumed.
            "generator": torch.Generator(device).manual_seed((self.seed + step) % 2**63),
        }
        if together is None:
            tokens = generate(model, self.prompt, **how)
        else:
            context = model.arch.max_seq_len
            tokens = generate_uncached(*together, context, self.prompt, **how)
        # Every token has a different shape, and each would be compiled.
        with torch.compiler.set_stance("force_eager"):
            try:
                ids = list(tokens)
            except Diverged as error:  # the guard decides what to do about it, on all ranks
                log.warning("no sample: %s", error)
                ids = []
        text = self.shown + self.tokenizer.decode(ids)
        return {"kind": "sample", "step": step, "prompt": self.shown, "text": text}


PROMPT = re.compile(r"(?:\S+ +){0,4}\S+")
"""The first five words of a line."""
MAX_PROMPT = 32
"""Maximum number of characters of a prompt from held-out text: it must fit in a command line."""

MIN_LETTERS = 6
"""Minimum number of letters and digits of such a prompt; a line of dashes has none."""


def first_words(sources: Sequence[Source], tokenizer: Tokenizer, end: int) -> str:
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
