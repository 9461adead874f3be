"""An exponential moving average of the weights: smoother than they are, and often better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from dtt.errors import DamagedError
from dtt.runtime.log import log
from dtt.runtime.sharding import Whole, fill, local

T = TypeVar("T")

OWNER = "ema"
"""First part of the paths of its state in a checkpoint."""
UPDATES = f"{OWNER}/updates/count"


class Ema:
    """Averages of parameters, in fp32 beside them: average += (1 - d) * (parameter - average).

    After t updates d is min(decay, (1 + t) / (10 + t)) (TensorFlow's ExponentialMovingAverage), so
    that it soon forgets where it began. Half of it comes from the last ln 2 / (1 - decay) updates.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        """Begins as a copy of those parameters that are trained."""
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self._names = list(trained)
        self._parameters: list[Tensor] = list(trained.values())
        self._averages = [p.detach().to(torch.float32, copy=True) for p in self._parameters]
        self._updates = torch.zeros((), device=self._averages[0].device)
        self._decay = decay

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Follow the parameters one step further; does not wait for the device.

        Nothing changes where `skip` [], on the device, is 1.0 rather than 0.0: the `found_inf` of
        optimizers.
        """
        decay = ((1 + self._updates) / (10 + self._updates)).clamp(max=self._decay)
        weights = [(1 - decay) * (1 - skip)] * len(self._averages)
        parameters = [parameter.float() for parameter in _locals(self._parameters)]
        torch._foreach_lerp_(_locals(self._averages), parameters, weights)
        self._updates += 1 - skip

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Meanwhile the parameters hold the averages, in their own precision.

        Takes the memory that gradients take in a step.
        """
        parameters = _locals(self._parameters)  # their contents: FSDP knows them by their memory
        kept = [p.clone() for p in parameters]
        _copy(parameters, _locals(self._averages))
        try:
            yield
        finally:
            _copy(parameters, kept)

    def tensors(self) -> dict[str, Tensor]:
        """All of its state, by `ema/parameter/value`, and `ema/updates/count`."""
        named = zip(self._names, self._averages, strict=True)
        return {UPDATES: self._updates} | {f"{OWNER}/{n}/value": average for n, average in named}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Whole]) -> None:
        """Go on from the `tensors()` in the state of a checkpoint; DamagedError if they are of
        other parameters. Where there are none it begins with the parameters, and says so."""
        found = averages(state)
        if not found:
            log.info("the checkpoint holds no average of the weights: it begins with them now")
            _copy(_locals(self._averages), _locals(self._parameters))
            self._updates.zero_()
            return
        if found.keys() != set(self._names) or UPDATES not in state:
            odd = sorted((found.keys() ^ set(self._names)) | ({UPDATES} - state.keys()))[0]
            raise DamagedError(
                "the checkpoint's average of the weights does not fit this run",
                why=f"{odd} is on one side only",
            )
        for name, average in zip(self._names, self._averages, strict=True):
            fill(average, found[name])
        fill(self._updates, state[UPDATES])


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_copy_(targets, sources)


def _locals(tensors: list[Tensor]) -> list[Tensor]:
    return [local(tensor) for tensor in tensors]


def averages(state: Mapping[str, T]) -> dict[str, T]:
    """The averaged weights in the state of a checkpoint, by parameter name; may be none."""
    return {
        path.split("/")[1]: tensor
        for path, tensor in state.items()
        if path.startswith(f"{OWNER}/") and path != UPDATES
    }
