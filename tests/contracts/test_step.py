"""Contract of `Passes`: whatever runs them, every objective has the same gradients in fp64."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.preference_pairs import VOCAB_SIZE, gradients, make_pairs, packed, split
from torch import Tensor, nn

import dtt
from dtt.base.targets import IGNORE_INDEX
from dtt.data.samples.loader import MicroBatch
from dtt.model.output import Output
from dtt.train.objectives.dpo import METRICS, DpoConfig
from dtt.train.objectives.loss_function import loss_function
from dtt.train.step import LossFunction, Passes, update

TERMS = 7


class Routed(nn.Module):
    """The first stage: two experts and a linear router, whose load should be balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, 4)
        self.router = nn.Linear(4, 2)
        self.experts = nn.Linear(4, 8)

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return hidden states and the imbalance of the router."""
        x_BTD = self.embed(tokens_BT)
        shares_BTE = self.router(x_BTD).softmax(-1)
        y_BTED = self.experts(x_BTD).unflatten(-1, (2, 4))
        balance = 0.1 * shares_BTE.square().sum()
        return (shares_BTE[..., None] * y_BTED).sum(-2).tanh(), {"balance": balance}


class Head(nn.Linear):
    """The second stage: logits and the loss of their targets."""

    def forward(  # type: ignore[override]
        self, x_BTD: Tensor, targets_BT: Tensor, reduction: str = "sum", z_loss: float = 0.0
    ) -> Output:
        logits_BTV = super().forward(x_BTD)
        losses_BT = F.cross_entropy(
            logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none"
        ).view(targets_BT.shape)
        penalty = z_loss * logits_BTV.logsumexp(-1).square().sum()
        return Output(losses_BT.sum() + penalty if reduction == "sum" else losses_BT, {}, {})


class Toy(nn.Module):
    """Both stages on one device, in fp64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Routed()
        self.last = Head(4, VOCAB_SIZE)
        self.double()

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, doc_ids_BT: Tensor | None, **options: Any
    ) -> Output:
        x_BTD, aux = self.first(tokens_BT)
        return self.last(x_BTD, targets_BT, **options)._replace(aux=aux)


@dataclass(frozen=True)
class Cut(Passes):
    """The step of a pipeline of two stages: hidden states and their gradients cross the cut."""

    def run(self, micro_batches: Any, objective: LossFunction, terms: int) -> Output:
        """Run all forward passes of the first stage, the second stage, then the way back."""
        toy, scale, outputs = self.module, self.replicas / max(1, terms), []
        assert isinstance(toy, Toy)
        sent = [toy.first(micro_batch.tokens) for micro_batch in micro_batches]
        for (x_BTD, aux), micro_batch in zip(sent, micro_batches, strict=True):
            received_BTD = x_BTD.detach().requires_grad_()
            output = toy.last(received_BTD, micro_batch.targets, **objective.options)
            output = objective.losses(output, micro_batch).apply(lambda value: scale * value)
            output.loss.backward()
            own = [scale * value for value in aux.values()]
            torch.autograd.backward([x_BTD, *own], [received_BTD.grad, *map(torch.ones_like, own)])
            outputs.append(output._replace(aux=dict(zip(aux, own, strict=True))))
        return reduce(Output.plus, outputs).apply(Tensor.detach)


def text() -> list[MicroBatch]:
    """Two micro-batches of text with different numbers of targets."""
    ids = torch.arange(4 * 6).view(4, 6) % 7
    targets = ids[:, 1:].clone()
    targets[0, :3] = IGNORE_INDEX
    parts = zip(ids[:, :-1].split(2), targets.split(2), strict=True)
    return [MicroBatch(*part, None) for part in parts]


def pairs() -> list[MicroBatch]:
    """Several micro-batches of preference pairs, with log-probabilities of a reference model."""
    batch = packed(make_pairs(13))
    chance = torch.rand(batch.targets.shape, generator=torch.Generator().manual_seed(1))
    reference = torch.where(batch.targets != IGNORE_INDEX, chance.log(), 0.0)
    return split(replace(batch, extra={"reference_logprobs": reference}), 2)


CASES = {
    "next_token": (loss_function(), text()),
    "z_loss": (loss_function(z_loss=0.1), text()),
    "dpo": (loss_function(DpoConfig(beta=0.3)), pairs()),
    "dpo_normalised": (loss_function(DpoConfig(length_normalised=True)), pairs()),
}


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_step_has_the_losses_and_gradients_of_plain_autograd(
    case: str, replicas: int
) -> None:
    objective, micro_batches = CASES[case]
    expected, plain = Toy(), []
    for batch in micro_batches:
        output = expected(batch.tokens, batch.targets, batch.doc_ids, **objective.options)
        plain.append(objective.losses(output, batch))
    whole = reduce(Output.plus, plain).apply(lambda value: replicas * value / TERMS)
    (whole.loss + whole.aux["balance"]).backward()
    for step in (Passes, Cut):
        toy = Toy()
        found = step(toy, "fp32", replicas).run(micro_batches, objective, TERMS)
        assert_equal(found.named(), whole.apply(Tensor.detach).named())
        assert_equal(gradients(toy), gradients(expected))
        assert not any(value.requires_grad for value in found.named().values())
    assert list(whole.metrics) == (sorted(METRICS) if case.startswith("dpo") else [])


@pytest.mark.parametrize("case", CASES)
def test_an_evaluation_returns_the_sums_of_the_training_step_and_no_gradients(case: str) -> None:
    objective, micro_batches = CASES[case]
    toy = Toy()
    step = Passes(toy, "fp32")
    found = [step.evaluate(micro_batch, objective) for micro_batch in micro_batches]
    assert not gradients(toy)
    trained = step.run(micro_batches, objective, 1)
    assert_equal(reduce(Output.plus, found).named(), trained.named())


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_an_update_changes_the_weights_unless_it_is_skipped_and_clears_the_gradients(
    skip: float,
) -> None:
    toy = Toy()
    before = {name: p.detach().clone() for name, p in toy.named_parameters()}
    optimizer = torch.optim.AdamW(toy.parameters(), lr=0.1, fused=True)
    Passes(toy, "fp32").run(text(), loss_function(), TERMS)
    update({"adamw": optimizer}, torch.tensor(skip), step=0)
    same = [torch.equal(before[name], p) for name, p in toy.named_parameters()]
    assert all(same) if skip else not any(same)
    assert not gradients(toy)


def test_the_backward_pass_of_training_is_written_once() -> None:
    folder = Path(dtt.__file__).parent
    calls = re.compile(r"autograd\.backward\(|\w\.backward\(\)")
    found = [path.name for path in folder.rglob("*.py") for _ in calls.findall(path.read_text())]
    assert found == ["step.py"]
