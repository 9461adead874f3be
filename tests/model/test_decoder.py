from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from support.tiny_architectures import penalise

from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder, parameter_role, params_of
from dtt.model.init import initialize


def make(arch: Architecture) -> tuple[Decoder, torch.Tensor]:
    model = Decoder(arch)
    initialize(model, seed=1)
    tokens = torch.randint(arch.vocab_size, (3, 16), generator=torch.Generator().manual_seed(0))
    return model, tokens


def test_loss_and_gradients_are_those_of_the_sum_of_the_cross_entropies(arch: Architecture) -> None:
    model, tokens = make(arch)
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    targets[0, :5] = -100
    loss = model(tokens, targets).loss
    loss.backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    expected.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-4, atol=1e-5)


def test_auxiliary_losses_of_the_blocks_add_up_with_their_gradients(arch: Architecture) -> None:
    (found, tokens), (expected, _) = make(arch), make(arch)
    streams: list[torch.Tensor] = []
    for block in expected.layers:
        block.register_forward_hook(lambda _block, _inputs, output: streams.append(output[0]))
    output = penalise(found)(tokens, tokens)
    main = expected(tokens, tokens).loss
    squares = sum(0.01 * x_BTD.square().sum() for x_BTD in streams)
    assert output.aux.keys() == {"squares"}
    torch.testing.assert_close(output.aux["squares"], squares)
    torch.autograd.backward([output.loss, *output.aux.values()])
    (main + squares).backward()
    for mine, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        if mine.grad is not None:  # not for the correction of a router
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_token_never_changes_what_comes_before_it(arch: Architecture) -> None:
    model, tokens = make(arch)
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % arch.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_parameter_names_are_the_contract(arch: Architecture) -> None:
    contract = re.compile(
        r"(embed|pos_embed|norm|head|layers\.\d+\."
        r"(attn(_post)?_norm|mlp(_post)?_norm|attn\.([qkvo]|[qk]_norm)|mlp\.(shared\.)?(gate|up|down)"
        r"|mlp\.router))\.(weight|bias)"
        r"|layers\.\d+\.mlp\.(experts\.(gate|up|down)|router\.balance)"
    )
    for name in Decoder(arch).state_dict():
        assert contract.fullmatch(name), name


def test_every_parameter_has_one_role(arch: Architecture) -> None:
    model, _ = make(arch)
    found = {name: param.role for name, param in params_of(model).items()}
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert ("head" in found.values()) == (not arch.tie_embeddings)
    assert {n for n, r in found.items() if r in ("matrix", "router")} == {
        n for n, p in model.named_parameters() if n.startswith("layers.") and p.ndim > 1
    }


@pytest.mark.parametrize(
    ("name", "ndim", "expected"),
    [
        ("layers.3.mlp.experts.gate", 3, "matrix"),
        ("layers.3.mlp.experts.down", 3, "matrix"),
        ("layers.3.mlp.experts.down_bias", 2, "vector"),
        ("layers.3.attn.q.bias", 1, "vector"),
    ],
)
def test_a_stack_has_the_role_of_what_it_stacks(name: str, ndim: int, expected: str) -> None:
    assert parameter_role(name, ndim) == expected


@pytest.mark.parametrize(("name", "ndim"), [("embed.weight", 3), ("layers.0.mlp.experts.up", 4)])
def test_other_shapes_have_no_role(name: str, ndim: int) -> None:
    with pytest.raises(ValueError, match=name):
        parameter_role(name, ndim)


def test_it_can_be_built_on_the_meta_device_and_filled_later(arch: Architecture) -> None:
    direct, tokens = make(arch)
    with torch.device("meta"):
        late = Decoder(arch)
    late = late.to_empty(device="cpu")
    initialize(late, seed=1)
    assert torch.equal(direct(tokens), late(tokens))
    assert not list(late.buffers())


def test_dropout_acts_in_training_only(arch: Architecture) -> None:
    model, tokens = make(dataclasses.replace(arch, dropout=0.5))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_bf16_autocast_is_close_to_fp32(arch: Architecture) -> None:
    model, tokens = make(arch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, tokens).loss
    loss.backward()
    # A score that is rounded may choose another expert.
    rel = 5e-3 if arch.mixture is None else 2e-2
    assert loss.item() == pytest.approx(model(tokens, tokens).loss.item(), rel=rel)
    for name, parameter in model.named_parameters():
        assert name.endswith("balance") or (
            parameter.grad is not None and parameter.grad.dtype == torch.float32
        )


@pytest.mark.slow(except_for=["llama"])
def test_blocks_compile_without_a_graph_break(arch: Architecture) -> None:
    model, tokens = make(arch)
    expected = model(tokens)
    torch.compiler.reset()  # the other architectures, of which one function may have only so many
    for layer in model.layers:
        layer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(model(tokens), expected)
