"""Check a tiny model of every causal class of transformers, and print a table.

    python benchmarks/library_models.py                    # all types, about ten minutes
    python benchmarks/library_models.py lfm2 granite       # some types, with the reasons

Each type gets the default configuration of its class, made small by the names of its keys, and the
checks of `dtt verify --model`. docs/library-models.md is the output of this script.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

SIZES: dict[str, int] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "dim_model", "lru_width",
         "word_embed_proj_dim", "embedding_dim", "attention_hidden_size"), 64
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "dim_ff", "dff", "d_inner",
         "ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size"), 96
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks",
         "num_decoder_layers"), 4
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
         "attention_heads", "swa_num_attention_heads", "num_decoder_attention_heads",
         "linear_num_heads", "linear_num_value_heads"), 4
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads",
         "index_n_heads"), 2
    ),
    **dict.fromkeys(
        ("head_dim", "dim_head", "d_head", "swa_head_dim", "kv_channels", "linear_head_dim",
         "linear_key_head_dim", "linear_value_head_dim", "qk_nope_head_dim", "v_head_dim",
         "index_head_dim", "mamba_d_head", "mamba_head_dim", "global_head_dim"), 16
    ),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    "qk_head_dim": 24,
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts",
         "n_group", "num_expert_group"), 2
    ),
    "topk_group": 1,
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
         "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size",
         "shared_intermediate_size"), 32
    ),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "hc_lowrank"), 24),
    **dict.fromkeys(
        ("mamba_d_state", "state_size", "ssm_state_size", "chunk_size", "mamba_chunk_size",
         "block_size", "mamba_dt_rank", "time_step_rank"), 16
    ),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "window_size", "attention_window_size",
         "local_attention", "attention_chunk_size", "index_topk"), 64
    ),
}  # fmt: skip
"""Small sizes, by the names that the library's configurations have for them."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HYBRID = ["linear_attention", "full_attention"] * 2
MORE: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE)
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 24},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 256,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 16,
        "intermediate_size": [96] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "inkling2_loop_text": {
        "unpadded_vocab_size": 256,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
    },
    "inkling2_text": {"unpadded_vocab_size": 256},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": HYBRID},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "layer_types": HYBRID,
        "output_gate_type": "sigmoid",
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "zamba": {
        "num_hidden_layers": 6,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "hybrid_layer_ids": [1, 3],
        "num_query_groups": 4,
        "kv_channels": 16,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What the rules above do not reach, by type."""

UNTRIED = {
    "blt": "a second model chooses its patches of bytes; there is no small configuration yet",
    "gemma4_assistant": "the library's own default configuration is invalid",
}
"""Types without a small configuration."""
PAGE = """# Causal models of transformers, type by type

`python benchmarks/library_models.py` printed this page with transformers {version} on a CPU. Each
type has the default configuration of its class, made small (width 64, mostly 4 layers, 256 token
ids), with initial values, in fp32. It *works* if dtt's logits, losses and gradients equal those of
the library's own forward pass (within 1e-5), each parameter gets a gradient, no token sees a later
one, and the exported folder has equal logits. `dtt verify --model FOLDER` does the same with a
model of yours; [any-model.md](any-model.md) describes what else works.

*documents*: what keeps the documents of a packed row apart: `positions` that restart; `masks`, one
for each type of layer; or nothing (`joined`): training then needs
`data.packing=none`, or `data.mask_documents=false`.
"""


def tiny(kind: str) -> dict[str, Any]:
    """Return the default config.json of a type, made small."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(kind).to_dict()
    config = {key: size for key, size in SIZES.items() if type(default.get(key)) is int}
    if "qk_rope_head_dim" in config:
        # Latent attention: what rotates is a head of its own, and no heads share keys.
        config |= {"num_key_value_heads": 4} | ({"head_dim": 8} if "head_dim" in default else {})
    return {"model_type": kind, **config, **MORE.get(kind, {})}


def row(kind: str) -> tuple[str, str, str]:
    """Return whether a type works, what keeps documents of a row apart, and remarks."""
    from dtt.base.errors import DttError
    from dtt.model.architecture import BuiltArchitecture
    from dtt.model.library.family import TransformersFamily
    from dtt.model.library.model import BY_MASKS
    from dtt.verify import folder

    if kind in UNTRIED:
        return "not tried", "", UNTRIED[kind]
    try:
        section = TransformersFamily(config=tiny(kind))
        # Its compressors see blocks of 128 tokens.
        length = 256 if kind == "deepseek_v4" else 64
        arch = BuiltArchitecture(section=section, vocab_size=256, max_seq_len=length)
        model = folder.initialized(arch)
        checks = {one.name: one for one in folder.checks(model, folder.of_library(model))}
    except DttError as error:
        return "refused", "", reason(str(error))
    failed = [one for one in checks.values() if one.verdict == "fails"]
    if failed:
        # A start of training refuses what does not pass these two.
        refused = {one.name for one in failed} <= {"gradients", "causal"}
        return "refused" if refused else "fails", "", reason(failed[0].detail)
    apart = "masks" if kind in BY_MASKS else "positions"
    joined = checks["documents"].verdict != "works"
    dropout = [checks["dropout"].detail.replace("model.config.", "")] if "dropout" in checks else []
    return "works", "joined" if joined else apart, "".join(dropout)


def reason(text: str) -> str:
    """Return the reason in an error, on one line."""
    lines = [line.strip() for line in text.replace("; ", "\n").splitlines()]
    why = next((line.removeprefix("why:").strip() for line in lines if line[:4] == "why:"), "")
    first = lines[0]
    return why if first.startswith("dtt cannot train") else f"{first} ({why})" if why else first


def table(kinds: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the table of some types."""
    found = {}
    for kind in kinds:
        found[kind] = row(kind)
        print(kind, *found[kind], file=sys.stderr, flush=True)
    counts = Counter(result for result, _, _ in found.values())
    yield ", ".join(f"{count} {result}" for result, count in counts.most_common()) + "."
    yield ""
    yield "| type | | documents | remarks |"
    yield "| --- | --- | --- | --- |"
    for kind, (result, documents, remarks) in found.items():
        yield f"| `{kind}` | {result} | {documents} | {remarks.replace('|', '/')} |"


def main() -> None:
    """Print the page, or the table of the types that are named."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    settings: Any = transformers.utils.logging
    settings.set_verbosity_error()
    kinds = sys.argv[1:]
    if not kinds:
        print(PAGE.format(version=transformers.__version__))
    print("\n".join(table(kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))))


if __name__ == "__main__":
    main()
