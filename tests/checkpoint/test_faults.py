"""A kill at every system call of a save that changes the disk: no checkpoint is lost or torn.

The harness is a benchmark, which also injects other faults into other back ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.running import ROOT

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")

BACKENDS = ("dtt, asynchronous", "dtt, two ranks, sharded")


@pytest.mark.slow
def test_a_save_killed_at_any_system_call_leaves_the_previous_or_the_new_checkpoint_complete(
    tmp_path: Path,
) -> None:
    counts = tmp_path / "counts.json"
    # Otherwise each of hundreds of processes would write its coverage.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    env["TMPDIR"] = "/dev/shm"  # none of these faults involves the disk's cache
    script = ROOT / "benchmarks/faults.py"
    run = subprocess.run(
        [sys.executable, script, "--quick", "--json", counts, "--only", *BACKENDS],
        env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(counts.read_text())["faults"]
    assert found.keys() == {*BACKENDS}
    for by_kind in found.values():
        [times] = by_kind.values()
        assert times.keys() <= {"previous step", "new step", "not injected"}
        assert times["previous step"] > 20
        assert times["new step"] > 10
        assert times.get("not injected", 0) < sum(times.values()) / 4
