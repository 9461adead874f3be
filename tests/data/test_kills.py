"""Some of the random kills of `benchmarks/tokenize_kills.py`, which counts a hundred."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from running import ROOT


@pytest.mark.slow
def test_random_kills_leave_nothing_behind_and_end_the_job_with_a_message() -> None:
    if (
        importlib.util.find_spec("mpi4py") is None
        or not Path(sys.executable).with_name("mpirun").exists()
    ):
        pytest.skip("no MPI: pip install -e '.[mpich]'")
    script = ROOT / "benchmarks/tokenize_kills.py"
    done = subprocess.run(
        [sys.executable, str(script), "5", "3"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "or not ended in 10 s: 0" in done.stdout
