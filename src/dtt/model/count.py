"""Parameter and FLOP counts of an architecture."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from dtt.model.architecture import Architecture

Shape = tuple[int, ...]


def parameters(arch: Architecture) -> int:
    """Return the number of trainable parameters; a tied head is counted once."""
    positions = arch.max_seq_len * arch.dim if arch.position == "learned" else 0
    heads = arch.vocab_size * arch.dim * (1 if arch.tie_embeddings else 2)
    layer = sum(map(prod, layer_shapes(arch).values()))
    norm = sum(map(prod, _norm_shapes(arch, "norm", arch.dim).values()))
    return heads + positions + arch.n_layers * layer + norm


def flops_per_token(
    arch: Architecture, seq_len: int, *, causal: bool = False, adapter: int = 0
) -> int:
    """Return the FLOPs of the forward and backward pass per trained token, for MFU.

    6 per parameter in a matrix multiplication (the head is one, the input embedding is none) plus
    12 * (n_heads * head_dim) * seq_len for the attention of each layer. The causal mask does not
    halve this: the count is torchtitan's, after PaLM (Chowdhery et al., 2022), appendix B. Unlike
    torchtitan, a layer with a sliding window w counts min(w, seq_len) tokens. With `causal`, only
    visible tokens count: w - w^2 / (2 * seq_len) instead of w on average. With an `adapter` of
    this many weights, the others are frozen, and have 4 FLOPs, without that of their gradient.
    """
    # The head multiplies every token, also if it is tied. The input embedding is a lookup.
    matmul_weights = arch.n_layers * active_weights(layer_shapes(arch).values(), 0)
    matmul_weights += arch.vocab_size * arch.dim
    widths = [min(window or seq_len, seq_len) for window in arch.windows]
    attended = sum(w - w * w // (2 * seq_len) if causal else w for w in widths)
    per_weight = 4 if adapter else 6
    return per_weight * matmul_weights + 6 * adapter + 12 * arch.n_heads * arch.head_dim * attended


def active_weights(shapes: Iterable[Shape], experts_per_token: int) -> int:
    """Return the number of weights that multiply each token.

    A matrix [out, in] counts in full. In a stack [experts, out, in], only the
    `experts_per_token` matrices that a token is routed to count. Biases and norms do not count.
    """
    matrices = (shape for shape in shapes if len(shape) > 1)
    return sum(
        prod(shape[-2:]) * (experts_per_token if len(shape) == 3 else 1) for shape in matrices
    )


def layer_shapes(arch: Architecture) -> dict[str, Shape]:
    """Return the shape of each parameter of one layer, by its name within the layer."""
    dim, q, kv = arch.dim, arch.n_heads * arch.head_dim, arch.n_kv_heads * arch.head_dim
    matrices = {
        "attn.q": (q, dim),
        "attn.k": (kv, dim),
        "attn.v": (kv, dim),
        "attn.o": (dim, q),
        "mlp.up": (arch.ffn_dim, dim),
        "mlp.down": (dim, arch.ffn_dim),
    }
    if arch.mlp != "gelu":
        matrices["mlp.gate"] = (arch.ffn_dim, dim)
    shapes: dict[str, Shape] = {f"{name}.weight": shape for name, shape in matrices.items()}
    with_bias = {"none": (), "qkv": ("attn.q", "attn.k", "attn.v"), "all": tuple(matrices)}
    shapes |= {f"{name}.bias": matrices[name][:1] for name in with_bias[arch.bias]}
    norms: dict[str, int] = {}
    if arch.norm_placement != "post":
        norms |= dict.fromkeys(("attn_norm", "mlp_norm"), dim)
    if arch.norm_placement != "pre":
        norms |= dict.fromkeys(("attn_post_norm", "mlp_post_norm"), dim)
    if arch.qk_norm != "none":
        of_head = arch.qk_norm == "head"
        norms |= {"attn.q_norm": arch.head_dim if of_head else q}
        norms |= {"attn.k_norm": arch.head_dim if of_head else kv}
    for name, width in norms.items():
        shapes |= _norm_shapes(arch, name, width)
    return shapes


def _norm_shapes(arch: Architecture, name: str, width: int) -> dict[str, Shape]:
    """Return the shapes of the parameters of the norm `name`."""
    kinds = ("weight", "bias") if arch.norm == "layernorm" else ("weight",)
    return {f"{name}.{kind}": (width,) for kind in kinds}
