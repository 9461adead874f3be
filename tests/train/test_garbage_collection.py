"""Garbage is collected after the same steps on every rank, and never in between."""

from __future__ import annotations

import gc
import weakref

from dtt.train.run import garbage_collected_by_loop


class Node:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


def test_cycles_live_until_the_loop_collects() -> None:
    with garbage_collected_by_loop():
        old = weakref.ref(Node())
        gc.freeze()
        node = weakref.ref(Node())
        for _ in range(5 * gc.get_threshold()[0]):  # would have made it run by itself
            _ = [[]]
        assert node() is not None
        gc.collect()
        assert node() is None
        assert old() is not None  # what was there before is not looked at
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
