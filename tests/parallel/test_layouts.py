"""The loss curve of a run is the same on every layout: some of the table that
`benchmarks/layouts.py` prints, or, with DTT_ALL_LAYOUTS=1, all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_layout_trains_as_one_process_does(tmp_path: Path) -> None:
    every = os.environ.get("DTT_ALL_LAYOUTS") == "1"
    counts = tmp_path / "differences.json"
    script = [sys.executable, ROOT / "benchmarks/layouts.py", "--json", counts]
    run = subprocess.run([*script, *([] if every else ["--quick"])], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    differences = json.loads(counts.read_text())
    assert len(differences) == (96 if every else 6)
    assert max(differences.values()) < 1e-4
