"""torch.compile with a way back: where compilation fails, the run continues without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtt.runtime.log import log

SHAPES = 128
"""Input shapes that one function is compiled for: more than schedules of batches and contexts
have. After so many (by itself 8) torch would run the others uncompiled."""

Function = Callable[..., Any]


class Compiler:
    """Compiles functions until that fails once; from then on all of them run uncompiled."""

    def __init__(self) -> None:
        self.failure = ""
        """Why compilation failed; empty as long as it works."""

    def compiled(self, plain: Function, otherwise: Function | None = None) -> Function:
        """Return a compiled `plain`, which calls `otherwise` (`plain` itself) after a failure.

        Shapes stay static: each has a graph of its own. A second shape never makes a graph
        dynamic, which some kernels (FlexAttention) do not survive.
        """
        import torch._functorch.config

        torch._dynamo.config.recompile_limit = SHAPES  # noqa: SLF001  (it has no public name)
        # Else the backward graph is compiled in the first backward pass, where a failure could no
        # longer be answered by running the forward pass uncompiled.
        torch._functorch.config.force_non_lazy_backward_lowering = True  # noqa: SLF001
        fast = torch.compile(plain, dynamic=False)
        slow = otherwise or plain

        def call(*inputs: Any, **named: Any) -> Any:
            if not self.failure:
                try:
                    return fast(*inputs, **named)
                except torch._dynamo.exc.TorchDynamoException as error:  # noqa: SLF001
                    self.failure = _reason(error)
                    log.warning("training goes on uncompiled: %s", self.failure)
            return slow(*inputs, **named)

        return call

    def follow(self) -> None:
        """Run uncompiled since another rank cannot compile: ranks should be equally fast, and their
        communication the same."""
        if not self.failure:
            self.failure = "another rank cannot compile"
            log.info("training goes on uncompiled: %s", self.failure)


compiler = Compiler()
"""The one of this process: for blocks, attention kernels and the loss alike."""


def _reason(error: Exception) -> str:
    """Its first line that says something; torch tells how to debug itself in dozens more."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith("backend=")]
    return (told or lines or [type(error).__name__])[0]
