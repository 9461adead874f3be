"""How many parameters and how many floating-point operations, from the architecture alone."""

from __future__ import annotations

from dtt.model.architecture import Architecture


def parameters(arch: Architecture) -> int:
    """Number of trainable numbers; a tied head is counted once."""
    positions = arch.max_seq_len * arch.dim if arch.position == "learned" else 0
    heads = arch.vocab_size * arch.dim * (1 if arch.tie_embeddings else 2)
    layer = _matrices(arch) + _biases(arch) + _norms(arch)
    return heads + positions + arch.n_layers * layer + _norm(arch, arch.dim)


def flops_per_token(arch: Architecture, seq_len: int, *, causal: bool = False) -> int:
    """Floating-point operations of forward and backward per trained token, for MFU.

    6 per parameter in a matrix product (the head is one, the input embedding is none) plus
    12 * (n_heads * head_dim) * seq_len for the attention of each layer, the causal half not
    discounted: torchtitan's count, after PaLM (Chowdhery et al., 2022), appendix B. Unlike there,
    a layer with a window counts that many tokens, where the sequence is longer. `causal`: only the
    tokens that each can see count, w - w^2 / (2 * seq_len) of w on average.
    """
    products = arch.n_layers * _matrices(arch) + arch.vocab_size * arch.dim
    widths = [min(window or seq_len, seq_len) for window in arch.windows]
    attended = sum(w - w * w // (2 * seq_len) if causal else w for w in widths)
    return 6 * products + 12 * arch.n_heads * arch.head_dim * attended


def _matrices(arch: Architecture) -> int:
    """Weights of one layer's matrices."""
    attention = 2 * arch.dim * arch.head_dim * (arch.n_heads + arch.n_kv_heads)
    return attention + (2 if arch.mlp == "gelu" else 3) * arch.dim * arch.ffn_dim


def _biases(arch: Architecture) -> int:
    """Biases of one layer's matrices."""
    if not arch.bias:
        return 0
    attention = arch.head_dim * (arch.n_heads + 2 * arch.n_kv_heads) + arch.dim
    return attention + arch.ffn_dim * (1 if arch.mlp == "gelu" else 2) + arch.dim


def _norms(arch: Architecture) -> int:
    """Weights and biases of one layer's norms."""
    heads = 2 * _norm(arch, arch.head_dim) if arch.qk_norm else 0
    return heads + (4 if arch.sandwich_norm else 2) * _norm(arch, arch.dim)


def _norm(arch: Architecture, width: int) -> int:
    return width * (2 if arch.norm == "layernorm" else 1)
