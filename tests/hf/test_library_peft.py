"""Adapters of PEFT over models that transformers computes, both ways."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.ranks import on_ranks
from torch import Tensor

from dtt.base.errors import ConfigError, DttError, InputError
from dtt.config.adapter import LoraConfig
from dtt.config.parallel import Sizes
from dtt.hf import library_folder, verify, write_folder
from dtt.hf import peft as ours
from dtt.hf.model_source import find_model
from dtt.hf.read import LoadedModel
from dtt.mesh.dist import World
from dtt.mesh.mesh import make_mesh
from dtt.model.adapted_layers import adaptable, adapted_layers
from dtt.model.architecture import BuiltArchitecture
from dtt.model.contract import Model
from dtt.model.library.family import TransformersFamily
from dtt.model.lora import attach, merged
from dtt.parallel.apply import apply
from dtt.train.contract_check import check_adapters_called
from dtt.verify.folder import initialized, of_library

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 8}
TYPES: dict[str, dict[str, Any]] = {
    "lfm2": {key: size for key, size in SIZES.items() if key != "head_dim"},
    "cohere2": SIZES,
    "gpt_oss": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": {**SIZES, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_moe": {**SIZES, "moe_intermediate_size": 32, "num_experts": 8},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
}
GLM4_MOE = {**SIZES, **EXPERTS, "model_type": "glm4_moe"}
LAGUNA = {
    **GLM4_MOE, "model_type": "laguna", "num_experts": 8, "shared_expert_intermediate_size": 32,
}  # fmt: skip
del LAGUNA["n_routed_experts"]
JAMBA = {
    "model_type": "jamba", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_period": 2,
    "attn_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 8, "mamba_d_state": 8,
}  # fmt: skip
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 16}


def ids() -> Tensor:
    return torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(1))


def built(config: dict[str, Any]) -> BuiltArchitecture:
    section = TransformersFamily(config=config)
    return BuiltArchitecture(section=section, vocab_size=256, max_seq_len=64)


def write_base(folder: Path, config: dict[str, Any]) -> Model:
    """Write a folder of a small model with initial values, and return the model."""
    model = initialized(built(config))
    of_library(model)
    write_folder.write_library(model, folder, torch.float32, "5GB")
    return model


def theirs(folder: Path) -> Any:
    return library_folder.loaded(folder, torch.float32)[0]


def randomised(model: torch.nn.Module) -> dict[str, Tensor]:
    """Give the adapters of a model values that are not zero, and return them."""
    torch.manual_seed(5)
    found = {name: p for name, p in model.named_parameters() if "lora_" in name}
    for parameter in found.values():
        torch.nn.init.normal_(parameter, std=0.2)
    return found


def write_adapter(model: Model, folder: Path, cfg: LoraConfig) -> LoadedModel:
    """Write an adapter of `model` into FOLDER/adapter, and return the merged model."""
    arch, base = model.arch, {name: p.detach().clone() for name, p in model.named_parameters()}
    layers = adapted_layers(cfg, arch)
    attach(model, cfg, torch.float32)
    state = {name: p.detach() for name, p in randomised(model).items()}
    (folder / "adapter").mkdir()
    base_folder = folder / "base"
    adapter = ours.Adapter(state, layers, str(base_folder), None, base_folder, 0.0)
    ours.write_peft(folder / "adapter", adapter, arch)
    whole = {name: tensor[()] for name, tensor in merged(base, state, layers).items()}
    return LoadedModel(arch, whole, folder, None, ())


@pytest.mark.parametrize("kind", TYPES)
def test_logits_are_those_of_peft_both_ways(tmp_path: Path, kind: str) -> None:
    model = write_base(tmp_path / "base", {"model_type": kind, **TYPES[kind]})
    cfg = LoraConfig(
        rank=4, alpha=6.0, rslora=True,
        rank_pattern={next(iter(adaptable(model.arch))).removesuffix(".weight"): 2},
    )  # fmt: skip
    trained = write_adapter(model, tmp_path, cfg)
    assert verify.check_adapter(tmp_path / "adapter", tmp_path / "base", trained) < 1e-4
    back = ours.read_peft(tmp_path / "adapter", model.arch, cfg)
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert back.keys() == own.keys()
    assert all(torch.equal(back[name], p) for name, p in own.items())


@pytest.mark.parametrize(
    ("config", "targets", "says"),
    [
        (GLM4_MOE, "all-linear", "it takes them for experts: down_proj, gate_up_proj"),
        (MAMBA, ("out_proj",), "incompatible with Mamba-based models"),
        # A rule of transformers that renames `mlp.shared_expert.` also matches the new name.
        (LAGUNA, "all-linear", r"those of (mlp\.shared_experts\.(down|gate|up)_proj(, )?){3}"),
    ],
)  # fmt: skip
def test_layers_that_peft_does_not_adapt_as_dtt_does_are_refused(
    tmp_path: Path, config: dict[str, Any], targets: Any, says: str
) -> None:
    cfg = LoraConfig(rank=4, targets=targets)
    trained = write_adapter(write_base(tmp_path / "base", config), tmp_path, cfg)
    with pytest.raises(InputError, match=says):
        verify.check_adapter(tmp_path / "adapter", tmp_path / "base", trained)


def test_an_adapter_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    arch = write_base(tmp_path / "base", GLM4_MOE).arch
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj", "gate_proj", "up_proj"])
    peft.get_peft_model(theirs(tmp_path / "base"), settings).save_pretrained(tmp_path / "adapter")
    with pytest.raises(InputError, match="target_parameters"):
        ours.read_peft(tmp_path / "adapter", arch, LoraConfig())


def with_adapters(config: dict[str, Any], cfg: LoraConfig) -> Model:
    model = initialized(built(config))
    attach(model, cfg, torch.float32)
    randomised(model)
    return model


def test_an_adapter_of_a_layer_that_no_pass_calls_is_refused() -> None:
    """Mamba and Jamba multiply with the weight of `dt_proj`."""
    with pytest.raises(ConfigError, match=r"the weights of mixer\.dt_proj by itself"):
        check_adapters_called(with_adapters(MAMBA, LoraConfig(rank=4)), torch.device("cpu"))
    model = with_adapters(JAMBA, LoraConfig(rank=4))
    with pytest.raises(ConfigError, match=r"the weights of mamba\.dt_proj by itself") as refused:
        check_adapters_called(model, torch.device("cpu"))
    # What it says to type is accepted.
    targets = advised(refused.value)
    assert {"in_proj", "x_proj", "q_proj", "down_proj"} < set(targets)
    assert "dt_proj" not in targets
    other = with_adapters(JAMBA, LoraConfig(rank=4, targets=targets))
    check_adapters_called(other, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_moe", "gpt_oss"])
def test_adapters_of_layers_that_are_called_pass(kind: str) -> None:
    model = with_adapters({"model_type": kind, **TYPES[kind]}, LoraConfig(rank=4))
    before = model(ids())
    check_adapters_called(model, torch.device("cpu"))
    assert torch.equal(model(ids()), before)
    assert not any(module._forward_hooks for module in model.modules())


def with_shards(world: World, compiled: bool) -> tuple[str, float]:
    """Check adapters of Jamba under FSDP2: of all layers, then of those that the refusal lists.

    Returns the refusal, and how far logits are from those of one process afterwards.
    """
    torch.set_num_threads(1)
    # Without a C++ compiler, which a machine may lack: the graphs as Dynamo records them.
    torch.compile = partial(torch.compile, backend="eager")

    def checked(cfg: LoraConfig) -> Model:
        model = with_adapters(JAMBA, cfg)
        apply(model, world, make_mesh(Sizes(shard=2), world), compile_blocks=compiled)
        check_adapters_called(model, world.device)
        return model

    with pytest.raises(ConfigError) as refused:
        checked(LoraConfig(rank=4))
    cfg = LoraConfig(rank=4, targets=advised(refused.value))
    with torch.no_grad():
        difference = checked(cfg)(ids()) - with_adapters(JAMBA, cfg)(ids())
    return str(refused.value), float(difference.abs().max())


def advised(refused: ConfigError) -> tuple[str, ...]:
    """Return the targets that a refusal says to type."""
    return tuple(str(refused).partition("adapter.targets=[")[2].partition("]")[0].split(","))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_two_ranks_with_shards_agree_on_adapters_without_effect(*, compiled: bool) -> None:
    one, other = on_ranks(2, with_shards, compiled)
    assert one == other
    refusal, difference = one
    assert "the weights of mamba.dt_proj by itself" in refusal
    assert difference < 1e-5


def test_other_layers_of_that_model_have_the_logits_of_peft(tmp_path: Path) -> None:
    cfg = LoraConfig(rank=4, targets=("q_proj", "g_proj", "layers.0.mlp.down_proj"))
    trained = write_adapter(write_base(tmp_path / "base", LAGUNA), tmp_path, cfg)
    assert verify.check_adapter(tmp_path / "adapter", tmp_path / "base", trained) < 1e-4


def test_layers_that_compute_more_than_a_product_have_no_adapter() -> None:
    arch = built({"model_type": "llama4_text", **SIZES, "num_local_experts": 4})
    assert not any("router" in name for name in adaptable(arch))


def test_a_folder_of_an_adapter_in_place_of_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "ORG/NAME"}')
    with pytest.raises(DttError, match=r"init\.from=hf:ORG/NAME init\.adapter="):
        find_model(str(tmp_path))
