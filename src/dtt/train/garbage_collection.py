"""Scheduling of Python's garbage collector, so that it does not delay training.

By default it runs whenever enough objects were created. That takes a sixth of the time of imports,
and in training it stops each rank at a different time, while all other ranks wait for that one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 100
"""Steps between collections, which happen on all ranks after the same step."""


@contextmanager
def scheduled() -> Iterator[None]:
    """Disable automatic garbage collection inside; only `collect` collects."""
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def freeze() -> None:
    """Exclude all objects that exist now from later collections."""
    gc.freeze()


def collect(step: int) -> None:
    """Collect objects created since `freeze`, if a collection is due after `step`."""
    if step % EVERY == 0:
        gc.collect()
