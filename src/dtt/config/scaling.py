"""Keys that scale learning rates and initial weights with the shape of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from dtt.config.base import Section


class StandardConfig(Section):
    """No scaling: rates and initial weights are used as given, whatever the shape."""

    type: Literal["standard"] = "standard"


class MupConfig(Section):
    """The maximal update parametrization (Yang et al., arXiv 2203.03466, table 8).

    Hyperparameters tuned on a base model transfer to wider ones: learning rates, `model.init_std`
    and weight decay are those of the base, and dtt derives their values for this model's shape. At
    the base shape they are unchanged.
    """

    type: Literal["mup"] = "mup"
    base_dim: PositiveInt | None = None
    """`model.dim` of the base model; its other widths (heads, MLP) are assumed to be in
    proportion."""
    base_head_dim: PositiveInt | None = None
    """`head_dim` of the base model; null: that of this model, which is then wider by having more
    heads."""
    depth: Literal["none", "sqrt", "linear"] = "none"
    """Depth scaling: the output of each sub-layer is divided by the square root of
    `n_layers / base_layers` (`sqrt`: Depth-muP, arXiv 2310.02244) or by `n_layers / base_layers`
    itself (`linear`: CompleteP, arXiv 2505.01618), with the matching learning rates; `none`: only
    widths are scaled."""
    base_layers: PositiveInt | None = None
    """`model.n_layers` of the base model; required unless `depth` is `none`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for missing sizes of the base model, to which muP compares the model."""
        if self.base_dim is None:
            yield (
                "base_dim",
                "muP needs the width of the model that was tuned, such as base_dim=256",
            )
        if self.depth != "none" and self.base_layers is None:
            yield "base_layers", f"depth={self.depth} needs the layers of the model that was tuned"


ScalingConfig = Annotated[StandardConfig | MupConfig, Field(discriminator="type")]
