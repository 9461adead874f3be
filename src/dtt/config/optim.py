"""Keys of the optimizers, a tagged union: `type` selects one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from dtt.config.base import Length, LengthKey, Section
from dtt.config.schedule import RunFacts
from dtt.config.weight_decay import Decayed, parse_decay

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
"""Decay of a running average: the weight of its old value."""
Betas = tuple[Beta, Beta]


ROLES = ("matrix", "embed", "head", "vector", "router", "adapter")
"""Roles of parameters; an entry of `groups` may name one."""


class Optimizer(Section):
    """The base class of optimizers. One of your own defines keys and `build`."""

    type: str
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""

    whole_state: ClassVar[frozenset[str]] = frozenset()
    """Names of state that each rank which holds a parameter has whole, such as matrices of its
    rows. All other state of the shape of its parameter is sharded as the parameter is."""

    def build(self, params: Any, run: RunFacts) -> Any:
        """Return a torch.optim.Optimizer that holds the `tensor` of each of `params` once.

        `params` is a mapping of names to `dtt.Param`. The learning rates of its groups are those at
        the peak of the schedule: dtt sets `lr` before each step. Checkpoints keep the tensors and
        numbers in `state[parameter]`, and nothing else. A step that the guard skips is not called,
        for which the host waits for the device; an optimizer whose class has
        `_step_supports_amp_scaling = True` reads `found_inf` itself, as those of torch do.
        """
        raise NotImplementedError

    def state_bytes(self, param: Any) -> int | None:
        """Return the bytes of state of a `dtt.Param`, for `dtt plan`; None: it measures them.

        It does so in a step on tensors without data (of torch's device `meta`).
        """
        return None


class AdamWGroup(Section):
    """Settings for parameters selected by role or name; null: the settings of `optim`."""

    match: str
    """A role: `matrix` (hidden matrices), `embed`, `head`, `vector` (norms and biases) or
    `adapter`; or a pattern for full parameter names, such as `layers.0.*` or `*norm.weight`: `*`
    matches any text, `?` one character, `[kv]` one of these. The first entry that matches a
    parameter applies."""
    lr: PositiveFloat | None = None
    """Peak learning rate."""
    betas: Betas | None = None
    """Decay of the first and second moment, with AdamW."""
    eps: PositiveFloat | None = None
    """Epsilon added to the square root of the second moment, with AdamW."""
    weight_decay: Decayed | None = None
    """Decoupled weight decay, as in `optim`; null: that of `optim` for hidden matrices and
    adapters, 0 for the others."""
    decay: LengthKey | None = None
    """Duration of the learning-rate decay of these parameters at the end of the run, in the form
    and shape of `schedule.decay` (`60%`); null: that of `schedule`, which must be wsd."""


class MuonGroup(AdamWGroup):
    """Settings for parameters selected by role or name; null: those of their optimizer."""

    optimizer: Literal["muon", "adamw"] | None = None
    """Optimizer of these parameters; null: Muon for hidden matrices, AdamW for the others."""
    split: PositiveInt | tuple[PositiveInt, ...] | None = None
    """Split of the rows for Muon: into this number of equal matrices, or into matrices with these
    numbers of rows. For fused projections, such as q, k and v."""


class AdamWSettings(Section):
    """AdamW settings for embeddings, output head, norms and biases, which have no weight decay."""

    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    betas: Betas = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Epsilon added to the square root of the second moment."""


class AdamWConfig(AdamWSettings, Optimizer):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101), fused where the device supports it."""

    type: Literal["adamw"] = "adamw"
    weight_decay: Decayed = 0.1
    """Decoupled weight decay of the hidden matrices; all other parameters have none. A number, or
    `horizon 0.2`: the decay 1 / (0.2 * lr * steps), for which weights are the moving average of
    their updates over a fifth of the run (arXiv 2405.13698). `cautious 0.1` and `cautious horizon
    0.2` decay only those weights that the update moves towards zero as well (arXiv 2510.12402)."""
    groups: tuple[AdamWGroup, ...] = ()
    """Settings for parameters selected by role or by name."""


class MuonConfig(Optimizer):
    """Muon (Jordan et al. 2024) for the hidden matrices, AdamW for all other parameters."""

    type: Literal["muon"] = "muon"
    lr: PositiveFloat = 2e-3
    """Peak learning rate of the hidden matrices."""
    scale: Literal["rms", "spectral", "hyperball"] = "rms"
    """Scale of the updates: `rms`: 0.2 * sqrt(max(rows, columns)), for which learning rates are
    about those of AdamW (Moonlight, arXiv 2502.16982); `spectral`: sqrt(max(1, rows / columns)), as
    Jordan et al., for which they are about ten times higher; `hyperball` (arXiv 2606.16899): `lr`
    times the norm of the matrix, which is kept at its initial value instead of weight decay:
    learning rates, such as 0.02, are relative changes per step."""
    momentum: Beta = 0.95
    """Decay of the gradient average that is orthogonalised."""
    momentum_warmup: NonNegativeInt = 0
    """Steps of linear momentum warm-up from 0.85 to `momentum`; skipped steps do not count."""
    ns_coefficients: Literal["classic", "polar-express"] = "classic"
    """Polynomials of the five Newton-Schulz iterations: `classic`: the same in all of them, which
    brings singular values to about [0.7, 1.2]; `polar-express`: an optimal one for each (arXiv
    2505.16932)."""
    normuon_beta2: Beta | None = None
    """Decay of NorMuon's running average, such as 0.95 (arXiv 2510.05491): each row of the update
    is divided by its root mean square over the steps; null: no NorMuon."""
    weight_decay: Decayed = 0.1
    """Decoupled weight decay of the hidden matrices; all other parameters have none. A number, or
    `horizon 0.2`: the decay 1 / (0.2 * lr * steps), for which weights are the moving average of
    their updates over a fifth of the run (arXiv 2405.13698). `cautious 0.1` and `cautious horizon
    0.2` decay only those weights that the update moves towards zero as well (arXiv 2510.12402)."""
    adamw: AdamWSettings = AdamWSettings(lr=2e-3)
    """AdamW settings for embeddings, output head, norms and biases."""
    groups: tuple[MuonGroup, ...] = ()
    """Settings for parameters selected by role or by name."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for a weight decay of matrices whose norm hyperball keeps."""
        if self.scale == "hyperball" and parse_decay(self.weight_decay).value:
            yield "weight_decay", "optim.scale=hyperball keeps the norm of matrices: set 0"


if TYPE_CHECKING:
    OptimConfig = Optimizer  # it may be one of a user's own
else:
    OptimConfig = Annotated[MuonConfig | AdamWConfig, Field(discriminator="type")]


def horizon_keys(optim: Optimizer) -> Iterator[str]:
    """Yield the keys of the section whose weight decay is given by horizon, with repetitions."""
    if not isinstance(optim, AdamWConfig | MuonConfig):
        return
    for key, holder in [("weight_decay", optim), *(("groups", entry) for entry in optim.groups)]:
        if holder.weight_decay is not None and parse_decay(holder.weight_decay).by_horizon:
            yield f"optim.{key}"


def own_decays(optim: Optimizer) -> tuple[Length, ...]:
    """Return the distinct durations of learning-rate decays that entries of `groups` set."""
    if not isinstance(optim, AdamWConfig | MuonConfig):
        return ()
    return tuple(dict.fromkeys(e.decay for e in optim.groups if e.decay is not None))
