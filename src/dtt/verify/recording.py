"""Recording of a training run in its ranks: samples, gradients, and which ranks hold which bits.

The run is a real one. The recorder only replaces the objects that the trainer calls by ones that
write files before and after they do the same work:

    rows-STEP-DATA-RANK   samples of a rank, in the order of its micro-batches; DATA is its index
                          among the data-parallel ranks
    gradients-STEP-RANK   gradients before clipping, and clipped-STEP-RANK after it
    held-STEP-RANK        hash of each part of a tensor that a rank holds after the step;
                          held_gradients-STEP-RANK: of the clipped gradients
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dtt.base.files import write_atomically
from dtt.checkpoint import tensors
from dtt.data.samples.loader import Batch, MicroBatch
from dtt.mesh.mesh import DATA
from dtt.mesh.sharding import LaidOut, Placed, local, on_this_rank, this_rank, world_size
from dtt.model.output import Output
from dtt.params.table import Params
from dtt.train import run
from dtt.train.state import Position, rng_tensors
from dtt.train.step import LossFunction, Passes
from dtt.train.trainer import Trainer

ROWS, GRADIENTS, CLIPPED = "rows", "gradients", "clipped"
HELD, HELD_GRADIENTS = "held", "held_gradients"


@dataclass(frozen=True)
class Recorder:
    """Writer of the records of one rank."""

    folder: Path
    spoilt: int | None = None
    """Step whose gradients become NaN on the last rank, so that the guard must skip it."""

    def instrument(self, trainer: Trainer) -> Trainer:
        """Return a trainer that does the same and records it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state, position = trainer.state, trainer.position
        index = state.mesh.index(*DATA)
        record = {"inner": state.passes, "recorder": self, "position": position, "index": index}
        passes = RecordedPasses(**_fields(state.passes) | record)
        params = RecordedParams(state.params, self, position)
        state = replace(state, passes=passes, params=params)
        return RecordedTrainer(**_fields(trainer) | {"state": state}, recorder=self)

    def path(self, kind: str, *place: int) -> Path:
        """Return the path of a record."""
        return self.folder / "-".join(map(str, (kind, *place)))

    def write(self, kind: str, step: int, laid_out: Mapping[str, LaidOut]) -> None:
        """Write this rank's share of tensors, as for a checkpoint, which are copied from a GPU."""
        share = [
            replace(shard, tensor=shard.tensor.cpu())
            for shard in tensors.cut(laid_out, this_rank())
        ]
        tensors.write(self.path(kind, step, this_rank()), share)

    def write_held(self, kind: str, step: int, laid_out: Mapping[str, LaidOut]) -> None:
        """Write the hash of each part that this rank holds, with the place of the part.

        Records of checkpoints cannot show that replicas differ: each rank writes another part.
        """
        rank = this_rank()
        found = [
            (name, held.layout.box(rank), digest(local(held.tensor)))
            for name, held in laid_out.items()
        ]
        write_atomically(self.path(kind, step, rank), json.dumps(found))


class RecordedParams(Params):
    """The parameters, whose gradients are recorded before and after clipping."""

    def __init__(self, params: Params, recorder: Recorder, position: Position) -> None:
        """Record with `recorder`; `position` is that of the run."""
        super().__init__(params.values(), params.mesh)
        self._recorder, self._position = recorder, position

    def align(self) -> None:
        """Record what `clip` clips."""
        super().align()
        step = self._position.step + 1
        self._recorder.write(GRADIENTS, step, self._gradients())
        if step == self._recorder.spoilt and this_rank() == world_size() - 1:
            # One rank and one parameter: the others must learn that the step does not count. The
            # last parameter that has elements here, as a shard may be empty.
            part = [local(held.tensor) for held in self._gradients().values()]
            next(p for p in reversed(part) if p.numel()).fill_(float("nan"))

    def clip(self, limit: float) -> Tensor:
        """Clip as `Params.clip` does."""
        step = self._position.step + 1
        norm = super().clip(limit)
        gradients = self._gradients()
        self._recorder.write(CLIPPED, step, gradients)
        self._recorder.write_held(HELD_GRADIENTS, step, gradients)
        return norm

    def _gradients(self) -> dict[str, Placed]:
        return {
            name: Placed(param.tensor.grad, param.layout)
            for name, param in self.items()
            if param.tensor.grad is not None
        }


@dataclass(frozen=True)
class RecordedPasses(Passes):
    """Passes, whose micro-batches are recorded."""

    inner: Passes | None = None
    """The passes that compute."""
    recorder: Recorder | None = None
    position: Position | None = None
    index: int = 0
    """Index of this rank among the data-parallel ranks."""

    def run(
        self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, terms: int
    ) -> Output:
        """Run the passes as `Passes.run` does."""
        assert self.inner is not None
        assert self.recorder is not None
        assert self.position is not None
        columns: dict[str, list[Tensor]] = {}
        for micro_batch in micro_batches:
            parts = {"tokens": micro_batch.tokens, "targets": micro_batch.targets}
            if micro_batch.doc_ids is not None:
                parts["documents"] = micro_batch.doc_ids
            for name, values in (parts | dict(micro_batch.extra)).items():
                columns.setdefault(name, []).append(values)
        joined = {name: torch.cat(values) for name, values in columns.items()}
        joined["terms"] = torch.tensor(terms)
        path = self.recorder.path(ROWS, self.position.step + 1, self.index, this_rank())
        save_file(joined, path)
        return self.inner.run(micro_batches, loss_function, terms)


@dataclass(frozen=True, kw_only=True)
class RecordedTrainer(Trainer):
    """The training loop, with a record of what each rank holds after a step."""

    recorder: Recorder

    def step(self, batch: Batch, multiplier: float) -> None:
        """Do a step as `Trainer.step` does."""
        super().step(batch, multiplier)
        state, world = self.state, self.world
        random = on_this_rank(rng_tensors(world.rank, world.device))
        held = {**state.params, **state.tensors(), **random}
        self.recorder.write_held(HELD, self.position.step, held)


def train(config: str, overrides: Sequence[str], from_step: int | None, recorder: Recorder) -> None:
    """Train as `dtt train` does, and record; called in each rank."""
    run.run(config or None, overrides, (), from_step, instrument=recorder.instrument)


def _fields(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in fields(instance)}


def digest(tensor: Tensor) -> str:
    """Return the hash of the bits of a tensor."""
    octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # numpy lacks bf16
    return hashlib.sha256(octets.numpy().tobytes()).hexdigest()
