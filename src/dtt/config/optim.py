"""Base classes of optimizers: keys and behaviour. `dtt.config.variants` lists those of dtt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, PositiveFloat

from dtt.config.base import Section
from dtt.config.schedule import RunFacts
from dtt.config.value_types import Decayed, parse_decay

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

    supports_mup: ClassVar[bool] = False
    """True if `build` multiplies each learning rate by `run.lr_factor(param, power)`."""
    supports_rounding: ClassVar[bool] = False
    """True if a step writes bf16 weights with `run.rounding`."""
    uniform_state: ClassVar[bool] = False
    """True if all state has the dtype of its parameter and is sharded as it is, in dimensions that
    it has, and all parameters of an optimizer have the same."""

    def build(self, params: Any, run: RunFacts) -> Any:
        """Return a torch.optim.Optimizer that holds the `tensor` of each of `params` once.

        Or several by name, which together do. A name is the first part of paths in checkpoints.

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


class GroupedOptimizer(Optimizer):
    """An optimizer whose parameters have settings by their role, or by their name."""

    supports_mup = supports_rounding = uniform_state = True
    if TYPE_CHECKING:  # keys of each subclass, where they are documented
        weight_decay: Decayed
        groups: tuple[AdamWGroup, ...]

    def settings_of(self, param: Any, entry: Any, run: RunFacts) -> Any:
        """Return the `dtt.optim.groups.Settings` of a parameter.

        `entry` is the first of `groups` that matches it; None: none does. Raises ConfigError if it
        does not fit the parameter.
        """
        raise NotImplementedError


def horizon_keys(optim: Optimizer) -> Iterator[str]:
    """Yield the keys of the section whose weight decay is given by horizon, with repetitions."""
    if not isinstance(optim, GroupedOptimizer):
        return
    given = [("weight_decay", optim.weight_decay)]
    given += [("groups", e.weight_decay) for e in optim.groups if e.weight_decay is not None]
    for key, decay in given:
        if parse_decay(decay).horizon:
            yield f"optim.{key}"
