"""Context parallelism: ranks that share each sequence.

A sequence is split into 2C chunks. Each of C ranks has two, one from either end, so that causal
attention costs the same on every rank. Ranks all-gather keys and values before attention (Llama 3,
arXiv 2407.21783, section 3.3.2); everything else is computed per token.

Shapes: B sequences, T tokens of a sequence, P tokens of it on this rank, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dtt.base.targets import IGNORE_INDEX
from dtt.mesh.collectives import gather
from dtt.mesh.mesh import Mesh
from dtt.model.attention_backend import make_context_attention_fns
from dtt.model.decoder import Decoder
from dtt.model.output import HiddenStates, StagePass
from dtt.model.token_context import GivenContext, document_positions

PADDING = -1
"""Document id of padding tokens; no real document has it."""


@dataclass(frozen=True)
class SequenceShard:
    """The tokens of each sequence that this rank holds."""

    rank: int
    size: int
    group: ProcessGroup

    def chunks(self, length: int) -> tuple[range, range]:
        """Return the positions of this rank's two chunks among `length` tokens."""
        # 2C chunks. With C contiguous parts the last rank would compute almost twice the mean of
        # causal attention; an early and a late chunk have the same sum on every rank.
        chunk = length // (2 * self.size)
        starts = self.rank * chunk, length - (self.rank + 1) * chunk
        first, last = (range(start, start + chunk) for start in starts)
        return first, last

    def of(self, full_BT: Tensor) -> Tensor:
        """Select this rank's tokens: [B, T] → [B, P]."""
        return torch.cat([full_BT[:, c.start : c.stop] for c in self.chunks(full_BT.shape[1])], 1)

    def gather(self, part: Tensor) -> Tensor:
        """All-gather [..., P, D] → [..., T, D], in the order of the tokens."""
        # [..., 2, chunk, D]: both chunks travel in one all-gather.
        halves = part.reshape(*part.shape[:-2], 2, -1, part.shape[-1])
        chunks = gather(halves, -3, self.group)
        # In rank order the gathered chunks are 0, 2C-1, 1, 2C-2, …: even places ascend, odd ones
        # descend.
        first, last = chunks[..., 0::2, :, :], chunks[..., 1::2, :, :]
        return torch.cat((first, last.flip(-3)), -3).flatten(-3, -2)


class ContextParallel(nn.Module):
    """Wrapper that calls a Decoder with this rank's tokens, but takes full sequences."""

    def __init__(self, model: Decoder, layout: Mesh) -> None:
        """Wrap `model` for the ranks of its context group."""
        super().__init__()
        self.model = model
        # A group of its own, also if it has all ranks: FSDP2 gathers weights at the same time.
        group = layout.group("context")
        self.shard = SequenceShard(layout.index("context"), layout.size("context"), group)
        self.multiple = 2 * layout.size("context", "tensor")
        """Sequence lengths are padded to a multiple of this, so that all ranks have the same number
        of tokens."""

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        doc_ids_BT: Tensor | None = None,
        z_loss: float = 0.0,
        reduction: Literal["sum", "none"] = "sum",
        stage: StagePass | None = None,
    ) -> Any:
        """Return what the model returns: logits [B, T, V], or with targets an `Output`.

        Its loss is the fp32 *sum* of the loss of this rank's tokens. With `reduction="none"`, it is
        the loss of each target of the full sequences, [B, T], whose gradient on each rank is one
        summand of the total.

        All ranks of the context group pass the same arguments, but for the hidden states of a
        `stage`, [B, P, D], which are those of this rank's tokens. Sequences may have any length:
        they are padded.
        """
        length = tokens_BT.shape[1]
        padding = (0, -length % self.multiple)
        if doc_ids_BT is None:
            positions_BT = torch.arange(length, device=tokens_BT.device)[None]
        else:
            # Computed before padding and selection: a rank does not see the start of a document
            # that lies in another rank's chunk.
            positions_BT = document_positions(doc_ids_BT)
            # Padding is a document of its own, so no real token attends to it.
            doc_ids_BT = F.pad(doc_ids_BT, padding, value=PADDING)
        if targets_BT is not None:
            # Padded targets are ignored: padding changes neither the loss nor the number of
            # targets.
            targets_BT = self.shard.of(F.pad(targets_BT, padding, value=IGNORE_INDEX))
        tokens_BT, positions_BT = F.pad(tokens_BT, padding), F.pad(positions_BT, padding)
        chunks = self.shard.chunks(tokens_BT.shape[1])
        kind = tokens_BT.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        else:
            dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        how = chunks, self.shard.gather, self.model.attention, dtype
        attention_fns = make_context_attention_fns(self.model.arch, tokens_BT, doc_ids_BT, *how)
        own_BP = self.shard.of(tokens_BT)
        out = self.model(
            own_BP,
            targets_BT,
            z_loss=z_loss,
            reduction=reduction,
            context=GivenContext(own_BP, self.shard.of(positions_BT), attention_fns),
            stage=stage,
        )
        if isinstance(out, HiddenStates):
            return out
        # Logits of all tokens: for generation only, where the caller reads one position.
        if targets_BT is None:
            return self.shard.gather(out)[:, :length]
        if reduction == "sum":
            return out
        return out._replace(loss=self.shard.gather(out.loss[..., None])[:, :length, 0])
