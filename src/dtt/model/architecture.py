"""The fully resolved description of a decoder, and helpers that resolve its sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from dtt.base.errors import ConfigError
from dtt.config.key_types import tag_of
from dtt.config.model import AnyModel, Family, LongRopeScaling, NoRopeScaling, RopeScaling
from dtt.config.own import own_code
from dtt.config.value_types import InitialStd


@dataclass(frozen=True, kw_only=True)
class ExpertMixture:
    """The experts of a layer, and how a router chooses among them."""

    experts: int
    per_token: int
    """Number of experts of a token."""
    ffn_dim: int
    """Hidden width of an expert."""
    shared_dim: int = 0
    """Hidden width of the shared expert, which all tokens pass; 0: there is none."""
    dense_layers: int = 0
    """Number of first layers with an ordinary MLP instead, of the architecture's `ffn_dim`."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits that gives the scores."""
    normalise: bool = True
    """Divide the scores of the chosen experts by their sum."""
    epsilon: float = 0.0
    """Added to that sum."""
    corrected: bool = False
    """True if a bias that follows the load of the experts is added to the scores for the choice."""
    groups: int = 1
    groups_per_token: int = 1
    """Number of groups whose experts are candidates for a token."""
    scale: float = 1.0
    """Multiplier of the weights of the chosen experts."""

    def describe(self) -> str:
        """Return the experts in words."""
        shared = " and a shared one" if self.shared_dim else ""
        return f"{self.per_token} of {self.experts} experts{shared}"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The resolved architecture of a decoder: every option chosen, every size known.

    `Decoder` is built from this alone. A `DecoderFamily` makes it, of a configuration or of
    config.json.
    """

    family: str
    vocab_size: int
    max_seq_len: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    norm: Literal["layernorm", "rmsnorm", "rmsnorm_plus_one"]
    """`rmsnorm_plus_one` multiplies by 1 + weight, as Gemma does."""
    norm_eps: float
    qk_norm: Literal["none", "head", "all_heads"]
    """Norms of queries and keys before the rotary embedding: over each head, or over all heads of
    a token together."""
    norm_placement: Literal["pre", "post", "sandwich"]
    """Norms of the inputs of attention and MLP, of their outputs (before the residual addition), or
    of both."""
    position: Literal["learned", "rope"]
    rope_theta: float
    rope_scaling: RopeScaling
    partial_rotary_factor: float
    """Fraction of the dimensions of each head that RoPE rotates, the first ones."""
    rope_layers: tuple[bool, ...]
    """True for each layer with a rotary embedding; all are False with learned positions."""
    rope_local_theta: float | None
    """RoPE base of sliding-window layers, which then use no RoPE scaling; None: same as other
    layers."""
    windows: tuple[int | None, ...]
    """Sliding-window size of each layer in tokens, the current one included; None: full causal
    attention."""
    mlp: Literal["gelu", "swiglu", "geglu"]
    bias: Literal["none", "qkv", "all"]
    """Linear layers with a bias: those of queries, keys and values, or all except the head."""
    tie_embeddings: bool
    embed_scale: float
    """Multiplier of the token embeddings."""
    attn_scale: float
    """Multiplier of the attention scores q kᵀ."""
    residual_scale: float
    """Multiplier of the outputs of attention and MLP, before the residual addition."""
    logit_scale: float
    """Multiplier of the final hidden states, before the head."""
    logit_softcap: float | None
    """Soft cap c of the logits: c * tanh(logits / c); None: no cap."""
    init_std: InitialStd
    """Standard deviations of the initial weights, by role."""
    dropout: float
    mixture: ExpertMixture | None = None
    """Experts instead of the MLP; None: every layer has an ordinary MLP."""

    def mixture_of(self, layer: int) -> ExpertMixture | None:
        """Return the experts of a layer; None if it has an ordinary MLP."""
        dense = self.mixture is None or layer < self.mixture.dense_layers
        return None if dense else self.mixture

    @property
    def mlp_width(self) -> int:
        """Number of hidden units of MLPs that compute a token, in the last layer."""
        mixture = self.mixture
        if mixture is None:
            return self.ffn_dim
        return mixture.per_token * mixture.ffn_dim + mixture.shared_dim

    def rope(self, layer: int) -> tuple[float, RopeScaling] | None:
        """Return the RoPE base and scaling of layer `layer`, or None if it has no RoPE."""
        if not self.rope_layers[layer]:
            return None
        if self.windows[layer] is not None and self.rope_local_theta is not None:
            return self.rope_local_theta, NoRopeScaling()
        return self.rope_theta, self.rope_scaling

    def is_long(self, length: int) -> bool:
        """Return True for a document that LongRoPE rotates as a long one, cached keys too."""
        scaling = self.rope_scaling
        return isinstance(scaling, LongRopeScaling) and length > scaling.original_max_seq_len

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that RoPE rotates."""
        return int(self.head_dim * self.partial_rotary_factor)


@dataclass(frozen=True, kw_only=True)
class BuiltArchitecture:
    """The description of a model that its family builds itself: what can be known from outside."""

    section: Family
    vocab_size: int
    max_seq_len: int

    mixture: ClassVar[None] = None
    """Experts are inside, where dtt does not see them."""

    @property
    def family(self) -> str:
        """The name of the family."""
        return tag_of(self.section)

    @cached_property
    def skeleton(self) -> Any:  # a Model: the contract is in a module above this one
        """The model without memory for its parameters, to be read only."""
        return self.build()

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self.skeleton.blocks())

    def is_long(self, _length: int) -> bool:
        """Return False: no document is rotated differently for its length."""
        return False

    def build(self) -> Any:
        """Return a new model whose parameters are on the meta device; its buffers have values.

        Raises OwnCodeError for one that does not keep the contract of `dtt.Model`.
        """
        with own_code(self.section, "model"), _parameters_on_meta():
            model = self.section.build(self.vocab_size, self.max_seq_len)
            if not callable(getattr(model, "head_weight", None)):
                raise TypeError(f"build returned {type(model).__name__}, not a dtt.Model")
            rows = model.head_weight().shape[0]
            if rows != self.vocab_size:
                raise ValueError(f"the head has {rows} rows for {self.vocab_size} token ids")
            if not model.blocks():
                raise ValueError("the model has no blocks: put them into self.layers")
            owners: dict[int, str] = {}
            for name, parameter in model.named_parameters(remove_duplicate=False):
                if (other := owners.setdefault(id(parameter), name)) != name:
                    why = "for a tied head, leave `head` out"
                    raise ValueError(f"{other} and {name} are one parameter: {why}")
        model.arch = self
        return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put each new parameter on the meta device, where it takes no memory.

    Buffers stay where they are made: a table of angles has values that no checkpoint keeps, and
    `torch.device("meta")` would lose them.
    """
    from torch import nn

    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # One that is there already stays itself, so that a tie is seen.
        if parameter is not None and not parameter.is_meta:
            values = parameter.data
            parameter = nn.Parameter(values.to("meta"), requires_grad=parameter.requires_grad)
            # Those of a scale or an offset may be set where the module is made, and nowhere else.
            if values.ndim <= 1:
                parameter.initial = values  # type: ignore[attr-defined]
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


AnyArchitecture = Architecture | BuiltArchitecture


def decoder_architecture(arch: AnyArchitecture, what: str) -> Architecture:
    """Return the architecture of dtt's own decoder; raise ConfigError for any other model.

    `what` needs to know the inside of the model.
    """
    if isinstance(arch, BuiltArchitecture):
        raise ConfigError(
            f"{what} cannot be used with a model that its family builds itself",
            where=f"model.family={arch.family}",
            why="it needs to know the inside of the model",
        )
    return arch


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def fit_vocabulary(cfg: AnyModel, tokenizer_size: int) -> int:
    """Return the number of rows of the embedding.

    Without `model.vocab_size` this is the tokenizer's size, rounded up to a multiple of 64. Raises
    ConfigError if the tokenizer has more ids than `model.vocab_size`.
    """
    if cfg.vocab_size is None:
        # Matrix kernels are fastest with sizes that fill their tiles, and 64 divides evenly over 2
        # to 64 tensor-parallel ranks. At most 63 rows are never used.
        return round_up(tokenizer_size, 64)
    if cfg.vocab_size < tokenizer_size:
        raise ConfigError(
            f"model.vocab_size ({cfg.vocab_size}) is smaller than the tokenizer's vocabulary"
            f" ({tokenizer_size})",
            why="token ids would lie outside the embedding",
            next="set model.vocab_size=null to take the tokenizer's, or use another tokenizer",
        )
    return cfg.vocab_size


def fit_context(cfg: AnyModel, seq_len: int) -> int:
    """Return the maximum context length in tokens.

    Raises ConfigError if training sequences are longer than `model.max_seq_len`.
    """
    if cfg.max_seq_len is None:
        return seq_len
    if cfg.max_seq_len < seq_len:
        raise ConfigError(
            f"train.seq_len ({seq_len}) is longer than model.max_seq_len ({cfg.max_seq_len})",
            next=f"set train.seq_len={cfg.max_seq_len}, or raise model.max_seq_len",
        )
    return cfg.max_seq_len
