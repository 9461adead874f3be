"""An exponential moving average of the weights: smoother than the weights, and often better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from dtt.base.errors import DamagedError
from dtt.base.log import log
from dtt.mesh.dtypes import wide, wide_dtype
from dtt.mesh.sharding import FullTensor, fill, local
from dtt.params.table import Params

T = TypeVar("T")

OWNER = "ema"
"""First component of the paths of the EMA state in a checkpoint."""
UPDATES = f"{OWNER}/updates/count"
AT_ONCE = 32
"""Number of parameters that an update converts to fp32 at once: about three blocks of a Llama. One
by one, small tensors would cost a kernel each."""


class Ema:
    """Exponential moving averages of parameters, kept in fp32 and laid out as the parameters.

    Each update computes average += (1 - d) * (parameter - average). After t updates d is
    min(decay, (1 + t) / (10 + t)), as in TensorFlow's ExponentialMovingAverage, so that the average
    soon forgets the initial weights. The last ln 2 / (1 - decay) updates make up half of it.
    """

    def __init__(self, params: Params, decay: float) -> None:
        """Initialise the averages as fp32 copies of the parameters that are not frozen."""
        trained = params.trainable()
        self._names, self._gather = list(trained), params.mesh.gather
        self._parameters: list[Tensor] = [param.tensor for param in trained.values()]
        # fp32 also for bf16 weights: with a decay of 0.999 an update moves the average by a
        # thousandth of the difference, which bf16 would round away.
        self._averages = [p.detach().to(wide_dtype(p), copy=True) for p in self._parameters]
        # On the device, as a skipped step does not count, and only the device knows whether it was
        # skipped.
        self._updates = torch.zeros((), device=self._averages[0].device)
        self._decay = decay

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Move the averages one step towards the parameters; does not synchronise with the device.

        `skip` [] is a tensor on the device, the `found_inf` of optimizers: 0.0, or 1.0 if the
        averages must stay as they are.
        """
        decay = ((1 + self._updates) / (10 + self._updates)).clamp(max=self._decay)
        # Weight 0 leaves the averages as they are. A skipped step is then no branch on the host.
        weight = (1 - decay) * (1 - skip)
        averages, parameters = _locals(self._averages), _locals(self._parameters)
        for start in range(0, len(parameters), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            # Of bf16 weights `wide` is a copy: of all at once, twice the memory of the weights.
            some = [wide(parameter) for parameter in parameters[part]]
            torch._foreach_lerp_(averages[part], some, [weight] * len(some))
        self._updates += 1 - skip

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the parameters hold the averages inside the `with` block, in the parameters' dtype.

        Needs memory for a copy of the parameters, as much as gradients take in a step.
        """
        # Exchange the contents, not the tensors: FSDP identifies parameters by their storage.
        parameters, averages = _locals(self._parameters), _locals(self._averages)
        # Kept in the dtype of the parameters, so that the weights return bit for bit.
        kept = [p.clone() for p in parameters]
        _copy(parameters, averages)
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
        # Averages that this rank lacks may be of parameters that other ranks hold.
        lacking = self._gather((set(self._names) - found.keys(), found.keys() - self._names))
        unknown = set.intersection(*(extra for _, extra in lacking))
        if odd := sorted(unknown.union({UPDATES} - state.keys(), *(some for some, _ in lacking))):
            raise DamagedError(
                "the checkpoint's average of the weights does not match this run",
                why=f"{odd[0]} is present on one side only",
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
