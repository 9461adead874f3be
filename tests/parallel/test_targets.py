"""Gradients on two ranks, and of accumulated micro-batches, are those of the one big batch.

They are divided by the targets of all ranks, of which some may have none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtt.base.ranks import Ranks
from dtt.base.targets import IGNORE_INDEX
from dtt.config.model import ModelConfig
from dtt.config.parallel import Sizes
from dtt.data.samples.loader import MicroBatch
from dtt.mesh.dist import World, start
from dtt.mesh.mesh import DATA, make_mesh
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from dtt.parallel.apply import apply
from dtt.parallel.context import ContextParallel
from dtt.train.objectives.loss_function import loss_function
from dtt.train.step import Passes

ROWS, SEQ_LEN = 8, 16
LAYOUTS = {
    "DDP 2": Sizes(replicate=2),
    "FSDP2 2": Sizes(shard=2),
    "tensor 2": Sizes(tensor=2),
    "context 2": Sizes(context=2),
}


def batch() -> MicroBatch:
    """Return a batch in which every second row, and the middle of each other row, has no targets.

    So with two ranks, one of them has none: it reads the odd rows, or, with context parallelism,
    has the middle of each row.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(128, (ROWS, SEQ_LEN + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[1::2] = IGNORE_INDEX
    targets[:, 4:12] = IGNORE_INDEX
    documents = (torch.arange(SEQ_LEN) >= 6).int().expand(ROWS, -1).contiguous()
    return MicroBatch(ids[:, :-1], targets, documents)


def outcome(world: World, sizes: dict[str, int], micro_batch: int) -> dict[str, Any]:
    """Return the loss and the gradients of one step, as lists, and the targets of this rank."""
    torch.set_num_threads(1)
    layout = make_mesh(Sizes(**sizes), world)
    config = ModelConfig(dim=32, n_layers=2, n_heads=4)
    with torch.device("meta") if layout.sharded else world.device:
        model = Decoder(families.get("llama").architecture(config, 128, SEQ_LEN))
    module = apply(model, world, layout, compile_blocks=False)
    if layout.sizes.context > 1:
        module = ContextParallel(model, layout)
    if layout.sharded:
        model.to_empty(device="cpu")
    initialize(model, seed=0)
    whole = batch()
    rows = slice(layout.index(*DATA), None, layout.size(*DATA))
    tokens, targets, documents = whole.tokens[rows], whole.targets[rows], whole.doc_ids[rows]
    parts = zip(*(x.split(micro_batch) for x in (tokens, targets, documents)), strict=True)
    losses = Passes(module, "fp32", layout.gradient_replicas).run(
        [MicroBatch(*part) for part in parts],
        loss_function(),
        int((whole.targets != IGNORE_INDEX).sum()),
    )
    found: dict[str, Tensor] = {"loss": layout.mean(losses.loss.clone())}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    numbers = {name: value.tolist() for name, value in found.items()}
    return numbers | {"own targets": int((targets != IGNORE_INDEX).sum())}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return outcome(start(Ranks(), "cpu"), {}, ROWS)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in expected.keys() - {"own targets"}:
        torch.testing.assert_close(
            torch.tensor(found[name]), torch.tensor(expected[name]), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("micro_batch", [1, 3, 4])
def test_micro_batches_without_targets_change_nothing(
    micro_batch: int, alone: dict[str, Any]
) -> None:
    assert alone["own targets"] == ROWS // 2 * 8
    assert_same(outcome(start(Ranks(), "cpu"), {}, micro_batch), alone)


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_without_targets_change_nothing(
    layout: str, micro_batch: int, alone: dict[str, Any]
) -> None:
    sizes = LAYOUTS[layout]
    found = on_ranks(2, outcome, sizes._asdict(), micro_batch)
    if sizes.data > 1:
        assert [one["own targets"] > 0 for one in found] == [True, False]
    for one in found:
        assert_same(one, alone)
