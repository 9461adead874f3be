from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from support.tiny_architectures import VARIANTS, tiny_architecture

from dtt.base.errors import ConfigError, InputError
from dtt.config.load import resolve
from dtt.config.model import LinearRopeScaling, ModelConfig, NoRopeScaling
from dtt.model import families
from dtt.model.architecture import Architecture
from dtt.model.families.base import DecoderFamily


def test_facts_about_families_need_no_torch() -> None:
    code = "import sys, dtt.model.families, dtt.model.count; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_architecture_survives_the_hugging_face_config(arch: Architecture) -> None:
    family = families.get(arch.family)
    assert family.from_hf_config(family.to_hf_config(arch, 0)) == arch


def test_weight_rules_name_each_parameter_once(arch: Architecture) -> None:
    from dtt.model.decoder import Decoder

    named = [n for rule in families.get(arch.family).weight_rules(arch) for n in rule.dtt_names]
    assert sorted(named) == sorted(Decoder(arch).state_dict())


def test_sizes_left_out_are_those_of_the_family() -> None:
    gpt2 = families.get("gpt2").architecture(ModelConfig(family="gpt2", dim=96), 1000, 64)
    llama = families.get("llama").architecture(ModelConfig(dim=96), 1000, 64)
    assert (gpt2.ffn_dim, llama.ffn_dim) == (384, 256)
    assert (gpt2.tie_embeddings, llama.tie_embeddings) == (True, False)
    assert gpt2.vocab_size == llama.vocab_size == 1024
    assert llama.n_kv_heads == llama.n_heads
    assert llama.max_seq_len == 64


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size \(100\) .* vocabulary \(1000\)"):
        families.get("llama").architecture(ModelConfig(vocab_size=100), 1000, 64)


@pytest.mark.parametrize("family", ["gemma3", "olmo3"])
def test_yarn_that_no_export_would_compute_is_refused(family: str) -> None:
    yarn = "{type: yarn, original_max_seq_len: 16, truncate: false}"
    with pytest.raises(ConfigError, match=r"rope_scaling\.truncate.*does not read it"):
        resolve(None, [f"model.family={family}", f"model.rope_scaling={yarn}"], env={})


def test_sequences_longer_than_the_context_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.seq_len \(64\) .* model\.max_seq_len \(32\)"):
        families.get("gpt2").architecture(ModelConfig(family="gpt2", max_seq_len=32), 100, 64)


UNTRUNCATED = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False,
}  # fmt: skip
"""transformers 5 looks for `truncate` beside the types of layers, and so never finds it."""


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gpt2", "activation_function", "relu"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("llama", "attention_bias", True),
        ("llama", "hidden_act", "gelu"),
        ("llama", "rope_parameters", {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0}),
        ("llama", "rope_parameters", {"rope_theta": 5e5, "partial_rotary_factor": 0.5}),
        ("mistral", "hidden_act", "gelu"),
        ("mistral", "rope_parameters", {"type": "dynamic", "factor": 8.0}),
        ("qwen3", "attention_bias", True),
        ("llama", "partial_rotary_factor", 0.5),
        ("qwen2", "attention_bias", False),
        ("qwen2", "layer_types", ["sliding_attention"] * 6),
        ("qwen3", "layer_types", ["full_attention", "sliding_attention"]),
        ("phi3", "rope_scaling", {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
        ("phi3", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("phi3", "rope_scaling", {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}),
        ("phi3", "partial_rotary_factor", 0.74),
        (
            "llama",
            "rope_scaling",
            {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        ),
        ("smollm3", "use_sliding_window", True),
        ("smollm3", "no_rope_layers", [1, 0]),
        ("smollm3", "layer_types", ["sliding_attention"] * 6),
        ("olmo2", "attention_bias", True),
        ("olmo2", "sliding_window", 8),
        ("olmo3", "rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 2}}),
        ("gemma3", "layer_types", ["full_attention", "chunked_attention"]),
        ("gemma3", "hidden_activation", "silu"),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "use_bidirectional_attention", True),
        (
            "gemma3",
            "rope_parameters",
            {"sliding_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}},
        ),
        ("gemma3", "rope_parameters", {"full_attention": {"rope_type": "longrope"}}),
        ("gemma3", "rope_parameters", {"full_attention": UNTRUNCATED}),
        ("olmo3", "rope_parameters", {"full_attention": UNTRUNCATED}),
    ],
)
def test_a_config_that_asks_for_more_is_refused(family: str, key: str, value: object) -> None:
    cfg = ModelConfig(family=family)  # type: ignore[arg-type]
    facts = families.get(family)
    config = facts.to_hf_config(facts.architecture(cfg, 100, 64), 0)
    with pytest.raises(InputError, match="is not supported"):
        facts.from_hf_config(config | {key: value})


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        # Ministral, as it is published
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types: \['full_attention', 'sliding_attention'\], unknown to dtt",
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window: 0"),
        ("llama", {"is_causal": False}, "is_causal: False"),
        ("llama", {"is_causal": None}, "is_causal: None"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            r"a rope_scaling \(.*linear.*\) that contradicts its rope_parameters",
        ),
        (
            "llama",
            {"rope_theta": 5e5},
            r"rope_theta: 500000.0 and rope_parameters.rope_theta: 10000.0",
        ),
        ("gemma3", {"sliding_window": None}, "but the sliding_window is off"),
        (
            "gemma3",
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            "rope_parameters: .* an object for sliding_attention",
        ),
        ("qwen3", {"layer_types": ["full_attention"]}, "2 layers"),
    ],
)
def test_what_is_refused_is_named(family: str, changes: dict[str, Any], named: str) -> None:
    facts = families.get(family)
    with pytest.raises(InputError, match=named):
        facts.from_hf_config(_tiny_config(facts) | changes)


def _tiny_config(family: DecoderFamily) -> dict[str, Any]:
    variant = next(name for name, cfg in VARIANTS.items() if cfg.family == family.name)
    return family.to_hf_config(tiny_architecture(variant), 0)


@pytest.mark.parametrize("family", families.every(), ids=lambda family: family.name)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", ["chunked_attention"] * 2),
        ("layer_types", ["linear_attention", "full_attention"]),
        ("layer_types", ["full_attention"] * 7),
        ("hidden_act", "gelu_fast"),
        ("hidden_activation", "gelu_fast"),
        ("activation_function", "gelu_fast"),
        ("rope_scaling", {"rope_type": "proportional"}),
        ("rope_parameters", {"rope_type": "proportional"}),
        ("norm_placement", "post"),
        ("attention_chunk_size", 8),
        ("quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_no_family_ignores_a_kind_that_it_does_not_have(
    family: DecoderFamily, key: str, value: object
) -> None:
    config = _tiny_config(family)
    family.from_hf_config(config)
    with pytest.raises(InputError, match="is not supported"):
        family.from_hf_config(config | {key: value})


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"bitsandbytes, 4 bits(.|\n)*deq"),
        ({"quant_method": "gptq", "bits": 4}, r"gptq, 4 bits(.|\n)*release of this model that is"),
        ({"quant_method": "fp8"}, r"quantised: fp8\n(.|\n)*FineGrainedFP8Config\(dequantize=True"),
    ],
)
def test_quantised_weights_are_refused_with_the_way_to_others(
    how: dict[str, object], says: str
) -> None:
    family = families.get("llama")
    with pytest.raises(InputError, match=says):
        family.from_hf_config(_tiny_config(family) | {"quantization_config": how})


def test_every_nth_layer_of_gemma3_has_no_window() -> None:
    cfg = ModelConfig(family="gemma3", n_layers=7, window=8, window_pattern=3)
    arch = families.get("gemma3").architecture(cfg, 100, 64)
    assert arch.windows == (8, 8, None, 8, 8, None, 8)
    config = families.get("gemma3").to_hf_config(arch, 0)
    del config["layer_types"]
    older = config | {"sliding_window_pattern": 3}
    assert families.get("gemma3").from_hf_config(older) == arch


def test_what_transformers_5_14_writes_beside_the_ropes_of_gemma3_changes_nothing() -> None:
    family = families.get("gemma3")
    config = family.to_hf_config(tiny_architecture("gemma3"), 0)
    unused: dict[str, Any] = {"rope_type": "default", "rope_theta": None}
    beside = {**config, "rope_parameters": {**config["rope_parameters"], **unused}}
    assert family.from_hf_config(beside) == family.from_hf_config(config)
    beside["rope_parameters"]["rope_theta"] = 1e4
    with pytest.raises(InputError, match="rope_parameters"):
        family.from_hf_config(beside)


def test_layers_with_a_window_have_a_rotary_embedding_of_their_own() -> None:
    cfg = ModelConfig(
        family="gemma3",
        n_layers=2,
        window_pattern=2,
        rope_theta=1e6,
        rope_scaling=LinearRopeScaling(),
    )
    arch = families.get("gemma3").architecture(cfg, 100, 64)
    assert [arch.rope(i) for i in range(2)] == [(1e4, NoRopeScaling()), (1e6, LinearRopeScaling())]
    mistral = families.get("mistral").architecture(
        ModelConfig(family="mistral", window=8, rope_theta=1e6), 100, 64
    )
    assert mistral.rope(0) == (1e6, NoRopeScaling())


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gpt2", "rope_theta", 5e5),
        ("gpt2", "rope_scaling", LinearRopeScaling()),
        ("llama", "window", 8),
        ("qwen3", "no_rope_layer_interval", 8),
        ("olmo2", "window", 8),
        ("olmo3", "max_window_layers", 2),
        ("llama", "partial_rotary_factor", 0.5),
        ("mistral", "window_pattern", 2),
        ("phi3", "rope_scaling", LinearRopeScaling()),
        ("llama", "logit_softcap", 30.0),
    ],
)
def test_a_key_that_a_family_would_ignore_is_refused(family: str, key: str, value: object) -> None:
    cfg = ModelConfig(family=family, **{key: value})  # type: ignore[arg-type]
    assert [found for found, _ in cfg.problems()] == [key]


@pytest.mark.parametrize("family", [f.name for f in families.every() if f.name != "gpt2"])
def test_models_that_transformers_would_not_load_are_refused_before_training(family: str) -> None:
    cfg = ModelConfig(family=family, dim=36, n_heads=8, head_dim=4, n_layers=1)  # type: ignore[arg-type]
    facts = families.get(family)
    config = facts.to_hf_config(facts.architecture(cfg, 100, 64), 0)
    try:
        transformers.AutoConfig.for_model(**config)
        loads = True
    except StrictDataclassClassValidationError:
        loads = False
    assert [key for key, _ in cfg.problems()] == ([] if loads else ["n_heads"])


def test_architectures_are_values() -> None:
    arch = families.get("llama").architecture(ModelConfig(), 100, 64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        arch.dim = 3  # type: ignore[misc]
