"""Every training uses the same forward and backward passes, with any objective."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtt
from dtt.data.samples.loader import MicroBatch
from dtt.train.step import LOSS, forward_backward, next_token, update


class Routed(nn.Module):
    """A model with two experts and a linear router, whose load should be balanced."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 4)
        self.router = nn.Linear(4, 2)
        self.experts = nn.Linear(4, 16)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        doc_ids_BT: Tensor | None = None,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Return the sum of the cross-entropy."""
        return self.both(tokens_BT, targets_BT)[0]

    def both(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of the cross-entropy and of the imbalance of the router."""
        x_BTD = self.embed(tokens_BT)
        shares_BTE = self.router(x_BTD).softmax(-1)
        logits_BTEV = self.experts(x_BTD).unflatten(-1, (2, 8))
        logits_BTV = (shares_BTE[..., None] * logits_BTEV).sum(-2)
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        return loss, 0.1 * shares_BTE.square().sum()


def balanced(module: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
    """Return the losses of a mixture of experts."""
    assert isinstance(module, Routed)
    loss, balance = module.both(micro_batch.tokens, micro_batch.targets)
    return {LOSS: loss, "balance": balance}


def micro_batches(count: int, ids: Tensor) -> list[MicroBatch]:
    """Divide rows of ids into micro-batches."""
    return [MicroBatch(part[:, :-1], part[:, 1:], None) for part in ids.chunk(count)]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by name, where there are any."""
    named = module.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_gradients_are_those_of_the_mean_over_all_targets(count: int) -> None:
    ids = torch.arange(4 * 6).view(4, 6) % 7
    module, reference = Routed(), Routed()
    result = forward_backward(
        module, micro_batches(count, ids), next_token(), terms=20, precision="fp32", replicas=2
    )
    mean = 2 * reference(ids[:, :-1], ids[:, 1:]) / 20
    mean.backward()
    torch.testing.assert_close(result.loss, mean.detach())
    assert result.terms == 20
    assert set(result.losses) == {LOSS}
    torch.testing.assert_close(gradients(module), gradients(reference))


def test_auxiliary_losses_are_minimised_with_the_loss_and_returned_by_name() -> None:
    ids = torch.arange(4 * 6).view(4, 6) % 7
    module, reference = Routed(), Routed()
    result = forward_backward(module, micro_batches(2, ids), balanced, terms=20, precision="fp32")
    loss, balance = (part / 20 for part in reference.both(ids[:, :-1], ids[:, 1:]))
    (loss + balance).backward()
    torch.testing.assert_close(
        dict(result.losses), {LOSS: loss.detach(), "balance": balance.detach()}
    )
    assert not any(value.requires_grad for value in result.losses.values())
    torch.testing.assert_close(gradients(module), gradients(reference))


def test_a_step_without_any_target_has_a_finite_loss() -> None:
    ids = torch.zeros(1, 1, dtype=torch.long)
    batch = [MicroBatch(ids, torch.full_like(ids, -100), None)]
    result = forward_backward(Routed(), batch, next_token(), terms=0, precision="fp32")
    assert result.loss == 0.0


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_an_update_changes_the_weights_unless_it_is_skipped_and_clears_the_gradients(
    skip: float,
) -> None:
    module = Routed()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    batch = micro_batches(1, torch.arange(12).view(2, 6) % 7)
    forward_backward(module, batch, next_token(), terms=10, precision="fp32")
    update({"adamw": optimizer}, torch.tensor(skip), step=0)
    same = [torch.equal(before[name], p) for name, p in module.named_parameters()]
    assert all(same) if skip else not any(same)
    assert not gradients(module)


def test_the_backward_pass_of_training_is_written_once() -> None:
    folder = Path(dtt.__file__).parent
    calls = re.compile(r"autograd\.backward\(|\w\.backward\(\)")
    found = [path.name for path in folder.rglob("*.py") for _ in calls.findall(path.read_text())]
    assert found == ["step.py"]
