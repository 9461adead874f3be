"""Detection of what slows a GPU down without an error: host waits, mixed devices, float64."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dtt

PACKAGE = str(Path(dtt.__file__).parent)

ATEN = torch.ops.aten
READS = {ATEN._local_scalar_dense: 0, ATEN.item: 0, ATEN.is_nonzero: True}
"""Operators that read a number, and what `Watch` answers. In inference mode, composite operators
are not decomposed before they are dispatched."""
COPIES = (ATEN.copy_, ATEN._to_copy, ATEN.to)


class InfraMode(TorchDispatchMode):
    """A dispatch mode under which Dynamo still compiles, as it does not with others."""

    supports_higher_order_operators = True  # FlexAttention is one

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True."""
        return True


class Watch(InfraMode):
    """Record in `found` what each operator does that a step on a GPU should not do.

    A copy to the host, or to the device from pageable memory, waits until the device has finished
    all kernels before it. With `read`, numbers that the host reads are zeros, so that it goes on.
    """

    def __init__(self, read: bool = False) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.operators = 0
        self._read = read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, self.operators = kwargs or {}, self.operators + 1
        ins = _tensors((args, named))
        operator = getattr(func, "overloadpacket", func)
        on_gpu = any(x.device.type == "cuda" for x in ins)
        if self._read and operator in READS:
            if on_gpu:
                self._note("host waits", func)
            return READS[operator]
        if self._read and on_gpu and operator is ATEN.nonzero:
            self._note("host waits", func)
            return torch.zeros((1, ins[0].dim()), dtype=torch.long, device=ins[0].device)
        out = func(*args, **named)
        outs = _tensors(out)
        # Operators accept a number of the host among tensors of a GPU; a copy of it waits.
        here = [x for x in ins if x.device.type == "cpu" and (x.dim() or operator in COPIES)]
        if on_gpu and outs and all(x.device.type == "cpu" for x in outs):
            self._note("host waits", func)
        elif here and (on_gpu or any(x.device.type == "cuda" for x in outs)):
            # `copy_` also has the GPU's tensor among its inputs
            self._note("host waits" if operator in COPIES else "mixed devices", func)
        if any(x.dtype is torch.float64 for x in (*ins, *outs)):
            self._note("float64", func)
        return out

    def _note(self, what: str, func: Any) -> None:
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(PACKAGE)]
        place = "?"
        if frames:
            place = f"{Path(frames[-1].filename).relative_to(PACKAGE)}, {frames[-1].name}"
        self.found[f"{what}: {func} in {place}"] += 1


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.device.type != "meta"]


def _as_traced(graph: Any, inputs: Any) -> Any:
    return boxed_nop(graph, inputs)


uncompiled = aot_autograd(
    fw_compiler=_as_traced, bw_compiler=_as_traced, inference_compiler=_as_traced,
    partition_fn=min_cut_rematerialization_partition,
)  # fmt: skip
"""A back end that traces graphs as Inductor does, and runs their operators one by one."""
