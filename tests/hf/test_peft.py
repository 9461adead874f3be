"""Adapters of PEFT, both ways: equal logits, equal rules for names, and what is refused by name."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import yaml
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from support.tiny_architectures import VARIANTS, tiny_architecture
from torch import Tensor

from dtt.base import patterns
from dtt.base.errors import ConfigError, DamagedError, DttError, InputError
from dtt.config.adapter import LoraConfig
from dtt.hf import peft as ours
from dtt.hf.read import read_hf_architecture
from dtt.hf.weights import from_hf, to_hf
from dtt.model import families
from dtt.model.adapted_layers import adapted_layers
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder
from dtt.model.init import initialize
from dtt.model.lora import attach, merged

FAMILIES = [name for name in VARIANTS if name != "gemma3"] + ["gemma3"]


def write_base(folder: Path, variant: str) -> Architecture:
    """Write a tiny model of transformers with seeded weights; return its architecture."""
    arch = tiny_architecture(variant)
    model = Decoder(arch)
    initialize(model, 3)
    folder.mkdir(parents=True)
    config = families.get(arch.family).to_hf_config(arch, 0)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    save_file(dict(to_hf(model.state_dict(), arch)), folder / "model.safetensors", {"format": "pt"})
    return read_hf_architecture(folder)


def theirs(folder: Path) -> Any:
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32, attn_implementation="eager").eval()


def base_state(folder: Path, arch: Architecture) -> dict[str, Tensor]:
    return from_hf(load_file(folder / "model.safetensors"), arch)


def ids(arch: Architecture) -> Tensor:
    return torch.randint(arch.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))


def logits(state: dict[str, Any], arch: Architecture) -> Tensor:
    model = Decoder(arch).eval()
    model.load_state_dict({name: tensor[()] for name, tensor in state.items()})
    with torch.no_grad():
        out: Tensor = model(ids(arch))
    return out


def randomised(model: Any) -> Any:
    """Give the adapters of a model of PEFT values that are not zero."""
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def section_of(folder: Path, arch: Architecture) -> LoraConfig:
    """Return the section that the error of another one prints."""
    with pytest.raises(ConfigError) as refused:
        ours.read_peft(folder, arch, LoraConfig(rank=77))
    section = yaml.safe_load(str(refused.value).partition("use its settings:")[2])
    return LoraConfig.model_validate_json(json.dumps(section["adapter"]))


@pytest.mark.slow(except_for=["llama", "gpt2", "phi3"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_an_adapter_of_peft_has_the_same_logits(tmp_path: Path, variant: str) -> None:
    arch = write_base(tmp_path / "base", variant)
    names = [rule.hf_name.split(".")[-2] for rule in ours.linear_rules(arch)]
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=variant == "llama",
        target_modules="all-linear" if arch.mixture is None else sorted(set(names)),
        rank_pattern={names[0]: 2}, alpha_pattern={names[-1]: 9}, task_type="CAUSAL_LM",
    )  # fmt: skip
    model = randomised(peft.get_peft_model(theirs(tmp_path / "base"), settings))
    model.save_pretrained(tmp_path / "adapter")
    cfg = section_of(tmp_path / "adapter", arch)
    state = ours.read_peft(tmp_path / "adapter", arch, cfg)
    weights = merged(base_state(tmp_path / "base", arch), state, adapted_layers(cfg, arch))
    with torch.no_grad():
        expected = model(ids(arch)).logits
    torch.testing.assert_close(logits(weights, arch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow(except_for=["llama", "gpt2", "phi3"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_peft_reads_what_dtt_writes(tmp_path: Path, variant: str) -> None:
    arch = write_base(tmp_path / "base", variant)
    cfg = LoraConfig(
        rank=4, alpha=6.0, rslora=variant == "phi3",
        targets=("attn.q", "v", *(() if arch.mixture else ("down", "layers.1.mlp.up"))),
        rank_pattern={"v" if arch.mixture else "down": 3}, alpha_pattern={"q": 10.0},
    )  # fmt: skip
    layers = adapted_layers(cfg, arch)
    model = Decoder(arch)
    attach(model, cfg, torch.float32)
    torch.manual_seed(2)
    state = {
        name: torch.randn(parameter.shape) * 0.3
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    adapter = ours.Adapter(state, layers, str(tmp_path / "base"), None, tmp_path / "base", 0.05)
    (tmp_path / "out").mkdir()
    ours.write_peft(tmp_path / "out", adapter, arch)
    read: Any = peft.PeftModel.from_pretrained(theirs(tmp_path / "base"), tmp_path / "out").eval()
    weights = merged(base_state(tmp_path / "base", arch), state, layers)
    with torch.no_grad():
        expected = read(ids(arch)).logits
    torch.testing.assert_close(logits(weights, arch), expected, rtol=1e-4, atol=1e-4)
    # And dtt reads it again: a fused layer with the ranks of all its parts.
    again = section_of(tmp_path / "out", arch)
    back = ours.read_peft(tmp_path / "out", arch, again)
    rebuilt = merged(base_state(tmp_path / "base", arch), back, adapted_layers(again, arch))
    torch.testing.assert_close(logits(rebuilt, arch), expected, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_peft(tmp_path: Path) -> None:
    arch = write_base(tmp_path / "base", "llama")
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_rslora=True)
    model = randomised(peft.get_peft_model(theirs(tmp_path / "base"), settings))
    model.save_pretrained(tmp_path / "adapter")
    cfg = LoraConfig(rank=4, alpha=8.0, rslora=True)
    own = Decoder(arch)
    attach(own, cfg, torch.float32)
    state = base_state(tmp_path / "base", arch) | ours.read_peft(tmp_path / "adapter", arch, cfg)
    own.load_state_dict(state)
    own(ids(arch)).square().mean().backward()
    model(ids(arch)).logits.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == 2 * 2 * 7
    for name, parameter in own.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            layer = name.removesuffix(".lora_a").removesuffix(".lora_b")
            [rule] = [r for r in ours.linear_rules(arch) if r.dtt_names == (f"{layer}.weight",)]
            part = f"lora_{name[-1].upper()}.default.weight"
            hf_name = f"base_model.model.{rule.hf_name.removesuffix('.weight')}.{part}"
            torch.testing.assert_close(parameter.grad, gradients[hf_name], rtol=1e-4, atol=1e-6)
        else:
            assert parameter.grad is None


def test_patterns_follow_the_rules_of_peft() -> None:
    rng = random.Random(0)
    names = [
        f"model.layers.{i}.{m}" for i in (0, 1, 11) for m in ("self_attn.q_proj", "mlp.up_proj")
    ]
    parts = [
        "q_proj",
        "proj",
        "^model",
        r"layers\.1",
        "self_attn.q_proj",
        ".*up_proj",
        "1.mlp.up_proj",
    ]
    for _ in range(300):
        patterns = {
            "".join(rng.sample(parts, rng.randint(1, 2))): rng.randint(1, 9) for _ in range(3)
        }
        config = ours.PeftConfig(peft_type="LORA", rank_pattern=patterns)
        for name in names:
            expected = patterns.get(get_pattern_key(list(patterns), name), 8)
            assert config.of_layer(name).rank == expected, (patterns, name)


CHANGES: dict[str, tuple[dict[str, Any], type[DttError], str]] = {
    "dora": ({"use_dora": True}, InputError, "use_dora"),
    "bias": ({"bias": "all"}, InputError, "bias"),
    "trained head": ({"modules_to_save": ["lm_head"]}, InputError, "modules_to_save"),
    "trained tokens": ({"trainable_token_indices": [1]}, InputError, "trainable_token_indices"),
    "pissa": ({"init_lora_weights": "pissa"}, InputError, "init_lora_weights"),
    "parameters": ({"target_parameters": ["x"]}, InputError, "target_parameters"),
    "later field": ({"use_new_lora": True}, InputError, "use_new_lora as this"),
    "ia3": ({"peft_type": "IA3"}, InputError, "peft_type"),
    "classifier": ({"task_type": "SEQ_CLS"}, InputError, "task_type"),
    "transposed": ({"fan_in_fan_out": True}, InputError, "fan_in_fan_out"),
    "rank as text": ({"r": "4"}, InputError, "r as"),
    "no expression": ({"rank_pattern": {"*q": 2}}, InputError, "rank_pattern"),
    "another rank": ({"r": 5}, DamagedError, "rank of"),
    "fewer targets": ({"target_modules": ["q_proj"]}, DamagedError, "different layers"),
    "layers": ({"layers_to_transform": [0]}, DamagedError, "different layers"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Architecture]:
    folder = tmp_path_factory.mktemp("peft")
    arch = write_base(folder / "base", "llama")
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model = randomised(peft.get_peft_model(theirs(folder / "base"), settings))
    model.save_pretrained(folder / "adapter")
    return folder / "adapter", arch


CFG = LoraConfig(rank=4, alpha=8.0, targets=("q", "v"))


@pytest.mark.parametrize("case", CHANGES)
def test_what_dtt_does_not_do_is_refused_by_name(
    tmp_path: Path, saved: tuple[Path, Architecture], case: str
) -> None:
    folder, arch = saved
    changes, error, said = CHANGES[case]
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").symlink_to(folder / "adapter_model.safetensors")
    with pytest.raises(error, match=said):
        ours.read_peft(tmp_path, arch, CFG)


def test_fields_of_methods_that_are_off_are_read(
    tmp_path: Path, saved: tuple[Path, Architecture]
) -> None:
    """All that the installed PEFT writes, and one of a later release."""
    folder, arch = saved
    config = json.loads((folder / "adapter_config.json").read_text()) | {"use_new_lora": False}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").symlink_to(folder / "adapter_model.safetensors")
    assert len(ours.read_peft(tmp_path, arch, CFG)) == 2 * 2 * 2


@pytest.mark.parametrize(
    "cfg",
    [
        CFG.model_copy(update={"alpha": 16.0}),
        CFG.model_copy(update={"rslora": True}),
        CFG.model_copy(update={"targets": ("q",)}),
    ],
)
def test_other_settings_are_refused_with_the_right_ones(
    saved: tuple[Path, Architecture], cfg: LoraConfig
) -> None:
    folder, arch = saved
    with pytest.raises(ConfigError, match="use its settings"):
        ours.read_peft(folder, arch, cfg)
    assert section_of(folder, arch).targets == ("attn.q", "attn.v")


def test_the_settings_of_an_adapter_of_some_layers_name_these(tmp_path: Path) -> None:
    arch = write_base(tmp_path / "base", "llama")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1])
    peft.get_peft_model(theirs(tmp_path / "base"), settings).save_pretrained(tmp_path / "adapter")
    cfg = section_of(tmp_path / "adapter", arch)
    assert cfg.targets == ("layers.1.attn.q",)
    assert len(ours.read_peft(tmp_path / "adapter", arch, cfg)) == 2


def test_tensors_that_belong_to_no_layer_are_refused(
    tmp_path: Path, saved: tuple[Path, Architecture]
) -> None:
    folder, arch = saved
    tensors = load_file(folder / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    name = next(name for name in tensors if "lora_A" in name)
    for changed, said in (
        ({"base_model.model.lm_head.weight": torch.zeros(2, 2)}, "lm_head"),
        ({re.sub(r"layers\.0", "layers.7", name): tensors[name]}, "incomplete"),
        ({name: tensors[name].T.contiguous()}, "rank"),
    ):
        whole = {name: tensor.clone() for name, tensor in {**tensors, **changed}.items()}
        save_file(whole, tmp_path / "adapter_model.safetensors")
        with pytest.raises(DttError, match=said):
            ours.read_peft(tmp_path, arch, CFG)


def test_a_pattern_without_end_is_refused_by_name(
    saved: tuple[Path, Architecture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exponential time, as a stranger's file may take, and as one's own may by mistake."""
    monkeypatch.setattr(patterns, "SECONDS_OF_NAME", 0.01)
    folder, arch = shutil.copytree(saved[0], tmp_path / "adapter"), saved[1]
    slow = "(([a-z._0-9]|[a-z._0-9])+)+[XY]"
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    for key, value in (("rank_pattern", {slow: 2}), ("target_modules", slow)):
        path.write_text(json.dumps(config | {key: value}))
        with pytest.raises(InputError, match=r"not matched in time(.|\n)*takes more than 0.01 s"):
            ours.read_peft(folder, arch, LoraConfig())
    for cfg in (LoraConfig(targets=slow), LoraConfig(rank_pattern={slow: 2})):
        with pytest.raises(ConfigError, match="not matched in time"):
            adapted_layers(cfg, arch)
