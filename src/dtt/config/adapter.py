"""Keys of adapters, a tagged union: `type` selects one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from dtt.config.base import Section

ALL_LINEAR = "all-linear"


class NoAdapterConfig(Section):
    """No adapter: all weights are trained."""

    type: Literal["none"] = "none"


class LoraConfig(Section):
    """Low-rank adaptation (LoRA, Hu et al. 2021, arXiv 2106.09685): W x + s B A x, W frozen.

    A has the shape [rank, in] and B, which starts as zero, [out, rank]. Only they are trained and
    saved, so `init.from` must name the weights W.
    """

    type: Literal["lora"] = "lora"
    base: Literal["unquantized", "nf4"] = "unquantized"
    """Storage of the frozen matrices: in the dtype of `train.precision`, or in 4 bits (`nf4`,
    QLoRA, arXiv 2305.14314). The latter quantises the linear layers of blocks, adapted or not,
    when they are read; it leaves out stacks of experts. Rows must be multiples of 64."""
    rank: PositiveInt = 16
    """Rank of the product B A."""
    alpha: PositiveFloat = 32.0
    """Numerator of the scale s = alpha / rank."""
    rslora: bool = False
    """Divide `alpha` by the square root of the rank instead of the rank (rsLoRA, arXiv
    2312.03732)."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Fraction of the elements of the input of A that are set to 0 in training."""
    targets: str | tuple[str, ...] = ALL_LINEAR
    """Linear layers to adapt: `all-linear` (all but the head), a list of names such as `q` or
    `attn.q` (a layer's name ends with one of them), or a regular expression for complete names,
    such as `layers\\.[0-7]\\..*`. Names are `layers.N.attn.{q,k,v,o}` and
    `layers.N.mlp.{gate,up,down}`."""
    rank_pattern: dict[str, PositiveInt] = Field(default_factory=dict)
    """Ranks of some layers, by regular expressions for the ends of their names (`^` at the front:
    for complete names), such as `{down: 32}`. The first one that matches applies."""
    alpha_pattern: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Values of `alpha` of some layers, as `rank_pattern`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for each invalid regular expression, and for an empty list of targets."""
        patterns = [("rank_pattern", p) for p in self.rank_pattern]
        patterns += [("alpha_pattern", p) for p in self.alpha_pattern]
        if isinstance(self.targets, str):
            patterns.append(("targets", self.targets))
        elif not self.targets:
            yield "targets", "must name at least one layer"
        for key, pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                yield key, f"{pattern!r} is not a regular expression: {error}"


AdapterConfig = Annotated[NoAdapterConfig | LoraConfig, Field(discriminator="type")]
