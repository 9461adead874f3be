"""torch.compile with a fallback: if compilation fails, the run continues uncompiled.

Inductor loads the kernels of both passes onto the device while it compiles. That is in the first
forward pass, so a kernel of the backward pass that does not fit the device is found in time to run
the forward pass uncompiled. `tests/gpu_free/nightly_kernels.py` checks this.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

from dtt.base.log import log

SHAPES = 128
"""Maximum number of input shapes that one function is compiled for: more than batch-size and
context-length schedules need. Beyond it (by default 8) torch would run other shapes uncompiled."""

EXHAUSTED = re.compile(r"(CUDA|HIP).*out of memory")
"""Message of a kernel for whose stack the device had no memory when it was loaded: Inductor raises
a RuntimeError with the text of torch's, Triton's or the driver's error."""

Function = Callable[..., Any]


class Compiler:
    """A compiler of functions; after its first failure, all of them run uncompiled."""

    def __init__(self) -> None:
        self.failure = ""
        """Reason why compilation failed; empty if it has not."""

    def compiled(
        self, plain: Function, otherwise: Function | None = None, *, dynamic: bool = False
    ) -> Function:
        """Return a compiled `plain`, which calls `otherwise` (default: `plain`) after a failure.

        Unless `dynamic`, shapes stay static: each has its own graph. A second shape never makes a
        graph dynamic, as some kernels (FlexAttention) fail on dynamic shapes.
        """
        import torch._functorch.config

        torch._dynamo.config.recompile_limit = SHAPES  # noqa: SLF001  (it has no public name)
        # By default the backward graph is compiled in the first backward pass, where it would be
        # too late to rerun the forward pass uncompiled.
        torch._functorch.config.force_non_lazy_backward_lowering = True  # noqa: SLF001
        fast = torch.compile(plain, dynamic=dynamic)
        slow = otherwise or plain

        def call(*inputs: Any, **named: Any) -> Any:
            if not self.failure:
                try:
                    return fast(*inputs, **named)
                except Exception as error:
                    if (full := _out_of_memory(error)) is not None:
                        # Uncompiled, the run would need more memory, and run out of it again.
                        raise full from None
                    if not _of_compiler(error):
                        raise
                    self.failure = _reason(error)
                    log.warning("training continues uncompiled: %s", self.failure)
            return slow(*inputs, **named)

        return call

    def follow(self) -> None:
        """Run uncompiled because another rank cannot compile.

        All ranks should run at the same speed, with the same communication.
        """
        if not self.failure:
            self.failure = "another rank cannot compile"
            log.info("training continues uncompiled: %s", self.failure)


compiler = Compiler()
"""The compiler that this process uses for blocks, attention kernels and the loss."""


def _of_compiler(error: Exception) -> bool:
    """Return True if compilation failed, or a compiled kernel cannot run on this device.

    Dynamo wraps what a back end raises, but not always its own errors: torch 2.11 fails an
    assertion on `tuple._replace`. A kernel that does not fit the device raises an error of Triton
    or Inductor at its first launch. Other errors come from the compiled function itself and must
    reach the caller, as must a RuntimeError of a launch: CUDA is unusable after it.
    """
    import torch

    module = type(error).__module__
    wrapped = isinstance(error, torch._dynamo.exc.TorchDynamoException)  # noqa: SLF001
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    by_dynamo = str(innermost.f_globals.get("__name__")).startswith("torch._dynamo.")
    return wrapped or by_dynamo or module.startswith(("triton.", "torch._inductor."))


def _out_of_memory(error: BaseException) -> BaseException | None:
    """Return the error of the device's memory that `error` is or wraps; None if there is none."""
    import torch

    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, torch.OutOfMemoryError):
            return inner
        if EXHAUSTED.search(str(inner)):
            return torch.OutOfMemoryError(_reason(inner))
        inner = getattr(inner, "inner_exception", None) or inner.__cause__
    return None


def _reason(error: BaseException) -> str:
    """Return the first informative line of the message; dozens of debugging hints follow it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if not line.startswith("backend=")]
    if reasons[:1] == ["from user code:"]:  # Dynamo appends the place to an empty message
        return f"{type(error).__name__} at {''.join(reasons[1:2])}"
    return (reasons or lines or [type(error).__name__])[0]
