"""Parameter and FLOP counts of an architecture."""

from __future__ import annotations

from dtt.model.architecture import Architecture


def parameters(arch: Architecture) -> int:
    """Return the number of trainable parameters; a tied head is counted once."""
    positions = arch.max_seq_len * arch.dim if arch.position == "learned" else 0
    heads = arch.vocab_size * arch.dim * (1 if arch.tie_embeddings else 2)
    layer = _matrices(arch) + _biases(arch) + _norms(arch)
    return heads + positions + arch.n_layers * layer + _norm(arch, arch.dim)


def flops_per_token(arch: Architecture, seq_len: int, *, causal: bool = False) -> int:
    """Return the FLOPs of the forward and backward pass per trained token, for MFU.

    6 per parameter in a matrix multiplication (the head is one, the input embedding is none) plus
    12 * (n_heads * head_dim) * seq_len for the attention of each layer. The causal mask does not
    halve this: the count is torchtitan's, after PaLM (Chowdhery et al., 2022), appendix B. Unlike
    torchtitan, a layer with a sliding window w counts min(w, seq_len) tokens. With `causal`, only
    visible tokens count: w - w^2 / (2 * seq_len) instead of w on average.
    """
    products = arch.n_layers * _matrices(arch) + arch.vocab_size * arch.dim
    widths = [min(window or seq_len, seq_len) for window in arch.windows]
    attended = sum(w - w * w // (2 * seq_len) if causal else w for w in widths)
    return 6 * products + 12 * arch.n_heads * arch.head_dim * attended


def _matrices(arch: Architecture) -> int:
    """Return the number of weights in one layer's matrices."""
    attention = 2 * arch.dim * arch.head_dim * (arch.n_heads + arch.n_kv_heads)
    return attention + (2 if arch.mlp == "gelu" else 3) * arch.dim * arch.ffn_dim


def _biases(arch: Architecture) -> int:
    """Return the number of biases of one layer's linear layers."""
    if not arch.bias:
        return 0
    attention = arch.head_dim * (arch.n_heads + 2 * arch.n_kv_heads) + arch.dim
    return attention + arch.ffn_dim * (1 if arch.mlp == "gelu" else 2) + arch.dim


def _norms(arch: Architecture) -> int:
    """Return the number of weights and biases of one layer's norms."""
    heads = 2 * _norm(arch, arch.head_dim) if arch.qk_norm else 0
    return heads + (4 if arch.sandwich_norm else 2) * _norm(arch, arch.dim)


def _norm(arch: Architecture, width: int) -> int:
    return width * (2 if arch.norm == "layernorm" else 1)
