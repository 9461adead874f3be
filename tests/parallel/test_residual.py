"""The residual stream has one dtype, and a run one loss, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from torch import Tensor, nn

from dtt.base.ranks import Ranks
from dtt.config.model import ModelConfig
from dtt.config.parallel import Sizes
from dtt.mesh.dist import World, start
from dtt.mesh.mesh import make_mesh
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from dtt.parallel.apply import apply, autocast
from dtt.parallel.context import ContextParallel
from dtt.train.precision import Precision

LENGTH = 16
LAYOUTS = {
    "DDP": Sizes(replicate=2),
    "FSDP2": Sizes(shard=2),
    "context": Sizes(context=2),
    "tensor": Sizes(tensor=2),
}
Outcome = tuple[list[str], float]


def outcome(world: World, sizes: Sizes, family: str, precision: str) -> Outcome:
    """Dtypes of what the blocks take and give, forward and backward, and the loss of one batch,
    which all ranks see."""
    torch.set_num_threads(1)
    cfg = ModelConfig(family=family, dim=32, n_layers=2, n_heads=4)  # type: ignore[arg-type]
    layout = make_mesh(sizes, world)
    with torch.device("meta") if layout.sharded else world.device:
        model = Decoder(families.get(cfg.family).architecture(cfg, 128, LENGTH))
        model = model.to(Precision(precision).weights)
    module = apply(model, world, layout, compile_blocks=False, precision=precision)
    if sizes.context > 1:
        module = ContextParallel(model, layout)
    if layout.sharded:
        model.to_empty(device="cpu")
    initialize(model, seed=0)
    seen: set[str] = set()

    def watch(_module: nn.Module, inputs: Any, output: Any) -> None:
        for x in (inputs[0], output[0]):
            seen.add(f"forward {x.dtype}")
            x.register_hook(lambda grad: seen.add(f"backward {grad.dtype}"))

    for block in model.layers:
        block.register_forward_hook(watch)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(128, (2, LENGTH + 1), generator=generator)
    with autocast(world.device, precision):
        loss: Tensor = module(ids[:, :-1], ids[:, 1:]).loss
    loss.backward()
    if sizes.context > 1:  # each rank has the loss of its tokens
        torch.distributed.all_reduce(loss.detach())
    return sorted(seen), loss.item()


def outcomes(world: World, family: str) -> dict[str, Outcome]:
    return {name: outcome(world, sizes, family, "bf16") for name, sizes in LAYOUTS.items()}


@pytest.mark.slow(except_for=["llama"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
def test_the_residual_stream_is_bf16_on_every_layout(family: str) -> None:
    alone = outcome(start(Ranks(), "cpu"), Sizes(), family, "bf16")
    assert alone[0] == ["backward torch.bfloat16", "forward torch.bfloat16"]
    for of_rank in on_ranks(2, outcomes, family):
        for name, (dtypes, loss) in of_rank.items():
            assert dtypes == alone[0], name
            if name in ("DDP", "FSDP2"):
                assert loss == alone[1], name
            else:  # sums in another order
                assert loss == pytest.approx(alone[1], rel=2e-3), name


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16-pure", "bfloat16")])
def test_without_autocast_it_is_that_of_the_weights(precision: str, dtype: str) -> None:
    expected = [f"backward torch.{dtype}", f"forward torch.{dtype}"]
    assert outcome(start(Ranks(), "cpu"), Sizes(), "llama", precision)[0] == expected
    for dtypes, _ in on_ranks(2, outcome, Sizes(shard=2), "llama", precision):
        assert dtypes == expected
