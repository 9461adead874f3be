"""`train.epochs`: the number of steps of a run, before training opens its data."""

from __future__ import annotations

from dtt.base.errors import InputError
from dtt.config.load import with_steps
from dtt.config.merging import Resolved


def with_epochs_resolved(resolved: Resolved) -> Resolved:
    """Return the configuration with the number of steps that `train.epochs` resolves to.

    Returns it unchanged without `train.epochs`, and as long as its token files do not exist.
    """
    if resolved.config.train.epochs is None:
        return resolved
    from dtt.data.samples.dataset import open_dataset  # imports numpy

    try:
        return with_steps(resolved, open_dataset(resolved.config).requested_steps)
    except InputError:
        return resolved
