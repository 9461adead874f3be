"""Python's garbage collector, out of the way of training.

By itself it runs whenever enough objects were made: for a sixth of the time that imports take, and
then at another moment on each rank, while all ranks wait for the one that it holds up.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 100
"""Steps between collections, on all ranks after the same step."""


@contextmanager
def scheduled() -> Iterator[None]:
    """Inside, garbage is collected by `collect` alone."""
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def freeze() -> None:
    """What exists by now is there to stay: it is never looked at again."""
    gc.freeze()


def collect(step: int) -> None:
    """Collect what was made since `freeze`, if that is due after `step`."""
    if step % EVERY == 0:
        gc.collect()
