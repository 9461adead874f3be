"""How many parameters and how many floating-point operations, from the architecture alone."""

from __future__ import annotations

from dtt.model.architecture import Architecture


def parameters(arch: Architecture) -> int:
    """Number of trainable numbers; a tied head is counted once."""
    positions = arch.max_seq_len * arch.dim if arch.position == "learned" else 0
    heads = arch.vocab_size * arch.dim * (1 if arch.tie_embeddings else 2)
    return heads + positions + arch.n_layers * (_matrices(arch) + _vectors(arch)) + _norm(arch)


def flops_per_token(arch: Architecture, seq_len: int) -> int:
    """Floating-point operations of forward and backward per trained token, for MFU.

    6 per parameter in a matrix product (the head is one, the input embedding is none) plus
    12 * n_layers * (n_heads * head_dim) * seq_len for attention, the causal half not discounted:
    torchtitan's count, after PaLM (Chowdhery et al., 2022), appendix B.
    """
    products = arch.n_layers * _matrices(arch) + arch.vocab_size * arch.dim
    return 6 * products + 12 * arch.n_layers * arch.n_heads * arch.head_dim * seq_len


def _matrices(arch: Architecture) -> int:
    """Weights of one layer's matrices."""
    attention = 2 * arch.dim * arch.head_dim * (arch.n_heads + arch.n_kv_heads)
    return attention + (3 if arch.mlp == "swiglu" else 2) * arch.dim * arch.ffn_dim


def _vectors(arch: Architecture) -> int:
    """Norms and biases of one layer."""
    if not arch.bias:
        return 2 * _norm(arch)
    attention = arch.head_dim * (arch.n_heads + 2 * arch.n_kv_heads) + arch.dim
    mlp = arch.ffn_dim * (2 if arch.mlp == "swiglu" else 1) + arch.dim
    return 2 * _norm(arch) + attention + mlp


def _norm(arch: Architecture) -> int:
    return arch.dim * (2 if arch.norm == "layernorm" else 1)
