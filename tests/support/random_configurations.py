"""Random configurations: every key that affects training, in pairs of features, then triples."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

from dtt.base.errors import ConfigError
from dtt.config.load import resolve
from dtt.config.model import MIXTURES
from dtt.config.parallel import Sizes
from dtt.config.run import RunConfig
from dtt.config.variants import VARIANTS

NEED_MORE = ("tokens", "text", "chat", "preference")
"""Kinds of data that are tried with further keys; every other one is tried by itself."""
LORA = "optim.type=adamw", "init.from=jobs/x", "adapter.type=lora"
DPO = "data.type=preference", "objective.type=dpo", "init.from=jobs/x"
MIXTURE = "data.sources=[{path: a, weight: 3}, {path: b, weight: 1}]"
CAUTIOUS = "optim.weight_decay={value: 0.1, cautious: true}"
GROUPS = (
    "model.n_experts=8", "model.n_expert_groups=4", "model.expert_groups_per_token=2",
    "model.n_shared_experts=2", "model.routed_scaling=2.5", "model.expert_ffn_dim=96",
)  # fmt: skip
LLAMA3 = "{type: llama3, original_max_seq_len: 16, low_freq_factor: 0.5, high_freq_factor: 3.0}"
YARN = (
    "{type: yarn, original_max_seq_len: 16, beta_fast: 8.0, beta_slow: 0.5, truncate: false, "
    "attention_factor: 1.2}"
)
LONGROPE = (
    f"{{type: longrope, short_factor: {[1 + i / 16 for i in range(16)]}, attention_factor: 1.1, "
    f"long_factor: {[1 + i for i in range(16)]}, original_max_seq_len: 64}}"
)

FEATURES: dict[str, tuple[tuple[str, ...], ...]] = {
    "family": (
        ("model.family=gpt2",),
        ("model.family=mistral", "model.window=64"),
        ("model.family=qwen2", "tokenizer.pre_tokenizer=qwen2", "model.window=64",
         "model.max_window_layers=1"),
        ("model.family=qwen3", "model.head_dim=128"),
        ("model.family=gemma3", "model.head_dim=128", "model.query_pre_attn_scalar=64",
         "model.rope_local_theta=5000.0"),
        ("model.family=phi3", "model.partial_rotary_factor=0.5"),
        ("model.family=phi3", "model.n_heads=8", f"model.rope_scaling={LONGROPE}"),
        ("model.family=smollm3", "model.no_rope_layer_interval=2"),
        ("model.family=olmo2",),
        ("model.family=olmo3", "model.window=64", "model.window_pattern=2"),
        ("model.family=mixtral", "model.window=64"),
        ("model.family=qwen3_moe", "model.expert_ffn_dim=96", "model.n_dense_layers=1"),
        ("model.family=olmoe", "model.n_experts=5", "model.experts_per_token=1"),
        ("model.family=dots1", *GROUPS),
    ),
    "experts": (
        ("model.family=mixtral", "train.balance_loss=0.1"),
        ("model.family=qwen3_moe", "model.norm_topk=false", "train.router_z_loss=0.1"),
        ("model.family=olmoe", "model.norm_topk=true", "train.balance_loss=0"),
        ("model.family=dots1", *GROUPS, "train.balance_rate=0.1", "train.balance_loss=0.1"),
    ),
    "heads": (("model.n_kv_heads=2",), ("model.n_heads=8", "model.n_kv_heads=2")),
    "softcap": (("model.family=gemma3", "model.logit_softcap=5.0"),),
    "tied": (("model.tie_embeddings=true",), ("model.tie_embeddings=false",)),
    "sizes": (
        ("model.vocab_size=5000", "model.ffn_dim=500"),
        ("model.max_seq_len=4096", "model.norm_eps=1e-3", "model.rope_theta=5e5"),
    ),
    "init": (
        ("model.init_std={matrix: 0.02, embed: 1.0, output: 0}",),
        ("init.from=jobs/x", "train.ema_decay=0.9", "init.average=true"),
        ("init.from=jobs/x", "init.optimizer=carry"),
    ),
    "rope": (
        ("model.rope_scaling={type: linear, factor: 4.0}",),
        (f"model.rope_scaling={LLAMA3}",),
        (f"model.rope_scaling={YARN}",),
    ),
    "scaling": (
        ("scaling={type: mup, base_dim: 128}",),
        ("scaling={type: mup, base_dim: 128, base_head_dim: 32, depth: sqrt, base_layers: 2}",),
    ),
    "documents": (
        ("data.mask_documents=true",),
        ("data.packing=best-fit", "data.mask_documents=true"),
        ("data.packing=best-fit",),
        ("data.packing=none", "data.mask_documents=true"),
        ("data.eod_mask_loss=true",),
    ),
    "data": (
        (MIXTURE,),
        (MIXTURE, "data.weights=[{step: 2, weights: {a: 0.0, b: 1.0}}]"),
        (MIXTURE, "data.on_exhausted=renormalise"),
        ("data.sources=[{path: a/**, weight: 3}, {path: b, weight: 1}]",),
        ("data.type=chat",),
        ("data.type=chat", "chat.train_on=last", "chat.too_long=whole_turns"),
        ("data.type=chat", "chat.train_on=all", "chat.turns=expand"),
        DPO,
        (*DPO, "objective.length_normalised=true", "objective.beta=5.0"),
        (*DPO, "objective.reference=jobs/y"),
        ("data.type=text", "data.mask_documents=true", "tokenizer.type=file"),
        ("data.type=text", "data.eod_mask_loss=true", "tokenizer.type=file"),
        *((f"data.type={name}",) for name in VARIANTS["data"] if name not in NEED_MORE),
    ),
    "adapter": (
        LORA,
        (*LORA, "adapter.targets=[q, v]", "adapter.rslora=true"),
        (*LORA, "adapter.rank=8", "adapter.alpha=4.0", "adapter.rank_pattern={down: 32}",
         "adapter.alpha_pattern={q: 8.0}"),
    ),
    "optimizer": (
        ("optim.type=adamw",),
        ("optim.type=adamw", CAUTIOUS, "optim.betas=[0.8, 0.9]"),
        ("optim.type=adamw", "optim.weight_decay={value: 0.2, horizon: true}", "optim.state=8bit"),
        ("optim.scale=spectral", "optim.momentum=0.9"),
        ("optim.normuon_beta2=0.95", "optim.momentum_warmup=2"),
        (CAUTIOUS,),
    ),
    "groups": (
        ("optim.groups=[{match: head, lr: 0.01, betas: [0.5, 0.9]}]",),
        ("optim.groups=[{match: embed, weight_decay: 0.1, eps: 1e-6}]",),
        ("optim.type=muon", "optim.groups=[{match: layers.1.*, optimizer: adamw}]"),
        ("optim.type=muon", "optim.groups=[{match: '*.mlp.up.weight', split: 2}]"),
    ),
    "schedule": (
        ("schedule={type: constant, warmup: 10}",),
        ("schedule={type: cosine, floor: 0.1}",),
        ("schedule={type: linear, floor: 0.2}",),
        ("schedule={type: inverse-sqrt, warmup: 10}",),
        ("schedule={type: wsd, warmup: 5%, decay: 20%, shape: exponential, floor: 0.1}",),
    ),
    "batch": (
        ("train.batch_schedule={type: doubling, start: 8192, every: 10%}",),
        ("train.batch_schedule={type: list, stages: [[0, 32768], [0.5, 65536]]}",),
    ),
    "context schedule": (("train.context_schedule=[[0, 512], [0.5, 1024]]",),),
    "clipping": (("train.clip_norm=null",),),
    "z-loss": (("train.z_loss=1e-3",),),
    "average": (
        ("train.ema_decay=0.9",),
    ),
    "remat": (
        ("train.remat=full",), ("train.remat=selective",),
    ),
    "sharding": (("parallel.reduce=each",), ("parallel.reduce=last",), ("parallel.reshard=false",)),
    "guard": (("guard.spike=skip", "guard.non_finite=skip"),),
    "checkpoint": (("checkpoint.asynchronous=false",),),
    "seed": (("seed=7",),),
}  # fmt: skip
"""Alternatives for each feature, as arguments. The first configurations have two of them."""
WITHOUT_EFFECT = (
    "name", "actions", "download", "clean", "tokenizer", "tokenize", "track", "eval", "profile",
    "export", "pipeline", "launch", "checkpoint.every", "checkpoint.keep_",
    "checkpoint.mirror",
    "train.device", "train.eval_", "train.sample_", "train.log_every", "train.hang_seconds",
    "train.compile", "train.attention", "chat.template", "chat.kwargs", "chat.control_text",
    # Which file is read, not what is computed from it.
    *(f"data[{kind}].{key}" for kind in ("tokens", "chat", "preference")
      for key in ("to", *(f"sources[tokens].{name}" for name in ("dtype", "validation", "name")))),
    # A comparison takes other values for these.
    "train.steps", "train.epochs", "train.budget", "train.seq_len", "train.global_batch_tokens",
    "train.micro_batch", "train.precision", "train.stochastic_rounding", "model.dim",
    # What a module of the library computes is compared in tests of its own.
    "model.config", "model.n_layers", "model.dropout", "adapter[lora].dropout", "init.adapter",
    # The small models of a comparison have rows of fewer weights than a block.
    "adapter[lora].base",
    "data[synthetic].vocab_size", *(f"parallel.{dim}" for dim in Sizes._fields),
    "parallel.layers_per_stage", "parallel.stages_per_rank", "parallel.expert",
)  # fmt: skip
"""Beginnings of keys that no feature needs."""


def configurations(seed: int, counts: Sequence[int] = (2, 3)) -> Iterator[tuple[str, RunConfig]]:
    """Yield random valid configurations, each with its arguments; it never ends.

    First every combination of as many features as `counts` begins with, in random order with
    random alternatives, then of the next number.
    """
    source = random.Random(seed)
    names = sorted(FEATURES)
    while True:
        for count in counts:
            chosen = list(combinations(names, count))
            source.shuffle(chosen)
            for features in chosen:
                arguments = [a for f in features for a in source.choice(FEATURES[f])]
                if len({a for a in arguments if a.startswith("model.family=")}) > 1:
                    continue  # the last one would leave the keys of the others
                arguments += _layout(source, arguments)
                try:
                    cfg = resolve(None, arguments, env={}).config
                except ConfigError:
                    continue  # these features exclude each other
                yield " ".join(f"'{a}'" if " " in a else a for a in arguments), cfg


def _layout(source: random.Random, features: Sequence[str]) -> list[str]:
    """Return arguments for a mesh of two processes, less often four or eight."""
    count = source.choices((1, 2, 3), (6, 3, 1))[0]
    dims = source.sample(Sizes._fields, count)
    sizes = [f"parallel.{dim}={2 if dim in dims else 1}" for dim in Sizes._fields]
    mixture = any(f"model.family={family}" in features for family in MIXTURES)
    if mixture and not {"shard", "context", "tensor"}.isdisjoint(dims) and source.random() < 0.7:
        sizes.append("parallel.expert=2")
    if "pipeline" not in dims:
        return sizes
    # 13 layers make uneven stages.
    stages, layers = source.choice((1, 2)), source.choice((12, 13))
    pipeline = f"parallel.stages_per_rank={stages}", f"model.n_layers={layers}"
    return [*sizes, *pipeline, "model.tie_embeddings=false"]
