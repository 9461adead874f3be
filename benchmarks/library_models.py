"""Check a tiny model of every causal class of transformers, and print a table.

    python benchmarks/library_models.py                    # all types, about half an hour
    python benchmarks/library_models.py lfm2 granite       # some types
    python benchmarks/library_models.py rows.jsonl         # keep rows, and skip those kept there

Each type gets the default configuration of its class, made small by the names of its keys, and the
checks of `dtt verify --model`, and is trained, resumed and adapted.
docs/library-models.md is the output of this script.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any, NamedTuple

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
VOCABULARY = 320
"""Token ids: those of the tokenizer of the documents, rounded up."""
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
        "vocab_size_per_layer_input": VOCABULARY,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 16,
        "intermediate_size": [96] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "inkling2_loop_text": {
        "unpadded_vocab_size": VOCABULARY,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
    },
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY},
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
type has the default configuration of its class, made small (width 64, mostly 4 layers), with
initial values, in fp32. It *works* if dtt's logits, losses and gradients equal those of the
library's own forward pass (within 1e-5), each parameter gets a gradient, no token sees a later one,
and the exported folder has equal logits. `dtt verify --model FOLDER` does the same with a model of
yours; [any-model.md](any-model.md) describes what else works.

- *trained*: the loss falls in 6 steps of `dtt train` on documents of 40 to 70 words.
- *resumed*: a restart after step 3 ends with the same bits, in weights and in optimizers.
- *documents*: what keeps the documents of a packed row apart: `positions` that restart; `masks`,
  one for each type of layer; or nothing (`alone`): training needs `data.packing=none`, a sequence
  for each document, with which this type was trained.
- *LoRA*: adapters of all linear layers learn, and `PEFT` computes equal logits with what dtt
  writes; or what keeps it from that.
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


class Row(NamedTuple):
    """What is known of a type."""

    result: str
    trained: str = ""
    resumed: str = ""
    documents: str = ""
    lora: str = ""
    remarks: str = ""


def row(kind: str, tokens: Path) -> Row:
    """Check, train and adapt a small model of a type; `tokens` is a token folder."""
    from dtt.base.errors import DttError
    from dtt.model.architecture import BuiltArchitecture
    from dtt.model.library.family import TransformersFamily
    from dtt.model.library.model import BY_MASKS
    from dtt.verify import folder

    if kind in UNTRIED:
        return Row("not tried", remarks=UNTRIED[kind])
    try:
        section = TransformersFamily(config=tiny(kind))
        # Its compressors see blocks of 128 tokens.
        length = 256 if kind == "deepseek_v4" else 64
        arch = BuiltArchitecture(section=section, vocab_size=VOCABULARY, max_seq_len=length)
        model = folder.initialized(arch)
        checks = {one.name: one for one in folder.checks(model, folder.of_library(model))}
    except DttError as error:
        return Row("refused", remarks=reason(str(error)))
    failed = [one for one in checks.values() if one.verdict == "fails"]
    if failed:
        # A start of training refuses what does not pass these two.
        refused = {one.name for one in failed} <= {"gradients", "causal"}
        return Row("refused" if refused else "fails", remarks=reason(failed[0].detail))
    apart = "masks" if kind in BY_MASKS else "positions"
    documents = "alone" if checks["documents"].verdict != "works" else apart
    dropout = [checks["dropout"].detail.replace("model.config.", "")] if "dropout" in checks else []
    trained, resumed = attempt(lambda: train(kind, tokens, length, documents == "alone"), 2)
    [lora] = attempt(lambda: (adapt(arch),), 1)
    return Row("works", trained, resumed, documents, lora, "".join(dropout))


def attempt(call: Callable[[], Sequence[str]], values: int) -> list[str]:
    """Return the texts of `call`, or the reason why there are none."""
    from dtt.base.errors import DttError

    try:
        return list(call())
    except DttError as error:
        return [f"refused: {reason(str(error))}"] + [""] * (values - 1)
    except Exception as error:  # noqa: BLE001  whatever a class of the library raises
        return [f"{type(error).__name__}: {error}".splitlines()[0]] + [""] * (values - 1)


def train(kind: str, tokens: Path, length: int, alone: bool) -> tuple[str, str]:
    """Train 6 steps, and again from step 3; return how the loss falls, and if bits are equal."""
    import dtt

    settings: dict[str, dict[str, Any] | str] = {
        "model": {"family": "transformers", "config": tiny(kind), "max_seq_len": length},
        "data": {
            "tokens": str(tokens), "packing": "none" if alone else "best-fit",
            "mask_documents": True,
        },
        "train": {
            "steps": 6, "seq_len": length, "global_batch_tokens": 4 * length, "micro_batch": 4,
            "eval_every": 0, "eval_tokens": length, "sample_tokens": 0, "precision": "fp32",
            "device": "cpu",
        },
        "checkpoint": {"every": 3}, "schedule": {"warmup": 0}, "name": "t",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name, chdir(name):
        job = dtt.train(dtt.load(settings))
        losses = [one["loss"] for one in job.metrics.to_pylist() if one["kind"] == "train"]
        last, whole = job.path / "checkpoints/step-000006", Path(name) / "whole"
        last.rename(whole)
        dtt.train(str(job.path))
        files = sorted(path.name for path in whole.glob("*.safetensors"))
        same = [(whole / one).read_bytes() == (last / one).read_bytes() for one in files]
    fell = f"{losses[0]:.2f} to {losses[-1]:.2f}"
    return fell if losses[-1] < losses[0] else f"no: {fell}", "yes" if same and all(same) else "no"


def adapt(arch: Any) -> str:
    """Train adapters of all linear layers, and compare with PEFT."""
    import torch
    from torch.nn import init

    from dtt.base.errors import InputError
    from dtt.config.adapter import LoraConfig
    from dtt.hf import library_export, peft, verify
    from dtt.hf.read import LoadedModel
    from dtt.model.adapted_layers import adapted_layers
    from dtt.model.init import initialize
    from dtt.model.lora import attach, merged
    from dtt.train.contract_check import check_adapters_called, check_gradients
    from dtt.verify import folder

    cfg, base = LoraConfig(rank=4), folder.initialized(arch)
    layers = adapted_layers(cfg, arch)
    if not layers:
        return "no linear layers"
    model = folder.initialized(arch)
    attach(model, cfg, torch.float32)
    initialize(model, seed=0)
    check_gradients(arch, adapted=model)
    check_adapters_called(model, torch.device("cpu"))
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ids = torch.randint(VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(0))
    optimizer, losses = torch.optim.AdamW(weights.values(), lr=1e-3), []
    for _ in range(10):
        output: Any = model(ids[:, :-1], ids[:, 1:])
        losses.append(float(output.loss.detach()))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if not losses[-1] < losses[0]:
        return f"no: loss {losses[0]:.2f} to {losses[-1]:.2f}"
    for weight in weights.values():
        init.normal_(weight, std=0.1)
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        path = Path(name)
        state = {
            n: tensor[()].clone()
            for n, tensor in merged(dict(base.named_parameters()), weights, layers).items()
        }
        folder.of_library(base)
        library_export.write(base, path / "base", torch.float32, "5GB")
        (path / "adapter").mkdir()
        adapter = peft.Adapter(weights, layers, str(path / "base"), None, path / "base", 0.0)
        peft.write_peft(path / "adapter", adapter, arch)
        trained = LoadedModel(arch, state, path, None, ())
        try:
            verify.check_adapter(path / "adapter", path / "base", trained)
        except InputError as error:
            why = str(error).partition("why:")[2].strip().partition(". ")[0].splitlines()[0]
            return f"merged only: {why}"
    return "PEFT"


def reason(text: str) -> str:
    """Return the reason in an error, on one line."""
    lines = [line.strip() for line in text.replace("; ", "\n").splitlines()]
    why = next((line.removeprefix("why:").strip() for line in lines if line[:4] == "why:"), "")
    first = lines[0]
    return why if first.startswith("dtt cannot train") else f"{first} ({why})" if why else first


def tokenized(folder: Path) -> Path:
    """Write a token folder of short documents, and return its path."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    texts = (" ".join(words[(i * 7 + j * j) % 10] for j in range(40 + i % 30)) for i in range(400))
    lines = (json.dumps({"text": f"{i} {text}"}) + "\n" for i, text in enumerate(texts))
    (folder / "counting.jsonl").write_text("".join(lines))
    made = (
        "tokenizer.vocab_size=300",
        "tokenize.out=tokens",
        "tokenize.validation_fraction=0.1",
        "tokenize.unit_bytes=8192",
    )
    for command in (("download",), ("tokenize", *made)):
        whole = [sys.executable, "-m", "dtt.main", *command, "-d", "counting.jsonl"]
        subprocess.run(whole, cwd=folder, check=True, stdout=sys.stderr)
    return folder / "tokens"


def table(kinds: Sequence[str], found: dict[str, Row], kept: Path | None) -> Iterator[str]:
    """Yield the lines of the table of some types; rows that are `found` are not made again."""
    with tempfile.TemporaryDirectory() as name:
        tokens = tokenized(Path(name))
        for kind in kinds:
            if kind not in found:
                found[kind] = row(kind, tokens)
                print(kind, *found[kind], file=sys.stderr, flush=True)
                if kept is not None:
                    with kept.open("a") as file:
                        file.write(json.dumps([kind, *found[kind]]) + "\n")
    counts = Counter(found[kind].result for kind in kinds)
    yield ", ".join(f"{count} {result}" for result, count in counts.most_common()) + "."
    yield ""
    yield "| type | | trained | resumed | documents | LoRA | remarks |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for kind in kinds:
        cells = (cell.replace("|", "/") for cell in found[kind])
        yield f"| `{kind}` | {' | '.join(cells)} |"


def main() -> None:
    """Print the page, or the table of the types that are named."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    settings: Any = transformers.utils.logging
    settings.set_verbosity_error()
    kept = next((Path(one) for one in sys.argv[1:] if one.endswith(".jsonl")), None)
    rows = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    found = {kind: Row(*cells) for kind, *cells in map(json.loads, rows)}
    kinds = [one for one in sys.argv[1:] if not one.endswith(".jsonl")]
    lines = list(table(kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), found, kept))
    if not kinds:
        print(PAGE.format(version=transformers.__version__))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
