"""Random models that transformers wrote: dtt computes the same logits, or refuses by name."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dtt.base.errors import DttError, InputError
from dtt.hf.read import LoadedModel, read_hf_folder
from dtt.hf.verify import check_import
from dtt.model.decoder import Decoder

MODELS = 20
"""Of each family."""
Draw = Callable[[random.Random], Any]


def pick(*values: object) -> Draw:
    return lambda rng: rng.choice(values)


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "original_max_position_embeddings": 16, "rope_theta": 5e5, **LLAMA3},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "llama3", "original_max_position_embeddings": 16, **LLAMA3, "factor": 0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 16,
        "beta_slow": 2,
        "rope_theta": 1e4,
    },
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
        "attention_factor": 1.25,
        "rope_theta": 5e5,
    },
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "default", "factor": 8.0},
    {},
)


def layer_types(*kinds: str) -> Draw:
    return lambda rng: [rng.choice(kinds) for _ in range(rng.choice((2, 3, 3, 3)))]


COMMON: dict[str, Draw] = {
    "is_causal": pick(True, False, None),
    "is_decoder": pick(True, False),
    "is_encoder_decoder": pick(False, True),
    "tie_word_embeddings": pick(True, False, None),
    "use_cache": pick(True, False),
    "chunk_size_feed_forward": pick(0, 4),
    "pruned_heads": pick({}, {"0": [1]}),
    "cross_attention_hidden_size": pick(None, 32),
    "quantization_config": pick(None, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "auto_map": pick(None, {"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}),
    "eos_token_id": pick(None, 0, [0, 5]),
    "pad_token_id": pick(None, 3),
    "torch_dtype": pick("float32", "bfloat16"),
    "attn_implementation": pick("eager", "flash_attention_2"),
    "temperature": pick(0.6),
    "some_new_key": pick(None, 0, True),
    "per_layer_config": pick(None, {"0": {"num_attention_heads": 2}}),
}
ROTARY: dict[str, Draw] = {
    "rope_theta": pick(1e4, 5e5, 1000000, 0, None),
    "rope_scaling": pick(None, *ROPES),
    "rope_parameters": pick(None, *ROPES),
    "partial_rotary_factor": pick(None, 1.0, 0.5),
    "original_max_position_embeddings": pick(None, 16),
    "attention_bias": pick(False, True),
    "mlp_bias": pick(False, True),
    "hidden_act": pick("silu", "gelu", "gelu_pytorch_tanh"),
    "rms_norm_eps": pick(1e-6, 1e-5, 1e-3, 0, None),
    "num_key_value_heads": pick(1, 2, 4, None),
    "head_dim": pick(8, 16, None),
    "attention_dropout": pick(0.0, 0.1, None),
    "sliding_window": pick(None, 0, 1, 5, -1, 4096, True),
    "layer_types": layer_types("sliding_attention", "full_attention"),
    "no_rope_layer_interval": pick(1, 2, 3, 9, 0),
    "max_window_layers": pick(1, 2, 28),
    "use_sliding_window": pick(False, True),
    "final_logit_softcapping": pick(None, 5.0),
    "query_pre_attn_scalar": pick(12, 256, 0),
    "rope_interleaved": pick(False, True),
    "no_rope_layers": pick([1, 1, 0], [0, 0, 1], [1, 0], []),
    "residual_multiplier": pick(1.0, 0.5),
    "logits_scaling": pick(8.0),
    "pretraining_tp": pick(1, 2),
}
LONG = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 4.0, 9.0, 16.0]}
HALF = {"short_factor": [1.0, 1.2], "long_factor": [1.0, 4.0], "partial_rotary_factor": 0.5}
LONG_ROPES: tuple[dict[str, Any], ...] = (
    {"type": "longrope", **LONG},
    {"type": "longrope", **HALF},
    {"rope_type": "longrope", **LONG, "rope_theta": 5e5, "attention_factor": 1.5},
    {"rope_type": "longrope", **LONG, "factor": 8.0, "original_max_position_embeddings": 16},
    {"type": "su", **LONG},
    {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
)
NESTED: tuple[dict[str, Any], ...] = (
    {"full_attention": ROPES[0], "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}},
    {"full_attention": ROPES[2], "sliding_attention": {"rope_type": "default"}},
    {"full_attention": ROPES[5]},
    {"full_attention": ROPES[10], "sliding_attention": {"rope_type": "default"}},
    {"full_attention": ROPES[0], "sliding_attention": ROPES[2]},
    {"sliding_attention": None, "full_attention": {"rope_theta": 5e5}},
)
EXPERTS: dict[str, Draw] = ROTARY | {
    "num_experts_per_tok": pick(1, 2, 3, 9, 0, None),
    "norm_topk_prob": pick(True, False),
    "output_router_logits": pick(True, False),
    "router_aux_loss_coef": pick(0.0, 0.5),
    "moe_intermediate_size": pick(16, 24, None),
}
CHANGES: dict[str, dict[str, Draw]] = {
    "gpt2": {
        "n_inner": pick(None, 48, 0),
        "activation_function": pick("gelu_new", "gelu_pytorch_tanh", "gelu", "relu"),
        "layer_norm_epsilon": pick(1e-5, 1e-3, 0),
        "scale_attn_weights": pick(True, False),
        "scale_attn_by_inverse_layer_idx": pick(False, True),
        "reorder_and_upcast_attn": pick(False, True),
        "add_cross_attention": pick(False, True),
        "resid_pdrop": pick(0.0, 0.2),
        "n_ctx": pick(64, 1024),
        "n_positions": pick(64, 32),
        "hidden_size": pick(32, 64),
        "num_attention_heads": pick(4, 2),
        "sliding_window": pick(None, 5),
        "n_head": pick(2, 4, 8, 3),
    },
    "llama": ROTARY,
    "mistral": ROTARY,
    "qwen2": ROTARY,
    "qwen3": ROTARY,
    "phi3": ROTARY
    | {
        "rope_scaling": pick(*ROPES[:2], *LONG_ROPES, *LONG_ROPES),
        "original_max_position_embeddings": pick(16, 32, 64),
        "resid_pdrop": pick(0.0, 0.2),
        "embd_pdrop": pick(0.0, 0.2),
    },
    "smollm3": ROTARY,
    "olmo2": ROTARY,
    "olmo3": ROTARY | {"rope_parameters": pick(None, *NESTED, *ROPES[:4])},
    "mixtral": EXPERTS
    | {"num_local_experts": pick(3, 4, None), "router_jitter_noise": pick(0.0, 0.1)},
    "qwen3_moe": EXPERTS
    | {
        "num_experts": pick(4, 6),
        "decoder_sparse_step": pick(1, 2),
        "mlp_only_layers": pick([], [0], [1], [0, 1], [0, 1, 2], None),
    },
    "olmoe": EXPERTS | {"num_experts": pick(4, 6, 0), "clip_qkv": pick(None, 5.0)},
    "dots1": EXPERTS
    | {
        "n_routed_experts": pick(8, 12),
        "n_shared_experts": pick(1, 2, 0),
        "first_k_dense_replace": pick(0, 1, 3),
        "n_group": pick(1, 2, 4),
        "topk_group": pick(1, 2, 9),
        "routed_scaling_factor": pick(1.0, 2.5),
    },
    "gemma3_text": {
        **{key: draw for key, draw in ROTARY.items() if key != "hidden_act"},
        "rope_parameters": pick(None, *NESTED, *ROPES[:4]),
        "rope_local_base_freq": pick(1e4, 2e4, None),
        "sliding_window_pattern": pick(1, 2, 3, 6, 0),
        "_sliding_window_pattern": pick(2),
        "attn_logit_softcapping": pick(None, 50.0),
        "use_bidirectional_attention": pick(None, False, True, "all"),
        "hidden_activation": pick("gelu_pytorch_tanh", "silu", None),
    },
}
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
}


OF_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "sliding_window": None,
    },
}  # fmt: skip
ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}
SHAPES = {
    "head_dim",
    "num_key_value_heads",
    "n_inner",
    "n_positions",
    "n_head",
    "tie_word_embeddings",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
    "mlp_only_layers",
    "n_routed_experts",
    "n_shared_experts",
    "first_k_dense_replace",
}
"""Keys that decide how large the weights are."""


def write_model(folder: Path, kind: str, tokenizer: Path, changes: Mapping[str, Any]) -> None:
    """Write a model with weights that fit the changes, and the changes into its config.json.

    Changes go there as they are: transformers would correct some of them, and refuse others.
    """
    sizes = {"model_type": kind, **(GPT2 if kind == "gpt2" else SIZES), **OF_EXPERTS.get(kind, {})}
    shapes = {key: value for key, value in changes.items() if key in SHAPES}
    make: Any = transformers.AutoConfig.for_model
    build: Any = transformers.AutoModelForCausalLM.from_config
    try:
        model = build(make(**(sizes | shapes)))
    except Exception:  # noqa: BLE001  (it refuses these, and so must dtt)
        model = build(make(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    written = json.loads((folder / "config.json").read_text())
    replaced = ROPE_KEYS if changes.keys() & ROPE_KEYS else set()
    replaced |= {"layer_types"} if "sliding_window_pattern" in changes else set()
    kept = {key: value for key, value in written.items() if key not in replaced}
    (folder / "config.json").write_text(json.dumps(kept | changes))


def read(folder: Path) -> LoadedModel | DttError:
    try:
        return read_hf_folder(folder)
    except DttError as refused:
        return refused


def difference(found: LoadedModel, folder: Path) -> float | None:
    """Return the largest difference of a logit from those of AutoModelForCausalLM; None if that
    cannot load the folder."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    try:
        theirs = load(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    except Exception:  # noqa: BLE001  (of many kinds)
        return None
    ours = Decoder(found.arch).eval()
    ours.load_state_dict({name: tensor.float() for name, tensor in found.state.items()})
    ids = torch.randint(96, (2, min(48, found.arch.max_seq_len)))
    with torch.no_grad():
        return float((ours(ids) - theirs(ids).logits).abs().max())


@pytest.mark.slow(except_for=["llama"])
@pytest.mark.parametrize("kind", CHANGES)
def test_logits_are_equal_or_the_model_is_refused_by_name(
    kind: str, tokenizer_json: Path, tmp_path: Path
) -> None:
    rng, outcomes = random.Random(kind), Counter[str]()
    own = CHANGES[kind]
    torch.manual_seed(0)
    for number in range(MODELS):
        names = rng.sample(sorted(own), rng.randint(1, 3))
        names += rng.sample(sorted(COMMON), number % 3 == 0)
        changes = {name: (own | COMMON)[name](rng) for name in names}
        folder = tmp_path / str(number)
        write_model(folder, kind, tokenizer_json, changes)
        found = read(folder)
        if isinstance(found, DttError):
            outcomes["refused"] += 1
            assert any(name in str(found) for name in changes), (changes, str(found))
            continue
        apart = difference(found, folder)
        if apart is None:
            outcomes["not of transformers"] += 1
            with pytest.raises(InputError, match="transformers cannot load it"):
                check_import(folder, found)
            continue
        assert apart < 1e-4, changes
        assert check_import(folder, found) < 1e-4, changes
        outcomes["equal"] += 1
    assert min(outcomes["equal"], outcomes["refused"]) >= MODELS / 10, outcomes
