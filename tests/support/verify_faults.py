"""Faults that others have had, each planted in the ranks of a layout by replacing one function.

The table in the documentation of `dtt verify` lists where they were found. A fault is planted in
the processes of a layout only, never in the reference of one process; those of the export in the
process that exports.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dtt.verify import recording


@dataclass(frozen=True)
class Fault:
    """A fault, and what finds it."""

    plant: Callable[[], None]
    checks: str
    """Letters of the checks one of which must find it: the first is that of its kind."""
    keys: str
    """Arguments of the run, separated by spaces."""


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by `around`, which gets the original as its first argument."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: around(original, *a, **k))


def train(name: str, config: str, overrides: Sequence[str], from_step: Any, recorder: Any) -> None:
    """Plant a fault if this is a rank of a layout, and train."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        FAULTS[name].plant()
    recording.train(config, overrides, from_step, recorder)


def export(name: str, *arguments: Any) -> None:
    """Plant a fault and export."""
    from dtt.verify import layout_runs

    FAULTS[name].plant()
    layout_runs.export_job(*arguments)


def rank() -> int:
    return int(os.environ["RANK"])


# ---- gradients and losses ------------------------------------------------------------------------


def gradients_times(factor: Callable[[], float], match: str = "") -> Callable[[], None]:
    """Scale the gradients of parameters whose names contain `match`, after the backward passes."""

    def plant() -> None:
        from dtt.mesh.sharding import local
        from dtt.train.step import Passes

        def around(run: Any, step: Any, *arguments: Any) -> Any:
            output = run(step, *arguments)
            for name, parameter in step.module.named_parameters():
                if parameter.grad is not None and match in name:
                    local(parameter.grad).mul_(factor())
            return output

        wrap(Passes, "run", around)

    return plant


def terms(count: Callable[[Any, Any, int], int]) -> Callable[[], None]:
    """Divide the loss by another number of terms: that of (step, micro-batches, true number)."""

    def plant() -> None:
        from dtt.train.step import Passes

        def around(run: Any, step: Any, batches: Any, objective: Any, true: int) -> Any:
            return run(step, batches, objective, count(step, batches, true))

        wrap(Passes, "run", around)

    return plant


def own_targets(step: Any, batches: Any, _true: int) -> int:
    return int(step.replicas * sum(int((b.targets >= 0).sum()) for b in batches))


def all_positions(step: Any, batches: Any, _true: int) -> int:
    return int(step.replicas * sum(b.targets.numel() for b in batches))


def mean_per_micro_batch() -> None:
    from functools import reduce

    from dtt.model.output import Output
    from dtt.train.step import Passes

    def around(run: Any, step: Any, batches: Any, objective: Any, _terms: int) -> Any:
        own = [own_targets(step, [b], 0) * len(batches) for b in batches]
        parts = [run(step, [b], objective, n) for b, n in zip(batches, own, strict=True)]
        return reduce(Output.plus, parts)

    wrap(Passes, "run", around)


def pipelined(change: Callable[..., Any]) -> Callable[[], None]:
    """Replace `run` of a pipeline's step by `change`, which gets it first."""

    def plant() -> None:
        from dtt.train.pipelined_step import PipelinedPasses

        wrap(PipelinedPasses, "run", change)

    return plant


def not_divided(run: Any, step: Any, batches: Any, objective: Any, _terms: int) -> Any:
    return run(step, batches, objective, 1)


def divided_again(run: Any, step: Any, batches: Any, objective: Any, terms: int) -> Any:
    return run(step, batches, objective, terms * len(batches))


def next_micro_batch(run: Any, step: Any, batches: Any, *others: Any) -> Any:
    """The last rank computes the loss of other micro-batches than it received."""
    ours = batches if step.module.rank == 0 else [*batches[1:], batches[0]]
    return run(step, ours, *others)


def norm_of_the_stage() -> None:
    from dtt.mesh.mesh import Mesh

    def around(total: Any, mesh: Any, values: Any, over: Any = LOSS_AND_TENSOR) -> Any:
        return total(mesh, values, over)

    wrap(Mesh, "sum", around)


def not_reduced_at_the_end() -> None:
    """A stage reduces its gradients in the pass of its first micro-batch instead of its last."""
    from dtt.parallel.pipelining import Pipeline

    seen = set[int]()

    def around(reduce: Any, pipeline: Any, stage: int, **ends: Any) -> Any:
        first = stage not in seen
        seen.add(stage)
        if ends["end"]:
            seen.clear()
        return reduce(pipeline, stage, last=first, end=ends["end"])

    wrap(Pipeline, "reduce_gradients", around)


def micro_batch_lost() -> None:
    from dtt.model.output import Output
    from dtt.train.step import Passes

    def around(run: Any, step: Any, batches: Any, *others: Any) -> Any:
        first = run(step, batches[:-1], *others)
        for parameter in step.module.parameters():
            parameter.grad = None
        return Output.plus(first, run(step, batches[-1:], *others))

    wrap(Passes, "run", around)


def forward(change: Callable[[Any], Any]) -> Callable[[], None]:
    """Change the micro-batches that the model gets."""

    def plant() -> None:
        from dtt.train.step import Passes

        wrap(Passes, "_forward", lambda run, s, batch, *rest: run(s, change(batch), *rest))

    return plant


def validation(change: Callable[[Any], Any]) -> Callable[[], None]:
    """Change what validation measures."""

    def plant() -> None:
        from dtt.train.step import Passes

        wrap(Passes, "evaluate", lambda run, *arguments, **how: change(run(*arguments, **how)))

    return plant


def loss_times(factor: float) -> Callable[[], None]:
    def plant() -> None:
        from dtt.train.step import Passes

        def around(run: Any, *arguments: Any) -> Any:
            output = run(*arguments)
            return output._replace(loss=factor * output.loss)

        wrap(Passes, "run", around)

    return plant


def z_loss_left_out() -> None:
    from dtt.train.step import Passes

    def around(run: Any, step: Any, batches: Any, objective: Any, count: int) -> Any:
        return run(step, batches, replace(objective, options={"z_loss": 0.0}), count)

    wrap(Passes, "run", around)


def softcap_left_out_of_validation() -> None:
    from dtt.model import contract
    from dtt.train.step import Passes

    cap = [True]

    def evaluate(run: Any, *arguments: Any, **how: Any) -> Any:
        cap[0] = False
        try:
            return run(*arguments, **how)
        finally:
            cap[0] = True

    def loss(run: Any, *arguments: Any, **how: Any) -> Any:
        return run(*arguments, **how | {"softcap": how["softcap"] if cap[0] else None})

    wrap(Passes, "evaluate", evaluate)
    wrap(contract, "linear_cross_entropy", loss)


def tied_head_without_gradient() -> None:
    from dtt.model import contract

    wrap(
        contract,
        "linear_cross_entropy",
        lambda run, hidden, head, *rest, **how: run(hidden, head.detach(), *rest, **how),
    )


def window_off_by_one() -> None:
    from dtt.parallel import context

    def around(run: Any, arch: Any, *rest: Any) -> Any:
        return run(replace(arch, windows=tuple(w and w + 1 for w in arch.windows)), *rest)

    wrap(context, "make_context_attention_fns", around)


def positions_restart() -> None:
    from dtt.parallel import context

    def around(run: Any, doc_ids: Any) -> Any:
        return run(doc_ids) % (doc_ids.shape[1] // 2)

    wrap(context, "document_positions", around)


def context_parts_in_wrong_order() -> None:
    import torch

    from dtt.mesh.collectives import gather
    from dtt.parallel.context import SequenceShard

    def wrong(shard: Any, part: torch.Tensor) -> torch.Tensor:
        return gather(part, -2, shard.group)

    SequenceShard.gather = wrong  # type: ignore[method-assign]


def lora_summand_not_reduced() -> None:
    from torch.distributed.tensor import DTensor

    def around(run: Any, tensor: Any, **how: Any) -> Any:
        if how.get("grad_placements"):
            from torch.distributed.tensor import Replicate

            how = {"grad_placements": [Replicate()]}
        return run(tensor, **how)

    wrap(DTensor, "to_local", around)


def lora_scale_twice() -> None:
    from dtt.model.lora import LoraLinear

    def around(run: Any, layer: Any, *arguments: Any) -> None:
        run(layer, *arguments)
        layer.scale *= 2

    wrap(LoraLinear, "__init__", around)


def no_gradient_sync() -> None:
    from contextlib import contextmanager

    from dtt.train import step

    @contextmanager
    def never(module: Any, *_arguments: Any, **_how: Any) -> Any:
        with module.no_sync():
            yield

    step.gradient_sync = never  # type: ignore[assignment]


def replicas_not_reduced() -> None:
    from torch.distributed.fsdp import FSDPModule

    wrap(FSDPModule, "set_requires_all_reduce", lambda run, module, _on: run(module, False))


# ---- norms ---------------------------------------------------------------------------------------


def norm(*, local_only: bool) -> Callable[[], None]:
    """Sum the squares of all parts: without the other ranks, or with replicas counted n times."""

    def plant() -> None:
        import torch

        from dtt.mesh.sharding import local
        from dtt.params.table import Params

        def wrong(params: Any) -> torch.Tensor:
            parts = [local(p.tensor.grad).square().sum() for p in params.values()]
            total = torch.stack(parts).sum()
            return (total if local_only else params.mesh.sum(total)).sqrt()

        Params.norm = wrong  # type: ignore[method-assign]

    return plant


def clipping_scales_nothing() -> None:
    from dtt.params.table import Params

    Params.clip = lambda params, _limit: params.norm()  # type: ignore[method-assign]


def logged_norm_is_local() -> None:
    from dtt.params.table import Params

    wrap(Params, "clip", lambda run, params, limit: run(params, limit) * (1 + rank()))


# ---- data ----------------------------------------------------------------------------------------


def read(change: Callable[[Any], Any]) -> Callable[[], None]:
    """Change the micro-batches that a rank reads."""

    def plant() -> None:
        from dtt.data.samples.loader import BatchReader

        wrap(BatchReader, "read", lambda run, *a, **k: [change(batch) for batch in run(*a, **k)])

    return plant


def ranks_read_the_same() -> None:
    from dtt.data.samples.loader import BatchReader

    wrap(BatchReader, "read", lambda run, reader, *a, **k: run(replace(reader, rank=0), *a, **k))


def order_depends_on_ranks() -> None:
    from dtt.data.samples.dataset import Dataset

    wrap(Dataset, "order", lambda run, data, first, count: run(data, first + 1, count))


def read_again_after_resume() -> None:
    from dtt.data.samples import loader

    wrap(
        loader,
        "training_batches",
        lambda run, dataset, reader, first: run(dataset, reader, max(0, first - 1)),
    )


# ---- optimizers and state ------------------------------------------------------------------------


def muon_per_shard() -> None:
    from dtt.optim.muon import optimizer

    def update(muon: Any, bucket: Any) -> Any:
        for batch in bucket.batches:
            matrices = optimizer.orthogonalize(
                muon._averaged(batch), muon._polynomials, muon._ns_dtype
            )
            muon._apply(batch, matrices, None, None)
        yield from ()

    optimizer.Muon._update = update  # type: ignore[method-assign]


def muon_scale_of_shard() -> None:
    from dtt.optim.muon.optimizer import Muon

    wrap(Muon, "_factor", lambda run, muon, rows, columns: run(muon, rows // 2, columns // 2))


def momentum_of_other_rows() -> None:
    from dtt.mesh.sharding import local
    from dtt.optim.muon.optimizer import Muon

    def around(run: Any, muon: Any, *arguments: Any) -> Any:
        run(muon, *arguments)
        for state in muon.state.values():
            part = local(state["momentum"])
            part.copy_(part.roll(1, 0))

    wrap(Muon, "step", around)


def decay_of_norms() -> None:
    from dtt.optim import groups

    def around(run: Any, *arguments: Any, **how: Any) -> Any:
        found = run(*arguments, **how)
        for group in (g for of_one in found.values() for g in of_one):
            group["weight_decay"] = group["weight_decay"] or 0.1
        return found

    wrap(groups, "grouped", around)


def adam_counts_twice() -> None:
    from torch.optim import AdamW

    def around(run: Any, optimizer: Any, *arguments: Any) -> Any:
        run(optimizer, *arguments)
        for state in optimizer.state.values():
            state["step"] += 1

    wrap(AdamW, "step", around)


def average_on_one_rank() -> None:
    from dtt.optim.ema import Ema

    wrap(Ema, "update", lambda run, *a: run(*a) if rank() == 0 else None)


def skipped_on_one_rank() -> None:
    from dtt.train.anomaly_guard import Guard

    def around(run: Any, guard: Any, values: Any) -> Any:
        judgement = run(guard, values)
        return judgement if rank() else replace(judgement, skip=0 * judgement.skip)

    wrap(Guard, "judge", around)


def other_initial_weights() -> None:
    from dtt.train import assemble

    wrap(assemble, "initialize", lambda run, model, seed, base: run(model, seed + rank(), base))


def random_numbers_of_rank_0() -> None:
    from dtt.train import trainer

    wrap(trainer, "seed_rank", lambda run, seed, _rank: run(seed, 0))


def state_of_frozen_weights() -> None:
    import torch

    from dtt.train import components

    def around(run: Any, state: Any) -> Any:
        frozen = next(p for p in state.params.values() if not p.trainable)
        more = {f"adamw/{frozen.name}/exp_avg": torch.zeros_like(frozen.tensor)}
        return run(state) | state.params.laid_out(more)

    wrap(components.TrainState, "tensors", around)


def optimizer_state_not_loaded() -> None:
    from dtt.train import components

    components.load_optimizers = lambda *_: None  # type: ignore[assignment]


def shard_of_other_rank_loaded() -> None:
    from dtt.train import state

    class Swapped:
        def __init__(self, full: Any) -> None:
            self.full, self.shape, self.dtype = full, full.shape, full.dtype

        def __getitem__(self, index: Any) -> Any:
            return self.full[index].flip(0) if index and self.full.shape else self.full[index]

    wrap(state, "fill", lambda run, tensor, full: run(tensor, Swapped(full)))


def rate_of_step_before_after_resume() -> None:
    from dtt.train.run_schedule import RunSchedule
    from dtt.train.trainer import Trainer

    late = [0]

    def restore(run: Any, trainer: Any, resume: Any) -> None:
        late[0] = int(resume is not None)
        run(trainer, resume)

    wrap(Trainer, "restore", restore)
    wrap(RunSchedule, "multiplier", lambda run, schedule, step: run(schedule, step - late[0]))


def schedule_of_local_steps() -> None:
    from dtt.train.run_schedule import RunSchedule

    wrap(RunSchedule, "multiplier", lambda run, schedule, step: run(schedule, step // 2))


# ---- exports -------------------------------------------------------------------------------------


def transposed() -> None:
    from dtt.hf.weights import HFTensors

    def around(run: Any, tensors: Any, name: str) -> Any:
        tensor = run(tensors, name)
        square = tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1]
        return tensor.T.contiguous() if square else tensor

    wrap(HFTensors, "__getitem__", around)


def scale_not_folded() -> None:
    from dtt.hf import write_folder

    wrap(write_folder, "fold", lambda _run, trained: trained)


def tied_head_stored_untied() -> None:
    import json

    from dtt.hf import write_folder

    def around(run: Any, trained: Any, folder: Any, *rest: Any) -> None:
        run(trained, folder, *rest)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))

    wrap(write_folder, "_write_config", around)


PIPELINE = "parallel.pipeline=2 parallel.replicate=1 model.tie_embeddings=false"
LOSS_AND_TENSOR = "replicate", "shard", "context", "tensor"
DOCUMENTS = "data.packing=best-fit data.mask_documents=true"
LORA = "optim.type=adamw init.from=jobs/x adapter.type=lora"
DPO = "data.type=preference objective.type=dpo init.from=jobs/x"

FAULTS: dict[str, Fault] = {
    "gradient halved under tensor": Fault(gradients_times(lambda: 0.5), "G", "parallel.tensor=2"),
    "gradient not averaged": Fault(gradients_times(lambda: 2.0), "G", "parallel.shard=2"),
    "context gradient of norms doubled": Fault(
        gradients_times(lambda: 2.0, "norm"), "G", "parallel.context=2"
    ),
    "pipeline not divided by targets": Fault(pipelined(not_divided), "LG", PIPELINE),
    "pipeline divided at each micro-batch": Fault(pipelined(divided_again), "LG", PIPELINE),
    "hidden states of another micro-batch": Fault(pipelined(next_micro_batch), "DLG", PIPELINE),
    "norm of one stage": Fault(norm_of_the_stage, "N", PIPELINE),
    "stage reduced too early": Fault(
        not_reduced_at_the_end, "GR", f"{PIPELINE} parallel.shard=2"
    ),
    "partial sums of norms": Fault(
        gradients_times(lambda: 0.5 + rank(), "_norm"), "GR", "parallel.tensor=2"
    ),
    "mean per rank": Fault(
        terms(own_targets), "LG", f"parallel.replicate=2 {DOCUMENTS}"
    ),
    "padding counted": Fault(
        terms(all_positions), "LG", f"parallel.replicate=2 {DOCUMENTS}"
    ),
    "mean per micro-batch": Fault(
        mean_per_micro_batch, "LG", f"parallel.replicate=2 {DOCUMENTS}"
    ),
    "micro-batch lost": Fault(micro_batch_lost, "G", "parallel.shard=2"),
    "loss of one tensor rank": Fault(loss_times(0.5), "L", "parallel.tensor=2"),
    "documents attend to each other": Fault(
        forward(lambda batch: replace(batch, doc_ids=None)), "L",
        "parallel.tensor=2 data.mask_documents=true",
    ),
    "window off by one": Fault(
        window_off_by_one, "L", "parallel.context=2 model.family=gemma3"
    ),
    "positions restart": Fault(
        positions_restart, "L", f"parallel.context=2 {DOCUMENTS}"
    ),
    "context parts in wrong order": Fault(context_parts_in_wrong_order, "L", "parallel.context=2"),
    "tied head without gradient": Fault(
        tied_head_without_gradient, "G", "parallel.tensor=2 model.tie_embeddings=true",
    ),
    "z-loss left out": Fault(
        z_loss_left_out, "G", "parallel.context=2 train.z_loss=1e-3"
    ),
    "soft-cap left out of validation": Fault(
        softcap_left_out_of_validation, "L",
        "parallel.replicate=2 model.family=gemma3 model.logit_softcap=5.0",
    ),
    "validation counted twice": Fault(
        validation(lambda output: output._replace(loss=2 * output.loss)), "L", "parallel.context=2"
    ),
    "LoRA's summand not reduced": Fault(
        lora_summand_not_reduced, "G", f"parallel.tensor=2 {LORA}",
    ),
    "LoRA's scale twice": Fault(lora_scale_twice, "G", f"parallel.tensor=2 {LORA}"),
    "DDP without all-reduce": Fault(no_gradient_sync, "GR", "parallel.replicate=2"),
    "HSDP without all-reduce": Fault(
        replicas_not_reduced, "GR", "parallel.replicate=2 parallel.shard=2"
    ),
    "replicas counted in the norm": Fault(norm(local_only=False), "N", "parallel.tensor=2"),
    "norm of the local shard": Fault(norm(local_only=True), "N", "parallel.shard=2"),
    "clipping scales nothing": Fault(
        clipping_scales_nothing, "N", "parallel.shard=2"
    ),
    "logged norm is local": Fault(logged_norm_is_local, "N", "parallel.shard=2"),
    "targets shifted": Fault(
        read(lambda batch: replace(batch, targets=batch.targets.roll(1, 1))), "D",
        "parallel.replicate=2",
    ),
    "reference of DPO lost": Fault(
        read(lambda b: replace(b, extra={name: 0 * x for name, x in b.extra.items()})), "D",
        f"parallel.replicate=2 {DPO}",
    ),
    "ranks read the same": Fault(ranks_read_the_same, "D", "parallel.replicate=2"),
    "order depends on ranks": Fault(order_depends_on_ranks, "D", "parallel.shard=2"),
    "read again after resume": Fault(read_again_after_resume, "S", "parallel.shard=2"),
    "Muon per shard": Fault(muon_per_shard, "U", "parallel.shard=2"),
    "Muon's scale of the shard": Fault(muon_scale_of_shard, "U", "parallel.shard=2"),
    "momentum of other rows": Fault(momentum_of_other_rows, "U", "parallel.shard=2"),
    "decay of norms": Fault(decay_of_norms, "U", "parallel.replicate=2 optim.type=adamw"),
    "Adam counts twice": Fault(adam_counts_twice, "U", "parallel.shard=2 optim.type=adamw"),
    "average on one rank": Fault(
        average_on_one_rank, "RUL", "parallel.replicate=2 train.ema_decay=0.9"
    ),
    "skipped on one rank": Fault(skipped_on_one_rank, "SRU", "parallel.replicate=2"),
    "other initial weights": Fault(other_initial_weights, "RL", "parallel.replicate=2"),
    "random numbers of rank 0": Fault(random_numbers_of_rank_0, "R", "parallel.replicate=2"),
    "state of frozen weights": Fault(
        state_of_frozen_weights, "U", f"parallel.shard=2 {LORA}"
    ),
    "optimizer state not loaded": Fault(optimizer_state_not_loaded, "S", "parallel.shard=2"),
    "shard of another rank loaded": Fault(shard_of_other_rank_loaded, "S", "parallel.shard=2"),
    "rate of the step before after a resume": Fault(
        rate_of_step_before_after_resume, "S", "parallel.shard=2"
    ),
    "schedule of local steps": Fault(
        schedule_of_local_steps, "UL", "parallel.replicate=2"
    ),
    "export transposed": Fault(transposed, "X", "parallel.shard=2"),
    "scale not folded": Fault(
        scale_not_folded, "X", "parallel.shard=2 scaling.type=mup scaling.base_dim=64"
    ),
    "tied head stored untied": Fault(
        tied_head_stored_untied, "X", "parallel.shard=2 model.tie_embeddings=true",
    ),
}  # fmt: skip


def faulty_runs(name: str, inputs: Any, folder: Any, cfg: Any, checks: str) -> Any:
    """Return the case of a configuration with a fault planted in its layouts or its export."""
    from dtt.verify.layout_runs import LayoutRuns
    from dtt.verify.shrink import shrink

    case = LayoutRuns(folder, shrink(cfg), checks, inputs)
    if "X" in FAULTS[name].checks:
        case.export = partial(export, name)
    else:
        case.train = partial(train, name)
    return case
