"""Peak memory of a training step, from the real code on fake tensors.

    python tests/gpu_free/peak_memory.py MODEL ROWS LENGTH GPUS [KEY=VALUE …] [--parts]

Prints the traced peak beside the estimate of `dtt plan`, in GB (1e9 bytes), and with --parts what
was held then, by shape.
"""

from __future__ import annotations

import inductor  # before torch  # noqa: F401

import sys  # isort: skip
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from fake_run import make, training
from serving import serve
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.utils._pytree import tree_leaves
from watch import InfraMode

from dtt.estimate.case import Case
from dtt.estimate.memory import memory
from dtt.mesh.compilation import compiler

ALIGNMENT = 512
"""Bytes to a multiple of which CUDA's allocator rounds."""


class Peak(InfraMode):
    """Tracks the bytes of all live CUDA storages."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._sizes: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self.parts = False
        # FSDP2 empties and refills the storages of gathered parameters, which is no operator.
        self._resizes = [
            patch.object(module, name, self._then_seen(getattr(module, name)))
            for module, name in (
                (_fsdp_param, "alloc_storage"), (_fsdp_param, "free_storage"),
                (_fsdp_param_group, "alloc_storage"),
            ) if hasattr(module, name)
        ]  # fmt: skip

    def __enter__(self) -> Peak:
        for one in self._resizes:
            one.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for one in self._resizes:
            one.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            self.see(x)
        return out

    def _then_seen(self, resize: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def resized(tensor: Tensor) -> None:
            resize(tensor)
            self.see(tensor)

        return resized

    def see(self, x: Any) -> None:
        """Record the size of the storage of `x`, which may have changed."""
        x = getattr(x, "_local_tensor", x)
        if not isinstance(x, Tensor) or x.device.type != "cuda":
            return
        storage = x.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        if key not in self._sizes:
            weakref.finalize(storage, self._freed, key)
            self._names[key] = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        if self.live > self.peak:
            self.peak = self.live
            if self.parts:
                self.at_peak = Counter()
                for held, bytes_ in self._sizes.items():
                    self.at_peak[self._names[held]] += bytes_

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def traced(case: Case, *, parts: bool = False) -> Peak:
    """Trace the second step, in which optimizer state exists."""
    with Peak() as trace, training(case) as step:
        step()
        trace.peak, trace.parts = trace.live, parts
        step()
    assert not compiler.failure, compiler.failure
    return trace


def planned(case: Case) -> int:
    """Return the estimate of `dtt plan` without what the trace does not see."""
    estimate = memory(case)
    return estimate.total - estimate.parts["framework"] - estimate.parts["batches"]


def case_of(model: str, rows: str, length: str, gpus: str, *keys: str) -> Case:
    """Return the case of a shipped model on H100s."""
    keys += (f"train.micro_batch={rows}", f"train.seq_len={length}")
    return make(*keys, model=model, gpu="H100", ranks=int(gpus))


def main(arguments: list[str]) -> None:
    """Compare one case."""
    parts = "--parts" in arguments
    case = case_of(*(a for a in arguments if a != "--parts"))
    trace, estimate, total = traced(case, parts=parts), memory(case), planned(case)
    print(f"traced {trace.peak / 1e9:.2f}, planned {total / 1e9:.2f} "
          f"({total / trace.peak - 1:+.1%}) at {estimate.moment}")  # fmt: skip
    if parts:
        print("   ", {name: round(size / 1e9, 2) for name, size in estimate.parts.items()})
        for name, size in trace.at_peak.most_common(16):
            print(f"    {size / 1e9:7.3f}  {name}")


def ratio(question: str) -> float:
    """Return planned by traced bytes; the question has the arguments of a case."""
    case = case_of(*question.split())
    return planned(case) / traced(case).peak


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1:])
    else:
        serve(ratio)
