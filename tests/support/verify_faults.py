"""Faults that others have had, each planted in the ranks of a layout by replacing one function.

The table in the documentation of `dtt verify` lists where they were found. A fault is planted in
the processes of a layout only, never in the reference of one process; those of the export in the
process that exports.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch

from dtt.mesh.collectives import gather
from dtt.mesh.sharding import local
from dtt.model.output import Output
from dtt.verify import recording

PIPELINE = "parallel.pipeline=2 parallel.replicate=1 model.tie_embeddings=false"
LOSS_AND_TENSOR = "replicate", "shard", "context", "tensor"
REPLICATE, SHARD, CONTEXT, TENSOR = (f"parallel.{dim}=2" for dim in LOSS_AND_TENSOR)
DOCUMENTS = "data.packing=best-fit data.mask_documents=true"
LORA = "optim.type=adamw init.from=jobs/x adapter.type=lora"
DPO = "data.type=preference objective.type=dpo init.from=jobs/x"
ADAMW = "optim.type=adamw"


@dataclass(frozen=True)
class Fault:
    """A fault, and what finds it."""

    plant: Callable[[], None]
    checks: str
    """Letters of the checks one of which must find it: the first is that of its kind."""
    keys: str
    """Arguments of the run, separated by spaces."""


FAULTS: dict[str, Fault] = {}


def fault(name: str, checks: str, *keys: str, at: str = "") -> Callable[[Any], Any]:
    """Register a fault: what plants it or, with `at`, what takes that function's place."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        plant = partial(wrap, at, function) if at else function
        FAULTS[name] = Fault(plant, checks, " ".join(keys))
        return function

    return register


def wrap(target: str, around: Callable[..., Any]) -> None:
    """Replace `module:name` by `around`, which gets the original as its first argument."""
    owner, name = re.split(r"[.:](?=\w+$)", target)
    holder = pkgutil.resolve_name(owner)
    original = getattr(holder, name)
    setattr(holder, name, lambda *a, **k: around(original, *a, **k))


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

PASSES = "dtt.train.step:Passes.run"


def gradients_times(factor: Callable[[], float], match: str = "") -> Callable[..., Any]:
    """Scale the gradients of parameters whose names contain `match`, after the backward passes."""

    def around(run: Any, step: Any, *arguments: Any) -> Any:
        output = run(step, *arguments)
        for name, parameter in step.module.named_parameters():
            if parameter.grad is not None and match in name:
                local(parameter.grad).mul_(factor())
        return output

    return around


fault("gradient halved under tensor", "G", TENSOR, at=PASSES)(gradients_times(lambda: 0.5))
fault("gradient not averaged", "G", SHARD, at=PASSES)(gradients_times(lambda: 2.0))
fault("context gradient of norms doubled", "G", CONTEXT, at=PASSES)(
    gradients_times(lambda: 2.0, "norm")
)
fault("partial sums of norms", "GR", TENSOR, at=PASSES)(
    gradients_times(lambda: 0.5 + rank(), "_norm")
)


def own_targets(step: Any, batches: Any) -> int:
    return int(step.replicas * sum(int((b.targets >= 0).sum()) for b in batches))


@fault("mean per rank", "LG", REPLICATE, DOCUMENTS, at=PASSES)
def mean_per_rank(run: Any, step: Any, batches: Any, objective: Any, _terms: int) -> Any:
    return run(step, batches, objective, own_targets(step, batches))


@fault("padding counted", "LG", REPLICATE, DOCUMENTS, at=PASSES)
def padding_counted(run: Any, step: Any, batches: Any, objective: Any, _terms: int) -> Any:
    positions = int(step.replicas * sum(b.targets.numel() for b in batches))
    return run(step, batches, objective, positions)


@fault("mean per micro-batch", "LG", REPLICATE, DOCUMENTS, at=PASSES)
def mean_per_micro_batch(run: Any, step: Any, batches: Any, objective: Any, _terms: int) -> Any:
    own = [own_targets(step, [b]) * len(batches) for b in batches]
    parts = [run(step, [b], objective, n) for b, n in zip(batches, own, strict=True)]
    return reduce(Output.plus, parts)


@fault("micro-batch lost", "G", SHARD, at=PASSES)
def micro_batch_lost(run: Any, step: Any, batches: Any, *others: Any) -> Any:
    first = run(step, batches[:-1], *others)
    for parameter in step.module.parameters():
        parameter.grad = None
    return Output.plus(first, run(step, batches[-1:], *others))


@fault("loss of one tensor rank", "L", TENSOR, at=PASSES)
def half_of_the_loss(run: Any, *arguments: Any) -> Any:
    output = run(*arguments)
    return output._replace(loss=0.5 * output.loss)


@fault("z-loss left out", "G", CONTEXT, "train.z_loss=1e-3", at=PASSES)
def z_loss_left_out(run: Any, step: Any, batches: Any, objective: Any, count: int) -> Any:
    return run(step, batches, replace(objective, options={"z_loss": 0.0}), count)


PIPELINED = "dtt.train.pipelined_step:PipelinedPasses.run"


@fault("pipeline not divided by targets", "LG", PIPELINE, at=PIPELINED)
def not_divided(run: Any, step: Any, batches: Any, objective: Any, _terms: int) -> Any:
    return run(step, batches, objective, 1)


@fault("pipeline divided at each micro-batch", "LG", PIPELINE, at=PIPELINED)
def divided_again(run: Any, step: Any, batches: Any, objective: Any, terms: int) -> Any:
    return run(step, batches, objective, terms * len(batches))


@fault("hidden states of another micro-batch", "DLG", PIPELINE, at=PIPELINED)
def next_micro_batch(run: Any, step: Any, batches: Any, *others: Any) -> Any:
    """The last rank computes the loss of other micro-batches than it received."""
    ours = batches if step.module.rank == 0 else [*batches[1:], batches[0]]
    return run(step, ours, *others)


@fault("norm of one stage", "N", PIPELINE, at="dtt.mesh.mesh:Mesh.sum")
def norm_of_the_stage(total: Any, mesh: Any, values: Any, over: Any = LOSS_AND_TENSOR) -> Any:
    return total(mesh, values, over)


@fault("stage reduced too early", "GR", PIPELINE, SHARD)
def not_reduced_at_the_end() -> None:
    """A stage reduces its gradients in the pass of its first micro-batch instead of its last."""
    seen = set[int]()

    def around(reduce: Any, pipeline: Any, stage: int, **ends: Any) -> Any:
        first = stage not in seen
        seen.add(stage)
        if ends["end"]:
            seen.clear()
        return reduce(pipeline, stage, last=first, end=ends["end"])

    wrap("dtt.parallel.pipelining:Pipeline.reduce_gradients", around)


@fault(
    "documents attend to each other", "L", TENSOR, "data.mask_documents=true",
    at="dtt.train.step:Passes._forward",
)  # fmt: skip
def documents_attend_to_each_other(run: Any, step: Any, batch: Any, *rest: Any) -> Any:
    return run(step, replace(batch, doc_ids=None), *rest)


EVALUATE, CROSS_ENTROPY = (
    "dtt.train.step:Passes.evaluate",
    "dtt.model.contract:linear_cross_entropy",
)


@fault("validation counted twice", "L", CONTEXT, at=EVALUATE)
def validation_counted_twice(run: Any, *arguments: Any, **how: Any) -> Any:
    output = run(*arguments, **how)
    return output._replace(loss=2 * output.loss)


@fault(
    "soft-cap left out of validation", "L",
    REPLICATE, "model.family=gemma3 model.logit_softcap=5.0",
)  # fmt: skip
def softcap_left_out_of_validation() -> None:
    cap = [True]

    def evaluate(run: Any, *arguments: Any, **how: Any) -> Any:
        cap[0] = False
        try:
            return run(*arguments, **how)
        finally:
            cap[0] = True

    def loss(run: Any, *arguments: Any, **how: Any) -> Any:
        return run(*arguments, **how | {"softcap": how["softcap"] if cap[0] else None})

    wrap(EVALUATE, evaluate)
    wrap(CROSS_ENTROPY, loss)


@fault(
    "tied head without gradient", "G", TENSOR, "model.tie_embeddings=true", at=CROSS_ENTROPY
)  # fmt: skip
def tied_head_without_gradient(run: Any, hidden: Any, head: Any, *rest: Any, **how: Any) -> Any:
    return run(hidden, head.detach(), *rest, **how)


@fault(
    "window off by one", "L", CONTEXT, "model.family=gemma3",
    at="dtt.parallel.context:make_context_attention_fns",
)  # fmt: skip
def window_off_by_one(run: Any, arch: Any, *rest: Any) -> Any:
    return run(replace(arch, windows=tuple(w and w + 1 for w in arch.windows)), *rest)


@fault(
    "positions restart", "L", CONTEXT, DOCUMENTS, at="dtt.parallel.context:document_positions"
)  # fmt: skip
def positions_restart(run: Any, doc_ids: Any) -> Any:
    return run(doc_ids) % (doc_ids.shape[1] // 2)


@fault(
    "context parts in wrong order", "L", CONTEXT, at="dtt.parallel.context:SequenceShard.gather"
)  # fmt: skip
def context_parts_in_wrong_order(_run: Any, shard: Any, part: torch.Tensor) -> torch.Tensor:
    return gather(part, -2, shard.group)


@fault(
    "LoRA's summand not reduced", "G", TENSOR, LORA, at="torch.distributed.tensor:DTensor.to_local"
)  # fmt: skip
def lora_summand_not_reduced(run: Any, tensor: Any, **how: Any) -> Any:
    if how.get("grad_placements"):
        from torch.distributed.tensor import Replicate

        how = {"grad_placements": [Replicate()]}
    return run(tensor, **how)


@fault("LoRA's scale twice", "G", TENSOR, LORA, at="dtt.model.lora:LoraLinear.__init__")
def lora_scale_twice(run: Any, layer: Any, *arguments: Any) -> None:
    run(layer, *arguments)
    layer.scale *= 2


@fault("DDP without all-reduce", "GR", REPLICATE, at="dtt.train.step:gradient_sync")
@contextmanager
def no_gradient_sync(_run: Any, module: Any, *_arguments: Any, **_how: Any) -> Any:
    with module.no_sync():
        yield


@fault(
    "HSDP without all-reduce", "GR", REPLICATE, SHARD,
    at="torch.distributed.fsdp:FSDPModule.set_requires_all_reduce",
)  # fmt: skip
def replicas_not_reduced(run: Any, module: Any, _on: Any) -> None:
    run(module, False)


# ---- norms ---------------------------------------------------------------------------------------


def norm(*, local_only: bool) -> Callable[..., Any]:
    """Sum the squares of all parts: without the other ranks, or with replicas counted n times."""

    def wrong(_run: Any, params: Any) -> torch.Tensor:
        parts = [local(p.tensor.grad).square().sum() for p in params.values()]
        total = torch.stack(parts).sum()
        return (total if local_only else params.mesh.sum(total)).sqrt()

    return wrong


NORM, CLIP = "dtt.params.table:Params.norm", "dtt.params.table:Params.clip"
fault("replicas counted in the norm", "N", TENSOR, at=NORM)(norm(local_only=False))
fault("norm of the local shard", "N", SHARD, at=NORM)(norm(local_only=True))


@fault("clipping scales nothing", "N", SHARD, at=CLIP)
def clipping_scales_nothing(_run: Any, params: Any, _limit: Any) -> Any:
    params.align()
    return params.norm()


@fault("logged norm is local", "N", SHARD, at=CLIP)
def logged_norm_is_local(run: Any, params: Any, limit: Any) -> Any:
    return run(params, limit) * (1 + rank())


# ---- data ----------------------------------------------------------------------------------------

READ = "dtt.data.samples.loader:BatchReader.read"


@fault("targets shifted", "D", REPLICATE, at=READ)
def targets_shifted(run: Any, *a: Any, **k: Any) -> Any:
    return [replace(batch, targets=batch.targets.roll(1, 1)) for batch in run(*a, **k)]


@fault("reference of DPO lost", "D", REPLICATE, DPO, at=READ)
def reference_lost(run: Any, *a: Any, **k: Any) -> Any:
    return [replace(b, extra={n: 0 * x for n, x in b.extra.items()}) for b in run(*a, **k)]


@fault("ranks read the same", "D", REPLICATE, at=READ)
def ranks_read_the_same(run: Any, reader: Any, *a: Any, **k: Any) -> Any:
    return run(replace(reader, rank=0), *a, **k)


@fault("order depends on ranks", "D", SHARD, at="dtt.data.samples.dataset:Dataset.order")
def order_depends_on_ranks(run: Any, data: Any, first: int, count: int) -> Any:
    return run(data, first + 1, count)


@fault("read again after resume", "S", SHARD, at="dtt.data.samples.loader:training_batches")
def read_again_after_resume(run: Any, dataset: Any, reader: Any, first: int) -> Any:
    return run(dataset, reader, max(0, first - 1))


# ---- optimizers and state ------------------------------------------------------------------------


@fault("Muon per shard", "U", SHARD, at="dtt.optim.muon.optimizer:Muon._update")
def muon_per_shard(_run: Any, muon: Any, bucket: Any) -> Any:
    from dtt.optim.muon.optimizer import orthogonalize

    for batch in bucket.batches:
        matrices = orthogonalize(muon._averaged(batch), muon._ns_dtype)
        muon._apply(batch, matrices, None)
    yield from ()


@fault("Muon's scale of the shard", "U", SHARD, at="dtt.optim.muon.optimizer:Muon._factor")
def muon_scale_of_shard(run: Any, muon: Any, rows: int, columns: int) -> Any:
    return run(muon, rows // 2, columns // 2)


@fault("momentum of other rows", "U", SHARD, at="dtt.optim.muon.optimizer:Muon.step")
def momentum_of_other_rows(run: Any, muon: Any, *arguments: Any) -> Any:
    run(muon, *arguments)
    for state in muon.state.values():
        part = local(state["momentum"])
        part.copy_(part.roll(1, 0))


@fault("decay of norms", "U", REPLICATE, ADAMW, at="dtt.optim.groups:grouped")
def decay_of_norms(run: Any, *arguments: Any, **how: Any) -> Any:
    found = run(*arguments, **how)
    for group in (g for of_one in found.values() for g in of_one):
        group["weight_decay"] = group["weight_decay"] or 0.1
    return found


@fault("Adam counts twice", "U", SHARD, ADAMW, at="torch.optim:AdamW.step")
def adam_counts_twice(run: Any, optimizer: Any, *arguments: Any) -> Any:
    run(optimizer, *arguments)
    for state in optimizer.state.values():
        state["step"] += 1


@fault(
    "average on one rank", "RUL", REPLICATE, "train.ema_decay=0.9", at="dtt.optim.ema:Ema.update"
)
def average_on_one_rank(run: Any, *arguments: Any) -> Any:
    return run(*arguments) if rank() == 0 else None


@fault("skipped on one rank", "SRU", REPLICATE, at="dtt.train.anomaly_guard:Guard.judge")
def skipped_on_one_rank(run: Any, guard: Any, values: Any) -> Any:
    judgement = run(guard, values)
    return judgement if rank() else replace(judgement, skip=0 * judgement.skip)


@fault("other initial weights", "RL", REPLICATE, at="dtt.train.trained_model:initialize")
def other_initial_weights(run: Any, model: Any, seed: int, base: Any) -> Any:
    return run(model, seed + rank(), base)


@fault("random numbers of rank 0", "R", REPLICATE, at="dtt.train.trainer:seed_rank")
def random_numbers_of_rank_0(run: Any, seed: int, _rank: int) -> Any:
    return run(seed, 0)


@fault("state of frozen weights", "U", SHARD, LORA, at="dtt.train.trained_model:TrainState.tensors")
def state_of_frozen_weights(run: Any, state: Any) -> Any:
    frozen = next(p for p in state.params.values() if not p.trainable)
    more = {f"adamw/{frozen.name}/exp_avg": torch.zeros_like(frozen.tensor)}
    return run(state) | state.params.laid_out(more)


@fault("optimizer state not loaded", "S", SHARD, at="dtt.train.trained_model:load_optimizers")
def optimizer_state_not_loaded(*_: Any) -> None:
    return None


@fault("shard of another rank loaded", "S", SHARD, at="dtt.train.state:fill")
def shard_of_other_rank_loaded(run: Any, tensor: Any, full: Any) -> Any:
    class Swapped:
        shape, dtype = full.shape, full.dtype

        def __getitem__(self, index: Any) -> Any:
            return full[index].flip(0) if index and full.shape else full[index]

    return run(tensor, Swapped())


MULTIPLIER = "dtt.train.run_schedule:RunSchedule.multiplier"


@fault("schedule of local steps", "UL", REPLICATE, at=MULTIPLIER)
def schedule_of_local_steps(run: Any, schedule: Any, step: int) -> Any:
    return run(schedule, step // 2)


@fault("rate of the step before after a resume", "S", SHARD)
def rate_of_step_before_after_resume() -> None:
    late = [0]

    def restore(run: Any, trainer: Any) -> None:
        late[0] = int(trainer.resume is not None)
        run(trainer)

    wrap("dtt.train.trainer:Trainer.restore", restore)
    wrap(MULTIPLIER, lambda run, schedule, step: run(schedule, step - late[0]))


# ---- exports -------------------------------------------------------------------------------------


@fault("export transposed", "X", SHARD, at="dtt.hf.weights:HFTensors.__getitem__")
def transposed(run: Any, tensors: Any, name: str) -> Any:
    tensor = run(tensors, name)
    square = tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1]
    return tensor.T.contiguous() if square else tensor


@fault(
    "scale not folded", "X", SHARD, "scaling.type=mup scaling.base_dim=64",
    at="dtt.hf.write_folder:fold",
)  # fmt: skip
def scale_not_folded(_run: Any, trained: Any) -> Any:
    return trained


@fault(
    "tied head stored untied", "X", SHARD, "model.tie_embeddings=true",
    at="dtt.hf.write_folder:_write_config",
)  # fmt: skip
def tied_head_stored_untied(run: Any, trained: Any, folder: Any, *rest: Any) -> None:
    run(trained, folder, *rest)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))


def faulty_runs(name: str, folder: Any, cfg: Any, checks: str) -> Any:
    """Return the case of a configuration with a fault planted in its layouts or its export."""
    from dtt.verify.layout_runs import LayoutRuns
    from dtt.verify.shrink import shrink

    case = LayoutRuns(folder, shrink(cfg), checks)
    if "X" in FAULTS[name].checks:
        case.export = partial(export, name)
    else:
        case.train = partial(train, name)
    return case
