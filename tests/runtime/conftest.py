"""A real mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

MpiRun = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def mpirun() -> MpiRun:
    """Runs `python ARGS…` on so many ranks, with the mpirun of this environment or the machine."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        pytest.skip("no mpirun")
    lines = {"PYTHONUNBUFFERED": ""}  # each rank's line in one piece
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    crowd = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}

    def run(ranks: int, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, "-n", str(ranks), sys.executable, *args],
            env=os.environ | lines | root | crowd,
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    return run
