"""The base class of losses: keys and behaviour. `dtt.config.variants` lists those of dtt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from dtt.config.base import Section


class Objective(Section):
    """The base class of losses. One of your own defines keys and `loss`."""

    type: str

    needs: ClassVar[Literal["token_loss", "logits", "sum"]] = "token_loss"
    """What `loss` is given: the cross-entropy of each target in nats, [B, T] in fp32, 0 where a
    target does not count; the logits of all tokens, [B, T, V], which are large; or the sum of the
    cross-entropy over the targets, [], whose gradients have the z-loss."""
    per_pair: ClassVar[bool] = False
    """True if the terms of the loss are the pairs of `data.type: preference`, for a run that starts
    from trained weights. `batch.doc_ids` tells them apart: document 2i of a row is the chosen
    answer, 2i + 1 the rejected one. Validation is then of this loss."""
    needs_reference: ClassVar[bool] = False
    """True if `batch.extra["reference_logprobs"]` is needed: the log-probability of each target in
    the model that a key `reference` names, or else in the initial one, [B, T]."""

    def loss(self, out: Any, batch: Any) -> Any:
        """Return the sum of the loss over the targets of `batch` that count, a tensor [].

        dtt divides it by their number in the global batch. With a mapping of names to further sums
        beside it, these terms are reported as means (`own/NAME` for a class of your own). `batch`
        is a `dtt.MicroBatch`: `tokens`, `targets` (-100 where none counts) and `doc_ids`, each
        [B, T]. Validation stays the cross-entropy; the own loss is beside it, as `objective`.
        """
        raise NotImplementedError

    def models(self) -> Sequence[str]:
        """Return the sources of the models that `setup` loads: `dtt plan` counts their memory."""
        return ()

    def setup(self, run: Any) -> None:
        """Prepare for a run, once on each rank: load a teacher with `run.load_model(SOURCE)`.

        It is frozen, in the compute dtype, sharded as the model is, and in no checkpoint.

        Keep what it needs in attributes whose names begin with `_`. `run` is a `dtt.RunView`.
        """

    def state(self) -> Mapping[str, Any]:
        """Return tensors that checkpoints keep, by name; they are equal on all ranks."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the tensors of a checkpoint."""
