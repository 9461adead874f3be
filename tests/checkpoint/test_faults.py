"""Faults at every system call of a save, and damage of any kind: no checkpoint is lost or wrong.

The harness is a benchmark, which also runs other checkpoint back ends; here it runs dtt's alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from support.running import ROOT

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")

BACKENDS = ("dtt, asynchronous", "dtt, two ranks, sharded")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, int]]]:
    """Return the outcomes of `faults` and of `damage`, by back end and kind, with their counts."""
    counts = tmp_path_factory.mktemp("faults") / "counts.json"
    # Otherwise each of a thousand processes would write its coverage.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    env["TMPDIR"] = "/dev/shm"  # none of these faults involves the disk's cache
    script = ROOT / "benchmarks/faults.py"
    run = subprocess.run(
        [sys.executable, script, "--quick", "--json", counts, "--only", *BACKENDS],
        env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(counts.read_text())
    merged: dict[str, dict[str, dict[str, int]]] = {}
    for part, by_name in found.items():
        for name, by_kind in by_name.items():
            for kind, times in by_kind.items():
                merged.setdefault(part, {})[f"{name}: {kind}"] = times
    return merged


@pytest.mark.slow
def test_a_save_killed_at_any_system_call_leaves_the_previous_or_the_new_checkpoint_complete(
    outcomes: dict[str, dict[str, dict[str, int]]],
) -> None:
    assert outcomes["faults"].keys() == {f"{backend}: SIGKILL" for backend in BACKENDS}
    for times in outcomes["faults"].values():
        assert times.keys() <= {"previous step", "new step", "not injected"}
        assert times["previous step"] > 20
        assert times["new step"] > 20
        assert times.get("not injected", 0) < sum(times.values()) / 4


@pytest.mark.slow
def test_any_damage_is_detected_its_file_named_and_the_previous_checkpoint_loaded(
    outcomes: dict[str, dict[str, dict[str, int]]],
) -> None:
    damage = {name.split(": ")[1]: times for name, times in outcomes["damage"].items()}
    assert damage.pop("an extra file") == {"harmless": 1}  # the manifest does not list it
    for kind, times in damage.items():
        assert times.keys() == {"found"}, kind
    assert sum(times["found"] for times in damage.values()) > 500
