"""Context parallelism: processes that share a sequence compute what one alone does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks
from support.tiny_architectures import decoder
from torch import Tensor, nn

from dtt.config.model import LinearRopeScaling, ModelConfig
from dtt.config.parallel import Sizes
from dtt.mesh.dist import World
from dtt.mesh.mesh import make_mesh
from dtt.model.decoder import Decoder
from dtt.model.decoding import whole_passes
from dtt.model.generate import generate
from dtt.parallel.context import ContextParallel

LENGTH = 44
"""Of sequences: on two processes these are chunks of 11 tokens, on four there is padding."""

SHAPE: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4}
FAMILIES = {
    "gpt2": ModelConfig(family="gpt2", **SHAPE),
    "llama": ModelConfig(family="llama", n_kv_heads=2, **SHAPE),
    "qwen3": ModelConfig(family="qwen3", n_kv_heads=2, head_dim=16, **SHAPE),
    "gemma3": ModelConfig(
        family="gemma3",
        n_kv_heads=1,
        window=15,
        window_pattern=2,
        rope_theta=1e6,
        rope_scaling=LinearRopeScaling(),
        **SHAPE,
    ),
}


def make(family: str, length: int = LENGTH) -> Decoder:
    return decoder(FAMILIES[family], 100, length, seed=1)


def batch(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets of which some are none, and documents."""
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(100, (2, 3, length), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.1] = -100
    return tokens, targets, (torch.rand(targets.shape, generator=generator) < 0.08).cumsum(1)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(got: Tensor, expected: Tensor) -> float:
    """Relative to the largest number, or to 1: gradients that are 0 are sums of rounding errors."""
    return ((got - expected).abs().max() / expected.abs().max().clamp(min=1.0)).item()


def differences(world: World, sizes: Sizes, names: list[str]) -> dict[str, float]:
    """By family, documents and what was computed."""
    torch.set_num_threads(1)
    layout = make_mesh(sizes, world)
    tokens, targets, numbers = batch()
    found = {}
    for family in names:
        for documents in (None, numbers):
            model = make(family)
            loss = model(tokens, targets, doc_ids_BT=documents, z_loss=1e-3).loss
            loss.backward()
            expected = gradients(model)
            model.zero_grad()
            module = ContextParallel(model, layout)
            part = module(tokens, targets, doc_ids_BT=documents, z_loss=1e-3).loss
            part.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            total = part.detach().clone()
            dist.all_reduce(total)
            key = f"{family}, {'documents' if documents is not None else 'plain'}"
            found[f"{key}: loss"] = apart(total, loss)
            for name, gradient in gradients(model).items():
                found[f"{key}: {name}"] = apart(gradient, expected[name])
            with torch.no_grad():
                whole = model(tokens, doc_ids_BT=documents)
                found[f"{key}: logits"] = apart(module(tokens, doc_ids_BT=documents), whole)
    return found


def assert_none(differences: list[dict[str, float]]) -> None:
    for found in differences:
        assert {what: by for what, by in found.items() if not by < 2e-5} == {}


def test_two_that_share_a_sequence_compute_what_one_alone_does_in_every_family() -> None:
    assert_none(on_ranks(2, differences, Sizes(context=2), list(FAMILIES)))


@pytest.mark.slow
def test_four_that_share_a_sequence_compute_what_one_alone_does() -> None:
    """A window is longer than a chunk, documents are longer or shorter, the end is padded."""
    assert_none(on_ranks(4, differences, Sizes(context=4), ["gemma3"]))


def generated(world: World, length: int) -> tuple[list[int], list[int]]:
    """Until the context is full: by all ranks together, and by one alone."""
    torch.set_num_threads(1)
    layout = make_mesh(Sizes(context=world.size), world)
    model = make("gpt2", length)
    how: dict[str, Any] = {
        "max_new_tokens": length,
        "temperature": 1.0,
        "top_p": 0.9,
    }
    module, multiple, agreed = ContextParallel(model, layout), layout.granularity, world.from_first
    passes = whole_passes(module, multiple, agreed)
    together = generate(model, [1, 2, 3], generator=seeded(), decoding=passes, **how)
    return list(together), list(generate(model, [1, 2, 3], generator=seeded(), **how))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_text_fills_a_context_that_is_not_divisible() -> None:
    for together, alone in on_ranks(2, generated, LENGTH + 2):
        assert together == alone
        assert len(alone) == LENGTH - 1


def compiled(world: World) -> float:
    """How far the loss of compiled blocks is from that of others, in a second batch."""
    torch.set_num_threads(1)
    layout = make_mesh(Sizes(context=2), world)
    plain, model = make("gemma3"), make("gemma3")
    module = ContextParallel(model, layout)
    for layer in model.layers:
        layer.compile(dynamic=False, backend="aot_eager", fullgraph=True)
    tokens, targets, documents = batch()
    module(tokens, targets, doc_ids_BT=documents).loss.backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        got = module(tokens, targets, doc_ids_BT=documents // 2)
    wanted = ContextParallel(plain, layout)(tokens, targets, doc_ids_BT=documents // 2)
    return apart(got.loss, wanted.loss)


@pytest.mark.slow
def test_blocks_are_compiled_whole_and_once() -> None:
    assert max(on_ranks(2, compiled)) < 1e-6
