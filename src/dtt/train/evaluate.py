"""Validation loss and samples: looks at the model, changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dtt.config.train import TrainConfig
from dtt.data.dataset import Dataset
from dtt.data.loader import MicroBatch, Share
from dtt.data.source import Samples, Source
from dtt.data.tokenizer import open_tokenizer
from dtt.errors import Diverged
from dtt.model.decoder import Decoder
from dtt.model.generate import generate, generate_uncached
from dtt.model.loss import IGNORED
from dtt.optim.ema import Ema
from dtt.parallel.apply import autocast, release
from dtt.runtime.dist import World
from dtt.runtime.log import log
from dtt.track.base import Record
from dtt.train.state import Position


@dataclass(frozen=True)
class HeldOut:
    """The held-out text of one source."""

    source: Source
    count: int
    """Samples to look at, from its beginning."""
    share: float
    """What the source counts for in the overall loss; all shares together are 1."""


def held_out(dataset: Dataset, count: int) -> list[HeldOut]:
    """Shares out `count` samples equally over the sources that have held-out text.

    A source counts for as much as it has of the samples of the whole run: the overall loss of one
    step can be compared with that of another, though weights change in between.
    """
    shares = dataset.shares()
    found = [s for s in dataset.validation if s is not None and shares[s.name] > 0]
    total = sum(shares[source.name] for source in found)
    each = max(1, count // max(1, len(found)))
    return [HeldOut(s, min(each, len(s)), shares[s.name] / total) for s in found]


@dataclass(frozen=True)
class Measured:
    """Means over the targets of a source that were evaluated."""

    loss: float
    """In nats."""
    bytes_per_token: float | None
    """UTF-8 bytes of their text; None: not known."""


@dataclass(frozen=True)
class Evaluator:
    """Validation loss over the held-out text of every source, shared out over the ranks."""

    parts: Sequence[HeldOut]
    share: Share
    precision: str
    world: World
    contexts: int = 1
    """Ranks that share a sequence."""
    token_bytes: npt.NDArray[np.int64] | None = None
    """[vocab_size]: bytes of text that each id stands for; None: not known."""

    def record(
        self, model: nn.Module, step: int, stop: Callable[[], bool], ema: Ema | None = None
    ) -> Record | None:
        """The `eval` record: mean loss in nats per token, and in bits per byte of their text.

        With several sources, `losses` has that of each; with an average of the weights, `ema_loss`
        is the loss with that. None as soon as `stop()`, which is asked on every rank between
        batches, is true.
        """
        losses = self._losses(model, stop)
        if losses is None:
            return None
        record: Record = {"kind": "eval", "step": step, **self._overall(losses)}
        if len(losses) > 1:
            names = [part.source.name for part in self.parts]
            record["losses"] = dict(zip(names, (one.loss for one in losses), strict=True))
        if ema is not None:
            with ema.swapped():
                averaged = self._losses(model, stop)
            if averaged is None:
                return None
            record["ema_loss"] = self._overall(averaged)["loss"]
        return record

    @cached_property
    def _token_bytes(self) -> Tensor | None:
        """`token_bytes` on the device."""
        if self.token_bytes is None:
            return None
        return torch.from_numpy(self.token_bytes).to(self.world.device)

    @torch.no_grad()
    def _losses(self, model: nn.Module, stop: Callable[[], bool]) -> list[Measured] | None:
        """Measure each source; None once `stop()`."""
        totals = torch.zeros(len(self.parts), 3, device=self.world.device, dtype=torch.float64)
        with _evaluating(model):
            for total, part in zip(totals, self.parts, strict=True):
                for samples in self._chunks(part.count):
                    if stop():
                        return None
                    for micro_batch in self._mine(part.source, samples):
                        total += self._loss(model, micro_batch)
        return [
            # Without a table of bytes per token: those of the source's text as a whole.
            Measured(
                loss / tokens,
                part.source.bytes_per_token if self.token_bytes is None else text_bytes / tokens,
            )
            for part, (loss, tokens, text_bytes) in zip(
                self.parts, self.world.sum_(totals).tolist(), strict=True
            )
        ]

    def _chunks(self, count: int) -> Iterator[Samples]:
        """The first `count` samples, a micro-batch for each rank at a time."""
        rows = self.share.micro_batch * self.share.size
        for first in range(0, count, rows):
            yield np.arange(first, min(first + rows, count), dtype=np.uint64)

    def _mine(self, source: Source, samples: Samples) -> list[MicroBatch]:
        """This rank's part; where there is none, a sample without targets: the others need this
        rank to gather weights."""
        mine = self.share.to_device(source, samples)
        if mine or self.share.size == 1:
            return mine
        (other,) = replace(self.share, rank=0, size=1).to_device(source, samples[:1])
        return [replace(other, targets=torch.full_like(other.targets, IGNORED))]

    def _loss(self, model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        """Sum of the loss, number of targets and of the bytes of their text.

        Ranks that share a sequence share these.
        """
        targets = micro_batch.targets
        with autocast(self.world.device, self.precision):
            loss = model(micro_batch.tokens, targets, documents_BT=micro_batch.documents)
        counted = targets != IGNORED
        text_bytes = targets.new_zeros(())
        if self._token_bytes is not None:
            # Not `targets[counted]`: on a GPU the host would wait for how many there are.
            text_bytes = (self._token_bytes[targets.clamp(min=0)] * counted).sum()
        counts = torch.stack([counted.sum(), text_bytes]) / self.contexts
        return torch.cat([loss.double()[None], counts.double()])

    def _overall(self, losses: Sequence[Measured]) -> dict[str, float | None]:
        shares = [part.share for part in self.parts]
        loss = sum(share * one.loss for share, one in zip(shares, losses, strict=True))
        known = [one.bytes_per_token for one in losses]
        bits_per_byte = None
        if all(known):
            bytes_per_token = sum(s * (b or 0) for s, b in zip(shares, known, strict=True))
            bits_per_byte = loss / math.log(2) / bytes_per_token
        return {"loss": loss, "bits_per_byte": bits_per_byte}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout; afterwards its weights may change, as an average takes their place."""
    model.eval()
    try:
        yield
    finally:
        model.train()
        release(model)


class Sampler:
    """Continues the configured prompt; the text depends on the weights, the seed and the step."""

    def __init__(self, config: TrainConfig, tokenizer: Path, end: int, seed: int) -> None:
        """`tokenizer` is a tokenizer.json; `end` its end-of-document id."""
        self._tokenizer = open_tokenizer(tokenizer)
        self._config, self._end, self._seed = config, end, seed
        encoded = self._tokenizer.encode(config.sample_prompt, add_special_tokens=False).ids
        self._prompt = encoded or [end]

    def record(
        self,
        model: Decoder,
        step: int,
        together: tuple[nn.Module, int, Callable[[int], int]] | None = None,
    ) -> Record:
        """The `sample` record; the prompt alone if the model has diverged.

        `together`: the module that ranks with a part of the model each must call at once, what the
        lengths of its sequences must be a multiple of, and what makes one rank's token that of all.
        """
        device = next(model.parameters()).device
        how: dict[str, Any] = {
            "max_new_tokens": self._config.sample_tokens,
            "temperature": 0.8,
            "top_p": 0.95,
            "stop_id": self._end,
            "generator": torch.Generator(device).manual_seed(self._seed + step),
        }
        if together is None:
            tokens = generate(model, self._prompt, **how)
        else:
            context = model.arch.max_seq_len
            tokens = generate_uncached(*together, context, self._prompt, **how)
        with torch.compiler.set_stance("force_eager"):  # each token has another shape
            try:
                ids = list(tokens)
            except Diverged as error:  # what is done about it is for the guard to say, on all ranks
                log.warning("no sample: %s", error)
                ids = []
        text = self._config.sample_prompt + self._tokenizer.decode(ids)
        return {"kind": "sample", "step": step, "text": text}


def evaluation_due(train: TrainConfig, steps: int, position: Position) -> bool:
    """Whether a run of `steps` should have a validation loss at this position, and has none."""
    wanted = every(train.eval_every, position.step) or position.step in (0, steps)
    return wanted and position.evaluated != position.step


def every(interval: int, step: int) -> bool:
    """Whether something that happens each `interval` steps (0: never) happens after `step`."""
    return interval > 0 and step % interval == 0
