"""Every parameter has exactly one optimizer and its settings: by its role, or by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from support.tables import table
from torch import nn
from torch.optim import Optimizer

from dtt.base.errors import ConfigError
from dtt.config.load import resolve
from dtt.config.optim import ROLES as ROLE_NAMES
from dtt.config.optim import AdamWGroup
from dtt.config.optim import Optimizer as OptimConfig
from dtt.config.parallel import Sizes
from dtt.config.schedule import RunFacts
from dtt.mesh.dist import World
from dtt.mesh.mesh import Mesh
from dtt.model.decoder import parameter_role
from dtt.optim.adamw import AdamWConfig, AdamWSettings
from dtt.optim.built import build
from dtt.optim.groups import describe, set_learning_rate
from dtt.optim.muon.variant import MuonConfig, MuonGroup
from dtt.params.table import Param, Params

SHAPES = {
    "embed.weight": (8, 4),
    "layers.0.attn.q.weight": (4, 4),
    "layers.0.attn.q_norm.weight": (4,),
    "layers.0.mlp.up.weight": (12, 4),
    "layers.1.attn.q.weight": (4, 4),
    "layers.1.attn.q_norm.weight": (4,),
    "layers.1.mlp.up.weight": (12, 4),
    "norm.weight": (4,),
    "head.weight": (8, 4),
}
ROLES = {
    name: "matrix" if name.startswith("layers") and len(shape) == 2
    else name.split(".")[0] if len(shape) == 2
    else "vector"
    for name, shape in SHAPES.items()
}  # fmt: skip


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}


def made(config: OptimConfig, facts: RunFacts = RunFacts(1)) -> dict[str, Optimizer]:  # noqa: B008
    return build(config, table(parameters(), ROLES), facts)


def group_of(optimizers: dict[str, Optimizer], name: str) -> tuple[str, dict[str, Any]]:
    [found] = [
        (owner, group)
        for owner, optimizer in optimizers.items()
        for group in optimizer.param_groups
        if name in group["names"]
    ]
    return found


@pytest.mark.parametrize(
    ("config", "matrix_owner"), [(MuonConfig(), "muon"), (AdamWConfig(), "adamw")]
)
def test_each_parameter_is_held_once_and_only_matrices_decay(
    config: OptimConfig, matrix_owner: str
) -> None:
    optimizers = made(config)
    for name, role in ROLES.items():
        owner, group = group_of(optimizers, name)
        assert owner == (matrix_owner if role == "matrix" else "adamw")
        assert (group["weight_decay"] > 0) == (role == "matrix")
        held = dict(zip(group["names"], group["params"], strict=True))
        assert held[name].shape == SHAPES[name]


@pytest.mark.parametrize(("config", "owner"), [(MuonConfig(), "muon"), (AdamWConfig(), "adamw")])
def test_a_stack_of_matrices_decays_and_a_stack_of_biases_does_not(
    config: OptimConfig, owner: str
) -> None:
    shapes = {"layers.0.mlp.experts.up": (3, 8, 4), "layers.0.mlp.experts.up_bias": (3, 8)}
    stacks = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    roles = {name: parameter_role(name, len(shape)) for name, shape in shapes.items()}
    optimizers = build(config, table(stacks, roles), RunFacts(1))
    found, group = group_of(optimizers, "layers.0.mlp.experts.up")
    assert (found, group["weight_decay"]) == (owner, 0.1)
    found, group = group_of(optimizers, "layers.0.mlp.experts.up_bias")
    assert (found, group["weight_decay"]) == ("adamw", 0.0)


def test_split_cuts_the_rows_of_each_expert() -> None:
    stack = {"layers.0.mlp.experts.gate_up": nn.Parameter(torch.ones(3, 8, 4))}
    config = MuonConfig(groups=(MuonGroup(match="*", split=2),))
    muon = build(config, table(stack), RunFacts(1))["muon"]
    assert muon.param_groups[0]["split"] == (4, 4)


def test_groups_give_each_role_its_own_rate_decay_and_betas() -> None:
    groups = (
        "{match: embed.weight, lr: 0.2, weight_decay: 0.3}, "
        "{match: head.weight, betas: [0.7, 0.99]}, {match: '*norm.weight', eps: 1e-6}"
    )
    sections = [
        "optim.lr=0.5", "optim.adamw.lr=0.1", "optim.adamw.betas=[0.8,0.9]",
        f"optim.groups=[{groups}]",
    ]  # fmt: skip
    optimizers = made(resolve(None, sections, env={}).config.optim)
    assert group_of(optimizers, "layers.0.attn.q.weight")[1]["lr"] == 0.5
    embed, head, norm = (
        group_of(optimizers, name)[1] for name in ("embed.weight", "head.weight", "norm.weight")
    )
    assert [g["lr"] for g in (embed, head, norm)] == [0.2, 0.1, 0.1]
    assert [g["weight_decay"] for g in (embed, head, norm)] == [0.3, 0, 0]
    assert [g["betas"] for g in (embed, head, norm)] == [(0.8, 0.9), (0.7, 0.99), (0.8, 0.9)]
    assert [g["eps"] for g in (embed, head, norm)] == [1e-8, 1e-8, 1e-6]


@pytest.mark.parametrize("config", [MuonConfig, AdamWConfig])
@pytest.mark.parametrize("own", [True, False])
def test_a_decay_of_a_group_is_cautious_only_if_it_says_so(
    config: type[OptimConfig], own: bool
) -> None:
    cautious_decay = {"value": 0.2, "cautious": True}
    decays = [cautious_decay, 0.1] if own else [0.1, cautious_decay]
    entry = MuonGroup if config is MuonConfig else AdamWGroup
    groups = (entry(match="layers.0.*", weight_decay=decays[0]),)
    optimizers = made(config(weight_decay=decays[1], groups=groups))
    for name, cautious in (("layers.0.mlp.up.weight", own), ("layers.1.mlp.up.weight", not own)):
        group = group_of(optimizers, name)[1]
        assert bool(group.get("cautious")) == cautious
        assert group["weight_decay"] == (0.2 if cautious else 0.1)


def test_an_entry_may_name_a_role_and_parameters_are_listed_by_it() -> None:
    entries = (
        MuonGroup(match="layers.1.*.up.weight", lr=0.6),
        *(MuonGroup(match=role, lr=0.1 * i) for i, role in enumerate(ROLE_NAMES, start=1)),
    )
    lora = "layers.0.attn.q.lora_a"
    router = "layers.0.mlp.router.weight"
    roles = ROLES | {lora: "adapter", router: "router"}
    found = parameters() | {name: nn.Parameter(torch.ones(2, 4)) for name in (lora, router)}
    optimizers = build(MuonConfig(groups=entries), table(found, roles), RunFacts(1))
    for name, role in roles.items():
        lr = 0.6 if name == "layers.1.mlp.up.weight" else 0.1 * (1 + ROLE_NAMES.index(role))
        assert group_of(optimizers, name)[1]["lr"] == pytest.approx(lr), name
    labels = [g["label"] for o in optimizers.values() for g in o.param_groups]
    assert sorted(labels) == sorted([*ROLE_NAMES, "matrix: layers.1.*.up.weight"])
    assert set(ROLE_NAMES) == set(roles.values())


def test_a_role_without_parameters_is_an_error() -> None:
    tied = {name: p for name, p in parameters().items() if name != "head.weight"}
    with pytest.raises(ConfigError, match=r"no parameter has the role head(.|\n)*tied"):
        build(AdamWConfig(groups=(AdamWGroup(match="head"),)), table(tied, ROLES), RunFacts(1))


def test_the_first_entry_that_matches_a_name_decides() -> None:
    entries = (
        MuonGroup(match="layers.0.attn.*.weight", optimizer="adamw", lr=0.3, betas=(0.5, 0.6)),
        MuonGroup(match="layers.*.weight", weight_decay=0.7),
        MuonGroup(match="embed.weight", optimizer="muon"),
    )
    optimizers = made(MuonConfig(lr=0.4, weight_decay=0.2, groups=entries))
    owner, group = group_of(optimizers, "layers.0.attn.q.weight")
    assert (owner, group["lr"], group["betas"]) == ("adamw", 0.3, (0.5, 0.6))
    assert group["weight_decay"] == 0.2  # it is a hidden matrix, whoever updates it
    assert group_of(optimizers, "layers.0.attn.q_norm.weight")[1]["weight_decay"] == 0
    owner, group = group_of(optimizers, "layers.1.attn.q.weight")
    assert (owner, group["lr"], group["weight_decay"]) == ("muon", 0.4, 0.7)
    assert group_of(optimizers, "layers.1.attn.q_norm.weight")[1]["weight_decay"] == 0.7
    assert group_of(optimizers, "embed.weight")[0] == "muon"


def test_an_optimizer_without_parameters_is_not_created() -> None:
    everything = MuonGroup(match="*", optimizer="adamw")
    assert list(made(MuonConfig(groups=(everything,)))) == ["adamw"]


@pytest.mark.parametrize("split", [3, (4, 4, 4)])
def test_split_resolves_to_the_rows_of_each_matrix(split: int | tuple[int, ...]) -> None:
    entry = MuonGroup(match="*.up.weight", split=split)
    optimizers = made(MuonConfig(groups=(entry,)))
    assert group_of(optimizers, "layers.0.mlp.up.weight")[1]["split"] == (4, 4, 4)
    assert group_of(optimizers, "layers.0.attn.q.weight")[1]["split"] is None


@pytest.mark.parametrize(
    ("entries", "messages"),
    [
        ([MuonGroup(match="*.atn.q.weight")], ["'*.atn.q.weight'", "attn.q.weight"]),
        ([MuonGroup(match="*"), MuonGroup(match="head*")], ["'head*'", "earlier"]),
        ([MuonGroup(match="layers.0.*", optimizer="muon")], ["q_norm.weight", "[4]"]),
        ([MuonGroup(match="*.up.weight", betas=(0.9, 0.9))], ["Muon updates", "up.weight"]),
        ([MuonGroup(match="*.up.weight", split=5)], ["12 rows"]),
        ([MuonGroup(match="*.up.weight", split=(4, 4))], ["12 rows"]),
        ([MuonGroup(match="embed.weight", split=2)], ["AdamW updates embed.weight"]),
    ],
    ids=["no match", "hidden", "muon on a vector", "betas", "parts", "rows", "split of AdamW"],
)  # fmt: skip
def test_an_entry_that_does_not_fit_is_refused_with_the_reason(
    entries: list[MuonGroup], messages: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        made(MuonConfig(groups=tuple(entries)))
    assert all(text in str(error.value) for text in ["optim.groups", *messages])


def test_muon_in_a_configuration_without_it_is_refused_before_any_start() -> None:
    entry = 'optim.groups=[{match: "*", optimizer: muon}]'
    assert resolve(None, [entry], env={}).config.optim.groups[0].optimizer == "muon"
    with pytest.raises(ConfigError, match=r"optimizer: is for another optim\.type than adamw"):
        resolve(None, ["optim.type=adamw", entry], env={})


def test_multipliers_are_factors_of_the_peak_and_leave_the_decay_of_a_step() -> None:
    name, other = "layers.0.mlp.up.weight", "layers.0.attn.q.weight"

    def factor(param: Param, power: float) -> float:
        return 0.5 ** (1 + 2 * power) if param.name in (name, "head.weight") else 1.0

    facts = RunFacts(1, lr_factor=factor)
    muon, adamw = made(MuonConfig(lr=0.2), facts), made(AdamWConfig(lr=0.2), facts)
    rates = [[group_of(o, n)[1]["peak_lr"] for n in (name, other)] for o in (muon, adamw)]
    assert rates == [[0.05, 0.2], [0.025, 0.2]]
    assert group_of(muon, "head.weight")[1]["peak_lr"] == 0.125 * MuonConfig().adamw.lr
    for optimizers in (muon, adamw):
        shrunk = [
            g["lr"] * g["weight_decay"] for n in (name, other) for _, g in [group_of(optimizers, n)]
        ]
        assert shrunk == pytest.approx([0.02, 0.02])


def test_all_groups_follow_one_multiplier() -> None:
    optimizers = made(MuonConfig(lr=0.2, adamw=AdamWSettings(lr=0.1)))
    set_learning_rate(optimizers, 0.5)
    assert {g["lr"] for g in optimizers["muon"].param_groups} == {0.1}
    assert {g["lr"] for g in optimizers["adamw"].param_groups} == {0.05}


def test_the_table_names_every_group_and_counts_every_parameter() -> None:
    entry = MuonGroup(match="*.up.weight", lr=0.5)
    table = describe(made(MuonConfig(groups=(entry,))))
    assert [line.split()[-7:] for line in table.splitlines()[1:]] == [
        ["matrix", "muon", "2", "32", "0.002", "0.1", "0.95"],
        ["*.up.weight", "muon", "2", "96", "0.5", "0.1", "0.95"],
        ["adamw", "1", "32", "0.002", "0", "0.9,", "0.95"],
        ["adamw", "3", "12", "0.002", "0", "0.9,", "0.95"],
        ["adamw", "1", "32", "0.002", "0", "0.9,", "0.95"],
    ]
    assert len({len(line) for line in table.splitlines()}) == 1


def of_stage(world: World, entry: str) -> str | dict[str, float]:
    """The rates of this rank's parameters, of which each rank has one half; or the error."""
    held = list(SHAPES)[world.rank :: 2]
    params = table({name: p for name, p in parameters().items() if name in held}, ROLES)
    mesh = Mesh(Sizes(pipeline=2), world.rank, world=world)
    config = resolve(None, [f"optim.groups=[{entry}]"], env={}).config.optim
    try:
        optimizers = build(config, Params(params.values(), mesh), RunFacts(1))
    except ConfigError as error:
        return str(error).splitlines()[0]
    groups = (group for optimizer in optimizers.values() for group in optimizer.param_groups)
    return {name: group["lr"] for group in groups for name in group["names"]}


def test_an_entry_may_match_parameters_of_another_stage_of_a_pipeline() -> None:
    first, second = on_ranks(2, of_stage, "{match: embed.weight, lr: 0.3}")
    assert first["embed.weight"] == 0.3
    assert 0.3 not in second.values()


@pytest.mark.parametrize(
    "entry", ["{match: nothing, lr: 1}", "{match: norm.weight, optimizer: muon}"]
)
def test_all_stages_of_a_pipeline_raise_the_error_of_one(entry: str) -> None:
    first, second = on_ranks(2, of_stage, entry)
    assert isinstance(first, str)
    assert first == second


class Two(OptimConfig):
    type: str = "two"
    supports_mup = True

    def build(self, params: Any, run: RunFacts) -> Any:
        """Return an optimizer for matrices, and another for the rest."""
        by_name: dict[str, list[Any]] = {"matrices": [], "rest": []}
        for param in params.values():
            lr = self.lr * run.lr_factor(param, 1.0)
            name = "matrices" if param.role == "matrix" else "rest"
            by_name[name].append({"params": [param.tensor], "lr": lr})
        return {name: torch.optim.SGD(groups) for name, groups in by_name.items()}


def test_a_variant_may_build_several_optimizers_and_scale_their_rates() -> None:
    facts = RunFacts(1, lr_factor=lambda param, power: 0.5 if param.role == "matrix" else 1.0)
    optimizers = made(Two(lr=0.2), facts)
    for name, role in ROLES.items():
        owner, group = group_of(optimizers, name)
        matrix = role == "matrix"
        assert owner == ("matrices" if matrix else "rest")
        assert group["peak_lr"] == (0.1 if matrix else 0.2)
