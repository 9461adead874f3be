"""Versions of dtt, its dependencies and drivers, and their comparison across nodes."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import dtt
from dtt.base.errors import EnvironmentUnfit

DISTRIBUTION = "dtt-lm"
"""Name of dtt among installed distributions, as in pyproject.toml."""

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "transformers")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def facts() -> dict[str, str]:
    """Return versions by name, without importing the packages; `none` for missing ones."""
    return {
        "dtt": f"{dtt.__version__} in {Path(dtt.__file__).parent}",
        "python": f"{platform.python_version()} in {sys.prefix}",
        **{name: _version(name) for name in PACKAGES},
        "driver": _driver(),
    }


def torch_facts() -> dict[str, str]:
    """Return the CUDA and NCCL versions that torch was built with.

    Raises EnvironmentUnfit if torch cannot be imported.
    """
    try:
        import torch
    except (ImportError, OSError) as error:  # a shared library fails to load
        raise EnvironmentUnfit(
            "torch cannot be imported", why=str(error), next="install dtt again: ./env.sh"
        ) from None
    nccl = "none"
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        from torch.cuda.nccl import version

        nccl = ".".join(map(str, version()))  # type: ignore[no-untyped-call]
    return {"cuda": torch.version.cuda or torch.version.hip or "none", "nccl": nccl}


def differences(nodes: Sequence[tuple[str, dict[str, str]]]) -> Iterator[EnvironmentUnfit]:
    """Yield a problem for each fact that is not the same on all nodes.

    `nodes` holds the node and the facts of each process.
    """
    for name in nodes[0][1]:
        where: dict[str, list[str]] = {}
        for node, facts in nodes:
            where.setdefault(facts[name], []).append(node)
        if len(where) > 1:
            versions = (f"{value} on {', '.join(dict.fromkeys(on))}" for value, on in where.items())
            yield EnvironmentUnfit(
                f"{name} is not the same on all nodes",
                why="; ".join(versions),
                next="install the same everywhere, or leave nodes out: launch.exclude=NODE",
            )


def install(extra: str) -> str:
    """Return the command that installs the requirements of an optional `extra` of dtt.

    The command names these requirements and this Python executable. So it works for an installation
    from a clone or a wheel, in any folder, and cannot install another project named dtt.
    """
    try:
        declared = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return "install dtt itself: ./env.sh in its clone"
    wanted = [
        requirement.partition(";")[0].strip()
        for requirement in declared
        if re.search(rf"extra == ['\"]{extra}['\"]", requirement)
    ]
    pip = ["-m", "pip", "install"]
    # Not find_spec("pip") of importlib: setuptools would mistake this process for pip and then fail
    # in the import by torch.utils.cpp_extension.
    if not any(metadata.distributions(name="pip")):  # environments created by uv have no pip
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *wanted])
    return shlex.join([sys.executable, *pip, *wanted])


def cpu_name() -> str:
    """Return the model of the CPU, or the architecture if the system does not report it."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def without(node: str) -> str:
    """Return the hint for excluding a node."""
    return f"exclude that node: launch.exclude={node}, or sbatch --exclude={node}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _driver() -> str:
    """Return the version of NVIDIA's driver, or `none`.

    It is in a line such as `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  …`.
    """
    text = NVIDIA_DRIVER.read_text() if NVIDIA_DRIVER.exists() else ""
    found = re.search(r"\d+\.[\d.]*\d", text)
    return found[0] if found else "none"
