"""The model: which family, and its sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from dtt.config.base import Section


class ModelConfig(Section):
    """A decoder-only transformer. The family fixes the wiring, these keys fix the sizes."""

    family: Literal["gpt2", "llama"] = "llama"
    """Which published architecture: `gpt2` (learned positions, LayerNorm, GELU, biases) or
    `llama` (RoPE, RMSNorm, SwiGLU, grouped heads)."""
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
    64 for llama."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding; null: the tokenizer's vocabulary, rounded up to a multiple of 64."""
    max_seq_len: PositiveInt | None = None
    """Longest context the model is declared for; null: `train.seq_len`."""
    tie_embeddings: bool | None = None
    """Whether the output head is the input embedding; null: true for gpt2, false for llama."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the norms."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding (llama)."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights; matrices that write into the residual stream get
    this divided by sqrt(2 * n_layers) (GPT-2, section 2.3)."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on embeddings, attention output and MLP output; off in modern pretraining."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Sizes that do not fit together."""
        if self.head_dim is None and self.dim % self.n_heads:
            yield "n_heads", f"n_heads ({self.n_heads}) does not divide dim ({self.dim})"
        elif self.family == "llama" and self.resolved_head_dim % 2:
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

    @property
    def resolved_head_dim(self) -> int:
        """`head_dim`, or what `dim` and `n_heads` imply."""
        return self.head_dim or self.dim // self.n_heads
