"""Learning rates and initial weights at a model's shape: unscaled, or scaled by muP.

muP (Yang et al., arXiv 2203.03466, table 8, the variant without a special case for tied heads)
transfers hyperparameters that were tuned on a smaller base model. With m = dim / base dim, the
settings of the base are multiplied by these factors:

                 forward pass                      initial std      rate, AdamW   rate, Muon
    embed        1                                 1                1             -
    head         1/m on the hidden states          1                1             -
    vector       -                                 -                1             -
    matrix       attention: 1/head_dim, not root   1/sqrt(m)        1/m           see below

Muon's update is orthogonal, so its scale is its spectral norm. muP keeps that norm over
sqrt(fan_out / fan_in) constant (Yang, Simon & Bernstein, arXiv 2310.17813), which at fixed
proportions keeps the norm itself constant. With the scale sqrt(max(1, rows / columns)) the factor
on the rate is therefore 1. With 0.2 * sqrt(max(rows, columns)), which grows as sqrt(m), it is
1/sqrt(m).

With l = n_layers / base layers, `depth` multiplies the output of each sub-layer by l**-a, and the
learning rates of all parameters in the layers by l**(a - 1): a = 1/2 (Depth-muP, arXiv 2310.02244)
or 1 (CompleteP, arXiv 2505.01618). The product of rate and weight decay stays that of the base, so
that weights decay over the same number of steps (Wang & Aitchison, arXiv 2405.13698). AdamW's eps
does not change either: it should be far below the gradients at any width.

A stack [experts, out, in] is scaled as its matrices: fan_in is `in`, fan_out is `out`, and the
number of experts has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, assert_never

from dtt.config.model import Family
from dtt.config.run import RunConfig
from dtt.config.scaling import MupConfig, StandardConfig
from dtt.model import families
from dtt.model.architecture import (
    AnyArchitecture,
    Architecture,
    BuiltArchitecture,
    fit_context,
    fit_vocabulary,
)

if TYPE_CHECKING:
    # It imports torch, which takes seconds: `dtt submit` scales a model only to count its size.
    from dtt.params.table import Param

ALPHA = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True)
class Scaling:
    """A model and the base model whose settings it reuses. An unscaled model is its own base."""

    arch: AnyArchitecture
    """The model's architecture, with its multipliers set."""
    base: AnyArchitecture
    """The base's architecture, with the depth of `arch` unless depth is scaled."""
    alpha: float
    """Exponent a: outputs of sub-layers are multiplied by `depth` ** -alpha."""

    @property
    def width(self) -> float:
        """Ratio of the model's width to the base's."""
        if isinstance(self.arch, BuiltArchitecture) or isinstance(self.base, BuiltArchitecture):
            return 1.0  # muP is refused
        return self.arch.dim / self.base.dim

    @property
    def depth(self) -> float:
        """Ratio of the model's depth to the base's."""
        return self.arch.n_layers / self.base.n_layers

    def lr_factor(self, param: Param, power: float) -> float:
        """Return the learning-rate factor of a parameter; matrices have width ** -`power`."""
        factor = self.depth ** (self.alpha - 1.0) if param.name.startswith("layers.") else 1.0
        return factor * self.width**-power if param.role == "matrix" else factor


def scaled(cfg: RunConfig, tokenizer_size: int) -> Scaling:
    """Return a run's architecture, with the multipliers of its `scaling` section, and its base.

    Raises ConfigError if the tokenizer or the sequences do not fit the model.
    """
    if isinstance(cfg.model, Family):
        built = BuiltArchitecture(
            section=cfg.model,
            vocab_size=fit_vocabulary(cfg.model, tokenizer_size),
            max_seq_len=fit_context(cfg.model, cfg.train.seq_len),
        )
        return Scaling(built, built, ALPHA["none"])
    family = families.get(cfg.model.family)
    arch = family.architecture(cfg.model, tokenizer_size, cfg.train.seq_len)
    match cfg.scaling:
        case StandardConfig():
            return Scaling(arch, arch, ALPHA["none"])
        case MupConfig(base_dim=dim, base_head_dim=head_dim, depth=depth, base_layers=layers):
            # the configuration refuses muP without a base
            assert dim is not None
            shape = {
                "dim": dim,
                "head_dim": head_dim or arch.head_dim,
                # With the depth of the model, the ratio of depths is 1, and no factor depends on
                # depth.
                "n_layers": arch.n_layers if depth == "none" else layers,
            }
            base_model = cfg.model.model_copy(update=shape)
            base = family.architecture(base_model, tokenizer_size, cfg.train.seq_len)
            return Scaling(_with_multipliers(arch, base, ALPHA[depth]), base, ALPHA[depth])
        case _:
            assert_never(cfg.scaling)


def _with_multipliers(arch: Architecture, base: Architecture, alpha: float) -> Architecture:
    """Return `arch` with the forward-pass multipliers of the table above.

    The family's own multipliers are taken from the base. A family that multiplies embeddings by
    sqrt(dim) would otherwise scale them with the width, although muP keeps their entries the same
    size at all widths.
    """
    return replace(
        arch,
        embed_scale=base.embed_scale,
        attn_scale=base.attn_scale * (base.head_dim / arch.head_dim),
        residual_scale=base.residual_scale * (base.n_layers / arch.n_layers) ** alpha,
        logit_scale=base.logit_scale * (base.dim / arch.dim),
    )
