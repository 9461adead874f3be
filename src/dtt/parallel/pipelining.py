"""Pipeline parallelism: ranks that share the layers of a model, and pass hidden states on.

Stage s of p * v is on rank s mod p of the pipeline (Narayanan et al., 2021, arXiv 2104.04473). The
schedules are those of torch.distributed.pipelining, and nothing else of dtt imports it: its stages
get all shapes beforehand, so that no version of torch runs the model once more to find them out.

Shapes: B sequences, T tokens of a sequence, P tokens of it on this rank, D dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtt.mesh.dtypes import wide_dtype
from dtt.mesh.mesh import Mesh
from dtt.model.architecture import Architecture
from dtt.model.layers import held_layers
from dtt.model.output import HiddenStates, Output, StagePass
from dtt.parallel.context import ContextParallel

Pass = Callable[[range, int, Tensor | None], Tensor]
"""Function of the layers of a stage, the number of a micro-batch, and the hidden states [B, P, D]
from the stage before, if any. Returns those for the next stage, or at the last one the loss []."""


class Pipeline(nn.Module):
    """Wrapper of the layers of one rank that computes what the whole model does, on all ranks."""

    def __init__(
        self, module: nn.Module, layers: Sequence[range], mesh: Mesh, dtype: torch.dtype,
        *, reduce_each: bool,
    ) -> None:  # fmt: skip
        """Wrap `module`, the Decoder or its wrapper; `layers` are those of each stage.

        Hidden states are of `dtype`. `reduce_each` is that of `Passes`.
        """
        super().__init__()
        self.module, self.layers, self.mesh = module, layers, mesh
        self.dtype, self.reduce_each = dtype, reduce_each
        self.ranks, self.rank = mesh.size("pipeline"), mesh.index("pipeline")
        self.own = range(self.rank, len(layers), self.ranks)
        """Stages of this rank."""
        self.names: list[tuple[str, str]] = []
        """Kind and name of each value that a training step reports, of all ranks."""
        self.mark: Callable[[], Any] | None = None
        """Function that returns the current time, on a GPU as an event; None if nobody asks."""
        self.passes: list[tuple[Any, Any]] = []
        """Start and end of each pass of this rank, by `mark`."""
        self._schedule: _Schedule | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of this pipeline. Its first use is a collective of all ranks of the run."""
        return self.mesh.group("pipeline")

    @cached_property
    def decoder(self) -> Any:
        """The Decoder."""
        return getattr(self.module, "model", self.module)

    @property
    def arch(self) -> Architecture:
        """The architecture of the whole model."""
        arch: Architecture = self.decoder.arch
        return arch

    def without_context(self) -> Pipeline:
        """Return a pipeline of the same layers that computes whole sequences on each rank."""
        return Pipeline(
            self.decoder, self.layers, self.mesh, self.dtype, reduce_each=self.reduce_each
        )

    def hidden_shape(self, tokens_BT: Tensor) -> tuple[int, int, int]:
        """Return the shape [B, P, D] of the hidden states of this rank."""
        rows, length = tokens_BT.shape
        parts = self.mesh.size("tensor")
        if isinstance(self.module, ContextParallel):
            length += -length % self.module.multiple
            parts *= self.module.shard.size
        return rows, length // parts, self.arch.dim

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, **options: Any) -> Any:
        """Return what the whole model returns, on all ranks of the pipeline, without a gradient.

        One stage computes at a time. The result is sent by the last rank: a host-side message with
        the names and shapes, then each tensor.
        """
        hidden_BPD: Tensor | None = None
        result: Any = None
        aux: dict[str, Tensor] = {}
        for stage in self.own:
            if stage > 0:
                shape = self.hidden_shape(tokens_BT)
                hidden_BPD = torch.empty(shape, dtype=self.dtype, device=tokens_BT.device)
                dist.recv(hidden_BPD, group=self.group, group_src=(stage - 1) % self.ranks)
            part = StagePass(self.layers[stage], hidden_BPD)
            result = self.module(tokens_BT, targets_BT, stage=part, **options)
            of_stage = result.aux if isinstance(result, HiddenStates | Output) else {}
            aux |= {name: aux.get(name, 0.0) + value for name, value in of_stage.items()}
            if isinstance(result, HiddenStates):
                target = (stage + 1) % self.ranks
                dist.send(result.hidden.contiguous(), group=self.group, group_dst=target)
        return self._from_last(result, aux)

    def _from_last(self, result: Any, aux: dict[str, Tensor]) -> Any:
        """Return the result of the last rank, with the sums of all ranks' `aux`, on every rank."""
        found = result if isinstance(result, Output) else Output(result, {}, {})
        last = self.rank == self.ranks - 1
        form = [
            None if not last else (isinstance(result, Output), found.loss.shape, found.loss.dtype)
        ]
        dist.broadcast_object_list(form, group=self.group, group_src=self.ranks - 1)
        with_targets, shape, dtype = form[0]  # type: ignore[misc]
        device = next(self.module.parameters()).device
        loss = found.loss.contiguous() if last else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(loss, group=self.group, group_src=self.ranks - 1)
        if not with_targets:
            return loss
        of_ranks = self.mesh.gather(list(aux), ("pipeline",))
        names = sorted({name for some in of_ranks for name in some})
        zero = torch.zeros((), dtype=loss.dtype, device=device)
        sums = {name: self.mesh.sum(aux.get(name, zero).clone(), ("pipeline",)) for name in names}
        return Output(loss, sums, {})

    def train_on(self, count: int, tokens_BT: Tensor, run: Pass) -> None:
        """Run the forward and backward passes of `count` micro-batches of the shape of `tokens_BT`.

        `count` must be at least the number of ranks, and with several stages a rank a multiple of
        it. Gradients are reduced over the ranks of a stage in the pass of its last micro-batch.
        """
        shape = self.hidden_shape(tokens_BT)
        if self._schedule is None or self._schedule.form != (count, shape):
            # One at a time: it has buffers for the hidden states of all micro-batches.
            self._schedule = None
            self._schedule = _Schedule(self, count, shape, tokens_BT.device)
        self._schedule.step(run)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Record start and end of a pass inside."""
        start = self.mark and self.mark()
        yield
        if self.mark is not None:
            self.passes.append((start, self.mark()))

    def reduce_gradients(self, stage: int, *, last: bool, end: bool) -> None:
        """Say, before a backward pass of a stage, whether it is the `last` one, and the rank's.

        As torch's own stage does for modules that are FSDP2's; here one module has all stages.
        """
        layers, blocks = self.layers[stage], held_layers(self.decoder)
        # A block, and its experts, which may have a group of their own.
        parts: list[Any] = [
            part for i in layers for part in blocks[i].modules() if isinstance(part, FSDPModule)
        ]
        # Embedding, norm and head form the root's group: those of a rank belong to one stage.
        if stage in (0, len(self.layers) - 1):
            parts.append(self.decoder)
        for part in parts:
            part.set_requires_gradient_sync(last or self.reduce_each, recurse=False)
            part.set_requires_all_reduce(last, recurse=False)
        assert isinstance(self.decoder, FSDPModule)
        # Waits for the reductions only at the end: the passes of other micro-batches follow.
        self.decoder.set_is_last_backward(end)


class _Schedule:
    """A schedule of torch for one shape of micro-batches."""

    def __init__(
        self, pipeline: Pipeline, count: int, shape: tuple[int, ...], device: torch.device
    ) -> None:
        from torch.distributed import pipelining

        self._run: Pass | None = None
        self._pipeline, self._count = pipeline, count
        self.form = count, shape
        self._left: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        schedule = self

        class CountedStage(pipelining.PipelineStage):
            """A stage that says before each backward pass whether gradients are reduced in it."""

            def backward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
                schedule.before_backward(self.stage_index)
                # What was received is here: the pass waits for no other stage.
                with pipeline.timed():
                    return super().backward_one_chunk(*arguments, **options)

        hidden = torch.empty(shape, dtype=pipeline.dtype, device="meta", requires_grad=True)
        nothing = torch.empty(1, device="meta")
        # torch 2.11 compares the outputs with what it was given.
        loss = torch.empty(1, dtype=wide_dtype(hidden), device="meta")
        last = len(pipeline.layers) - 1
        stages = [
            CountedStage(
                _Part(self, stage), stage, last + 1, device,
                input_args=(hidden if stage else nothing,),
                output_args=(loss if stage == last else hidden,),
                group=pipeline.group,
            )
            for stage in pipeline.own
        ]  # fmt: skip
        # The loss is computed in the last stage, and already scaled. It is [1], because torch
        # concatenates the outputs of the last stage.
        how: dict[str, Any] = {"loss_fn": lambda loss, _target: loss.sum(), "scale_grads": False}
        self._torch: Any = (
            pipelining.Schedule1F1B(stages[0], count, **how)
            if len(stages) == 1
            else pipelining.ScheduleInterleaved1F1B(list(stages), count, **how)
        )
        # torch divides tensors among micro-batches; these stand for them.
        self._inputs = torch.zeros(count, device=device)

    def step(self, run: Pass) -> None:
        """Run the passes of a step."""
        pipeline, self._run = self._pipeline, run
        self._left = dict.fromkeys(pipeline.own, self._count)
        self._seen = dict.fromkeys(pipeline.own, 0)
        inputs = [self._inputs] if 0 in pipeline.own else []
        last = len(pipeline.layers) - 1 in pipeline.own
        self._torch.step(
            *inputs, target=self._inputs if last else None, losses=[] if last else None
        )
        self._run = None

    def before_backward(self, stage: int) -> None:
        self._left[stage] -= 1
        end = not any(self._left.values())
        self._pipeline.reduce_gradients(stage, last=self._left[stage] == 0, end=end)

    def forward(self, stage: int, hidden_BPD: Tensor | None) -> Tensor:
        assert self._run is not None
        number = self._seen[stage]
        self._seen[stage] += 1
        with self._pipeline.timed():
            passed = self._run(self._pipeline.layers[stage], number, hidden_BPD)
        return passed if passed.ndim else passed[None]


class _Part(nn.Module):
    """The stand-in that torch takes for the module of a stage; parameters are in the Decoder."""

    def __init__(self, schedule: _Schedule, stage: int) -> None:
        super().__init__()
        self._forward, self._stage = schedule.forward, stage

    def forward(self, received: Tensor) -> Tensor:
        return self._forward(self._stage, received if self._stage else None)
