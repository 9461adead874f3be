"""A save struck at any system call, a checkpoint damaged in any way: nothing lost, nothing wrong.

The harness is a benchmark, which shows other ways to save beside; here a part of it, dtt's alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from running import ROOT

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")

WAYS = ("dtt, asynchronous", "dtt, two ranks, sharded")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, int]]]:
    """Counts of `struck` saves and `damaged` checkpoints, by way of saving and what was done."""
    counts = tmp_path_factory.mktemp("faults") / "counts.json"
    # Each of thousand processes would write what it has covered.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    env["TMPDIR"] = "/dev/shm"  # none of these faults is one of the disk's cache
    script = ROOT / "benchmarks/faults.py"
    run = subprocess.run(
        [sys.executable, script, "--quick", "--json", counts, "--only", *WAYS],
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


def test_killed_at_every_system_call_of_a_save_the_one_before_or_the_new_one_is_whole(
    outcomes: dict[str, dict[str, dict[str, int]]],
) -> None:
    assert outcomes["struck"].keys() == {f"{way}: SIGKILL" for way in WAYS}
    for times in outcomes["struck"].values():
        assert times.keys() <= {"the one before", "the new one", "not struck"}
        assert times["the one before"] > 20
        assert times["the new one"] > 20
        assert times.get("not struck", 0) < sum(times.values()) / 4


def test_any_damage_is_found_its_file_named_and_the_one_before_taken(
    outcomes: dict[str, dict[str, dict[str, int]]],
) -> None:
    damaged = {name.split(": ")[1]: times for name, times in outcomes["damaged"].items()}
    assert damaged.pop("an extra file") == {"harmless": 1}  # one the manifest does not name
    for kind, times in damaged.items():
        assert times.keys() == {"found"}, kind
    assert sum(times["found"] for times in damaged.values()) > 500
