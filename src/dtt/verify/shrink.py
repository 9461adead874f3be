"""The small configuration that `dtt verify` runs in place of the user's.

Everything that decides whether a layout is right stays: the family with all its switches, masks,
packing, objective, optimizer, schedule, clipping, accumulation. Sizes, the data and the precision
change. What cannot be kept is returned in words, never dropped silently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from dtt.config.adapter import LoraConfig
from dtt.config.model import MIXTURES, Family, LongRopeScaling, ModelConfig
from dtt.config.own import is_own
from dtt.config.run import RunConfig
from dtt.config.scaling import MupConfig
from dtt.config.validation import validate

STEPS = 4
"""Two of warm-up, if there is one, and two of decay: its first has the peak rate."""
SEQ_LEN = 64
"""Tokens of a sequence: four windows, and divisible by 2 x context 2 x tensor 2 x 8."""
SEQUENCES = 8
"""Sequences of a global batch: two micro-batches on each of four data-parallel ranks."""
WINDOW = SEQ_LEN // 4
HEAD_DIM = 16
"""The least that FlexAttention and fp8 take."""
VOCABULARY = 320
CLIP_NORM = 0.05
"""Gradient norms of new small models are 0.1 to 10, so this limit clips."""
LEARNING_RATE = 1e-3
"""Least learning rate. An update far below the weights' last digits would be lost in them."""
EPSILON = 1e-6
"""Least epsilon of AdamW. Where the true gradient is 0 (a bias of keys), a smaller one turns
rounding into updates of full size."""
RANK = 4

Nested = dict[str, Any]


@dataclass(frozen=True)
class Small:
    """A small configuration, and all that it takes to run it."""

    run: RunConfig
    texts: RunConfig
    """Download and tokenization of random text, with a tokenizer trained on it."""
    rows: RunConfig | None = None
    """The same for conversations or preference pairs."""
    base: RunConfig | None = None
    """The job whose weights the run starts from."""
    notes: tuple[str, ...] = ()
    """Differences from the user's configuration that the comparison does not cover."""


@dataclass
class _Shrinking:
    cfg: RunConfig
    exact: bool
    notes: list[str] = field(default_factory=list)

    def note(self, applies: object, text: str) -> None:
        if applies:
            self.notes.append(text)


def shrink(cfg: RunConfig, *, exact: bool = True) -> Small:
    """Return the small configuration of `cfg`, in fp64 on the CPU.

    Unless `exact`, device, precision and kernels are those of `cfg`.
    """
    shrinking = _Shrinking(cfg, exact)
    values: Nested = cfg.model_dump(mode="json")
    values |= {
        "name": "run",
        "track": [],
        "actions": [],
        "launch": {},
        "profile": {},
        "pipeline": {},
        "export": {"dtype": "fp32"},
        "eval": {},
        "checkpoint": {"every": 1, "keep_last": 10, "asynchronous": cfg.checkpoint.asynchronous},
        "parallel": {"reduce": cfg.parallel.reduce, "reshard": cfg.parallel.reshard},
    }
    values["model"] = _model(shrinking)
    values["scaling"] = _scaling(cfg, values["model"])
    values["train"] = _train(shrinking)
    values["schedule"] |= {"warmup": 2 if cfg.schedule.warmup.amount else 0}
    if cfg.schedule.type == "wsd":
        values["schedule"]["decay"] = 2
    values["optim"] = _optim(shrinking)
    _use_inputs(shrinking, values)
    values["adapter"] = _adapter(shrinking)
    base = _base(shrinking, values)
    rows = None
    if cfg.data.has_conversations:
        of_rows = {
            "download": {"dataset": "rows.jsonl", "out": "rows"},
            "tokenize": {"out": "rows-tokens", "validation_fraction": 0.1},
        }
        rows = _checked(values | of_rows, type(cfg))
    shrinking.note(cfg.eval.tasks, "eval.tasks (left out)")
    # The gradients of a small model never take a quarter of a device.
    auto = cfg.parallel.reduce == "auto" and cfg.parallel.shard != 1
    shrinking.note(auto, "parallel.reduce=auto (here as last; set each to verify that)")
    return Small(
        _checked(values, type(cfg)),
        _checked(_texts(values), type(cfg)),
        rows,
        base,
        tuple(shrinking.notes),
    )


def _checked(values: Nested, cls: type[RunConfig]) -> RunConfig:
    """Return the configuration; values that contradict each other are a fault of this module."""
    section, problems = validate(cls, json.loads(json.dumps(values)))
    assert section is not None, problems
    return section


def _model(shrinking: _Shrinking) -> Nested:
    model = shrinking.cfg.model
    values: Nested = model.model_dump(mode="json")
    if isinstance(model, Family):
        return values  # its sizes are keys that only it knows
    n_kv = model.n_kv_heads or model.n_heads
    ratio = model.n_heads // n_kv
    if ratio == 1:
        heads = kv_heads = _like(n_kv, 4, 3)
    else:
        kv_heads = min(n_kv, 2)
        heads = ratio * kv_heads
    # An even number of dimensions is rotated.
    head_dim = HEAD_DIM * (1 + int(HEAD_DIM * model.partial_rotary_factor) % 2)
    dim = heads * head_dim
    if model.head_dim:
        values["head_dim"] = head_dim
        # Attention may be wider or narrower than the residual stream.
        attention = model.head_dim * model.n_heads
        dim = dim // 2 if attention > model.dim else 2 * dim if attention < model.dim else dim
    layers = min(model.n_layers, 2)
    if (pipeline := shrinking.cfg.parallel).pipeline > 1:
        # Of 2 ranks with 1 or 2 stages each, unevenly where the real layers are.
        layers = 2 * min(2, pipeline.stages_per_rank)
        counts = {len(stage) for stage in pipeline.stage_layers(model.n_layers)}
        layers += min(1, len(counts) - 1)
    values |= {
        "dim": dim,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": kv_heads if model.n_kv_heads else None,
        # Divisible by the tensor dimension as the real one is, but not by 64.
        "ffn_dim": model.ffn_dim and 2 * dim + _like(model.ffn_dim, 8, 5),
        "vocab_size": model.vocab_size and _like(model.vocab_size, VOCABULARY, VOCABULARY + 1),
        "max_seq_len": model.max_seq_len
        and (SEQ_LEN if model.max_seq_len == shrinking.cfg.train.seq_len else 2 * SEQ_LEN),
        "max_window_layers": min(model.max_window_layers, 1),
        "dropout": 0.0,
    }
    if model.family in MIXTURES:
        values |= _experts(model, dim)
    if model.family in ("gemma3", "olmo3"):
        values["window_pattern"] = 1 if model.window_pattern == 1 else 2
    if model.family == "smollm3":
        values["no_rope_layer_interval"] = min(model.no_rope_layer_interval, 2)
    if window := model.window or {"gemma3": 512, "olmo3": 4096}.get(model.family):
        windowed = window < shrinking.cfg.train.seq_len
        values["window"] = WINDOW if windowed else 2 * SEQ_LEN
    if isinstance(scaling := model.rope_scaling, LongRopeScaling):
        rotated = int(head_dim * model.partial_rotary_factor) // 2
        long_documents = scaling.original_max_seq_len < shrinking.cfg.train.seq_len
        # Evenly spread, so that low and high frequencies are there.
        spread = [i * len(scaling.short_factor) // rotated for i in range(rotated)]
        values["rope_scaling"] |= {
            "short_factor": [scaling.short_factor[i] for i in spread],
            "long_factor": [scaling.long_factor[i] for i in spread],
            "original_max_seq_len": SEQ_LEN // 2 if long_documents else SEQ_LEN,
        }
    shrinking.note(model.dropout, f"model.dropout={model.dropout} (each layout draws its own)")
    return values


def _experts(model: ModelConfig, dim: int) -> Nested:
    """Return the sizes of a small mixture."""
    grouped = model.n_expert_groups > 1
    return {
        "n_experts": 8 if grouped else _like(model.n_experts, 6, 5),
        "experts_per_token": min(model.experts_per_token, 2),
        "expert_ffn_dim": model.expert_ffn_dim and dim + _like(model.expert_ffn_dim, 4, 5),
        "n_dense_layers": min(model.n_dense_layers, 1),
        "n_shared_experts": min(model.n_shared_experts, 2),
        "n_expert_groups": 4 if grouped else 1,
        "expert_groups_per_token": min(model.expert_groups_per_token, 3) if grouped else 1,
    }


def _like(real: int, even: int, odd: int) -> int:
    """Return the small number that is divisible by 2 as the real one is."""
    return even if real % 2 == 0 else min(real, odd)


def _scaling(cfg: RunConfig, model: Nested) -> Nested:
    values: Nested = cfg.scaling.model_dump(mode="json")
    if isinstance(cfg.scaling, MupConfig):
        values["base_dim"] = model["dim"] // 2
        values["base_head_dim"] = None if cfg.scaling.base_head_dim is None else HEAD_DIM // 2
        values["base_layers"] = cfg.scaling.base_layers and 1
    return values


def _train(shrinking: _Shrinking) -> Nested:
    train = shrinking.cfg.train
    values: Nested = train.model_dump(mode="json")
    batch = SEQUENCES * SEQ_LEN
    schedule = train.batch_schedule
    match schedule.type:
        case "doubling":
            values["batch_schedule"] |= {"start": batch // 2, "every": 1}
        case "list":
            values["batch_schedule"]["stages"] = [[0, batch // 2], [1, batch]]
        case _:
            pass
    values |= {
        "epochs": None,
        "steps": STEPS,
        "budget": None,
        "seq_len": SEQ_LEN,
        "context_schedule": [[0, SEQ_LEN // 2], [1, SEQ_LEN]] if train.context_schedule else [],
        "global_batch_tokens": batch,
        "micro_batch": 1,
        "clip_norm": None if train.clip_norm is None else CLIP_NORM,
        "stochastic_rounding": False,
        "log_every": 1,
        "eval_every": 0,
        "eval_tokens": 4 * SEQ_LEN,
        "eval_answers": 0,
        "sample_tokens": 0,
        "hang_seconds": 120.0,
    }
    if shrinking.exact:
        exact = {"device": "cpu", "precision": "fp64", "attention": "auto", "compile": False}
        special = train.precision in ("bf16-pure", "fp8")
        shrinking.note(special, f"train.precision={train.precision} (fp64)")
        values |= exact
    shrinking.note(train.stochastic_rounding, "train.stochastic_rounding (off)")
    return values


def _optim(shrinking: _Shrinking) -> Nested:
    optim = shrinking.cfg.optim
    values: Nested = optim.model_dump(mode="json")
    sections = [value for value in values.values() if isinstance(value, dict)]
    for holder in [values, *sections, *values.get("groups", ())]:
        if holder.get("lr") is not None:
            holder["lr"] = max(holder["lr"], LEARNING_RATE)
        if holder.get("eps") is not None:
            holder["eps"] = max(holder["eps"], EPSILON)
        if holder.get("decay") is not None:
            holder["decay"] = 1
        if isinstance(split := holder.get("split"), list):
            holder["split"] = len(split)
            shrinking.note(True, f"optim.groups: split={split} (into {len(split)} equal parts)")
    if "momentum_warmup" in values:
        values["momentum_warmup"] = min(values["momentum_warmup"], 2)
    return values


def _use_inputs(shrinking: _Shrinking, values: Nested) -> None:
    """Replace the user's data by that of `inputs`."""
    cfg, data = shrinking.cfg, values["data"]
    values["tokenizer"] = {"type": "file", "path": "tokens/tokenizer.json"}
    values["download"] = {"dataset": "texts.jsonl", "out": "texts"}
    values["tokenize"] = {"out": "tokens", "validation_fraction": 0.1}
    own = cfg.data.has_conversations
    tokens = "rows-tokens" if own else "tokens"
    if own:
        values["chat"] |= {"template": "chatml", "kwargs": {}}
        if values["chat"]["too_long"] == "stop":
            values["chat"]["too_long"] = "drop"
    if is_own(cfg.data.type):
        # Its samples have the ids of its own tokenizer, and so need a large vocabulary.
        shrinking.note(True, f"data.type={cfg.data.type} (random text)")
        same = {key: getattr(cfg.data, key) for key in ("packing", "mask_documents")}
        values["data"] = {"type": "tokens", "tokens": tokens, **same}
        return
    if cfg.data.known_vocab_size() is not None:
        data["vocab_size"] = VOCABULARY
    if not cfg.data.reads_token_files:
        return
    data["tokens"] = None if cfg.data.sources else tokens
    data["tokenizer"] = None
    for number, source in enumerate(cfg.data.sources):
        # The names decide the order of the samples, so one folder is as good as several.
        what = f"data.sources: {source.type} (random text)"
        shrinking.note(is_own(source.type), what)
        entry = {"path": tokens, "name": source.label, "weight": source.weight}
        data["sources"][number] = entry
    for number, change in enumerate(data.get("weights", ())):
        change["step"] = 2 + number
    data["weights"] = data.get("weights", [])[: STEPS - 1]
    shrinking.note(len(cfg.data.weights) > STEPS - 1, "data.weights after the second")


def _adapter(shrinking: _Shrinking) -> Nested:
    adapter = shrinking.cfg.adapter
    values: Nested = adapter.model_dump(mode="json")
    if isinstance(adapter, LoraConfig):
        values["rank"] = min(adapter.rank, RANK)
        values["rank_pattern"] = {p: min(n, RANK + 2) for p, n in adapter.rank_pattern.items()}
        values["dropout"], values["base"] = 0.0, "unquantized"
        # The small model has rows of fewer weights than a block.
        shrinking.note(adapter.base == "nf4", "adapter.base=nf4 (unquantized)")
        own = "each layout draws its own"
        shrinking.note(adapter.dropout, f"adapter.dropout={adapter.dropout} ({own})")
    return values


def _base(shrinking: _Shrinking, values: Nested) -> RunConfig | None:
    """Return the job that the run starts from, and let `values` start from it."""
    init, objective = shrinking.cfg.init, values["objective"]
    if objective.get("reference") is not None:
        objective["reference"] = "jobs/base"
    if init.source is None and objective.get("reference") is None:
        return None
    if init.source is not None:
        values["init"] |= {"from": "jobs/base", "adapter": None}
    shrinking.note(init.adapter, f"init.adapter={init.adapter} (a new adapter)")
    base = values | {
        "name": "base",
        "adapter": {"type": "none"},
        "objective": {"type": "next_token"},
        "init": {},
        "data": {"type": "tokens", "tokens": "tokens"},
        "schedule": {"type": "wsd", "warmup": 0, "decay": 1},
        "train": values["train"]
        | {"steps": 1, "micro_batch": SEQUENCES}
        | {"context_schedule": [], "batch_schedule": {"type": "constant"}},
    }
    if init.average:
        base["train"]["ema_decay"] = 0.5
    return _checked(base, RunConfig)


def _texts(values: Nested) -> Nested:
    return values | {
        "name": "texts",
        "data": {"type": "tokens"},
        "objective": {"type": "next_token"},
        "tokenizer": {"type": "bpe", "vocab_size": VOCABULARY, "chat_tokens": True}
        | ({"pre_tokenizer": "qwen2"} if values["model"]["family"] == "qwen2" else {}),
        "adapter": {"type": "none"},
        "init": {},
    }


def describe(small: Small) -> str:
    """Return the sizes of the small configuration in words."""
    model, train = small.run.model, small.run.train
    size = "the model"
    if isinstance(model, ModelConfig):
        size = f"{model.n_layers} layers of width {model.dim}"
    return (
        f"{size}, {train.steps} steps of {SEQUENCES} "
        f"sequences of {train.seq_len} tokens, {train.precision} on {train.device}"
    )
