"""Numbers behind fake CUDA tensors: each storage has a shadow, a real one in host memory.

Operators run twice, on fake tensors and on their shadows; kernels that Inductor generated run in
Triton's interpreter, in fp32. What remains unseen is the arithmetic of tensor cores and libraries.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import inductor  # before torch

import weakref  # isort: skip
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton import language as tl
from triton.runtime import interpreter
from watch import ATEN, InfraMode

SILENT = ("prim", "profiler")
"""Namespaces of operators without numbers."""
Spoil = Callable[[str], str]


class NoShadow(Exception):
    """A fake tensor of a compilation has no numbers."""


class Shadow(InfraMode):
    """Executes operators and kernels on the shadows of their arguments."""

    def __init__(self, spoil: Spoil = str) -> None:
        """`spoil` changes the source of kernels, to plant mistakes; empty: it is not run."""
        super().__init__()
        self.launches = 0
        self._spoil = spoil
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._kernels: dict[str, Interpreted] = {}
        inductor.kernels.clear()
        inductor.listeners[:] = [self._launch]

    def of(self, x: Any) -> Any:
        """Return the real tensor behind a fake one."""
        if not isinstance(x, FakeTensor):
            return torch.device("cpu") if isinstance(x, torch.device) else x
        storage = self._storages.get(x.untyped_storage()._cdata)
        if storage is None:
            raise NoShadow
        with _disable_current_modes():
            place = x.storage_offset(), x.size(), x.stride()
            return torch.empty(0, dtype=x.dtype).set_(storage, *place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        given, made = tree_leaves((args, named)), tree_leaves(out)
        real = isinstance(func, torch._ops.OpOverload) and func.namespace not in (
            "prim",
            "profiler",
        )
        if not real or not any(isinstance(x, FakeTensor) for x in (*given, *made)):
            return out
        try:
            real_args, real_named = tree_map(self.of, (args, named))
        except NoShadow:
            return out
        with _disable_current_modes(), torch.no_grad():
            result = OTHERWISE.get(func, func)(*real_args, **real_named)
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        for fake, value in zip((x for x in made if isinstance(x, Tensor)), tensors, strict=True):
            if isinstance(fake, FakeTensor):
                self._remember(fake, value)
        return out

    def _remember(self, fake: FakeTensor, value: Tensor) -> None:
        storage = fake.untyped_storage()
        if (key := storage._cdata) in self._storages:
            return  # a view, or changed in place
        with _disable_current_modes():
            self._storages[key] = torch.UntypedStorage(storage.nbytes())
            self.of(fake).copy_(value)
        weakref.finalize(storage, self._storages.pop, key, None)

    def _launch(self, kernel: inductor.Kernel, arguments: tuple[Any, ...]) -> None:
        real = [self.of(x) for x in arguments]
        self.launches += 1
        with _disable_current_modes():
            if kernel.source not in self._kernels:
                module = PyCodeCache.load(self._spoil(kernel.source))
                self._kernels[kernel.source] = getattr(module, kernel.name)
            self._kernels[kernel.source].run(*real)


class Interpreted:
    """A kernel in Triton's interpreter, with one of its configurations."""

    def __init__(self, function: Any, config: Any, triton_meta: Any, inductor_meta: Any) -> None:
        self._function, self._config, self._meta = function, config, inductor_meta
        self._fixed = {
            name: value for name, value in triton_meta.get("constants", {}).items()
            if name in function.arg_names
        }  # fmt: skip

    def run(self, *arguments: Any) -> None:
        """Run on CPU tensors; the arguments are those of Inductor's launcher."""
        options = self._config.kwargs
        names = [n for n in self._function.arg_names if n not in {**options, **self._fixed}]
        named = dict(zip(names, arguments, strict=False))
        extra = self._meta.get("extra_launcher_args", ())
        given = dict(zip(extra, arguments[len(names) :], strict=True))
        grid = triton_heuristics.GridExpr.from_meta(self._meta, self._config)
        size = grid.eval_slow({**options, **named, **given})
        self._function[size](**named, **options, **self._fixed)


def _interpreted(
    _hints: Any, configs: Any, triton_meta: Any, inductor_meta: Any = None, **_: Any
) -> Callable[[Any], Interpreted]:
    # Fewer programs with larger blocks: the interpreter's time is that of its numpy calls.
    largest = max(configs, key=lambda one: one.kwargs.get("XBLOCK", 0))
    return lambda function: Interpreted(function, largest, triton_meta, inductor_meta)


class Libdevice:
    """CUDA's mathematical functions, which the interpreter lacks."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(torch, name)

        def call(*values: Any) -> Any:
            arrays = [torch.from_numpy(np.asarray(x.handle.data)) for x in values]
            handle = interpreter.TensorHandle(function(*arrays).numpy(), values[0].type.scalar)
            return tl.core.tensor(handle, values[0].type)

        return call


triton_heuristics.cached_autotune = _interpreted  # type: ignore[assignment]
triton_helpers.libdevice = Libdevice()  # type: ignore[assignment]


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -torch.inf)
    return scores if bias is None else scores + bias


def _attend(q, k, v, bias, _lse, _p=0.0, causal=False, *, scale=None):  # type: ignore[no-untyped-def]
    scores = _weights(q, k, bias, causal, scale or q.shape[-1] ** -0.5)
    zero = torch.zeros((), dtype=torch.int64)
    return scores.softmax(-1) @ v, scores.logsumexp(-1), zero, zero


def _attend_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, bias, out, _lse, _seed, _offset, _p, _mask, causal=False, *, scale=None
):
    scale = scale or q.shape[-1] ** -0.5
    weights = _weights(q, k, bias, causal, scale).softmax(-1)
    scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return scores @ k, scores.mT @ q, weights.mT @ grad, None


OTHERWISE: dict[Any, Callable[..., Any]] = {
    ATEN._scaled_dot_product_efficient_attention.default: _attend,
    ATEN._scaled_dot_product_efficient_attention_backward.default: _attend_backward,
}
"""What to call for operators that a CPU does not have."""
