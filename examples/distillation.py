"""A loss of your own with a teacher: `dtt train -c examples/distillation.yaml`."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dtt


class Distillation(dtt.Objective):
    """Forward KL divergence from a teacher, mixed with the cross-entropy (arXiv 1503.02531)."""

    needs = "logits"

    teacher: str
    """The teacher: a job, an export, or hf:ORG/NAME, with the vocabulary of the student."""
    temperature: float = 2.0
    """Temperature of both distributions."""
    weight: float = 0.5
    """Weight of the divergence; the rest is that of the cross-entropy."""

    _teacher: Any = None

    def models(self) -> Sequence[str]:
        """Return the source of the teacher, whose memory `dtt plan` counts."""
        return [self.teacher]

    def setup(self, run: dtt.RunView) -> None:
        """Load the teacher."""
        self._teacher = run.load_model(self.teacher)

    def loss(self, out: Tensor, batch: dtt.MicroBatch) -> Any:
        """Return the sum over the targets, and the two parts."""
        with torch.no_grad():
            theirs = self._teacher(batch.tokens, doc_ids_BT=batch.doc_ids)
        ours, theirs = (
            F.log_softmax(logits.float() / self.temperature, -1) for logits in (out, theirs)
        )
        counted = batch.targets != -100
        divergence = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1) * counted
        divergence = divergence.sum() * self.temperature**2
        entropy = F.cross_entropy(
            out.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum"
        )
        mixed = self.weight * divergence + (1 - self.weight) * entropy
        return mixed, {"divergence": divergence}
