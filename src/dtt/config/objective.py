"""Keys of the training objective: the loss that a run minimises."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from dtt.config.base import Section


class NextTokenConfig(Section):
    """Language modelling: the cross-entropy of the next token, as mean over the targets."""

    type: Literal["next_token"] = "next_token"


class DpoConfig(Section):
    """Direct preference optimization (DPO, Rafailov et al. 2023, arXiv 2305.18290), for
    `data.type: preference`.

    The log-probabilities of the reference model are computed once, before the first step, and kept
    in the folder of the job. Training then holds no second model.
    """

    type: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    """Strength of the penalty for moving away from the reference model: a reward is `beta` times
    the log-ratio of the probabilities that the model and the reference model give an answer."""
    length_normalised: bool = False
    """Divide the log-ratio of each answer by its number of tokens, so that long answers weigh as
    much as short ones (Lambert et al. 2024, arXiv 2411.15124). The mean log-ratios are small, so
    `beta` must be larger, such as 5."""
    reference: str | None = None
    """Reference model, in the form of `init.from`; null: the initial weights, `init.from`."""


ObjectiveConfig = Annotated[NextTokenConfig | DpoConfig, Field(discriminator="type")]
