"""Python's garbage collector, out of the way of training.

By itself it runs whenever enough objects were made: at another moment on each rank, and all ranks
wait for the one that it holds up.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 100
"""Steps between collections, on all ranks after the same step."""


@contextmanager
def scheduled() -> Iterator[None]:
    """Inside, garbage is collected by `collect` alone; what exists by now is never looked at."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect(step: int) -> None:
    """Collect what was made since `scheduled` began, if that is due after `step`."""
    if step % EVERY == 0:
        gc.collect()
