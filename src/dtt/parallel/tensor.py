"""Tensor, sequence and loss parallelism: a group of ranks shards every layer of a decoder.

Each rank has some heads, some columns of the MLP, and some rows of the vocabulary (Shoeybi et al.,
2019, arXiv 1909.08053). Between these layers, each rank has some tokens of every sequence
(Korthikanti et al., 2022, arXiv 2205.05198). One table of module names declares the styles for all
families.

Shapes: B sequences, T tokens, P ranks, D dim, V vocabulary.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from types import MappingProxyType, MethodType
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dtt.mesh.collectives import arrived, gather
from dtt.mesh.dist import World
from dtt.mesh.dtypes import wide
from dtt.mesh.sharding import local
from dtt.model.experts import Experts, routers
from dtt.model.layers import Absent
from dtt.model.lora import LORA_A, LORA_B
from dtt.model.loss import VocabularyPart

OWN_TOKENS, ALL_TOKENS = Shard(1), Replicate()
OWN_HEADS = 1
"""Dimension of the heads in [B, H, T, K]."""


class GatheredNorm(ParallelStyle):
    """Norm of this rank's tokens, followed by an all-gather: [B, T/P, D] → [B, T, D].

    Under autocast, the all-gather uses its dtype, the one of the following matrix multiplications:
    this halves the traffic.
    """

    def __init__(self, *, use_local_output: bool = False) -> None:
        """Create the style.

        With `use_local_output` the output is a plain tensor, and its gradient on each rank is one
        summand of the total (`Partial`). Otherwise the output is a DTensor, which tracks this
        itself.
        """
        super().__init__()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._own, self._gathered)

    @staticmethod
    def _own(_module: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> Any:
        # run_check would compare the tensors of all ranks: a collective in every layer.
        return DTensor.from_local(inputs[0], mesh, [OWN_TOKENS], run_check=False)

    def _gathered(self, _module: nn.Module, x: Any, mesh: DeviceMesh) -> Any:
        if torch.is_autocast_enabled(mesh.device_type):
            x = x.to(torch.get_autocast_dtype(mesh.device_type))
        # Queries, keys and values, or gate and up, share this one all-gather.
        gathered: DTensor = x.redistribute(placements=[ALL_TOKENS])
        # Each rank's head sees all tokens but only its rows of the vocabulary, so gradients of the
        # hidden states are summands.
        return gathered.to_local(grad_placements=[Partial()]) if self.use_local_output else gathered


class DividedNorm(ParallelStyle):
    """RMSNorm over all heads of a token, of which each rank has some: [B, T, D/P] → [B, T, D/P]."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def forward(x: Tensor) -> Tensor:
            # Ranks exchange one number per token. To all-gather the heads would move D/P of them,
            # and keep as many for the backward pass.
            own = wide(x).square().mean(-1, keepdim=True)
            mean = gather(own, -1, group).mean(-1, keepdim=True)
            weight = wide(local(module.weight)) + module.offset  # type: ignore[arg-type,operator]
            return (wide(x) * torch.rsqrt(mean + module.eps) * weight).type_as(x)  # type: ignore[operator]

        module.forward = forward
        return _distribute(module, device_mesh, Shard(0))


class OutputsDivided(ColwiseParallel):
    """Linear layer of which each rank has some outputs: [B, T, D] → [B, T, F/P].

    Of an adapter, each rank has all of A and its rows of B.
    """

    def _partition_linear_fn(self, _name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        _distribute(module, mesh, Shard(0), {LORA_A: Replicate()})


class InputsDivided(RowwiseParallel):
    """Linear layer of which each rank has some inputs: [B, T, F/P] → [B, T/P, D].

    Each rank's product is a summand for all tokens. The reduce-scatter adds them and leaves each
    rank its own tokens: half the bytes of an all-reduce. Of an adapter, each rank has its columns
    of A and all of B.
    """

    def __init__(self) -> None:
        """Create the style."""
        super().__init__(output_layouts=OWN_TOKENS)

    def _partition_linear_fn(self, _name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        whole = dict.fromkeys(("bias", LORA_B), Replicate())
        _distribute(module, mesh, Shard(1), whole)
        if hasattr(module, LORA_A):
            module.update = MethodType(_summand, module)  # type: ignore[assignment]


def _distribute(
    module: nn.Module,
    mesh: DeviceMesh,
    placement: Placement,
    others: Mapping[str, Placement] = MappingProxyType({}),
) -> nn.Module:
    """Distribute each parameter of `module` with `placement`, or with that in `others`."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        # None: ranks have equal weights or none yet, so rank 0 need not send its own.
        part = distribute_tensor(parameter, mesh, [others.get(name, placement)], src_data_rank=None)
        trained = nn.Parameter(part, requires_grad=parameter.requires_grad)
        module.register_parameter(name, trained)
    return module


def _summand(module: nn.Module, x: DTensor) -> DTensor:
    """Return this rank's summand B A_k x_k of the update of an adapter.

    It is added to the summand of W, and both pass the one reduction of the layer. DTensor would
    reduce A_k x_k first, and then the sum of all tokens without scattering it.
    """
    a, b = local(module.lora_a), module.lora_b  # type: ignore[arg-type]
    assert isinstance(b, DTensor)
    # Each rank's gradient of B, which all ranks have, is a summand.
    whole_b = b.to_local(grad_placements=[Partial()])
    low = functional.linear(x.to_local(), a.to(x.dtype))
    update = functional.linear(low, whole_b.to(low.dtype))
    return DTensor.from_local(update, x.device_mesh, [Partial()], run_check=False)


class DividedEmbedding(RowwiseParallel):
    """Vocabulary-parallel embedding: ids [B, T] → [B, T/P, D].

    Each rank looks up the ids in its rows; a reduce-scatter sums the results.
    """

    def __init__(self) -> None:
        """Create the style; every rank gets all ids."""
        super().__init__(input_layouts=ALL_TOKENS, output_layouts=OWN_TOKENS)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # A compiled block drops the gradient of an input whose collective is still pending (torch
        # 2.13).
        super()._apply(module, device_mesh).register_forward_hook(lambda _m, _i, out: arrived(out))
        return module


class OwnTokens(ParallelStyle):
    """Layer with all of its weights on each rank, for this rank's tokens.

    It takes its weights by `dtt.mesh.sharding.local_summand`, because the gradient of each rank's
    tokens is a summand.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Only the weight: a router's `balance` is added to plain tensors, and stays one itself.
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        part = distribute_tensor(weight, device_mesh, [ALL_TOKENS], src_data_rank=None)
        module.weight = nn.Parameter(part, requires_grad=weight.requires_grad)
        return module


def plan(*, norm_all_heads: bool) -> dict[str, ParallelStyle]:
    """Return the parallel style of each module; `*` is the layer index.

    `norm_all_heads` is True if queries and keys are normalised over all heads together. Modules
    that are not listed are not parallelised.
    """
    # Column-parallel layers give each rank complete heads: attention needs no communication.
    to_columns = OutputsDivided()
    to_tokens = InputsDivided()
    # Norms between layers see this rank's tokens only, so their activations take 1/P of the memory.
    tokens = SequenceParallel(use_local_output=True)
    heads = (
        DividedNorm()
        if norm_all_heads
        else SequenceParallel(sequence_dim=OWN_HEADS, use_local_output=True)
    )
    return {
        "embed": DividedEmbedding(),
        "pos_embed": DividedEmbedding(),
        "layers.*.attn_norm": GatheredNorm(),
        "layers.*.attn.q": to_columns,
        "layers.*.attn.k": to_columns,
        "layers.*.attn.v": to_columns,
        "layers.*.attn.q_norm": heads,
        "layers.*.attn.k_norm": heads,
        "layers.*.attn.o": to_tokens,
        "layers.*.attn_post_norm": tokens,
        "layers.*.mlp_norm": GatheredNorm(),
        "layers.*.mlp.gate": to_columns,
        "layers.*.mlp.up": to_columns,
        "layers.*.mlp.down": to_tokens,
        "layers.*.mlp_post_norm": tokens,
        # A mixture computes the tokens of each rank there, with experts that are not cut.
        "layers.*.mixture_norm": tokens,
        "layers.*.mlp.router": OwnTokens(),
        "layers.*.mlp.shared.gate": OwnTokens(),
        "layers.*.mlp.shared.up": OwnTokens(),
        "layers.*.mlp.shared.down": OwnTokens(),
        "norm": GatheredNorm(use_local_output=True),
        "head": to_columns,
    }


def apply_tensor(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a Decoder over the ranks of a one-dimensional mesh, in place.

    Every parameter becomes a DTensor; on the meta device there is no communication. Gradients of
    replicated parameters (norms, and biases that are added after a sum) may be `Partial`: FSDP2
    reduces them.
    """
    styles = plan(norm_all_heads=model.arch.qk_norm == "all_heads")  # type: ignore[union-attr]
    mixtures = {f"layers.{i}.mlp_norm" for i in routers(model)}
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            continue  # FSDP2 divides them
        name = name.replace("mlp_norm", "mixture_norm") if name in mixtures else name
        style = styles.get(re.sub(r"\.\d+\.", ".*.", name))
        # Without a norm before it, attention or MLP still needs the tokens of all ranks.
        norm_without_weights = isinstance(style, GatheredNorm) and not isinstance(module, Absent)
        if any(True for _ in module.parameters(recurse=False)) or norm_without_weights:
            if style is None:
                # A module left out would silently compute with the whole weight on every rank.
                raise ValueError(f"no tensor-parallel style for {name}: add it to plan()")
            # None: ranks have equal weights or none yet, so rank 0 need not send its own.
            parallelize_module(module, mesh, style, src_data_rank=None)
    # Some of torch's styles make parameters that are trained, also from frozen ones.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])
    model.part = VocabularyPart(mesh, model.arch.vocab_size)  # type: ignore[assignment,union-attr,arg-type]


def overlap(mesh: DeviceMesh, world: World) -> str:
    """Enable async tensor parallelism if the GPUs of `mesh` can access each other's memory.

    Return a log line that reports the outcome. All ranks call this together: it must be enabled
    on all or none, as its collectives are incompatible with ordinary ones. torch may then split
    matrix multiplications and overlap them with the communication of their slices; a profile
    (`dtt job profile JOB`) shows whether it does.
    """
    from torch._inductor import config
    from torch.distributed import _symmetric_memory as symmetric

    group, shared = mesh.get_group(), []

    def allocate() -> None:
        shared.append(symmetric.empty(1, device=torch.device(mesh.device_type)))

    def meet() -> None:
        symmetric.rendezvous(shared[0], group)
        with warnings.catch_warnings():  # deprecated in 2.13, but the compiler needs it
            warnings.simplefilter("ignore", FutureWarning)
            symmetric.enable_symm_mem_for_group(group.group_name)

    for attempt in (allocate, meet):  # agree after each, as rendezvous would hang on a missing rank
        reason = "another rank cannot reach its peers' memory"
        failed = False
        try:
            attempt()
        except RuntimeError as error:
            failed, reason = True, str(error).splitlines()[0]
        if world.maximum(int(failed)):
            return f"tensor parallelism: collectives do not overlap with matrix products: {reason}"
    config._micro_pipeline_tp = True  # noqa: SLF001  (it has no public name)
    # A permission, and not yet a fact: Inductor decides for each product when it compiles a block.
    return "tensor parallelism: the compiler may overlap collectives with matrix products"
