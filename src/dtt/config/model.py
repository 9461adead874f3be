"""The model: which family, and its sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from dtt.config.base import Section

ONLY_FOR: dict[str, tuple[str, ...]] = {
    "rope_theta": ("llama", "mistral", "qwen3", "gemma3"),
    "rope_scaling": ("llama", "mistral", "qwen3", "gemma3"),
    "rope_local_theta": ("gemma3",),
    "window": ("mistral", "gemma3"),
    "window_pattern": ("gemma3",),
    "query_pre_attn_scalar": ("gemma3",),
    "logit_softcap": ("gemma3",),
}
"""Families that have what these keys say; the others would ignore them."""


class NoRopeScaling(Section):
    """Every pair turns as RoPE says."""

    type: Literal["none"] = "none"


class LinearRopeScaling(Section):
    """Positions divided by a factor (position interpolation, arXiv 2306.15595)."""

    type: Literal["linear"] = "linear"
    factor: PositiveFloat = 8.0
    """What positions are divided by."""


class Llama3RopeScaling(Section):
    """Llama 3.1's: slow pairs turn slower by a factor, fast ones as before, others in between.

    A pair is slow when it turns less than `low_freq_factor` times in the original context, fast
    when it turns more than `high_freq_factor` times.
    """

    type: Literal["llama3"] = "llama3"
    factor: PositiveFloat = 8.0
    """How much slower the slow pairs turn."""
    low_freq_factor: PositiveFloat = 1.0
    """Turns in the original context below which a pair is slow."""
    high_freq_factor: PositiveFloat = 4.0
    """Turns in the original context above which a pair is fast."""
    original_max_seq_len: PositiveInt = 8192
    """The original context."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Between slow and fast there must be something."""
        if self.low_freq_factor >= self.high_freq_factor:
            yield "low_freq_factor", f"must be below high_freq_factor ({self.high_freq_factor})"


RopeScaling = Annotated[
    NoRopeScaling | LinearRopeScaling | Llama3RopeScaling, Field(discriminator="type")
]


class ModelConfig(Section):
    """A decoder-only transformer. The family fixes the wiring, these keys fix the sizes."""

    family: Literal["gpt2", "llama", "mistral", "qwen3", "gemma3"] = "llama"
    """Which published architecture: `gpt2` (learned positions, LayerNorm, GELU, biases), `llama`
    (RoPE, RMSNorm, SwiGLU, grouped heads), `mistral` (Llama with a window), `qwen3` (Llama with
    normed queries and keys) or `gemma3` (windows in most layers, norms before and after, GeGLU)."""
    dim: PositiveInt = 256
    """Width of the residual stream."""
    n_layers: PositiveInt = 6
    """Number of transformer blocks."""
    n_heads: PositiveInt = 4
    """Number of query heads."""
    n_kv_heads: PositiveInt | None = None
    """Number of key/value heads (grouped-query attention); null: as many as `n_heads`."""
    head_dim: PositiveInt | None = None
    """Width of one head; null: `dim / n_heads`."""
    ffn_dim: PositiveInt | None = None
    """Hidden width of the MLP; null: `4 * dim` for gpt2, `8/3 * dim` rounded up to a multiple of
    64 for the others."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding; null: the tokenizer's vocabulary, rounded up to a multiple of 64."""
    max_seq_len: PositiveInt | None = None
    """Longest context the model is declared for; null: `train.seq_len`."""
    tie_embeddings: bool | None = None
    """Whether the output head is the input embedding; null: true for gpt2 and gemma3."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the norms."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding (all but gpt2)."""
    rope_local_theta: PositiveFloat = 10_000.0
    """Its base in layers with a window (gemma3)."""
    rope_scaling: RopeScaling = NoRopeScaling()
    """How the rotary embedding reaches beyond its first context; not in gemma3's layers with a
    window."""
    window: PositiveInt | None = None
    """Sliding window: how many tokens one attends to, itself included (mistral, gemma3); null: no
    window for mistral, 512 for gemma3."""
    window_pattern: PositiveInt = 6
    """Every so many layers, one attends to all that came before instead (gemma3)."""
    query_pre_attn_scalar: PositiveInt | None = None
    """Products of queries and keys are divided by its root (gemma3); null: `head_dim`."""
    logit_softcap: PositiveFloat | None = None
    """Squash logits x to c * tanh(x / c) (gemma3); null: leave them."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights; matrices that write into the residual stream get
    this divided by sqrt(2 * n_layers) (GPT-2, section 2.3)."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on embeddings, attention output and MLP output; off in modern pretraining."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Sizes that do not fit together."""
        # With a head_dim of its own it would do, but not in transformers' Llama and Gemma 3.
        if self.dim % self.n_heads and (not self.head_dim or self.family in ("llama", "gemma3")):
            yield "n_heads", f"n_heads ({self.n_heads}) does not divide dim ({self.dim})"
        elif self.family != "gpt2" and self.resolved_head_dim % 2:
            yield "head_dim", f"RoPE needs an even head_dim, got {self.resolved_head_dim}"
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            yield (
                "n_kv_heads",
                f"n_kv_heads ({self.n_kv_heads}) does not divide n_heads ({self.n_heads})",
            )
        if self.family == "gpt2":
            if self.n_kv_heads not in (None, self.n_heads):
                yield "n_kv_heads", "gpt2 has no grouped heads: leave n_kv_heads out"
            if self.resolved_head_dim * self.n_heads != self.dim:
                yield "head_dim", "gpt2 needs head_dim * n_heads == dim: leave head_dim out"
        for key, families in ONLY_FOR.items():
            if self.family not in families and getattr(self, key) != getattr(_DEFAULTS, key):
                yield key, f"{self.family} has no {key}, only {', '.join(families)}: leave it out"

    @property
    def resolved_head_dim(self) -> int:
        """`head_dim`, or what `dim` and `n_heads` imply."""
        return self.head_dim or self.dim // self.n_heads


_DEFAULTS = ModelConfig()
