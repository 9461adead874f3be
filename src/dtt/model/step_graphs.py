"""CUDA graphs of decoding steps: a step of hundreds of kernels is launched as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from dtt.base.log import log

Step = Callable[[], None]

_capturing = threading.Lock()
"""One thread captures at a time: the answers of `dtt chat --web` have a thread each."""


class StepGraphs:
    """Steps by their key, captured on a GPU at their second run and replayed from then on.

    A step may read and write tensors only in place, and its key must determine all else that it
    does. Its first run is eager: libraries allocate and compile what must not be captured, and one
    token more does not pay for a graph.
    """

    def __init__(self, device: torch.device) -> None:
        """Capture steps on `device`; without a GPU, run them."""
        # Fake tensors say cuda without a GPU.
        self.captures = device.type == "cuda" and torch.cuda.is_available()
        self._replays: dict[Hashable, Step | None] = {}
        self._pool: Any = None

    def run(self, key: Hashable, step: Step) -> None:
        """Run a step, which does the same as the one that had this key before."""
        if not self.captures or key not in self._replays:
            self._replays[key] = None
            step()
            return
        replay = self._replays[key]
        if replay is None:
            replay = self._replays[key] = self.captured(step)
        replay()

    def captured(self, step: Step) -> Step:
        """Return a function that does what a step does, which has not run yet."""
        # Other threads may allocate and launch meanwhile. Graphs of one cache are never replayed at
        # the same time, so they share the memory of their activations.
        how: dict[str, Any] = {"pool": self._pool, "capture_error_mode": "thread_local"}
        try:
            graph = torch.cuda.CUDAGraph()
            with _capturing, torch.cuda.graph(graph, **how):
                step()
        except RuntimeError as error:
            # A layer that waits for the host, as one of a user's own may.
            log.warning(
                "each token is launched kernel by kernel: a CUDA graph cannot hold a step (%s)",
                str(error).partition("\n")[0],
            )
            self.captures = False
            return step
        self._pool = graph.pool()
        return graph.replay

    def clear(self) -> None:
        """Forget all steps: their tensors have been replaced."""
        self._replays.clear()
