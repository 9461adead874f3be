"""Answers with the resources of a case's Triton kernels, compiled to machine code for sm_90."""

from __future__ import annotations

import inductor  # before torch

import re  # isort: skip
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from fake_run import make, training
from serving import serve
from torch._inductor.codecache import PyCodeCache

from dtt.mesh.compilation import compiler

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
CASES = {
    "gpt2": ["model.family=gpt2"],
    "llama": [],
    "qwen3": ["model.family=qwen3"],
    "phi3": ["model.family=phi3"],
    "documents": ["data.mask_documents=true"],
    "windows": ["model.family=gemma3", "data.mask_documents=true"],
}
"""Keys by name; `head-N` is `documents` with heads of N."""


def resources(name: str) -> list[dict[str, Any]]:
    """Return shared memory, registers and stack of each kernel and configuration of a step."""
    keys = CASES.get(name)
    if keys is None:
        width = int(name.removeprefix("head-"))
        keys = [*CASES["documents"], f"model.head_dim={width}", "model.n_layers=1"]
    inductor.kernels.clear()
    documents = "data.mask_documents=true" in keys
    with training(make("optim.type=adamw", *keys), documents=documents) as step:
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


if __name__ == "__main__":
    serve(resources)
