"""Answers with the resources of a case's Triton kernels, compiled to machine code for sm_90.

`limit N` answers with what happens on a device with N bytes of shared memory a block; `pipelined
CASE` without the options of wide heads.
"""

from __future__ import annotations

import inductor  # before torch

import contextlib  # isort: skip
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from chunks import both_ranks
from fake_run import make, training
from serving import serve
from step_cases import CASES, DOCUMENTS
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache

from dtt.mesh.compilation import compiler
from dtt.model import attention_backend

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def resources(name: str) -> list[dict[str, Any]]:
    """Return shared memory, registers and stack of each kernel and configuration of a step."""
    keys = CASES.get(name)
    if keys is None:  # `head-N`: `documents` with heads of N
        width = int(name.removeprefix("head-"))
        keys = [*DOCUMENTS, f"model.head_dim={width}", "model.n_layers=1"]
    inductor.kernels.clear()
    parts = both_ranks() if name.startswith("chunks") else contextlib.nullcontext()
    with parts, training(make("optim.type=adamw", *keys)) as step:
        step()
    if compiler.failure:
        return [{"kernel": "not compiled", "why": compiler.failure}]
    kernels = list(inductor.kernels.values())
    if name.startswith("head-"):  # the others do not depend on it
        kernels = [kernel for kernel in kernels if "flex" in kernel.name]
    return [found for kernel in kernels for found in _compiled(kernel)]


def _compiled(kernel: inductor.Kernel) -> Iterator[dict[str, Any]]:
    tuner = getattr(PyCodeCache.load(kernel.source), kernel.name)
    tuner.precompile(warm_cache_only=True)
    for result in tuner.compile_results:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(result.kernel.asm["cubin"])
            file.flush()
            usage = subprocess.run(
                [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        found = {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
        yield {"kernel": kernel.name, "shared": result.kernel.metadata.shared, **found}


def loaded(limit: int) -> dict[str, Any]:
    """Return the kernels of a step that a device loads, and why it is not compiled, if so.

    This is the code of Inductor and Triton up to the driver's call.
    """
    kernels: list[str] = []

    def load(_: Any, name: str, source: str, device_str: str = "cuda") -> inductor.Kernel:
        getattr(PyCodeCache.load(source), name).precompile()
        kernels.append(name)
        return inductor.Kernel(name, source)

    keys = "optim.type=adamw", *DOCUMENTS, "model.n_layers=1", "model.head_dim=128"
    with (
        patch.object(triton.compiler.compiler, "max_shared_mem", lambda _: limit),
        patch.object(AsyncCompile, "triton", load),
        training(make(*keys)) as step,
    ):
        step()
    return {"kernels": kernels, "failure": compiler.failure}


def answer(question: str) -> Any:
    """Return the answer to a question of a test."""
    kind, _, rest = question.partition(" ")
    if kind == "limit":
        return loaded(int(rest))
    pipelined = patch.object(attention_backend, "kernel_options", lambda *_: {})
    with pipelined if kind == "pipelined" else contextlib.nullcontext():
        return resources(rest or question)


if __name__ == "__main__":
    serve(answer)
