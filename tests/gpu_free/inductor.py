"""Triton kernels and wrapper code that Inductor generates for an H100, without one.

The wrapper code runs on fake tensors: it allocates and frees as on a GPU. Kernels are recorded and
passed to `listeners`. Needs the package triton, but no CUDA.
"""

from __future__ import annotations

import fake_gpu  # before torch

from collections.abc import Callable, Sequence  # isort: skip
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch._inductor import async_compile, config
from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm
from torch._inductor.runtime import triton_helpers
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget


class Driver:
    """Triton's driver; the real one loads CUDA's."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_active_torch_device = staticmethod(lambda: fake_gpu.DEVICE)
    is_active = staticmethod(lambda: True)
    launcher_cls = staticmethod(lambda *_: None)
    # of a kernel that is loaded: module, function, registers, spilled ones, threads
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 1, 32, 0, 1024), unload_module=lambda _: None
    )


@dataclass
class Kernel:
    """A kernel in place of the compiled one."""

    name: str
    source: str

    def run(self, *arguments: Any, **_: Any) -> None:
        """Pass a launch to the listeners, which must not keep the arguments."""
        for listener in listeners:
            listener(self, arguments)


kernels: dict[str, Kernel] = {}
"""All kernels so far, by their source."""
listeners: list[Callable[[Kernel, tuple[Any, ...]], None]] = []


class OnTheCpu(TorchDispatchMode):
    """Creates tensors on the CPU, whatever their device should be."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        return func(*args, **({**named, "device": "cpu"} if "device" in named else named))


def _prepare() -> None:
    triton.runtime.driver.set_active(Driver())  # type: ignore[arg-type]
    triton_helpers.set_driver_to_gpu = lambda: None  # type: ignore[assignment]
    config.force_disable_caches = True
    config.compile_threads = 1
    config.triton.autotune_at_compile_time = False
    # The static launcher drops the machine code, which the tests look at.
    for launcher in ("use_static_cuda_launcher", "use_static_triton_launcher"):
        if hasattr(config, launcher):
            setattr(config, launcher, False)
    async_compile.AsyncCompile.triton = _record  # type: ignore[method-assign]
    guards = torch._C._dynamo.guards
    guards._empty_strided_cuda = _empty  # type: ignore[attr-defined]
    guards._reinterpret_tensor = _view  # type: ignore[attr-defined]
    # These trace patterns with real CUDA tensors. None of them occurs in a block of dtt.
    for module, name in ((fuse_attention, "_sfdp_init"), (pad_mm, "_pad_mm_init"),
                         (misc_patterns, "_misc_patterns_init")):  # fmt: skip
        setattr(module, name, lambda *_: None)
    folder: Any = joint_graph.UniformValueConstantFolder
    deduce = folder._deduce_value

    def deduced(self: Any, node: Any) -> Any:
        with OnTheCpu():  # it computes constants
            return deduce(self, node)

    folder._deduce_value = deduced


def _record(_self: Any, name: str, source: str, device_str: str = "cuda") -> Kernel:
    return kernels.setdefault(source, Kernel(name, source))


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=fake_gpu.DEVICE)


def _view(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    return torch.as_strided(x, size, stride, x.storage_offset() + offset)


_prepare()
