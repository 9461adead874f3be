"""Numbers behind fake CUDA tensors: each storage has a shadow, a real one in host memory.

Operators run twice, on fake tensors and on their shadows; kernels that Inductor generated run in
Triton's interpreter. What remains unseen is the arithmetic of tensor cores and libraries.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import inductor  # before torch

import weakref  # isort: skip
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._ops import HigherOrderOperator
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
        named = dict(kwargs or {})
        if isinstance(func, HigherOrderOperator) and named.pop("rng_state", None) is not None:
            # Inductor takes attention for random, and wraps what is computed again.
            func, *args = args
        out = func(*args, **named)
        given, made = tree_leaves((args, named)), tree_leaves(out)
        real = isinstance(func, torch._ops.OpOverload) and func.namespace not in SILENT
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


def _wide(x: Any) -> Any:
    """Return a handle with the fp32 values of one in bf16."""
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _cast(self: Any, source: Any, to: Any) -> Any:
    """Convert; the interpreter would truncate fp32 to bf16, where a GPU rounds to nearest."""
    kinds = source.dtype.scalar, to.scalar
    if kinds == (tl.bfloat16, tl.float32):
        return _wide(source)
    if kinds == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16)
        return interpreter.TensorHandle(rounded.numpy(), tl.bfloat16)
    return _cast_otherwise(self, source, to)


def truncated() -> Any:
    """Return a context in which kernels truncate to bf16."""
    return patch.object(interpreter.InterpreterBuilder, "cast_impl", _cast_otherwise)


def _product(self: Any, a: Any, b: Any, *more: Any) -> Any:
    """Multiply in fp32; the interpreter would multiply the bits of bf16 as integers."""
    return _dot(self, *(_wide(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *more)


_cast_otherwise = interpreter.InterpreterBuilder.cast_impl
_dot = interpreter.InterpreterBuilder.create_dot
interpreter.InterpreterBuilder.cast_impl = _cast
interpreter.InterpreterBuilder.create_dot = _product
# A third of the time: checks of integers for overflow, which a GPU does not have either.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
triton_heuristics.cached_autotune = _interpreted  # type: ignore[assignment]
triton_helpers.libdevice = Libdevice()  # type: ignore[assignment]
# The interpreter reduces with numpy only if it knows the function: a tenth of the time of the loss.
triton_helpers.maximum = tl.standard._elementwise_max


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = q.float() @ k.float().mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -torch.inf)
    return scores if bias is None else scores + bias


def _attend(q, k, v, bias, _lse, _p=0.0, causal=False, *, scale=None):  # type: ignore[no-untyped-def]
    scores = _weights(q, k, bias, causal, scale or q.shape[-1] ** -0.5)
    zero = torch.zeros((), dtype=torch.int64)
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1), zero, zero


def _attend_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, bias, out, lse, _seed, _offset, _p, _mask, causal=False, *, scale=None
):
    scale = scale or q.shape[-1] ** -0.5
    grad = grad.float()
    # Of the scores that the logsumexp covers, which may be more than these.
    weights = (_weights(q, k, bias, causal, scale) - lse.view(*q.shape[:-1], 1)).exp()
    scores = weights * (grad @ v.float().mT - (grad * out).sum(-1, keepdim=True)) * scale
    found = scores @ k.float(), scores.mT @ q.float(), weights.mT @ grad
    return *(x.to(q.dtype) for x in found), None


def _cudnn(*given, **named):  # type: ignore[no-untyped-def]
    out, lse, zero, _ = _attend(*given[:7], **named)
    return out, lse[..., None], None, None, 0, 0, zero, zero, None


def _cudnn_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, out, lse, seed, offset, bias, _cq, _ck, _mq, _mk, p, causal, *, scale=None
):
    how = grad, q, k, v, bias, out, lse, seed, offset, p, None, causal
    return _attend_backward(*how, scale=scale)[:3]


OTHERWISE: dict[Any, Callable[..., Any]] = {
    ATEN._scaled_dot_product_efficient_attention.default: _attend,
    ATEN._scaled_dot_product_efficient_attention_backward.default: _attend_backward,
    ATEN._scaled_dot_product_cudnn_attention.default: _cudnn,
    ATEN._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    # A CPU keeps another buffer between the two passes.
    ATEN.log_sigmoid_forward.default: lambda x: (x.sigmoid().log(), x.new_zeros(0)),
    ATEN.log_sigmoid_backward.default: lambda grad, x, _: grad * (-x).sigmoid(),
    ATEN.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
    ATEN.mm.dtype_out: lambda a, b, dtype, *, out: out.copy_(a.to(dtype) @ b.to(dtype)),
    ATEN.addmm.dtype: lambda c, a, b, dtype: c + a.to(dtype) @ b.to(dtype),
}
"""What to call for operators that a CPU does not have, or computes in another way."""
