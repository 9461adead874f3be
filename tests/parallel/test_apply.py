"""Ranks exchange gradients where they should; tests/parallel/test_targets.py has their values."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.ranks import on_ranks
from support.tiny_architectures import decoder
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dtt.base.ranks import Ranks
from dtt.config.model import ModelConfig
from dtt.config.parallel import Sizes
from dtt.mesh.dist import World, start
from dtt.mesh.mesh import Mesh, make_mesh
from dtt.model.decoder import Decoder
from dtt.parallel.apply import apply, autocast, gradient_sync

ROWS, SEQ_LEN = 8, 16


def make_model() -> Decoder:
    return decoder(ModelConfig(dim=16, n_layers=2, n_heads=2), 64, SEQ_LEN)


def applied(model: Decoder, world: World) -> nn.Module:
    layout = Mesh(Sizes(replicate=world.size), world.rank)
    return apply(model, world, layout, compile_blocks=False)


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(64, (ROWS, SEQ_LEN + 1), generator=generator)


def unsynchronised(world: World) -> tuple[bool, bool]:
    """Whether two ranks' gradients are equal: of a backward without, then one with exchange."""
    module = applied(make_model(), world)
    ids = batch()[world.rank :: world.size]
    equal = []
    for wanted in (False, True):
        with gradient_sync(module, wanted):
            module(ids[:, :-1], ids[:, 1:]).loss.backward()
        grad = next(module.parameters()).grad
        assert grad is not None
        both = grad.clone()
        torch.distributed.all_reduce(both)
        equal.append(torch.equal(both - grad, grad))
    return equal[0], equal[1]


def test_ranks_do_not_communicate_while_accumulating() -> None:
    assert on_ranks(2, unsynchronised) == [(False, True)] * 2


def names(world: World) -> tuple[list[str], bool]:
    model = make_model()
    module = applied(model, world)
    return [n for n, _ in model.named_parameters()], isinstance(module, DistributedDataParallel)


def test_the_model_keeps_its_parameter_names_under_ddp() -> None:
    model = make_model()
    assert applied(model, start(Ranks(), "cpu")) is model
    plain = [name for name, _ in model.named_parameters()]
    assert on_ranks(2, names) == [(plain, True)] * 2


def test_autocast_multiplies_in_bf16_only_when_asked() -> None:
    linear = nn.Linear(4, 4)
    cpu = torch.device("cpu")
    kinds = ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp8", torch.bfloat16)
    for precision, dtype in kinds:
        with autocast(cpu, precision):
            assert linear(torch.ones(1, 4)).dtype == dtype


def graphs_under_ddp(world: World) -> int:
    """Graphs that one block of 12 MB is compiled into."""
    torch.set_num_threads(1)
    graphs = []

    def record(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        graphs.append(graph)
        return graph.forward

    torch.compile = partial(torch.compile, backend=record)  # type: ignore[assignment]
    model = decoder(ModelConfig(dim=512, n_layers=1, n_heads=4), 64, SEQ_LEN)
    layout = Mesh(Sizes(replicate=world.size), world.rank)
    module = apply(model, world, layout, compile_blocks=True)
    ids = batch()[:1]
    module(ids[:, :-1], ids[:, 1:]).loss.backward()
    return len(graphs)


@pytest.mark.slow
def test_under_ddp_a_block_is_compiled_into_one_graph() -> None:
    assert on_ranks(2, graphs_under_ddp) == [1, 1]


def when_the_head_moves(world: World, tied: bool) -> tuple[bool, bool, bool]:
    """Return whether the head is gathered before the last block and after the backward pass of the
    loss, and whether its gradient is reduced before the backward pass of the first block."""
    config = ModelConfig(family="llama", dim=16, n_layers=2, n_heads=2, tie_embeddings=tied)
    model = decoder(config, 64, SEQ_LEN)
    mesh = make_mesh(Sizes(shard=world.size), world)
    module = apply(model, world, mesh, compile_blocks=False)
    seen: list[bool] = []

    def gathered() -> bool:
        return not isinstance(model.head_weight(), DTensor)

    # Before FSDP2's own hook, which gathers the block.
    model.layers[1].register_forward_pre_hook(lambda *_: seen.append(gathered()), prepend=True)

    def at_norm(_module: nn.Module, _inputs: object, out: Tensor) -> None:
        out.register_hook(lambda _grad: seen.append(gathered()))

    model.norm.register_forward_hook(at_norm)

    def reduced(*_: object) -> None:
        seen.append(model.head_weight().grad is not None)

    model.layers[0].register_full_backward_pre_hook(reduced)
    ids = batch()
    module(ids[:, :-1], ids[:, 1:]).loss.backward()
    assert isinstance(model.head_weight().grad, DTensor)
    before, after, reduced_early = seen
    return before, after, reduced_early


@pytest.mark.parametrize("tied", [False, True])
def test_an_untied_head_is_gathered_late_and_reduced_early(tied: bool) -> None:
    assert on_ranks(2, when_the_head_moves, tied) == [(tied, tied, not tied)] * 2
