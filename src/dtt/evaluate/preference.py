"""Validation on held-out preference pairs: the loss of DPO and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dtt.data.samples.loader import BatchReader, MicroBatch
from dtt.evaluate.validation import HeldOut, Means, chunks, eval_record, evaluating
from dtt.mesh.dist import World
from dtt.mesh.mesh import LOSS, Mesh
from dtt.optim.ema import Ema
from dtt.parallel.apply import autocast
from dtt.track.base import Record


@dataclass(frozen=True)
class PreferenceEvaluator:
    """Mean loss and metrics of the held-out pairs of every source, distributed over the ranks."""

    parts: Sequence[HeldOut]
    reader: BatchReader
    precision: str
    world: World
    objective: Callable[[nn.Module, MicroBatch], Mapping[str, Tensor]]
    """Function that returns the loss and the metrics by name, as sums over pairs."""
    mesh: Mesh

    def record(
        self, model: nn.Module, step: int, stop: Callable[[], bool], ema: Ema | None = None
    ) -> Record | None:
        """Return the record of the means of the loss and of each metric; `eval_record`."""
        return eval_record(self.parts, step, lambda: self._means(model, stop), ema)

    @torch.no_grad()
    def _means(self, model: nn.Module, stop: Callable[[], bool]) -> Means | None:
        """Measure each source; return None as soon as `stop()` is true."""
        found: list[dict[str, float]] = []
        with evaluating(model):
            for part in self.parts:
                totals: dict[str, Tensor] = {}
                for samples in chunks(self.reader, part.count):
                    if stop():
                        return None
                    for micro_batch in self.reader.read_on_all(part.source, samples):
                        with autocast(self.world.device, self.precision):
                            values = self.objective(model, micro_batch)
                        for name, value in values.items():
                            totals[name] = totals.get(name, 0.0) + value.double()
                sums = self.mesh.sum(torch.stack([*totals.values()]), LOSS).tolist()
                pairs = part.source.pairs(np.arange(part.count, dtype=np.uint64))
                found.append({n: s / pairs for n, s in zip(totals, sums, strict=True)})
        shares = [part.share for part in self.parts]
        overall = {
            name: sum(share * one[name] for share, one in zip(shares, found, strict=True))
            for name in found[0]
        }
        return Means(overall | {"bits_per_byte": None}, [one["loss"] for one in found])
