"""Parameter and FLOP counts of an architecture."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from dtt.model.architecture import AnyArchitecture, Architecture, BuiltArchitecture

Shape = tuple[int, ...]


def parameters(arch: AnyArchitecture) -> int:
    """Return the number of trainable parameters; a tied head is counted once."""
    if isinstance(arch, BuiltArchitecture):
        return sum(parameter.numel() for parameter in arch.skeleton.parameters())
    positions = arch.max_seq_len * arch.dim if arch.position == "learned" else 0
    heads = arch.vocab_size * arch.dim * (1 if arch.tie_embeddings else 2)
    layers = sum(prod(s) for i in range(arch.n_layers) for s in layer_shapes(arch, i).values())
    norm = sum(map(prod, _norm_shapes(arch, "norm", arch.dim).values()))
    return heads + positions + layers + norm


def active_parameters(arch: AnyArchitecture) -> int:
    """Return the number of trainable parameters that compute a token, with the embedding."""
    if isinstance(arch, BuiltArchitecture) or arch.mixture is None:
        return parameters(arch)
    idle = arch.mixture.experts - arch.mixture.per_token
    mixtures = arch.n_layers - arch.mixture.dense_layers
    return parameters(arch) - mixtures * idle * 3 * arch.dim * arch.mixture.ffn_dim


def flops_per_token(
    arch: AnyArchitecture, seq_len: int, *, causal: bool = False, adapter: int = 0
) -> int:
    """Return the FLOPs of the forward and backward pass per trained token, for MFU.

    6 per parameter in a matrix multiplication (the head is one, the input embedding is none) plus
    12 * (n_heads * head_dim) * seq_len for the attention of each layer. The causal mask does not
    halve this: the count is torchtitan's, after PaLM (Chowdhery et al., 2022), appendix B. Unlike
    torchtitan, a layer with a sliding window w counts min(w, seq_len) tokens. With `causal`, only
    visible tokens count: w - w^2 / (2 * seq_len) instead of w on average. With an `adapter` of
    this many weights, the others are frozen, and have 4 FLOPs, without that of their gradient.
    """
    if isinstance(arch, BuiltArchitecture):
        return _counted_flops(arch, seq_len, adapter)
    # The head multiplies every token, also if it is tied. The input embedding is a lookup.
    per_token = 0 if arch.mixture is None else arch.mixture.per_token
    matmul_weights = sum(
        active_weights(layer_shapes(arch, i).values(), per_token) for i in range(arch.n_layers)
    )
    matmul_weights += arch.vocab_size * arch.dim
    widths = [min(window or seq_len, seq_len) for window in arch.windows]
    attended = sum(w - w * w // (2 * seq_len) if causal else w for w in widths)
    per_weight = 4 if adapter else 6
    return per_weight * matmul_weights + 6 * adapter + 12 * arch.n_heads * arch.head_dim * attended


def _counted_flops(arch: BuiltArchitecture, seq_len: int, adapter: int) -> int:
    """Return the FLOPs per token that torch counts in a forward pass, and those of a backward pass.

    The latter has twice as many, or as many below an adapter. The tensors have no values. Kernels
    that torch does not know count 0.
    """
    from copy import deepcopy

    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model = deepcopy(arch.skeleton).to("meta")
    tokens_1T = torch.zeros(1, seq_len, dtype=torch.long, device="meta")
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(tokens_1T)
        forward: int = counter.get_total_flops() // seq_len
    except (NotImplementedError, RuntimeError, ValueError):
        # The rows of an expert depend on values. Without attention, then, whose part is small.
        forward = 2 * _multiplied(model)
    return 2 * forward + 6 * adapter if adapter else 3 * forward


def _multiplied(model: Any) -> int:
    """Return the number of weights of a `Model` that multiply each token."""
    share = model.active_share()
    found = 0.0
    for name, parameter in model.named_parameters():
        if model.role(name, parameter) not in ("vector", "embed", "balance"):
            found += parameter.numel() * (share if parameter.ndim == 3 else 1.0)
    head: int = model.head_weight().numel()
    tied = not any(model.role(n, p) == "head" for n, p in model.named_parameters())
    return round(found) + tied * head


def active_weights(shapes: Iterable[Shape], experts_per_token: int) -> int:
    """Return the number of weights that multiply each token.

    A matrix [out, in] counts in full. In a stack [experts, out, in], only the
    `experts_per_token` matrices that a token is routed to count. Biases and norms do not count.
    """
    matrices = (shape for shape in shapes if len(shape) > 1)
    return sum(
        prod(shape[-2:]) * (experts_per_token if len(shape) == 3 else 1) for shape in matrices
    )


def layer_shapes(arch: Architecture, layer: int) -> dict[str, Shape]:
    """Return the shape of each parameter of a layer, by its name within the layer."""
    dim, q, kv = arch.dim, arch.n_heads * arch.head_dim, arch.n_kv_heads * arch.head_dim
    matrices = {
        "attn.q": (q, dim),
        "attn.k": (kv, dim),
        "attn.v": (kv, dim),
        "attn.o": (dim, q),
    }
    mixture = arch.mixture_of(layer)
    stacks: dict[str, Shape] = {}
    if mixture is None:
        matrices |= _mlp_shapes(arch, "mlp", arch.ffn_dim)
    else:
        matrices["mlp.router"] = (mixture.experts, dim)
        if mixture.shared_dim:
            matrices |= _mlp_shapes(arch, "mlp.shared", mixture.shared_dim)
        stacks = {
            name: (mixture.experts, *shape)
            for name, shape in _mlp_shapes(arch, "mlp.experts", mixture.ffn_dim).items()
        }
        if mixture.corrected:
            stacks["mlp.router.balance"] = (mixture.experts,)
    shapes: dict[str, Shape] = {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= stacks
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


def _mlp_shapes(arch: Architecture, name: str, width: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of the matrices of an MLP of this width."""
    shapes = {f"{name}.up": (width, arch.dim), f"{name}.down": (arch.dim, width)}
    return shapes if arch.mlp == "gelu" else shapes | {f"{name}.gate": (width, arch.dim)}


def _norm_shapes(arch: Architecture, name: str, width: int) -> dict[str, Shape]:
    """Return the shapes of the parameters of the norm `name`."""
    kinds = ("weight", "bias") if arch.norm == "layernorm" else ("weight",)
    return {f"{name}.{kind}": (width,) for kind in kinds}
