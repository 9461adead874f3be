"""How rates and initial weights follow from the shape of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from dtt.config.base import Section


class StandardConfig(Section):
    """Rates and initial weights as they are given, whatever the shape."""

    type: Literal["standard"] = "standard"


class MupConfig(Section):
    """The maximal update parametrization (Yang et al., arXiv 2203.03466, table 8).

    What was tuned on the base model holds on wider ones: rates, `model.init_std` and weight decay
    are those of the base, and dtt works out what they come to at this model's shape. At the base
    shape itself nothing changes.
    """

    type: Literal["mup"] = "mup"
    base_dim: PositiveInt | None = None
    """`model.dim` of the base, whose other widths (heads, MLP) are taken to be in proportion."""
    base_head_dim: PositiveInt | None = None
    """`head_dim` of the base; null: this model's, which then has more heads and no larger ones."""
    depth: Literal["none", "sqrt", "linear"] = "none"
    """What sub-layers add is divided by the root of `n_layers / base_layers` (`sqrt`: Depth-muP,
    arXiv 2310.02244) or by all of it (`linear`: CompleteP, arXiv 2505.01618), with the rates that
    go with it; `none`: only widths change."""
    base_layers: PositiveInt | None = None
    """`model.n_layers` of the base; needed unless `depth` is `none`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """There must be a base: muP says how a model differs from it."""
        if self.base_dim is None:
            yield "base_dim", "muP needs the width of the model that was tuned, as base_dim=256"
        if self.depth != "none" and self.base_layers is None:
            yield "base_layers", f"depth={self.depth} needs the layers of the model that was tuned"


ScalingConfig = Annotated[StandardConfig | MupConfig, Field(discriminator="type")]
