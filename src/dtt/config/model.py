"""Keys of the model: its family and its sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from dtt.config.base import Depth, Section, Size, Tokens32
from dtt.config.value_types import DEFAULT_STD, Std

TIED = ("gpt2", "gemma3", "smollm3")
"""Families whose head is tied to the embedding by default."""
MIXTURES = "mixtral", "qwen3_moe", "olmoe", "dots1"
"""Families with a mixture of experts instead of the MLP."""
ROPE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "smollm3", "olmo2", "olmo3"),
    *MIXTURES,
)
ONLY_FOR: dict[str, tuple[str, ...]] = {
    "rope_theta": ROPE,
    "rope_scaling": ROPE,
    "rope_local_theta": ("gemma3",),
    "partial_rotary_factor": ("phi3",),
    "no_rope_layer_interval": ("smollm3",),
    "window": ("mistral", "mixtral", "qwen2", "qwen3", "gemma3", "phi3", "olmo3"),
    "window_pattern": ("gemma3", "olmo3"),
    "max_window_layers": ("qwen2", "qwen3"),
    "query_pre_attn_scalar": ("gemma3",),
    "logit_softcap": ("gemma3",),
    "n_experts": MIXTURES,
    "experts_per_token": MIXTURES,
    "norm_topk": MIXTURES,
    "expert_ffn_dim": ("qwen3_moe", "dots1"),
    "n_dense_layers": ("qwen3_moe", "dots1"),
    "n_shared_experts": ("dots1",),
    "n_expert_groups": ("dots1",),
    "expert_groups_per_token": ("dots1",),
    "routed_scaling": ("dots1",),
}  # fmt: skip
"""Families in which these keys have an effect; the others would ignore them."""


class Family(Section):
    """A family of models. One of your own defines keys and `build`.

    dtt trains it with DDP, FSDP2 and HSDP, on the data, with the optimizers and schedules and from
    the checkpoints of its own models. What needs to know the inside of a model is refused by name.
    """

    family: str
    """The class of the model, as `FILE.py:CLASS` or `MODULE:CLASS`."""
    vocab_size: Tokens32 | None = None
    """Rows of the embedding matrix; null: the tokenizer's vocabulary size, rounded up to a multiple
    of 64."""
    max_seq_len: Tokens32 | None = None
    """Maximum context length the model declares, in tokens; null: `train.seq_len`."""

    def build(self, vocab_size: int, context: int) -> Any:
        """Return the model, a `dtt.Model`, for a vocabulary and a context length in tokens.

        Its parameters get no memory here, and their values later: see `dtt.Model.init_weights`.
        """
        raise NotImplementedError


class NoRopeScaling(Section):
    """Standard RoPE without scaling."""

    type: Literal["none"] = "none"


class LinearRopeScaling(Section):
    """Linear position interpolation: positions are divided by a factor (arXiv 2306.15595)."""

    type: Literal["linear"] = "linear"
    factor: PositiveFloat = 8.0
    """Factor by which positions are divided."""


class Llama3RopeScaling(Section):
    """Llama 3.1's RoPE scaling: slows down low-frequency rotations by a factor.

    A pair of dimensions has a low frequency if it completes fewer than `low_freq_factor` rotations
    within the original context, and a high frequency if it completes more than `high_freq_factor`.
    High frequencies are unchanged; those in between are interpolated.
    """

    type: Literal["llama3"] = "llama3"
    factor: PositiveFloat = 8.0
    """Factor by which low-frequency rotations are slowed down."""
    low_freq_factor: PositiveFloat = 1.0
    """Rotations within the original context below which a frequency is low."""
    high_freq_factor: PositiveFloat = 4.0
    """Rotations within the original context above which a frequency is high."""
    original_max_seq_len: PositiveInt = 8192
    """Context length before scaling, in tokens."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error if no frequencies lie between low and high."""
        if self.low_freq_factor >= self.high_freq_factor:
            yield "low_freq_factor", f"must be below high_freq_factor ({self.high_freq_factor})"


class YarnRopeScaling(Section):
    """YaRN (Peng et al., arXiv 2309.00071): slows down low-frequency rotations by a factor.

    Frequencies between the two limits are blended linearly by the index of their pair. Cosines and
    sines are multiplied by `attention_factor`.
    """

    type: Literal["yarn"] = "yarn"
    factor: PositiveFloat = 4.0
    """Factor by which low-frequency rotations are slowed down."""
    original_max_seq_len: PositiveInt = 32768
    """Context length before scaling, in tokens."""
    beta_fast: PositiveFloat = 32.0
    """Rotations within the original context above which a frequency is unchanged."""
    beta_slow: PositiveFloat = 1.0
    """Rotations within the original context below which a frequency is divided by `factor`."""
    truncate: bool = True
    """Round the range of blended pairs outwards to whole pairs."""
    attention_factor: PositiveFloat | None = None
    """Multiplier of cosines and sines; null: 0.1 * ln(factor) + 1, or 1 if `factor` is below 1."""


class LongRopeScaling(Section):
    """LongRoPE (Ding et al., arXiv 2402.13753): a factor for the frequency of each pair.

    The factors depend on the length of the document: up to `original_max_seq_len` tokens, or more.
    """

    type: Literal["longrope"] = "longrope"
    short_factor: tuple[PositiveFloat, ...]
    """Divisors of the frequencies in short documents, one per pair of dimensions."""
    long_factor: tuple[PositiveFloat, ...]
    """Divisors of the frequencies in long documents, one per pair of dimensions."""
    original_max_seq_len: PositiveInt = 4096
    """Maximum length of a short document, in tokens."""
    attention_factor: PositiveFloat = 1.0
    """Multiplier of cosines and sines. `init.from` sets it to sqrt(1 + ln(s) / ln(original)) for a
    context that is s times the original one, unless config.json has it."""


RopeScaling = Annotated[
    NoRopeScaling | LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling | LongRopeScaling,
    Field(discriminator="type"),
]


class ModelConfig(Section):
    """A decoder-only transformer. The family sets the architecture, the other keys its sizes."""

    family: Literal[
        "gpt2",
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma3",
        "phi3",
        "smollm3",
        "olmo2",
        "olmo3",
        "mixtral",
        "qwen3_moe",
        "olmoe",
        "dots1",
    ] = "llama"
    """Published architecture: `gpt2` (learned positions, LayerNorm, GELU, biases), `llama` (RoPE,
    RMSNorm, SwiGLU, grouped-query attention), `mistral` (Llama with sliding-window attention),
    `qwen2` (Qwen2 and Qwen2.5: Llama with biases of queries, keys and values), `qwen3` (Llama with
    QK-norm), `gemma3` (sliding windows in most layers, pre- and post-norms, GeGLU), `phi3` (Phi-3
    and Phi-4: Llama with fused projections), `smollm3` (Llama without RoPE in every fourth layer),
    `olmo2` (Llama with post-norms and QK-norm over all heads), `olmo3` (the same with sliding
    windows in most layers), or with a mixture of experts `mixtral`, `qwen3_moe`, `olmoe` (QK-norm
    over all heads) or `dots1` (sigmoid scores with a correction, groups and shared experts)."""
    dim: Size = 256
    """Width of the residual stream."""
    n_layers: Depth = 6
    """Number of transformer blocks."""
    n_heads: Size = 4
    """Number of query heads."""
    n_kv_heads: Size | None = None
    """Number of key/value heads (grouped-query attention); null: equal to `n_heads`."""
    head_dim: Size | None = None
    """Width of one head; null: `dim / n_heads`."""
    ffn_dim: Size | None = None
    """Hidden width of the MLP; null: `4 * dim` for gpt2, `8/3 * dim` rounded up to a multiple of
    64 for the others."""
    vocab_size: Tokens32 | None = None
    """Rows of the embedding matrix; null: the tokenizer's vocabulary size, rounded up to a multiple
    of 64."""
    max_seq_len: Tokens32 | None = None
    """Maximum context length the model declares, in tokens; null: `train.seq_len`."""
    tie_embeddings: bool | None = None
    """Share the weights of the input embedding with the output head; null: true for gpt2,
    gemma3 and smollm3."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the normalization layers."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding (all but gpt2)."""
    rope_local_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding in layers with a window (gemma3)."""
    rope_scaling: RopeScaling = NoRopeScaling()
    """Scaling of the rotary embedding beyond its original context; not applied in layers with a
    window of gemma3 and olmo3. phi3 has `longrope`, which only it has, or none."""
    partial_rotary_factor: float = Field(default=1.0, gt=0.0, le=1.0)
    """Fraction of the dimensions of each head that RoPE rotates, the first ones (phi3)."""
    no_rope_layer_interval: PositiveInt = 4
    """Interval of layers without a rotary embedding: every N-th layer (smollm3)."""
    window: Tokens32 | None = None
    """Sliding window: number of tokens each token attends to, itself included (mistral, qwen2,
    qwen3, gemma3, phi3, olmo3); null: 512 for gemma3, 4096 for olmo3, no window for the others."""
    window_pattern: PositiveInt | None = None
    """Interval of layers with full causal attention instead of a window: every N-th layer (gemma3,
    olmo3); null: 6 for gemma3, 4 for olmo3."""
    max_window_layers: int = Field(default=0, ge=0)
    """Number of first layers with full causal attention instead of a window (qwen2, qwen3)."""
    query_pre_attn_scalar: PositiveInt | None = None
    """Attention scores are divided by the square root of this number (gemma3); null: `head_dim`."""
    logit_softcap: PositiveFloat | None = None
    """Soft-cap of the logits: x becomes c * tanh(x / c) (gemma3); null: none."""
    n_experts: Size = 8
    """Number of experts of a layer (mixtures)."""
    experts_per_token: Size = 2
    """Number of experts that compute each token (mixtures)."""
    expert_ffn_dim: Size | None = None
    """Hidden width of an expert (qwen3_moe, dots1); null: `ffn_dim`."""
    norm_topk: bool | None = None
    """Divide the scores of a token's experts by their sum (mixtures); null: true for all but
    olmoe."""
    n_dense_layers: int = Field(default=0, ge=0)
    """Number of first layers with an ordinary MLP, of width `ffn_dim` (qwen3_moe, dots1)."""
    n_shared_experts: int = Field(default=1, ge=1)
    """Number of experts that compute all tokens, as one MLP of their common width (dots1)."""
    n_expert_groups: Size = 1
    """Number of groups of experts (dots1)."""
    expert_groups_per_token: Size = 1
    """Number of groups whose experts may compute a token, those with the highest scores (dots1)."""
    routed_scaling: PositiveFloat = 1.0
    """Multiplier of the weights of a token's experts (dots1)."""
    init_std: Std = DEFAULT_STD
    """Standard deviation of the initial weights; for matrices that write into the residual stream
    it is divided by sqrt(2 * n_layers) (GPT-2, section 2.3). Or one by role, such as `{matrix:
    0.02, embed: 1.0, head: 0, output: 0}`: `output` is that of the matrices that write into the
    residual stream (attn.o, mlp.down), which nothing divides. Roles left out have that of
    `matrix`."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on embeddings, attention output and MLP output; usually 0 in modern pretraining."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for each combination of sizes that cannot work."""
        # An explicit head_dim makes dim % n_heads irrelevant, but transformers' Llama and Gemma 3
        # require it to be 0 in any case.
        if self.dim % self.n_heads and (not self.head_dim or self.family in ("llama", "gemma3")):
            yield "n_heads", f"n_heads ({self.n_heads}) does not divide dim ({self.dim})"
        elif self.family != "gpt2" and self.resolved_head_dim % 2:
            yield "head_dim", f"RoPE needs an even head_dim, got {self.resolved_head_dim}"
        yield from self._rope_problems()
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            yield (
                "n_kv_heads",
                f"n_kv_heads ({self.n_kv_heads}) does not divide n_heads ({self.n_heads})",
            )
        if self.family == "gpt2":
            if self.n_kv_heads not in (None, self.n_heads):
                yield "n_kv_heads", "gpt2 does not support grouped heads: omit n_kv_heads"
            if self.resolved_head_dim * self.n_heads != self.dim:
                yield "head_dim", "gpt2 needs head_dim * n_heads == dim: omit head_dim"
        tied = self.family in TIED if self.tie_embeddings is None else self.tie_embeddings
        if tied and isinstance(self.init_std, dict) and "head" in self.init_std:
            yield "init_std", "the head is tied to the embedding: set embed, and omit head"
        if self.family in MIXTURES:
            yield from self._mixture_problems()
        for key, families in ONLY_FOR.items():
            if self.family not in families and getattr(self, key) != getattr(_DEFAULTS, key):
                yield key, f"{self.family} has no {key}, only {', '.join(families)}: omit it"

    def _mixture_problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for numbers of experts that contradict each other."""
        groups, experts = self.n_expert_groups, self.n_experts
        if experts % groups:
            yield "n_expert_groups", f"{groups} groups do not divide {experts} experts"
            return
        if self.expert_groups_per_token > groups:
            yield "expert_groups_per_token", f"more than the {groups} groups"
        # A group is judged by its two best experts.
        if groups > 1 and experts // groups < 2:
            yield "n_expert_groups", "a group needs at least two experts"
        candidates = experts // groups * min(self.expert_groups_per_token, groups)
        if self.experts_per_token > candidates:
            yield "experts_per_token", f"only {candidates} experts can compute a token"

    def _rope_problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for each setting of RoPE that does not fit the heads or the family."""
        rotated = int(self.resolved_head_dim * self.partial_rotary_factor)
        if self.partial_rotary_factor != 1.0 and (rotated % 2 or not rotated):
            yield "partial_rotary_factor", f"RoPE needs an even number of dimensions, got {rotated}"
        scaling = self.rope_scaling
        if (self.family == "phi3") != isinstance(scaling, LongRopeScaling) and not isinstance(
            scaling, NoRopeScaling
        ):
            yield "rope_scaling", f"{self.family} has no {scaling.type}: longrope is phi3's"
        if self.family in ("gemma3", "olmo3") and getattr(scaling, "truncate", None) is False:
            # transformers 5 looks for it beside the types of layers, and so never finds it: no
            # export would compute what was trained.
            yield (
                "rope_scaling.truncate",
                f"transformers does not read it for {self.family}: omit it",
            )
        if isinstance(scaling, LongRopeScaling):
            # transformers derives the number of pairs from the width, not from head_dim.
            if self.resolved_head_dim * self.n_heads != self.dim:
                yield "head_dim", "longrope needs head_dim * n_heads == dim: omit head_dim"
            for key in ("short_factor", "long_factor"):
                if (found := len(getattr(scaling, key))) != rotated // 2:
                    why = f"{key} has {found} numbers, for {rotated // 2} pairs of dimensions"
                    yield "rope_scaling", why

    @property
    def resolved_head_dim(self) -> int:
        """The width of one head: `head_dim`, or `dim // n_heads` if it is null."""
        return self.head_dim or self.dim // self.n_heads


_DEFAULTS = ModelConfig()
AnyModel = ModelConfig | Family
"""A section `model`; the second may be one of a user's own."""
