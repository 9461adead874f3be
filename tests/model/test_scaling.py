"""muP: at the base nothing changes; away from it sizes and updates stay what they are there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.tables import table
from torch import nn

from dtt.base.errors import ConfigError
from dtt.config.load import resolve
from dtt.config.model import ModelConfig
from dtt.config.optim import Optimizer
from dtt.config.run import RunConfig
from dtt.config.scaling import MupConfig
from dtt.config.schedule import RunFacts
from dtt.model import families
from dtt.model.decoder import Decoder, parameter_role, params_of
from dtt.model.init import init_std, initialize
from dtt.model.scaling import Scaling, scaled
from dtt.optim import built
from dtt.optim.adamw import AdamWConfig
from dtt.optim.muon.variant import MuonConfig

FAMILIES = list(families.NAMES)
DEPTHS: dict[str, dict[str, Any]] = {
    "none": {},
    "sqrt": {"depth": "sqrt", "base_layers": 2},
    "linear": {"depth": "linear", "base_layers": 2},
}


def run(family: str, dim: int, n_layers: int = 2, **mup: Any) -> RunConfig:
    """A model `dim` wide with heads of 16; with keywords, scaled from a base 32 wide."""
    sizes = {"n_layers": n_layers, "n_heads": dim // 16, "ffn_dim": 4 * dim}
    cfg = RunConfig(model=ModelConfig(family=family, dim=dim, **sizes))  # type: ignore[arg-type]
    return cfg.model_copy(update={"scaling": MupConfig(base_dim=32, **mup)}) if mup else cfg


def made(scaling: Scaling) -> Decoder:
    model = Decoder(scaling.arch)
    initialize(model, 0, scaling.base)
    return model


def optimizers(cfg: RunConfig, model: Decoder, scaling: Scaling) -> dict[str, Any]:
    """Of each parameter, what the optimizer groups say."""
    params = params_of(model)
    facts = RunFacts(1, lr_factor=scaling.lr_factor)
    said = {}
    for optimizer in built.build(cfg.optim, params, facts).values():
        for group in optimizer.param_groups:
            rest = {k: v for k, v in group.items() if k not in ("params", "names")}
            said |= dict.fromkeys(group["names"], rest)
    return said


@pytest.mark.parametrize("optim", [AdamWConfig(), MuonConfig(), MuonConfig(scale="spectral")])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_at_the_base_shape_mup_is_the_standard_parametrization_bit_for_bit(
    family: str, depth: str, optim: Optimizer
) -> None:
    standard, mup = (
        cfg.model_copy(update={"optim": optim})
        for cfg in (run(family, 32), run(family, 32, base_head_dim=16, **DEPTHS[depth]))
    )
    one, other = scaled(standard, 100), scaled(mup, 100)
    assert one.arch == other.arch
    first, second = made(one), made(other)
    state = second.state_dict()
    assert all(torch.equal(state[name], value) for name, value in first.state_dict().items())
    assert optimizers(standard, first, one) == optimizers(mup, second, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_sizes_and_multipliers_are_those_of_table_8(family: str) -> None:
    base, wide = scaled(run(family, 32), 100), scaled(run(family, 128, base_head_dim=8), 100)
    assert wide.arch.logit_scale == base.arch.logit_scale / 4
    assert wide.arch.embed_scale == base.arch.embed_scale
    assert wide.arch.attn_scale == pytest.approx(math.sqrt(8) / 16)  # sqrt(base) / head_dim
    small = dict(made(base).named_parameters())
    for name, parameter in made(wide).named_parameters():
        if parameter.ndim == 2:
            hidden = name.startswith("layers.")
            ratio = (parameter.std() / small[name].std()).item()
            assert ratio == pytest.approx(0.5 if hidden else 1.0, rel=0.05), name


@pytest.mark.parametrize(
    ("optim", "matrix"),
    [(AdamWConfig(), 1 / 4), (MuonConfig(), 1 / 2), (MuonConfig(scale="spectral"), 1.0)],
)
@pytest.mark.parametrize(("depth", "block"), [("none", 1), ("sqrt", 1 / 2), ("linear", 1)])
def test_rates_follow_width_and_depth_and_decay_per_step_does_not(
    optim: Optimizer, matrix: float, depth: str, block: float
) -> None:
    base = run("qwen3", 32).model_copy(update={"optim": optim})
    wide = run("qwen3", 128, 8, base_head_dim=16, **DEPTHS[depth])
    wide = wide.model_copy(update={"optim": optim})
    scaling = scaled(wide, 100)
    assert scaling.arch.residual_scale == {"none": 1.0, "sqrt": 0.5, "linear": 0.25}[depth]
    small = scaled(base, 100)
    before, after = (
        optimizers(cfg, made(one), one) for cfg, one in ((base, small), (wide, scaling))
    )
    assert before.keys() < after.keys()
    for name, param in params_of(made(small)).items():
        factor = (matrix if param.role == "matrix" else 1) * (
            block if name.startswith("layers") else 1
        )
        one, other = before[name], after[name]
        assert other["peak_lr"] == pytest.approx(factor * one["peak_lr"]), name
        decay = one["peak_lr"] * one["weight_decay"]
        assert other["peak_lr"] * other["weight_decay"] == pytest.approx(decay), name


@pytest.mark.parametrize("scale", ["rms", "spectral"])
@pytest.mark.parametrize(
    ("experts", "rows", "columns"),
    [((), 1, 1), ((), 4, 1), ((), 1, 4), ((), 1, 2), ((3,), 1, 2)],
)
def test_muons_update_keeps_its_spectral_norm_over_the_root_of_the_shape(
    scale: str,
    experts: tuple[int, ...],
    rows: int,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Those that end at 1.
    exact = 24 * ((15 / 8, -10 / 8, 3 / 8),)
    monkeypatch.setattr("dtt.optim.muon.newton_schulz.POLYNOMIALS", exact)
    norms = []
    for dim in (32, 64, 128):
        cfg = run("llama", dim, base_head_dim=16)
        optim = MuonConfig(scale=scale, weight_decay=0.0)  # type: ignore[arg-type]
        weight = nn.Parameter(torch.zeros(*experts, rows * dim, columns * dim))
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(dim))
        params = table({"layers.0.w": weight})
        facts = RunFacts(1, lr_factor=scaled(cfg, 100).lr_factor)
        built.build(optim, params, facts)["muon"].step()
        norm = torch.linalg.matrix_norm(weight.detach(), 2).mean().item()
        norms.append(norm / math.sqrt(rows / columns))
    assert max(norms) / min(norms) < 1.05


def test_a_stack_is_scaled_as_its_matrices() -> None:
    scaling = scaled(run("llama", 128, base_head_dim=16, depth="sqrt", base_layers=1), 100)
    names = ("layers.0.mlp.up.weight", "layers.0.mlp.experts.up")
    weights = {n: nn.Parameter(torch.zeros((4,) * (i + 2))) for i, n in enumerate(names)}
    roles = {n: parameter_role(n, p.ndim) for n, p in weights.items()}
    params = table(weights, roles)
    for power in (1.0, 0.5):
        matrix, stack = (scaling.lr_factor(params[name], power) for name in names)
        assert matrix == stack != 1.0
    matrix_std, stack_std = (init_std(name, scaling.arch, scaling.base) for name in names)
    assert matrix_std == stack_std == scaling.arch.init_std.matrix / 2


def test_adamws_update_moves_the_outputs_of_a_matrix_alike_at_all_widths() -> None:
    moved = []
    for dim in (32, 128, 512):
        cfg = run("llama", dim, base_head_dim=16).model_copy(
            update={"optim": AdamWConfig(weight_decay=0.0)}
        )
        generator = torch.Generator().manual_seed(dim)
        inputs, wanted = torch.randn(2, dim, generator=generator)
        weight = nn.Parameter(torch.zeros(dim, dim))
        weight.grad = torch.outer(wanted, inputs)
        params = table({"layers.0.w": weight})
        facts = RunFacts(1, lr_factor=scaled(cfg, 100).lr_factor)
        built.build(cfg.optim, params, facts)["adamw"].step()
        moved.append((weight @ inputs).abs().mean().item())
    assert max(moved) / min(moved) < 1.3


@pytest.mark.parametrize("depth", ["sqrt", "linear"])
def test_the_residual_stream_does_not_grow_with_the_depth(depth: str) -> None:
    sizes = []
    for n_layers in (2, 8, 32):
        model = made(scaled(run("llama", 64, n_layers, **DEPTHS[depth]), 100))
        seen: list[float] = []
        model.norm.register_forward_pre_hook(
            lambda _, inputs, seen=seen: seen.append(inputs[0].std().item())
        )
        model(torch.arange(64)[None])
        sizes += seen
    assert max(sizes) / min(sizes) < 1.1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["scaling.type=mup"], r"scaling\.base_dim: muP needs the width"),
        (
            ["scaling.type=mup", "scaling.base_dim=64", "scaling.depth=sqrt"],
            r"scaling\.base_layers: depth=sqrt needs the layers",
        ),
    ],
)
def test_a_base_that_is_not_given_is_a_mistake_in_the_configuration(
    arguments: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(None, arguments)
