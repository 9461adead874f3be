"""Some of the random kills of `benchmarks/kills.py`, which counts a hundred."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from support.running import ROOT


@pytest.mark.slow
def test_after_random_kills_all_processes_end_and_a_rerun_writes_the_same_files() -> None:
    if (
        importlib.util.find_spec("mpi4py") is None
        or not Path(sys.executable).with_name("mpirun").exists()
    ):
        pytest.skip("no MPI: pip install -e '.[mpich]'")
    script = ROOT / "benchmarks/kills.py"
    command = [sys.executable, str(script), "tokenize", "5", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jobs differ, 0 manual steps" in done.stdout
