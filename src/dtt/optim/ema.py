"""An exponential moving average of the weights: smoother than the weights, and often better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from dtt.errors import DamagedError
from dtt.runtime.log import log
from dtt.runtime.sharding import FullTensor, fill, local

T = TypeVar("T")

OWNER = "ema"
"""First component of the paths of the EMA state in a checkpoint."""
UPDATES = f"{OWNER}/updates/count"


class Ema:
    """Exponential moving averages of parameters, kept in fp32 and laid out as the parameters.

    Each update computes average += (1 - d) * (parameter - average). After t updates d is
    min(decay, (1 + t) / (10 + t)), as in TensorFlow's ExponentialMovingAverage, so that the average
    soon forgets the initial weights. The last ln 2 / (1 - decay) updates make up half of it.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        """Initialise the averages as fp32 copies of the parameters that require gradients."""
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self._names = list(trained)
        self._parameters: list[Tensor] = list(trained.values())
        self._averages = [p.detach().to(torch.float32, copy=True) for p in self._parameters]
        self._updates = torch.zeros((), device=self._averages[0].device)
        self._decay = decay

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Move the averages one step towards the parameters; does not synchronise with the device.

        `skip` [] is a tensor on the device, the `found_inf` of optimizers: 0.0, or 1.0 if the
        averages must stay as they are.
        """
        decay = ((1 + self._updates) / (10 + self._updates)).clamp(max=self._decay)
        weights = [(1 - decay) * (1 - skip)] * len(self._averages)
        parameters = [parameter.float() for parameter in _locals(self._parameters)]
        torch._foreach_lerp_(_locals(self._averages), parameters, weights)
        self._updates += 1 - skip

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the parameters hold the averages inside the `with` block, in the parameters' dtype.

        Needs memory for a copy of the parameters, as much as gradients take in a step.
        """
        # Exchange the contents, not the tensors: FSDP identifies parameters by their storage.
        parameters = _locals(self._parameters)
        kept = [p.clone() for p in parameters]
        _copy(parameters, _locals(self._averages))
        try:
            yield
        finally:
            _copy(parameters, kept)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state: `ema/PARAMETER/value` for each parameter, and `ema/updates/count`."""
        named = zip(self._names, self._averages, strict=True)
        return {UPDATES: self._updates} | {f"{OWNER}/{n}/value": average for n, average in named}

    @torch.no_grad()
    def restore(self, state: Mapping[str, FullTensor]) -> None:
        """Restore the averages from the `tensors()` in the state of a checkpoint.

        Without averages in the checkpoint they start as the current parameters, and a line is
        logged. Raise DamagedError if they belong to different parameters.
        """
        found = averages(state)
        if not found:
            log.info(
                "the checkpoint has no average of the weights: the average starts from the weights"
            )
            _copy(_locals(self._averages), _locals(self._parameters))
            self._updates.zero_()
            return
        if found.keys() != set(self._names) or UPDATES not in state:
            odd = sorted((found.keys() ^ set(self._names)) | ({UPDATES} - state.keys()))[0]
            raise DamagedError(
                "the checkpoint's average of the weights does not match this run",
                why=f"{odd} is present on one side only",
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
    """Return the averaged weights in a checkpoint's state, by parameter name; may be empty."""
    return {
        path.split("/")[1]: tensor
        for path, tensor in state.items()
        if path.startswith(f"{OWNER}/") and path != UPDATES
    }
