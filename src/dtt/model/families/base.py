"""A model family as data: its architecture, its config.json and the names of its weights.

The tables of `dense.py` and `mixtures.py` say what differs from Llama; the code is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from dtt.config.model import MIXTURES, ONLY_FOR, TIED, ModelConfig
from dtt.config.value_types import DEFAULT_STD, InitialStd, parse_std
from dtt.model.architecture import (
    Architecture,
    ExpertMixture,
    fit_context,
    fit_vocabulary,
    round_up,
)
from dtt.model.families import rope_scaling
from dtt.model.families.hf_config import (
    COMMON,
    FULL,
    LOCAL,
    UNSET,
    Key,
    check_values,
    unsupported,
)

LLAMA_AXES: Mapping[str, Any] = {
    "norm": "rmsnorm",
    "qk_norm": "none",
    "norm_placement": "pre",
    "position": "rope",
    "rope_local_theta": None,
    "partial_rotary_factor": 1.0,
    "mlp": "swiglu",
    "bias": "none",
    "embed_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "logit_softcap": None,
    "dropout": 0.0,
}
"""Fields of `Architecture` as Llama has them."""
Windows = tuple[int | None, ...]
"""The sliding window of each layer; None: full attention."""
OF_MIXTURE = "mixture."
"""Beginning of `Key.field` for the fields of an `ExpertMixture`."""
MIXTURE = tuple(f"layers.{{i}}.mlp.{part}." for part in ("router", "experts", "shared"))
"""Beginnings of the names of the parameters of a mixture."""
SAME_KEYS = (
    "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "norm_eps", "rope_theta",
    "rope_scaling", "partial_rotary_factor", "logit_softcap", "dropout",
)  # fmt: skip
"""Keys of the section `model` that an architecture takes over."""
NOT_FROM_WEIGHTS = {"max_seq_len", "init_std", "dropout"}
"""Keys that do not depend on trained weights."""


@dataclass(frozen=True)
class WeightRule:
    """The mapping between tensors of a Hugging Face model and parameters of dtt.

    `{i}` in a name is the layer index. With `{e}` in `hf_name`, Hugging Face has one tensor per
    expert e: the slice e of each parameter, which is a stack [experts, out, in]. If there are
    several parameters, the Hugging Face tensor is their concatenation along the output axis.
    `transpose` is True if the Hugging Face tensor is [in, out], where dtt's is [out, in].
    """

    hf_name: str
    dtt_names: tuple[str, ...]
    transpose: bool = False

    def of_layer(self, i: int) -> WeightRule:
        """Return the rule for layer `i`, with `{i}` filled in."""
        names = tuple(name.replace("{i}", str(i)) for name in self.dtt_names)
        return replace(self, hf_name=self.hf_name.replace("{i}", str(i)), dtt_names=names)

    def of_expert(self, e: int) -> str:
        """Return the name of the Hugging Face tensor of expert `e`."""
        return self.hf_name.replace("{e}", str(e))

    @property
    def per_expert(self) -> bool:
        """True if Hugging Face has one tensor per expert."""
        return "{e}" in self.hf_name


def renamed(names: Mapping[str, str], *suffixes: str) -> tuple[WeightRule, ...]:
    """Return rules for tensors that differ in name only: names of dtt by those of Hugging Face.

    There is a rule for each of the suffixes, by default `weight` alone.
    """
    return tuple(
        WeightRule(f"{hf_name}.{suffix}", (f"{ours}.{suffix}",))
        for hf_name, ours in names.items()
        for suffix in suffixes or ("weight",)
    )


@dataclass(frozen=True, kw_only=True)
class DecoderFamily:
    """A published model architecture, and its Hugging Face format."""

    name: str
    other_type: str | None = None
    """`model_type` in config.json, if it is not the name."""
    hf_class: str
    """`architectures` in config.json: the class that transformers builds."""
    axes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Architecture` that are the same in all models, where they differ from Llama's."""
    scaled_embedding: bool = False
    """True if embeddings are multiplied by sqrt(dim)."""
    norm_topk: bool = True
    """True if the scores of the chosen experts are divided by their sum, by default."""
    routing: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ExpertMixture` that are the same in all models."""
    window_pattern: tuple[int, int] | None = None
    """Default window and interval, if every n-th layer has no window; else None."""

    keys: Mapping[str, Key]
    """Keys of config.json that are specific to the family; any other key is rejected."""
    window_keys: tuple[str, ...] = ()
    """Those of the sliding windows that an export has."""
    theta: float = 10_000.0
    """RoPE base of a config.json without one."""
    local_theta: float | None = None
    """The same for layers with a window; None: all layers have one base."""
    rope_types: tuple[str, ...] = rope_scaling.USUAL
    read: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """Function that replaces values of a checked config.json by those of the fields they stand for.
    It raises InputError if they contradict each other."""
    write: Callable[[Architecture], dict[str, Any]] = lambda arch: {}
    """Function that returns further entries of config.json."""
    weights: tuple[WeightRule, ...]
    """The first one is the embedding."""

    @property
    def hf_model_type(self) -> str:
        """`model_type` in config.json."""
        return self.other_type or self.name

    def architecture(self, cfg: ModelConfig, tokenizer_size: int, seq_len: int) -> Architecture:
        """Resolve every null of the config.

        Raises ConfigError if the tokenizer or the sequences do not fit.
        """
        fields = {key: getattr(cfg, key) for key in SAME_KEYS} | {
            "vocab_size": fit_vocabulary(cfg, tokenizer_size),
            "max_seq_len": fit_context(cfg, seq_len),
            "init_std": parse_std(cfg.init_std),
            "tie_embeddings": self._tied(cfg.tie_embeddings),
        }
        if self.window_pattern is None:
            full = min(cfg.max_window_layers, cfg.n_layers)
            fields["windows"] = (None,) * full + (cfg.window,) * (cfg.n_layers - full)
        else:
            window, interval = self.window_pattern
            window = cfg.window or window
            kinds = every_nth(cfg.n_layers, cfg.window_pattern or interval)
            fields["windows"] = tuple(window if kind == LOCAL else None for kind in kinds)
        if self.local_theta is not None:
            own = self.has("rope_local_theta")
            fields["rope_local_theta"] = cfg.rope_local_theta if own else cfg.rope_theta
        if self.has("no_rope_layer_interval"):
            fields["rope_layers"] = rope_layers(cfg.n_layers, cfg.no_rope_layer_interval)
        if cfg.query_pre_attn_scalar is not None:
            fields["attn_scale"] = cfg.query_pre_attn_scalar**-0.5
        arch = self._resolved(fields)
        if self.name not in MIXTURES:
            return arch
        width = cfg.expert_ffn_dim or arch.ffn_dim
        mixture = ExpertMixture(
            experts=cfg.n_experts,
            per_token=cfg.experts_per_token,
            ffn_dim=width,
            shared_dim=cfg.n_shared_experts * width if self.has("n_shared_experts") else 0,
            dense_layers=cfg.n_dense_layers,
            normalise=self.norm_topk if cfg.norm_topk is None else cfg.norm_topk,
            groups=cfg.n_expert_groups,
            groups_per_token=cfg.expert_groups_per_token,
            scale=cfg.routed_scaling,
            **self.routing,
        )
        return replace(arch, mixture=mixture)

    def from_hf_config(
        self, config: Mapping[str, Any], defaults: Callable[[], Mapping[str, Any]] = dict
    ) -> Architecture:
        """Return the architecture that a config.json describes.

        Raises InputError for features that `Decoder` does not support, and for keys that dtt does
        not know, unless they have the value in `defaults()` (those of transformers' class for the
        family).
        """
        check_values(config, self.keys, defaults)
        missing = {name: key.default for name, key in self.keys.items() if key.default is not UNSET}
        known = self.keys.keys() | COMMON.keys()
        values = self.read({**missing, **{k: v for k, v in config.items() if k in known}})
        fields = {key.field: values[name] for name, key in self.keys.items() if key.field}
        sizes = {
            name.removeprefix(OF_MIXTURE): fields.pop(name)
            for name in list(fields)
            if name.startswith(OF_MIXTURE)
        }
        fields |= {
            "vocab_size": values["vocab_size"],
            "init_std": InitialStd.uniform(values.get("initializer_range", DEFAULT_STD)),
            "tie_embeddings": self._tied(values.get("tie_word_embeddings")),
            "windows": self._read_windows(values, fields["n_layers"]),
        }
        if "rope_theta" in self.keys:
            fields |= self._read_rope(values, fields["windows"])
        if sizes:
            mixture = ExpertMixture(**{"ffn_dim": fields["ffn_dim"], **sizes, **self.routing})
            _check_mixture(config, mixture)
            fields["mixture"] = mixture
        arch = self._resolved(fields)
        # By the rules of the section `model`.
        problems = [why for _, why in _section(arch)[0].problems()]
        if problems:
            raise unsupported(config, "; ".join(problems))
        return arch

    def to_hf_config(self, arch: Architecture, end_of_document: int | None) -> dict[str, Any]:
        """Return the content of config.json, except the dtype.

        `end_of_document` is the id of the token that ends a document.
        """
        windows = windows_to_hf(arch.windows, self.window_pattern)
        constants = {n: key.writes for n, key in self.keys.items() if key.writes is not UNSET}
        return {
            "model_type": self.hf_model_type,
            "architectures": [self.hf_class],
            "vocab_size": arch.vocab_size,
            **{n: attrgetter(key.field)(arch) for n, key in self.keys.items() if key.field},
            **(rope_scaling.entries(arch) if "rope_theta" in self.keys else {}),
            **{name: windows[name] for name in self.window_keys},
            **constants,
            **self.write(arch),
            "initializer_range": arch.init_std.matrix,
            "tie_word_embeddings": arch.tie_embeddings,
            # dtt separates documents by one token, which also starts a generation. GPT-2 uses the
            # same id for both.
            "bos_token_id": end_of_document,
            "eos_token_id": end_of_document,
        }

    def weight_rules(self, arch: Architecture) -> Iterator[WeightRule]:
        """Yield the rules of this model, with the layer filled in; a tied head has none."""
        for rule in self.weights:
            name = rule.dtt_names[0]
            if name == "head.weight" and arch.tie_embeddings:
                continue
            if "{i}" not in rule.hf_name:
                yield rule
                continue
            for i in range(arch.n_layers):
                # Layers differ in the kind of their MLP.
                mixed = arch.mixture_of(i) is not None
                if not name.startswith("layers.{i}.mlp.") or name.startswith(MIXTURE) == mixed:
                    yield rule.of_layer(i)

    def has(self, key: str) -> bool:
        """Return True if the section `model` of this family has a key that others lack."""
        return self.name in ONLY_FOR[key]

    def _tied(self, given: bool | None) -> bool:
        return self.name in TIED if given is None else given

    def _resolved(self, fields: Mapping[str, Any]) -> Architecture:
        """Return the architecture with these fields; those that are None follow from others."""
        given = {name: value for name, value in fields.items() if value is not None}
        axes = {**LLAMA_AXES, **self.axes}
        dim, n_layers, n_heads = (given[name] for name in ("dim", "n_layers", "n_heads"))
        head_dim = given.get("head_dim", dim // n_heads)
        # Three matrices of 8/3 have as many weights as two of 4, those of an MLP without a gate
        # (Shazeer, 2020). The multiple of 64 suits matrix kernels and tensor parallelism.
        width = 4 * dim if axes["mlp"] == "gelu" else round_up(8 * dim // 3, 64)
        derived = {
            "family": self.name,
            "n_kv_heads": n_heads,
            "head_dim": head_dim,
            "ffn_dim": width,
            "rope_layers": (axes["position"] == "rope",) * n_layers,
            "attn_scale": head_dim**-0.5,
        }
        if self.scaled_embedding:
            derived["embed_scale"] = dim**0.5
        return Architecture(**{**axes, **derived, **given, **self.axes})

    def _read_windows(self, values: Mapping[str, Any], n_layers: int) -> Windows:
        """Return the window of each layer, by the kinds of a config.json or the family's rule."""
        window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
        if self.window_pattern is None:
            first = values.get("max_window_layers", 0)
            late = window is not None and first is not None
            kinds = [LOCAL if late and i >= first else FULL for i in range(n_layers)]
        else:
            interval = values.get("sliding_window_pattern", self.window_pattern[1])
            kinds = every_nth(n_layers, interval)
        windows = windows_from_hf(values, window, kinds)
        if any(windows) and not self.has("window"):
            raise unsupported(values, "sliding_window, layer_types: it has layers with a window")
        return windows

    def _read_rope(self, values: Mapping[str, Any], windows: Windows) -> dict[str, Any]:
        """Return the fields of RoPE that a config.json describes."""
        if self.local_theta is None:
            theta, scaling = rope_scaling.from_hf(values, self.theta, self.rope_types)
            return {"rope_theta": theta, "rope_scaling": scaling}
        beside = values.get("rope_local_base_freq")
        full, local_theta = rope_scaling.by_layer_type(values, beside, self.local_theta)
        theta, scaling = rope_scaling.from_hf(full, self.theta, self.rope_types)
        if not self.has("rope_local_theta"):
            # Without a base of its own, transformers 5 uses the default in layers with a window; 4
            # used rope_theta. Only a file in which both are the same has one meaning.
            if any(windows) and local_theta != theta:
                raise unsupported(
                    values,
                    f"the base of RoPE is {theta} in {FULL} and {local_theta} in {LOCAL}; "
                    "supported: the same in both",
                    next="write rope_theta for both into rope_parameters of config.json, or use "
                    "another model",
                )
            local_theta = theta
        return {"rope_theta": theta, "rope_scaling": scaling, "rope_local_theta": local_theta}


def windows_to_hf(windows: Windows, pattern: tuple[int, int] | None) -> dict[str, Any]:
    """Return all keys of windows in config.json.

    `pattern` is the family's default window, if it needs one.
    """
    window = next((w for w in windows if w is not None), None)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": pattern[0] if pattern is not None and window is None else window,
        # Of versions of transformers that do not read layer_types.
        "max_window_layers": windows.index(window) if window else len(windows),
        "layer_types": [FULL if w is None else LOCAL for w in windows],
    }


def windows_from_hf(
    config: Mapping[str, Any], window: int | None, default: Sequence[str]
) -> Windows:
    """Return the window of each layer; `default` are the types of a config.json that lists none.

    Raises InputError unless every layer has a type that dtt supports.
    """
    n_layers, kinds = len(default), config.get("layer_types") or default
    if len(kinds) != n_layers or not set(kinds) <= {LOCAL, FULL}:
        raise unsupported(
            config,
            f"config.json has layer_types: {kinds}; "
            f"supported: {LOCAL} or {FULL} for each of the {n_layers} layers",
        )
    if LOCAL in kinds and window is None:
        raise unsupported(
            config,
            f"config.json has layer_types: {kinds}, but the sliding_window is off (None)",
        )
    return tuple(window if kind == LOCAL else None for kind in kinds)


def every_nth(n_layers: int, interval: int) -> list[str]:
    """Return the types of layers of which every `interval`-th, counted from 1, has no window."""
    return [LOCAL if layer % interval else FULL for layer in range(1, n_layers + 1)]


def rope_layers(n_layers: int, interval: int) -> tuple[bool, ...]:
    """Return False for every `interval`-th layer, which has no rotary embedding."""
    return tuple(layer % interval != 0 for layer in range(1, n_layers + 1))


def _check_mixture(config: Mapping[str, Any], mixture: ExpertMixture) -> None:
    """Raise InputError, with the keys of config.json, for numbers that contradict each other."""
    if mixture.experts % mixture.groups or mixture.groups_per_token > mixture.groups:
        many = f"{mixture.experts} experts, n_group {mixture.groups}"
        raise unsupported(config, f"{many} and topk_group {mixture.groups_per_token}")
    candidates = mixture.experts // mixture.groups * mixture.groups_per_token
    if mixture.per_token > candidates:
        what = f"num_experts_per_tok is {mixture.per_token}"
        raise unsupported(config, f"{what}, and only {candidates} experts can compute a token")


def model_section(arch: Architecture) -> dict[str, Any]:
    """Return the `model` section from which the family builds `arch`.

    The keys in NOT_FROM_WEIGHTS are left out. Values are plain YAML types. Multipliers that differ
    from the family's own have no key here: the `scaling` section sets them.
    """
    section, named = _section(arch)
    dumped = section.model_dump(mode="json", exclude_none=True)
    return {name: value for name, value in dumped.items() if name in named}


def _section(arch: Architecture) -> tuple[ModelConfig, set[str]]:
    """Return the configuration that builds `arch`, and the names of the keys it determines."""
    same = ModelConfig.model_fields.keys() & vars(arch).keys()
    values = {name: getattr(arch, name) for name in same - NOT_FROM_WEIGHTS}
    if arch.position == "learned":
        del values["rope_theta"], values["rope_scaling"]
    if arch.family not in ONLY_FOR["rope_local_theta"]:
        del values["rope_local_theta"]
    if arch.family not in ONLY_FOR["partial_rotary_factor"]:
        del values["partial_rotary_factor"]
    local = [window for window in arch.windows if window is not None]
    if local:
        values["window"] = local[0]
        if arch.family in ONLY_FOR["max_window_layers"]:
            values["max_window_layers"] = arch.windows.index(local[0])
    if arch.family in ONLY_FOR["window_pattern"]:
        # Layers 1 … n - 1 have the window and layer n none. Without a full layer, n exceeds the
        # depth, which gives the same windows.
        values["window_pattern"] = (*arch.windows, None).index(None) + 1
    if arch.family in ONLY_FOR["no_rope_layer_interval"]:
        values["no_rope_layer_interval"] = (*arch.rope_layers, False).index(False) + 1
    if arch.family == "gemma3":
        # config.json has an integer here; its inverse square root is the scale.
        values["query_pre_attn_scalar"] = round(arch.attn_scale**-2)
    if arch.mixture is not None:
        values |= _mixture(arch.mixture, arch.family)
    return ModelConfig(**values), set(values)


def _mixture(mixture: ExpertMixture, family: str) -> dict[str, Any]:
    """Return the keys of a mixture that the family has."""
    keys = {
        "n_experts": mixture.experts,
        "experts_per_token": mixture.per_token,
        "norm_topk": mixture.normalise,
        "expert_ffn_dim": mixture.ffn_dim,
        "n_dense_layers": mixture.dense_layers,
        "n_shared_experts": mixture.shared_dim // mixture.ffn_dim,
        "n_expert_groups": mixture.groups,
        "expert_groups_per_token": mixture.groups_per_token,
        "routed_scaling": mixture.scale,
    }
    return {key: value for key, value in keys.items() if family in ONLY_FOR[key]}
