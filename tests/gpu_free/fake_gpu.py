"""An H100 that computes nothing, so that CUDA paths run on fake tensors without a GPU.

Import this module before torch: torch asks once which accelerator it has. Fake tensors have shapes,
dtypes and a device, but no numbers.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("fake_cuda.cpp")


def _load_hooks() -> ctypes.CDLL:
    """Compile the hooks (2 s, once per torch and user), and load them with torch's library."""
    assert "torch" not in sys.modules, "import fake_gpu before torch"
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_folder = Path(spec.origin).parent
    version = importlib.metadata.version("torch")
    cache = Path(tempfile.gettempdir()) / f"dtt-fake-cuda-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    library = cache / f"{version}-{SOURCE.stat().st_mtime_ns}.so"
    lib = torch_folder / "lib"
    if not library.exists():
        # Written elsewhere first: test processes start at the same time.
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / library.name
            command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch_folder}/include"]
            links = [f"-L{lib}", "-ltorch_cpu", "-lc10", "-o", str(made)]
            subprocess.run([*command, str(SOURCE), *links], check=True)
            made.replace(library)
    # as `import torch` loads it: its symbols must be visible to libraries that are loaded later
    ctypes.CDLL(str(lib / "libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(lib / "libtorch_cpu.so"))
    return ctypes.CDLL(str(library))


_HOOKS = _load_hooks()

import torch  # noqa: E402  (after the hooks)
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

TORCH = ("2.11.", "2.13.", "2.14.")
"""Versions of torch whose internals these programs replace."""
DEVICE = torch.device("cuda", 0)
MEMORY = int(79.1 * 2**30)
SHARED_MEMORY = 232_448
"""Bytes of shared memory that a block of an H100 can use: 227 KiB."""
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, warp_size=32,
    total_memory=MEMORY, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    regs_per_multiprocessor=65536, L2_cache_size=50 * 2**20, shared_memory_per_block=49152,
    shared_memory_per_block_optin=SHARED_MEMORY, shared_memory_per_multiprocessor=233_472,
    gcnArchName="", is_integrated=0, uuid="0",
)  # fmt: skip


class Stream:
    """A CUDA stream, or an event, that does nothing."""

    device, device_index, device_type, stream_id, cuda_stream = DEVICE, 0, 1, 0, 0

    def __init__(self, *_: object, **__: object) -> None: ...
    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 1.0

    def _nothing(self, *_: object, **__: object) -> None: ...

    record = wait = synchronize = wait_event = wait_stream = record_event = _nothing


class Generator(torch.Generator):
    """The random number generator of the GPU, whose state full remat saves and restores."""

    device = DEVICE  # type: ignore[assignment]

    def clone_state(self) -> Generator:
        return Generator()

    def graphsafe_get_state(self) -> Generator:
        return self

    def graphsafe_set_state(self, _: torch.Generator) -> None: ...


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, **named: Any,
) -> Tensor:  # fmt: skip
    """Call the kernel that a CUDA build uses here: cuDNN in bf16, `efficient` otherwise.

    A CPU build has only `math`, whose scores would take another order of memory.
    """
    if q.device.type == "cpu":
        how = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
        return _real_attention(q, k, v, **how, **named)
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
    aten = torch.ops.aten
    given = (q, k, v, attn_mask, True, dropout_p, is_causal)
    if attn_mask is not None or q.dtype is torch.float32:
        return aten._scaled_dot_product_efficient_attention(*given, scale=scale)[0]
    return aten._scaled_dot_product_cudnn_attention(*given, False, scale=scale)[0]


_real_attention = F.scaled_dot_product_attention
_STREAM = Stream()
ANSWERS: dict[str, Any] = {
    "is_available": True, "is_initialized": True, "init": None, "_lazy_init": None,
    "device_count": 8, "current_device": 0, "set_device": None,
    "_exchange_device": 0, "_maybe_exchange_device": 0,
    "get_device_name": PROPERTIES.name, "get_device_capability": (9, 0),
    "get_device_properties": PROPERTIES, "mem_get_info": (MEMORY, MEMORY),
    "max_memory_allocated": 0, "empty_cache": None, "is_bf16_supported": True,
    "current_stream": _STREAM, "default_stream": _STREAM, "stream": _STREAM, "set_stream": None,
    "synchronize": None, "set_rng_state": None, "is_current_stream_capturing": False,
}  # fmt: skip
"""What functions of torch.cuda return."""


def _pretend() -> None:
    """Replace torch.cuda's functions; before torch._dynamo is imported, which keeps them."""
    _HOOKS.guard_cuda()
    if not torch.__version__.startswith(TORCH):
        print(f"this pretends to be a GPU of torch {TORCH}, and may not fit {torch.__version__}",
              file=sys.stderr)  # fmt: skip
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name in ("cuda_getCurrentRawStream", "cuda_getDevice", "cuda_exchangeDevice",
                 "cuda_maybeExchangeDevice"):  # fmt: skip
        setattr(torch._C, f"_{name}", lambda *_: 0)
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[assignment]
    torch.cuda.default_generators = (Generator(),)
    torch.cuda.Stream = torch.cuda.Event = Stream  # type: ignore[assignment,misc]
    F.scaled_dot_product_attention = _attention
    # In the thread of the caller, where the dispatch modes of a test are active.
    torch.autograd.set_multithreading_enabled(False)
    FakeTensorMode.avoid_device_init = True  # type: ignore[method-assign,assignment]
    fake_tensor.init_gpu_context = lambda *_: None  # what avoids it only since torch 2.13


_pretend()


def fake_mode() -> FakeTensorMode:
    """Return a mode that makes tensors fake; real tensors, as a mesh has, may be mixed in."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # A tensor made of numbers would otherwise keep them, and be copied to the device for them. (A
    # subclass would not do: higher-order operators are registered for this class alone.)
    mode.may_turn_const = lambda _: False  # type: ignore[method-assign]
    return mode
