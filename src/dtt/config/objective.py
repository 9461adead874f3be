"""Keys of the training objective: the loss that a run minimises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat

from dtt.config.base import Section


class Objective(Section):
    """The base class of losses. One of your own defines keys and `loss`."""

    type: str

    needs: ClassVar[Literal["token_loss", "logits"]] = "token_loss"
    """What `loss` is given: the cross-entropy of each target in nats, [B, T] in fp32, 0 where a
    target does not count; or the logits of all tokens, [B, T, V], which are large."""

    def loss(self, out: Any, batch: Any) -> Any:
        """Return the sum of the loss over the targets of `batch` that count, a tensor [].

        dtt divides it by their number in the global batch. With a mapping of names to further sums
        beside it, these are reported, as means. `batch` is a `dtt.MicroBatch`: `tokens`, `targets`
        (-100 where none counts) and `doc_ids`, [B, T] each. Validation stays the cross-entropy;
        the own loss is beside it, as `objective`.
        """
        raise NotImplementedError

    def setup(self, run: Any) -> None:
        """Prepare for a run, once on each rank: load a teacher with `run.load_model(SOURCE)`.

        Keep what it needs in attributes whose names begin with `_`. `run` is a `dtt.RunView`.
        """

    def state(self) -> Mapping[str, Any]:
        """Return tensors that checkpoints keep, by name; they are equal on all ranks."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the tensors of a checkpoint."""


class NextTokenConfig(Objective):
    """Language modelling: the cross-entropy of the next token, as mean over the targets."""

    type: Literal["next_token"] = "next_token"


class DpoConfig(Objective):
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


if TYPE_CHECKING:
    ObjectiveConfig = Objective  # it may be one of a user's own
else:
    ObjectiveConfig = Annotated[NextTokenConfig | DpoConfig, Field(discriminator="type")]
