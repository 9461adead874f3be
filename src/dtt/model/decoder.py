"""The decoder-only transformer: one class for all families.

Options of a family are resolved when the model is built, not in the forward pass.

Shapes: B sequences, T tokens, D dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtt.base.targets import IGNORE_INDEX
from dtt.mesh.mesh import ALL, Mesh
from dtt.mesh.sharding import layout_of
from dtt.model.architecture import AnyArchitecture, Architecture, BuiltArchitecture
from dtt.model.contract import Model, Reduction, Role
from dtt.model.experts import Mixed
from dtt.model.layers import Absent, Block, make_norm
from dtt.model.linear import Embedding, Linear
from dtt.model.output import HiddenStates, Output, StagePass
from dtt.model.rope import rotations
from dtt.model.token_context import Context
from dtt.params.table import Param, Params


class Decoder(Model):
    """Decoder-only transformer that maps token ids to logits, or to a loss.

    Module names are part of the checkpoint format: `embed`, `pos_embed` (learned positions only),
    `layers.N.{attn_norm, attn.{q,k,v,o,q_norm,k_norm}, attn_post_norm, mlp_norm,
    mlp.{gate,up,down}, mlp_post_norm}`, `norm`, `head` (None when tied to `embed`); a mixture has
    `mlp.{router.{weight,balance}, experts.{gate,up,down}, shared.{gate,up,down}}`. There are no
    buffers.
    """

    def __init__(self, arch: Architecture, held: Sequence[range] | None = None) -> None:
        """Allocate the parameters without values: `dtt.model.init` or a checkpoint sets them.

        `held` are the layers of this rank's pipeline stages; None: all. The others, and the
        embedding and the head of other stages, are `Absent`, so that names are those of the model.
        """
        super().__init__()
        self.arch = arch
        indices = {i for layers in held or [range(arch.n_layers)] for i in layers}
        first, last = 0 in indices, arch.n_layers - 1 in indices
        # Typed as what they stand for: no code of this rank calls an absent layer.
        self.embed = cast("Embedding", Embedding(arch.vocab_size, arch.dim) if first else Absent())
        self.pos_embed = (
            Embedding(arch.max_seq_len, arch.dim) if arch.position == "learned" and first else None
        )
        self.layers = nn.ModuleList(
            Block(arch, i) if i in indices else Absent() for i in range(arch.n_layers)
        )
        # Hashable (base, scaling) pairs: the forward pass computes one table for each distinct
        # pair, not one for each layer. Llama has one pair, Gemma 3 two.
        self.ropes = [arch.rope(i) for i in range(arch.n_layers)]
        self.norm = make_norm(arch, arch.dim) if last else Absent()
        self.head = (
            Linear(arch.dim, arch.vocab_size, bias=False)
            if last and not arch.tie_embeddings
            else None
        )
        self.softcap = arch.logit_softcap

    def forward(  # type: ignore[override]
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        doc_ids_BT: Tensor | None = None,
        z_loss: float = 0.0,
        reduction: Reduction = "sum",
        context: Context | None = None,
        stage: StagePass | None = None,
    ) -> Tensor | Output | HiddenStates:
        """Return what `Model.forward` does; of a `stage` before the last, its `HiddenStates`."""
        context = context or Context(tokens_BT, doc_ids_BT, self.attention)
        layers, x_BTD = stage or StagePass(range(self.arch.n_layers), None)
        if x_BTD is None:
            x_BTD = _scaled(_residual(self.embed(tokens_BT)), self.arch.embed_scale)
            if self.pos_embed is not None:
                x_BTD = x_BTD + _residual(self.pos_embed(context.positions))
            x_BTD = F.dropout(x_BTD, self.arch.dropout, self.training)
        passed = self._through(layers, x_BTD, context, targets_BT)
        if layers.stop < self.arch.n_layers:
            return passed._replace(aux=self._summed(passed.aux))
        x_BTD = self.norm(context.read_by_head(passed.hidden))
        x_BTD = _scaled(x_BTD, self.arch.logit_scale)
        return self.losses(passed._replace(hidden=x_BTD), targets_BT, z_loss, reduction)

    def _through(
        self,
        layers: range,
        x_BTD: Tensor,
        context: Context,
        targets_BT: Tensor | None,
    ) -> HiddenStates:
        """Return what these layers make of their input, with the sums of this rank's tokens."""
        # Each table is a pair [B or 1, 1, T, K/2] in fp32, also under autocast: in bf16, positions
        # above 256 would round to their neighbours.
        angles = {
            rope: rotations(context.positions[:, None], self.arch.rotary_dim, *rope)
            if rope
            else None
            for rope in set(self.ropes)
        }
        # Made once for all layers. Where documents are masked, the mask depends on the batch, and
        # to build it for every layer would multiply its cost by n_layers.
        attention_fns = context.attention_fns(self.arch)
        counted_BT = self._counted(targets_BT)
        aux: dict[str, Tensor] = {}
        loads: dict[int, Tensor] = {}
        for i in layers:
            mixed: Mixed = self.layers[i](
                x_BTD, angles[self.ropes[i]], attention_fns[i], counted_BT
            )
            x_BTD = mixed.out
            aux |= {name: aux.get(name, 0.0) + value for name, value in mixed.aux.items()}
            loads |= {} if mixed.load is None else {i: mixed.load}
        return HiddenStates(x_BTD, aux, loads)

    def role(self, name: str, parameter: Tensor) -> Role:
        """Return the role of a parameter; see `parameter_role`."""
        return parameter_role(name, parameter.ndim)

    def holds(self, name: str) -> bool:
        """Return False if `name`, of a layer or parameter, belongs to another pipeline stage."""
        part, *rest = name.split(".")
        if part == "layers":
            index = int(rest[0])
            return index >= len(self.layers) or not isinstance(self.layers[index], Absent)
        edge = self.embed if part in ("embed", "pos_embed") else self.norm
        return not isinstance(edge, Absent)

    def _counted(self, targets_BT: Tensor | None) -> Tensor | None:
        """Return which of this rank's tokens the load of experts counts: those with a target.

        None for a model without experts, and where nothing is trained on the targets.
        """
        if self.arch.mixture is None or targets_BT is None or not torch.is_grad_enabled():
            return None
        counted_BT = targets_BT != IGNORE_INDEX
        return counted_BT if self.part is None else self.part.own_tokens(counted_BT)


def make_model(
    arch: AnyArchitecture,
    held: Sequence[range] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Model:
    """Return a model without memory; `held` are the layers of this rank's pipeline stages."""
    if isinstance(arch, BuiltArchitecture):
        built: Model = arch.build()
        return built.cast(dtype)
    with torch.device("meta"):
        return Decoder(arch, held).cast(dtype)


def _residual(x: Tensor) -> Tensor:
    """Cast an embedding to the dtype of the residual stream: the autocast dtype, if enabled.

    Autocast leaves lookups in the dtype of the weights. That is fp32 on one device and under DDP,
    but bf16 under FSDP2 and tensor parallelism, whose gathered weights are bf16. Without the cast,
    the dtype of the stream, and so the loss, would depend on the parallel layout.
    """
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _scaled(x: Tensor, scale: float) -> Tensor:
    """Return `x` times `scale`, rounded to the dtype of `x` first, as transformers does."""
    return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)


def params_of(model: Model, mesh: Mesh | None = None) -> Params:
    """Return the table of a model's parameters; `mesh` is that of its parallelisation, if any.

    A tied head appears once, as `embed`. Plain tensors are on all ranks of the mesh, or of this
    rank's place in a pipeline.
    """
    mesh = mesh or Mesh()
    stage = mesh.model if mesh.size("pipeline") > 1 else None
    holders = mesh.size(*ALL) if stage is None else stage
    return Params(
        (
            Param(
                name,
                tensor,
                model.role(name, tensor),
                layout_of(tensor, holders),
                mesh.expert_replicas if ".mlp.experts." in name else None,
            )
            for name, tensor in model.named_parameters()
        ),
        mesh,
    )


def parameter_role(name: str, ndim: int) -> Role:
    """Return the role of a parameter with `ndim` dimensions.

    A stack [experts, out, in] in a layer has the role of its matrices, and a stack of biases
    [experts, out] that of a bias. Raises ValueError for any other parameter.
    """
    if name.endswith((".lora_a", ".lora_b")):
        return "adapter"
    if name.endswith(".router.balance"):
        return "balance"
    if ndim == 1 or name.endswith("bias"):
        return "vector"
    if name.endswith(".router.weight"):
        return "router"
    match name.split(".")[0], ndim:
        case "embed" | "pos_embed", 2:
            return "embed"
        case "head", 2:
            return "head"
        case "layers", 2 | 3:
            return "matrix"
    raise ValueError(f"parameter {name} with {ndim} dimensions has no role")
