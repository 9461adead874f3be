"""The training step of a pipeline, where each rank has some of the layers.

- The schedules are 1F1B and, with `parallel.stages_per_rank` above 1, the interleaved one, both
  of `torch.distributed.pipelining`. dtt's stages tell torch all shapes, count the micro-batches
  themselves, and say before each backward pass whether FSDP2 reduces gradients in it.
- A Decoder has all names: the layers of other stages are `Absent`. So initial weights,
  checkpoints and the patterns of optimizers need nothing else, and a checkpoint fits any other
  layout. FSDP2 always wraps the layers of a rank.
- The last stage computes the loss, already divided by all targets of the batch. Auxiliary losses
  of other stages enter the graph where their hidden states leave it. Each rank reports its values
  times P, so the mean over all ranks is right.
- Evaluations, samples and tasks pass through the stages one after another, and all ranks get the
  result.
- Micro-batches have one size. Where a batch of a schedule has fewer than the pipeline needs,
  copies of the last one are added that count for nothing.
- A tied head is refused: two stages would train the same weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtt.data.samples.loader import MicroBatch
from dtt.mesh.dtypes import wide_dtype
from dtt.model.output import HiddenStates, Output, StagePass
from dtt.parallel.apply import autocast
from dtt.parallel.pipelining import Pipeline
from dtt.train.step import LossFunction, Passes


class _WithAuxiliary(torch.autograd.Function):
    """Hidden states, whose backward pass also starts that of an auxiliary loss of their layers."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.one = torch.ones_like(loss)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, ctx.one


@dataclass(frozen=True)
class PipelinedPasses(Passes):
    """Forward and backward passes of the layers of this rank."""

    def run(
        self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, terms: int
    ) -> Output:
        """Do what `Passes.run` does; all ranks of a pipeline pass the same micro-batches.

        The returned values are equal on average over the ranks of the pipeline: each has those that
        it computes, times the number of ranks.
        """
        pipeline = self.module
        assert isinstance(pipeline, Pipeline)
        scale = self.replicas / max(1, terms)
        factors = [scale] * len(micro_batches)
        # A smaller batch of a schedule may have fewer micro-batches than a pipeline needs. Those
        # that are added count for nothing.
        factors += [0.0] * missing(len(micro_batches), pipeline)
        sums: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        loads: dict[int, Tensor] = {}

        def passed(layers: range, number: int, hidden: Tensor | None) -> Tensor:
            factor = factors[number]
            micro_batch = micro_batches[min(number, len(micro_batches) - 1)]
            output = self._part(micro_batch, loss_function, layers, hidden)
            aux = {name: factor * value for name, value in output.aux.items()}
            if factor:
                for layer, load in output.loads.items():
                    loads[layer] = loads[layer] + load if layer in loads else load
            for name, value in aux.items():
                sums["aux", name].append(value.detach())
            if isinstance(output, HiddenStates):
                own = sum(aux.values(), torch.zeros(()))
                return _WithAuxiliary.apply(output.hidden, own) if aux else output.hidden  # type: ignore[no-untyped-call]
            for name, value in output.metrics.items():
                sums["metrics", name].append(factor * value.detach())
            loss = factor * output.loss
            sums["loss", ""].append(loss.detach())
            return sum(aux.values(), loss)

        pipeline.train_on(len(factors), micro_batches[0].tokens, passed)
        return self._reported(sums)._replace(loads=loads)

    def _reported(self, sums: dict[tuple[str, str], list[Tensor]]) -> Output:
        """Return the sums of this rank, under the names of all ranks."""
        pipeline = self.module
        assert isinstance(pipeline, Pipeline)
        parameter = next(pipeline.parameters())
        # The dtype of a loss, also of what a rank does not compute, because all are added up.
        zero = torch.zeros((), dtype=wide_dtype(parameter), device=parameter.device)
        own = {
            name: pipeline.ranks * torch.stack(values).sum().to(zero.dtype)
            for name, values in sums.items()
        }
        if not pipeline.names:
            # A message once in a run: the names do not change.
            every = pipeline.mesh.gather(list(own), ("pipeline",))
            pipeline.names = sorted({name for some in every for name in some})
        output = Output(zero, {}, {})
        for kind, name in pipeline.names:
            value = own.get((kind, name), zero)
            if kind == "loss":
                output = output._replace(loss=value)
            else:
                getattr(output, kind)[name] = value
        return output

    def _part(
        self,
        micro_batch: MicroBatch,
        loss_function: LossFunction,
        layers: range,
        hidden: Tensor | None,
    ) -> Output | HiddenStates:
        """Return the output of some layers, and of the objective after the last."""
        assert isinstance(self.module, Pipeline)
        with autocast(micro_batch.tokens.device, self.precision):
            output = self.module.module(
                micro_batch.tokens,
                micro_batch.targets,
                doc_ids_BT=micro_batch.doc_ids,
                stage=StagePass(layers, hidden),
                **loss_function.options,
            )
            if isinstance(output, HiddenStates):
                return output
            return loss_function.losses(output, micro_batch)


def make_passes(
    module: nn.Module, precision: str, replicas: int = 1, *, reduce_each: bool = False
) -> Passes:
    """Return what runs the passes of a module; the arguments are the fields of `Passes`."""
    kind = PipelinedPasses if isinstance(module, Pipeline) else Passes
    return kind(module, precision, replicas, reduce_each)


def missing(count: int, pipeline: Pipeline) -> int:
    """Return the number of micro-batches that must be added to `count` for a schedule."""
    # The interleaved schedule takes micro-batches in rounds of one for each rank.
    interleaved = len(pipeline.own) > 1
    return -count % pipeline.ranks if interleaved else max(0, pipeline.ranks - count)
