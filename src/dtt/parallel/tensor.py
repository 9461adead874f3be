"""Tensor, sequence and loss parallelism: a few devices share every layer of a decoder.

Each has some heads, some columns of the MLP, and some rows of the vocabulary (Shoeybi et al., 2019,
arXiv 1909.08053); between these, each has some tokens of every sequence (Korthikanti et al., 2022,
arXiv 2205.05198). What a layer needs is declared once, by the names of modules, for all families.

Shapes: B sequences, T tokens, P processes, D dim, V vocabulary.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dtt.parallel.collectives import arrived, gather
from dtt.runtime.dist import World

OWN_TOKENS, ALL_TOKENS = Shard(1), Replicate()
OWN_HEADS = 1
"""The dimension of heads in [B, H, T, K]."""


class GatheredNorm(ParallelStyle):
    """Norms this process's tokens, then gathers those of all: [B, T/P, D] → [B, T, D].

    Under autocast in its dtype, which is that of the products that follow: half the traffic.
    """

    def __init__(self, *, use_local_output: bool = False) -> None:
        """With `use_local_output` what comes out is a plain tensor, of whose gradient each process
        gives a summand; else a DTensor, which knows that of itself."""
        super().__init__()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._own, self._gathered)

    @staticmethod
    def _own(_module: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [OWN_TOKENS], run_check=False)

    def _gathered(self, _module: nn.Module, x: Any, mesh: DeviceMesh) -> Any:
        if torch.is_autocast_enabled(mesh.device_type):
            x = x.to(torch.get_autocast_dtype(mesh.device_type))
        whole: DTensor = x.redistribute(placements=[ALL_TOKENS])
        return whole.to_local(grad_placements=[Partial()]) if self.use_local_output else whole


class DividedEmbedding(RowwiseParallel):
    """Looks up the rows that this process has, and sums over all: ids [B, T] → [B, T/P, D]."""

    def __init__(self) -> None:
        """Every process gets all ids."""
        super().__init__(input_layouts=ALL_TOKENS, output_layouts=OWN_TOKENS)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # A compiled block that is given a sum still under way drops its gradient (torch 2.13).
        super()._apply(module, device_mesh).register_forward_hook(lambda _m, _i, out: arrived(out))
        return module


def plan() -> dict[str, ParallelStyle]:
    """How each module is divided; `*` is the number of a layer. What is not there takes no part."""
    to_columns = ColwiseParallel()
    to_tokens = RowwiseParallel(output_layouts=OWN_TOKENS)
    tokens = SequenceParallel(use_local_output=True)
    heads = SequenceParallel(sequence_dim=OWN_HEADS, use_local_output=True)
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
        "norm": GatheredNorm(use_local_output=True),
        "head": to_columns,
    }


def apply_tensor(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide a Decoder over the processes of a mesh of one dimension, in place.

    Every parameter becomes a DTensor; on the meta device nothing is exchanged. Gradients of those
    that all processes hold (norms, and biases of what is summed) may be `Partial`: FSDP2 sums them.
    """
    styles = plan()
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            style = styles[re.sub(r"\.\d+\.", ".*.", name)]
            parallelize_module(module, mesh, style, src_data_rank=None)
    rows = model.get_parameter("embed.weight").shape[0]
    model.part = VocabularyPart(mesh, rows)  # type: ignore[assignment]  # no Decoder is known here


def overlap(mesh: DeviceMesh, world: World) -> str:
    """Have compiled blocks exchange tokens while they multiply (async tensor parallelism), if the
    GPUs of `mesh` can reach each other's memory; says whether they do. All ranks together: they use
    it everywhere or nowhere, as its exchanges do not go with ordinary ones.

    torch then takes products apart, and sends or fetches a piece while it computes another.
    """
    from torch._inductor import config
    from torch.distributed import _symmetric_memory as symmetric

    group, shared = mesh.get_group(), []

    def allocate() -> None:
        shared.append(symmetric.empty(1, device=torch.device(mesh.device_type)))

    def meet() -> None:
        symmetric.rendezvous(shared[0], group)
        with warnings.catch_warnings():  # since 2.13 it says it is not needed; the compiler asks
            warnings.simplefilter("ignore", FutureWarning)
            symmetric.enable_symm_mem_for_group(group.group_name)

    for attempt in (allocate, meet):  # a rank that cannot allocate would be waited for
        reason = "another rank cannot reach its peers' memory"
        failed = False
        try:
            attempt()
        except RuntimeError as error:
            failed, reason = True, str(error).splitlines()[0]
        if world.agree(int(failed)):
            return f"tensor parallelism: products wait for exchanges: {reason}"
    config._micro_pipeline_tp = True  # noqa: SLF001  (it has no public name)
    return "tensor parallelism: exchanges overlap with products"


class VocabularyPart:
    """This process's share of the vocabulary; see `dtt.model.loss.Part`."""

    def __init__(self, mesh: DeviceMesh, vocab_size: int) -> None:
        """Of `vocab_size` tokens, which `mesh` divides equally."""
        self.first = mesh.get_local_rank() * (vocab_size // mesh.size())
        self.group = mesh.get_group()

    @torch.no_grad()
    def gather(self, x: Tensor) -> Tensor:
        """[...] → [P, ...]."""
        return gather(x[None], 0, self.group)
