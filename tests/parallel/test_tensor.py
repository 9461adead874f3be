"""Ranks that share every layer compute what one process does: losses, gradients, logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks
from support.tiny_architectures import VARIANTS, penalise, tiny_architecture
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtt.config.parallel import Sizes
from dtt.mesh.dist import World
from dtt.mesh.mesh import make_mesh
from dtt.mesh.sharding import local_shard
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from dtt.parallel import fp8
from dtt.parallel.apply import apply, autocast
from dtt.parallel.fp8 import linear_layers
from dtt.parallel.tensor import overlap

ROWS, SEQ_LEN = 2, 16
CASES = [(False, 0.0), (True, 0.1)]
"""Whether documents are masked, and the z-loss."""

MIXTURES = {"mixtral", "qwen3_moe", "olmoe", "dots1"}
"""Their experts have a mesh of their own: tests/verify/test_compare.py."""
ALL = (*(name for name in VARIANTS if name not in MIXTURES), "llama-penalised")
Outcome = dict[str, Tensor]


def empty(variant: str) -> Decoder:
    model = Decoder(tiny_architecture(variant.removesuffix("-penalised"), 128, SEQ_LEN))
    return penalise(model) if variant.endswith("penalised") else model


def make_model(variant: str) -> Decoder:
    """With weights in which nothing is the identity: norms and biases too are drawn."""
    model = empty(variant)
    initialize(model, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def divided(variant: str, world: World, sizes: Sizes, compile_blocks: bool = False) -> nn.Module:
    """The same, made on the meta device, laid out, and given its weights part by part."""
    torch.set_num_threads(1)
    whole = make_model(variant)
    with torch.device("meta"):
        model = empty(variant)
    module = apply(model, world, make_mesh(sizes, world), compile_blocks=compile_blocks)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert isinstance(mine, DTensor)
            part = local_shard(mine)
            part.local.copy_(theirs[part.box.slices])
    return module


def frozen(world: World, variant: str) -> list[str]:
    """The parameters that are trained after a model without any is divided."""
    with torch.device("meta"):
        model = empty(variant).requires_grad_(requires_grad=False)
    apply(model, world, make_mesh(Sizes(tensor=2), world), compile_blocks=False)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize("variant", ["qwen3", "olmo2"])
def test_frozen_weights_stay_frozen(variant: str) -> None:
    """Those of norms, too: below an adapter, they would be trained, and missing in the base."""
    assert on_ranks(2, frozen, variant) == [[], []]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets of which some are ignored, documents."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(128, (ROWS, SEQ_LEN + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, 3:6] = -100
    documents = (torch.arange(SEQ_LEN) >= 9).long().expand(ROWS, -1).contiguous()
    return ids[:, :-1], targets, documents


def outcome(
    model: nn.Module,
    masked: bool = False,
    z_loss: float = 0.0,
    precision: str = "fp32",
    rows: slice = slice(None),
    copies: int = 1,
) -> Outcome:
    """Logits, losses, and gradients of the total times `copies`, over which FSDP2 has averaged."""
    tokens, targets, documents = (x[rows] for x in batch())
    options = {"doc_ids_BT": documents} if masked else {}
    model.zero_grad()
    with torch.no_grad(), autocast(torch.device("cpu"), precision):
        found = {"logits": model(tokens, **options)}
        found["evaluated"] = model(tokens, targets, **options).loss
    with autocast(torch.device("cpu"), precision):
        output = model(tokens, targets, z_loss=z_loss, **options)
    (sum(output.aux.values(), output.loss) * copies).backward()
    found |= {name: value.detach() for name, value in output.named().items()}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        if isinstance(grad, DTensor):
            assert isinstance(parameter, DTensor)
            assert grad.placements == parameter.placements, name
            grad = grad.full_tensor()
        found[name] = grad
    return {name: value.clone() for name, value in found.items()}


def numbers(found: Outcome) -> dict[str, Any]:
    """As a pipe between processes takes them."""
    return {name: value.tolist() for name, value in found.items()}


def assert_close(got: dict[str, Any], wanted: Outcome) -> None:
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        assert values.abs().max() > 0
        torch.testing.assert_close(
            torch.tensor(got[name]), values, rtol=1e-4, atol=1e-5, msg=f"{name}: {{}}".format
        )


def of_two(world: World) -> list[dict[str, Any]]:
    models = (divided(variant, world, Sizes(tensor=2)) for variant in ALL)
    return [numbers(outcome(model, *case)) for model in models for case in CASES]


@pytest.mark.slow
def test_two_ranks_compute_what_one_does_for_every_family() -> None:
    first, second = on_ranks(2, of_two)
    assert first == second
    models = map(make_model, ALL)
    wanted = [outcome(model, *case) for model in models for case in CASES]
    for one, expected in zip(first, wanted, strict=True):
        assert_close(one, expected)


def of_four(world: World, variants: list[str]) -> list[dict[str, Any]]:
    """Each rank has a row of the batch."""
    sizes = Sizes(shard=2, tensor=2)
    rows = slice(world.rank // 2, None, 2)
    models = (divided(variant, world, sizes) for variant in variants)
    return [numbers(outcome(model, True, rows=rows, copies=2)) for model in models]


def test_gradients_of_two_shards_by_two_tensors_are_those_of_the_whole_batch() -> None:
    variants = ["gpt2", "qwen3", "olmo2"]
    found = on_ranks(4, of_four, variants)
    for variant, (first, peer, second, _) in zip(variants, zip(*found, strict=True), strict=True):
        assert first == peer
        for name in ("loss", "evaluated"):
            first[name] += second[name]
        first["logits"] += second["logits"]
        assert_close(first, outcome(make_model(variant), True))


def rough(world: World, precision: str) -> dict[str, Any]:
    return numbers(
        outcome(in_fp8(divided("llama", world, Sizes(tensor=2)), precision), precision=precision)
    )


def in_fp8(model: nn.Module, precision: str) -> nn.Module:
    if precision == "fp8":
        for layer in linear_layers(model).values():
            layer.product = fp8.linear
    return model


@pytest.mark.parametrize(("precision", "most"), [("bf16", 0.1), ("fp8", 0.5)])
def test_two_ranks_are_as_close_to_fp32_as_one_is(precision: str, most: float) -> None:
    exact = outcome(make_model("llama"))

    def error(found: dict[str, Any]) -> float:
        return max(
            float((torch.tensor(found[name]) - value).norm() / value.norm())
            for name, value in exact.items()
        )

    one = error(numbers(outcome(in_fp8(make_model("llama"), precision), precision=precision)))
    assert 0 < error(on_ranks(2, rough, precision)[0]) < 2 * one < most


def initialised(world: World) -> bool:
    with torch.device("meta"):
        model = Decoder(make_model("gpt2").arch)
    apply(model, world, make_mesh(Sizes(shard=2, tensor=2), world), compile_blocks=False)
    model.to_empty(device="cpu")
    initialize(model, seed=7)
    whole = Decoder(model.arch)
    initialize(whole, seed=7)
    pairs = zip(map(local_shard, model.parameters()), whole.parameters(), strict=True)
    return all(torch.equal(part.local, theirs[part.box.slices]) for part, theirs in pairs)


@pytest.mark.slow
def test_initial_weights_are_those_of_one_process() -> None:
    assert on_ranks(4, initialised) == [True] * 4


def compiled(world: World) -> tuple[dict[str, Any], int]:
    torch.compile = partial(torch.compile, backend="aot_eager")
    model = divided("llama", world, Sizes(tensor=2), compile_blocks=True)
    tokens, targets, _ = batch()
    model(tokens, targets).loss.backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return numbers({name: p.grad.full_tensor() for name, p in model.named_parameters()}), graphs


@pytest.mark.slow
def test_compiled_blocks_have_the_same_gradients() -> None:
    found, graphs = on_ranks(2, compiled)[0]
    assert graphs > 0
    wanted = outcome(make_model("llama"))
    assert_close(found, {name: wanted[name] for name in found})


def overlapped(world: World) -> tuple[str, bool]:
    line = overlap(make_mesh(Sizes(tensor=2), world).part("tensor"), world)
    return line, torch._inductor.config._micro_pipeline_tp


def test_without_shared_memory_collectives_do_not_overlap_and_the_reason_is_logged() -> None:
    line, on = on_ranks(2, overlapped)[0]
    assert "do not overlap" in line
    assert "cpu" in line
    assert not on


def overlapped_but_on_one(world: World, failing: str) -> tuple[str, bool]:
    """As on two GPUs that share memory, but for what fails on the second rank."""
    from torch.distributed import _symmetric_memory as symmetric

    def empty(*_: Any, **__: Any) -> Tensor:
        if failing == "allocate" and not world.first:
            raise RuntimeError("CUDA driver error: out of fabric memory")
        return torch.empty(1)

    def rendezvous(_tensor: Tensor, group: dist.ProcessGroup) -> None:
        dist.barrier(group)  # ranks exchange handles before they map each other's memory
        if failing == "meet" and not world.first:
            raise RuntimeError("CUDA driver error: peer access is not supported")

    symmetric.empty, symmetric.rendezvous = empty, rendezvous  # type: ignore[assignment]
    symmetric.enable_symm_mem_for_group = lambda _name: None
    line = overlap(make_mesh(Sizes(tensor=2), world).part("tensor"), world)
    return line, torch._inductor.config._micro_pipeline_tp


@pytest.mark.parametrize("failing", ["allocate", "meet"])
def test_collectives_overlap_on_all_ranks_or_on_none(failing: str) -> None:
    (first, on_first), (second, on_second) = on_ranks(2, overlapped_but_on_one, failing)
    assert not on_first
    assert not on_second
    assert "do not overlap" in first
    assert first.endswith("another rank cannot reach its peers' memory")
    assert "CUDA driver error" in second
    assert (
        on_ranks(2, overlapped_but_on_one, "nothing")
        == [("tensor parallelism: the compiler may overlap collectives with matrix products", True)]
        * 2
    )
