"""What rates and initial weights come to at a model's shape: as given, or by muP.

Under muP (Yang et al., arXiv 2203.03466, table 8, the variant in which a tied head is nothing
special) a model takes over what was tuned on its base. With m = dim / base dim, these are the
factors on what the base has:

                 forward pass                      initial std      rate, AdamW   rate, Muon
    embed        1                                 1                1             -
    head         1/m on the hidden states          1                1             -
    vector       -                                 -                1             -
    matrix       attention: 1/head_dim, not root   1/sqrt(m)        1/m           see below

Muon's update is orthogonal, so its spectral norm is its scale. What must stay the same is that norm
over sqrt(fan_out / fan_in) (Yang, Simon & Bernstein, arXiv 2310.17813), and so at fixed proportions
the norm itself: with the scale sqrt(max(1, rows / columns)) the factor on the rate is 1, with
0.2 * sqrt(max(rows, columns)), which grows as sqrt(m), it is 1/sqrt(m).

With l = n_layers / base layers, `depth` multiplies what each sub-layer adds by l**-a, and the rates
of all that is in the layers by l**(a - 1): a = 1/2 (Depth-muP, arXiv 2310.02244) or 1 (CompleteP,
arXiv 2505.01618). Rate times weight decay stays as on the base: so many steps after which weights
are forgotten (Wang & Aitchison, arXiv 2405.13698). AdamW's eps stays, too: it should be far below
gradients of any width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from dtt.config.optim import MuonConfig, OptimConfig
from dtt.config.run import RunConfig
from dtt.config.scaling import MupConfig, StandardConfig
from dtt.model import families
from dtt.model.architecture import Architecture

ALPHA = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True)
class Scaling:
    """A model and the base whose settings it takes over. Unscaled, a model is its own base."""

    arch: Architecture
    """With its multipliers set."""
    base: Architecture
    """As deep as `arch` unless depth is scaled."""
    alpha: float
    """Power of the depth by which what sub-layers add is divided."""

    @property
    def width(self) -> float:
        """How many times as wide as the base."""
        return self.arch.dim / self.base.dim

    @property
    def depth(self) -> float:
        """How many times as deep as the base."""
        return self.arch.n_layers / self.base.n_layers

    def learning_rates(
        self, optim: OptimConfig, roles: Mapping[str, str]
    ) -> dict[str, dict[str, float]]:
        """Factors on learning rates by optimizer (`adamw`, `muon`) and parameter.

        `roles` are by parameter, too: matrix | embed | head | vector.
        """
        muon = 0.0 if isinstance(optim, MuonConfig) and optim.scale == "spectral" else 0.5
        return {
            "adamw": {name: self._rate(name, role, 1.0) for name, role in roles.items()},
            "muon": {name: self._rate(name, role, muon) for name, role in roles.items()},
        }

    def _rate(self, name: str, role: str, power: float) -> float:
        """`power` of the width divides the rates of hidden matrices."""
        factor = self.depth ** (self.alpha - 1.0) if name.startswith("layers.") else 1.0
        return factor * self.width**-power if role == "matrix" else factor


def scaled(cfg: RunConfig, tokenizer_size: int) -> Scaling:
    """The architecture of a run, its multipliers set as `scaling` says, and that of its base.

    ConfigError when the tokenizer or the sequences do not fit the model.
    """
    family = families.get(cfg.model.family)
    arch = family.architecture(cfg.model, tokenizer_size, cfg.train.seq_len)
    match cfg.scaling:
        case StandardConfig():
            return Scaling(arch, arch, ALPHA["none"])
        case MupConfig(base_dim=dim, base_head_dim=head_dim, depth=depth, base_layers=layers):
            assert dim is not None
            shape = {
                "dim": dim,
                "head_dim": head_dim or arch.head_dim,
                "n_layers": arch.n_layers if depth == "none" else layers,
            }
            base_model = cfg.model.model_copy(update=shape)
            base = family.architecture(base_model, tokenizer_size, cfg.train.seq_len)
            return Scaling(_with_multipliers(arch, base, ALPHA[depth]), base, ALPHA[depth])
        case _:
            assert_never(cfg.scaling)


def _with_multipliers(arch: Architecture, base: Architecture, alpha: float) -> Architecture:
    """`arch` with the forward pass of the table above; the family's own multipliers are the base's.

    An embedding that the family multiplies by sqrt(dim) would grow with the width, though its
    rows are of one size at all widths: what the base multiplies it by serves all.
    """
    return replace(
        arch,
        embed_scale=base.embed_scale,
        attn_scale=base.attn_scale * (base.head_dim / arch.head_dim),
        residual_scale=base.residual_scale * (base.n_layers / arch.n_layers) ** alpha,
        logit_scale=base.logit_scale * (base.dim / arch.dim),
    )
