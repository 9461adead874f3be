"""The contract of a model: what training, evaluation, generation and export ask of any of them.

Shapes: B sequences, T tokens, D width of the hidden states, V vocabulary, H query heads, G heads
of keys and values, K their width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtt.config.own import own_code
from dtt.config.train import AttentionKernel
from dtt.mesh.sharding import local
from dtt.model.layers import held_layers
from dtt.model.linear import Linear
from dtt.model.loss import VocabularyPart, linear_cross_entropy
from dtt.model.output import HiddenStates, Output
from dtt.model.target_scores import target_scores
from dtt.model.token_context import Context

Role = Literal["matrix", "embed", "head", "vector", "router", "balance", "adapter"]
Reduction = Literal["sum", "none", "scores", "logits"]


class Model(nn.Module):
    """A causal language model. One of your own has `embed`, `layers`, and `hidden`.

    `embed` is an `nn.Embedding`, and `head` an `nn.Linear` without bias; without `head`, the
    weights of `embed` are those of the head, too. `layers` is an `nn.ModuleList` of blocks, which
    are sharded, compiled and recomputed one by one. No parameter may belong to two modules.
    """

    arch: Any
    """What dtt knows of the model, such as its vocabulary; set by dtt."""
    softcap: float | None = None
    """Soft cap c of the logits: c * tanh(logits / c); None: no cap."""
    attention: AttentionKernel = "auto"
    fused_loss = False
    part: VocabularyPart | None = None
    """This rank's vocabulary shard, if tensor parallelism divides the head's rows; else None."""

    def hidden(self, tokens_BT: Tensor, context: Context) -> Tensor | HiddenStates:
        """Return what the head is applied to, [B, T, D]: after the last norm.

        Use `context.positions` and `context.attend`, or `context.documents`: packed documents must
        not see each other. dtt compares a packed batch with its documents before the first step.
        """
        raise NotImplementedError

    def head_weight(self) -> Tensor:
        """Return the weight of the head, [V, D]."""
        head = getattr(self, "head", None)
        weight: Tensor = self.embed.weight if head is None else head.weight  # type: ignore[assignment,union-attr]
        return weight

    def by_token(self) -> frozenset[str]:
        """Return the names of parameters that have a row for each token id."""
        return frozenset({"embed.weight", "head.weight"})

    def cast(self, dtype: torch.dtype) -> Self:
        """Convert the weights, and neither buffers nor corrections of routers; return the model.

        `Module.to` would round tables of angles, and so turn late tokens by other angles; and steps
        of a thousandth would be lost in corrections.
        """
        for name, parameter in self.named_parameters():
            wider = dtype.itemsize > parameter.element_size()
            if wider or self.role(name, parameter) != "balance":
                parameter.data = parameter.data.to(dtype)
        return self

    def blocks(self) -> Mapping[int, nn.Module]:
        """Return the blocks that this rank has, by index."""
        return held_layers(self)

    def holds(self, _name: str) -> bool:
        """Return True: no pipeline divides the model. A `Decoder` may be divided."""
        return True

    def linear_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the linear layers in blocks, by name: those that LoRA can adapt."""
        names = {module: name for name, module in self.named_modules()}
        plain = nn.Linear.forward, Linear.forward
        for block in self.blocks().values():
            for module in block.modules():
                # Another subclass with a `forward` of its own computes more than the product.
                if isinstance(module, nn.Linear) and type(module).forward in plain:
                    yield f"{names[module]}.weight", module.weight

    def role(self, name: str, parameter: Tensor) -> Role:
        """Return the role of a parameter, which decides how it is trained.

        `matrix` (or a stack of them, [experts, out, in]), `embed`, `head`, `vector` (norms and
        biases: no weight decay), or `balance`, which no optimizer trains.
        """
        if name.endswith((".lora_a", ".lora_b")):
            return "adapter"
        owner = self.get_submodule(name.rpartition(".")[0])
        if parameter.ndim == 1 or isinstance(owner, nn.Conv1d | nn.Conv2d):
            return "vector"
        if isinstance(owner, nn.Embedding):
            return "embed"
        if parameter is getattr(getattr(self, "head", None), "weight", None):
            return "head"
        return "matrix" if parameter.ndim < 4 else "vector"

    def notes(self) -> Iterator[str]:
        """Yield what the log should say of the model at the start of a run."""
        return iter(())

    def without_values(self) -> Self:
        """Return a copy on the meta device, whose passes give shapes and take no time."""
        return deepcopy(self).to("meta")

    def active_share(self) -> float:
        """Return the share of stacks of matrices, [experts, out, in], that computes a token."""
        return 1.0

    def init_weights(self, module: nn.Module) -> None:
        """Initialise the parameters and buffers of one module, without those of modules inside it.

        The default draws those of `nn.Linear` and `nn.Embedding` with a standard deviation of 0.02
        (GPT-2) and sets biases to 0; any other module with parameters has `reset_parameters`.
        dtt seeds the generator by the name of the module, and calls this once for each.
        """
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        elif any(True for _ in module.parameters(recurse=False)):
            module.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        doc_ids_BT: Tensor | None = None,
        z_loss: float = 0.0,
        reduction: Reduction = "sum",
        context: Context | None = None,
    ) -> Tensor | Output:
        """Return logits [B, T, V]; with targets, an `Output` with the fp32 cross-entropy in nats.

        Its loss is the *sum*, or with `reduction="none"` that of each target, [B, T]; with "logits"
        these are in its place, for a loss of a user's own. With "scores", targets are [B, T, C], C
        candidates for each next token, and the result is a tensor [B, T, C, 2]: see
        `target_scores`.

        `model/loss.py` describes targets to ignore, and `z_loss`, which changes only the gradients.
        `doc_ids_BT` holds the document of each token: tokens attend only within theirs, and
        positions start at 0 in each. `context` stands for it where rows are no whole sequences.
        """
        context = context or Context(tokens_BT, doc_ids_BT, self.attention)
        with own_code(self.arch.section, "model"):
            found = self.hidden(tokens_BT, context)
            states = found if isinstance(found, HiddenStates) else HiddenStates(found, {}, {})
            if states.hidden.shape[:-1] != tokens_BT.shape:
                shapes = f"{list(states.hidden.shape)} for tokens {list(tokens_BT.shape)}"
                raise ValueError(f"{type(self).__name__}.hidden returned {shapes}")
        states = states._replace(hidden=context.read_by_head(states.hidden))
        return self.losses(states, targets_BT, z_loss, reduction)

    def reader(self) -> Callable[[Tensor], Tensor]:
        """Return a function that reads the next tokens of a text, [T]: the logits [V] after them.

        It computes the whole text each time. A model with a cache computes the new tokens only.
        """
        text: list[Tensor] = []

        def read(tokens_T: Tensor) -> Tensor:
            text.append(tokens_T)
            tokens_1T = torch.cat(text)[None]
            logits: Tensor = self(tokens_1T, context=Context(tokens_1T, read="last"))[0, -1]
            return logits

        return read

    def losses(
        self, states: HiddenStates, targets_BT: Tensor | None, z_loss: float, reduction: Reduction
    ) -> Tensor | Output:
        """Return what `forward` returns, from the final hidden states."""
        # A DTensor here is the vocabulary shard of this rank. The loss works on plain shards and
        # exchanges two numbers per token; DTensor's own cross-entropy would need the logits of all
        # tokens.
        head_VD = local(self.head_weight())
        if targets_BT is None or reduction == "logits":
            logits_BTV = F.linear(states.hidden, head_VD)
            if self.softcap is not None:
                logits_BTV = torch.tanh(logits_BTV / self.softcap) * self.softcap
            if targets_BT is not None:
                return Output(logits_BTV, self._summed(states.aux), {}, states.loads)
            if self.part is None:
                return logits_BTV
            return torch.cat(tuple(self.part.gather(logits_BTV)), dim=-1)
        hidden_ND = states.hidden.flatten(0, 1)
        if reduction == "scores":
            candidates_NC = targets_BT.flatten(0, 1)
            scores = target_scores(hidden_ND, head_VD, candidates_NC, self.softcap, self.part)
            return scores.view(*targets_BT.shape, 2)
        loss = linear_cross_entropy(
            hidden_ND,
            head_VD,
            targets_BT.flatten(),
            softcap=self.softcap,
            z_loss=z_loss,
            part=self.part,
            fused=self.fused_loss,
            reduction=reduction,
        )
        loss = loss if reduction == "sum" else loss.view(targets_BT.shape)
        return Output(loss, self._summed(states.aux), {}, states.loads)

    def _summed(self, aux: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return sums over all tokens of auxiliary losses that are sums over this rank's tokens."""
        part = self.part
        if part is None:
            return aux
        # Only the values: each rank's gradient is that of its own tokens, and tensor parallelism
        # adds them up. The gradient of the sum would be counted once per rank.
        return {
            name: part.gather(value.detach()).sum(0) + (value - value.detach())
            for name, value in aux.items()
        }
