"""Validation loss and samples: looks at the model, changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dtt.config.train import TrainConfig
from dtt.data.loader import Share
from dtt.data.tokenizer import open_tokenizer
from dtt.data.windows import Windows
from dtt.model.decoder import Decoder
from dtt.model.generate import generate
from dtt.parallel.apply import autocast
from dtt.runtime.dist import World
from dtt.track.base import Record


@dataclass(frozen=True)
class Evaluator:
    """Validation loss over the first windows of the held-out split, shared out over the ranks."""

    windows: Windows
    count: int
    """How many windows."""
    bytes_per_token: float
    """Of the held-out split."""
    share: Share
    precision: str
    world: World

    @torch.no_grad()
    def record(self, model: Decoder, step: int, stop: Callable[[], bool]) -> Record | None:
        """The `eval` record: mean loss in nats per token, and in bits per byte of text.

        None as soon as `stop()`, which is asked on every rank between batches, is true.
        """
        model.eval()
        total = torch.zeros(2, device=self.world.device, dtype=torch.float64)
        rows = self.share.micro_batch * self.world.size
        for first in range(0, self.count, rows):
            if stop():
                model.train()
                return None
            chunk = np.arange(first, min(first + rows, self.count), dtype=np.uint64)
            for tokens, targets in self.share.to_device(self.windows, chunk):
                with autocast(self.world.device, self.precision):
                    loss = model(tokens, targets)
                total += torch.stack([loss.double(), loss.new_tensor(targets.numel()).double()])
        model.train()
        loss_sum, tokens_seen = self.world.sum_(total).tolist()
        loss = loss_sum / tokens_seen
        bits_per_byte = loss / math.log(2) / self.bytes_per_token
        return {"kind": "eval", "step": step, "loss": loss, "bits_per_byte": bits_per_byte}


class Sampler:
    """Continues the configured prompt; the text depends on the weights, the seed and the step."""

    def __init__(self, config: TrainConfig, tokenizer: Path, end: int, seed: int) -> None:
        """`tokenizer` is a tokenizer.json; `end` its end-of-document id."""
        self._tokenizer = open_tokenizer(tokenizer)
        self._config, self._end, self._seed = config, end, seed
        encoded = self._tokenizer.encode(config.sample_prompt, add_special_tokens=False).ids
        self._prompt = encoded or [end]

    def record(self, model: Decoder, step: int) -> Record:
        """The `sample` record."""
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(self._seed + step)
        tokens = generate(
            model,
            self._prompt,
            max_new_tokens=self._config.sample_tokens,
            temperature=0.8,
            top_p=0.95,
            stop_id=self._end,
            generator=generator,
        )
        with torch.compiler.set_stance("force_eager"):  # each token has another shape
            ids = list(tokens)
        text = self._config.sample_prompt + self._tokenizer.decode(ids)
        return {"kind": "sample", "step": step, "text": text}
