"""Folding of forward-pass multipliers into the weights.

The stock classes of transformers implement the multipliers of their family, but not those of muP.
"""

from __future__ import annotations

import re
from dataclasses import replace

from torch import Tensor

from dtt.hf.read import LoadedModel
from dtt.mesh.dtypes import wide
from dtt.model import families
from dtt.model.architecture import Architecture

MODULE = re.compile(r"(?:layers\.\d+\.)?(?P<name>.+?)(?:\.weight|\.bias)?")
"""The name within its layer of the module that a parameter belongs to, or of a stack."""


def fold(trained: LoadedModel) -> LoadedModel:
    """Return an equivalent model whose multipliers are those that its config.json implies.

    The model computes the same function up to rounding. Weights that need no factor are shared, not
    copied.
    """
    family = families.get(trained.decoder.family)
    # As a reader of the folder would: what config.json cannot express is not in it.
    theirs = family.from_hf_config(family.to_hf_config(trained.decoder, trained.end_of_document))
    arch = replace(
        trained.decoder,
        embed_scale=theirs.embed_scale,
        attn_scale=theirs.attn_scale,
        residual_scale=theirs.residual_scale,
        logit_scale=theirs.logit_scale,
    )
    factors = _factors(trained.decoder, arch)
    state = {name: _folded(name, w, factors, arch) for name, w in trained.tensors.items()}
    return replace(trained, arch=arch, state=state)


def _factors(ours: Architecture, theirs: Architecture) -> dict[str, float]:
    """Return the factor for the output of each module, by its name within the layer."""
    embed = ours.embed_scale / theirs.embed_scale
    added = ours.residual_scale / theirs.residual_scale
    logits = ours.logit_scale / theirs.logit_scale
    normed = ours.norm_placement != "pre"
    return {
        "embed": embed,
        # A norm cancels any factor on its input, so the factor goes into the norm's own weight.
        "attn.q_norm" if ours.qk_norm != "none" else "attn.q": ours.attn_scale / theirs.attn_scale,
        "attn_post_norm" if normed else "attn.o": added,
        "mlp_post_norm" if normed else "mlp.down": added,
        "mlp_post_norm" if normed else "mlp.experts.down": added,
        "mlp_post_norm" if normed else "mlp.shared.down": added,
        # In the final norm, not in the head: a tied head is the embedding matrix and so has its
        # factor already, which is divided out here.
        "norm": logits / embed if ours.tie_embeddings else logits,
    }


def _folded(name: str, tensor: Tensor, factors: dict[str, float], arch: Architecture) -> Tensor:
    found = MODULE.fullmatch(name)
    assert found is not None
    factor = factors.get(found["name"], 1.0)
    if factor == 1.0:
        return tensor
    # A product in bf16 would be another weight, by up to 1/512 of it; the export rounds once.
    tensor = wide(tensor)
    if arch.norm == "rmsnorm_plus_one" and found["name"].endswith("norm"):
        # The stored weight is an offset from 1.
        return (1 + tensor) * factor - 1
    return tensor * factor
