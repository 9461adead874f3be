"""Parallelisation of a single-device model over a device mesh.

The order is tensor parallelism, activation checkpointing, compilation, then FSDP2 or DDP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dtt.base.log import log
from dtt.mesh.compilation import compiler
from dtt.mesh.dist import World
from dtt.mesh.mesh import Mesh
from dtt.model.contract import Model
from dtt.model.experts import MixtureMLP, routers
from dtt.parallel.expert import shard_experts, share_sequences
from dtt.parallel.tensor import apply_tensor, overlap

MATRIX_PRODUCTS = {"aten::mm", "aten::addmm", "aten::_scaled_mm"}
"""Operators that linear layers call. Batched ones are not included: they compute the [T, T] scores
of attention."""
COSTLY = (
    "aten::_scaled_dot_product",  # every kernel of SDPA
    "dtt::",  # attention in tiles
    "flex_attention",
    "inductor_compiled_code",  # compiled FlexAttention
    "_c10d_functional::",  # collectives
)
"""Name prefixes of operators whose outputs are saved, as recomputing them costs more than the
memory."""


def apply(
    model: Model,
    world: World,
    layout: Mesh,
    *,
    compile_blocks: bool,
    remat: Literal["none", "full", "selective"] = "none",
    precision: str = "fp32",
    reshard: bool = True,
) -> nn.Module:
    """Return the module to call in training; `model` keeps the parameters and their names.

    If the layout is sharded, parameters become DTensors in place; memory for a model on the meta
    device can then be allocated for this rank's shards alone. Unless `precision` is fp32 or fp64,
    weights are all-gathered in bf16, and gradients are reduced in fp32. `reshard` frees gathered
    weights between forward and backward pass.
    """
    # Collected first: the steps below wrap or replace `forward`, and FSDP2 needs the original
    # modules.
    blocks = list(model.blocks().values())
    share_sequences(model, layout)
    if layout.sizes.tensor > 1:
        # Tensor parallelism first, so that FSDP2 shards what is left of each matrix. The other
        # order would gather whole matrices.
        apply_tensor(model, layout.part("tensor"))
    apart = layout.experts is not None
    if remat != "none":
        # Before compilation, so that the compiler sees the recomputation and plans with it.
        rematerialize(model, remat, apart=apart)
    if compile_blocks and layout.sizes.tensor > 1 and world.device.type == "cuda":
        log.info("%s", overlap(layout.part("tensor"), world))
    if compile_blocks:
        log.info("the first step also compiles the model, which may take minutes")
        # torch 2.13 did not finish in five minutes when it compiled a block that is recomputed with
        # its collectives (two ranks of Gloo).
        in_parts = layout.sizes.tensor > 1 and remat == "full"
        compile_each_block(model, apart=apart, in_parts=in_parts)
        # Uncompiled on a CPU, where blocks of logits stay in the cache.
        model.fused_loss = world.device.type == "cuda"
    if layout.sharded:
        _shard(model, blocks, layout, precision, reshard)
        return model
    if world.size == 1:
        return model
    if compile_blocks:
        # By default Dynamo splits a block's graph wherever 25 MB of gradients are ready, to overlap
        # their all-reduce. Here each block is a separate graph, and DDP's hooks between blocks
        # overlap anyway.
        torch._dynamo.config.optimize_ddp = False  # noqa: SLF001  (it has no public name)
    ids = [world.device.index] if world.device.type == "cuda" else None
    # No gradient reaches them, and every rank computes the same values.
    corrections = list(_corrections(model))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, corrections)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return FixedBuckets(model, ids)


def compile_each_block(model: Model, *, apart: bool = False, in_parts: bool = False) -> None:
    """Compile each block (`model.layers`) when it is first called, in place.

    With `in_parts`, only `attend` is compiled, which is all before the MLP: the recomputation of a
    compiled MLP could not leave out its last product. Of blocks whose experts are sharded `apart`,
    `attend`, the router and `Experts.compute` are compiled: a graph would break at the exchange of
    rows, and in the hooks of FSDP2 around it.

    All blocks share one compilation per shape, of both passes, which is much faster than compiling
    the whole model; the compiled code is hardly slower. Shapes stay static: a smaller last batch of
    an evaluation, or a different size of `train.batch_schedule` and `train.context_schedule`, is
    compiled separately. If compilation fails on any rank, because there is no compiler or by a bug
    in torch, all blocks of all ranks run uncompiled from the next step on (they agree in
    `requests.agreed`), and the log reports the reason once.
    """
    # Each block has the same code and shapes, so Dynamo compiles the first and reuses its graph.
    block: Any
    for block in model.blocks().values():
        mlp: Any = getattr(block, "mlp", None)
        with_experts = apart and isinstance(mlp, MixtureMLP)
        if not (in_parts or with_experts):
            # `block.compile()` would also compile the hooks, as those of FSDP2.
            block.forward = compiler.compiled(block.forward)
            continue
        block.attend = compiler.compiled(block.attend)
        if with_experts:
            mlp.router.forward = compiler.compiled(mlp.router.forward)
            # Its number of rows differs in every micro-batch.
            mlp.experts.compute = compiler.compiled(mlp.experts.compute, dynamic=True)


def rematerialize(model: Model, kind: Literal["full", "selective"], *, apart: bool = False) -> None:
    """Checkpoint all blocks (`model.layers`), in place.

    `full` saves only the input of a block and runs all of it twice. `selective` also saves the
    outputs of attention, collectives and every second matrix multiplication (torchtitan's choice,
    arXiv 2410.06511); it recomputes cheap operators, and those whose output is large for their
    cost. The RNG state is restored for the recomputation. Names of modules and parameters do not
    change. Call this before compilation.

    Blocks whose experts are sharded `apart` are always recomputed in full: inside a block, the
    hooks of FSDP2 call other operators when it is recomputed, which torch 2.13 refuses where some
    are saved.
    """
    forward = {"full": _full, "selective": _selective}[kind]
    in_full = routers(model) if apart else {}
    for i, block in model.blocks().items():
        # All blocks share one function, and so one compilation.
        block.forward = (_full if i in in_full else forward).__get__(block)


def _full(block: nn.Module, *inputs: Any, **options: Any) -> Any:
    # The non-reentrant version works with DDP, FSDP2 and compilation, and saves the RNG state.
    # Compiled, attention counts as random even without dropout, and `preserve_rng_state=False`
    # would not change that (torch 2.13). It costs two calls on the host a block, and no wait.
    return checkpoint(type(block).forward, block, *inputs, use_reentrant=False, **options)


def _selective(block: nn.Module, *inputs: Any, **options: Any) -> Any:
    return _full(block, *inputs, context_fn=_contexts, **options)


def _contexts() -> Any:
    """Return the selective-checkpoint contexts of a block's forward pass and its recomputation."""
    products: Counter[bool] = Counter()

    def policy(
        context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any
    ) -> CheckpointPolicy:
        name = operator.name()
        kept = name.startswith(COSTLY)
        if name in MATRIX_PRODUCTS:
            # Every second product is recomputed: half of the memory of all products for half of
            # their time.
            products[context.is_recompute] += 1  # before torch 2.13, called in both passes
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


class FixedBuckets(DistributedDataParallel):
    """DDP whose buckets are the same in every step of a process, so that a run resumes bit for bit.

    DDP groups gradients again after its first step, in the order in which they became ready. Over
    three or more ranks, the place of a number in its bucket decides in which order the ranks'
    numbers are added, so the first step after a resume would round as no step of the whole run.
    """

    def __init__(self, model: nn.Module, device_ids: list[int] | None) -> None:
        """Group the gradients of `model` once; all ranks call this together."""
        # Gradients are views of the buckets: no second copy of all gradients.
        super().__init__(model, device_ids=device_ids, gradient_as_bucket_view=True)
        # The regrouping that would follow the first step, by the order of the reducer's parameters.
        # It happens once. (torch has no public name for it; `find_unused_parameters` would prevent
        # it as well, but walks through the graph in every step.)
        self.reducer._push_all_rebuilt_params()  # noqa: SLF001
        self.reducer._rebuild_buckets()  # noqa: SLF001

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the parameters in reverse, as gradients become ready, to overlap with sums."""
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], sparse[::-1]


def _shard(
    model: Model,
    blocks: Sequence[nn.Module],
    layout: Mesh,
    precision: str,
    reshard: bool,
    reshard_root: bool = False,
) -> None:
    """Apply FSDP2 (arXiv 2304.11277, 2411.00284): each block's weights are gathered when needed.

    The head is a group as well, unless it is the embedding; the rest is in the root group.
    """
    dims = ("replicate", "shard") if layout.sizes.replicate > 1 else ("shard",)
    mesh = layout.part(*dims)
    policy = MixedPrecisionPolicy()
    if precision not in ("fp32", "fp64"):
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # rotary angles must stay fp32
        )
    # Not sharded: the corrections of experts are equal on all ranks, in fp32, and no optimizer
    # trains them.
    own = set(_corrections(model).values())
    # A group per block: its weights are gathered while the block before computes, and freed after
    # it. One group for the model would gather everything at once.
    for block in blocks:
        if layout.experts is not None and isinstance(block.mlp, MixtureMLP):
            shard_experts(block.mlp.experts, layout, policy, reshard)
        fully_shard(
            block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, ignored_params=own
        )
    # In training the head and the root group stay gathered between the passes: the head is used at
    # the end of the forward pass, and at once again in the backward pass.
    head: Any = getattr(model, "head", None)
    # The loss takes the weight alone, so a head with a bias stays in the root group.
    if isinstance(head, nn.Linear) and len(list(head.parameters())) == 1:
        # In the root group the head of Llama 8B, 1 GB, was gathered before the first layer, and its
        # gradient of 2 GB reduced after the last: 4 % of a step on 128 H100. The embedding needs no
        # group: its place is first and last anyway.
        fully_shard(head, mesh=mesh, reshard_after_forward=reshard_root, mp_policy=policy)
        # The loss reads the weight without calling the head, so the hooks go around the loss.
        head.losses = model.losses  # type: ignore[assignment]
        register_fsdp_forward_method(head, "losses")
        model.losses = head.losses  # type: ignore[assignment,method-assign]
    fully_shard(
        model, mesh=mesh, reshard_after_forward=reshard_root, mp_policy=policy, ignored_params=own
    )


def shard_frozen(model: Model, layout: Mesh) -> None:
    """Shard a model that the run only calls, over the ranks that shard the weights of the run."""
    # Without the mesh of experts: only what is trained has exchanges for it.
    mesh = replace(layout, experts=None)
    _shard(model, list(model.blocks().values()), mesh, "fp32", reshard=True, reshard_root=True)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give each parameter on the meta device memory on `device`, without values; move buffers."""
    # Not `to_empty`: it swaps tensors, which fake tensors do not allow.
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
        for name, parameter in list(module.named_parameters(recurse=False)):
            memory = torch.empty_like(parameter, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=parameter.requires_grad))


def allocate_shards(model: nn.Module, device: torch.device) -> None:
    """Give a sharded model memory for this rank's shards only, without values; move buffers."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def _corrections(model: Model) -> dict[str, nn.Parameter]:
    """Return the parameters that no optimizer trains, by name."""
    named = model.named_parameters()
    return {name: tensor for name, tensor in named if model.role(name, tensor) == "balance"}


@contextmanager
def gradient_sync(module: nn.Module, last: bool, each: bool = False) -> Iterator[None]:
    """Reduce gradients over ranks in the backward passes inside, if this is the last one of a step.

    With `each`, sharded gradients are reduce-scattered every time, but all-reduced over replicas
    only the last time.
    """
    if isinstance(module, DistributedDataParallel) and not last:
        # DDP would all-reduce the gradients of every micro-batch; only their sum is needed.
        with module.no_sync():
            yield
        return
    for part in module.modules():
        if isinstance(part, FSDPModule):  # the outermost one sets it for all
            part.set_requires_gradient_sync(last or each)
            part.set_requires_all_reduce(last)
            break
    yield


def release(module: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass has left gathered.

    The next forward pass then gathers the current values of the parameters.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return an autocast context that is enabled, in bf16, for `precision` bf16 and fp8."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision in ("bf16", "fp8"))
