"""A Slurm that answers what it is told to and records what it was asked."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir

# Captured from Slurm 22.05; tests/slurm compares them with what a real one prints today.
SQUEUE = {
    "PENDING": "{id}|PENDING||{since}|{since}|{since}|Resources",
    "HELD": "{id}|PENDING||{since}|N/A|N/A|JobHeldUser",
    "RUNNING": "{id}|RUNNING|n[1-2]|{since}|{since}|{since}|None",
    "SUSPENDED": "{id}|SUSPENDED|n[1-2]|{since}|{since}|{since}|None",
    "CANCELLED": "{id}|CANCELLED||{since}|{since}|{since}|Resources",
    "COMPLETED": "{id}|COMPLETED|n1|{since}|{since}|{since}|None",
    "FAILED": "{id}|FAILED|n1|{since}|{since}|{since}|NonZeroExitCode",
    "TIMEOUT": "{id}|TIMEOUT|n1|{since}|{since}|{since}|TimeLimit",
    "NODE_FAIL": "{id}|NODE_FAIL|n[1-2]|{since}|{since}|{since}|NodeDown",
}
SACCT = {
    "RUNNING": "{id}|RUNNING|n[1-2]|{since}|{since}|Unknown|None",
    "CANCELLED": "{id}|CANCELLED by 0|n[1-2]|{since}|{since}|{since}|None",
}
FORGOTTEN = "slurm_load_jobs error: Invalid job id specified"
NO_CONTROLLER = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
NO_ACCOUNTING = "Slurm accounting storage is disabled"

PROGRAM = f"""#!{sys.executable}
import sys
from pathlib import Path
here = Path(__file__)
with here.with_suffix(".asked").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
sys.stdout.write(here.with_suffix(".out").read_text())
error = here.with_suffix(".err").read_text()
if error:
    sys.exit(error)
"""


@dataclass(frozen=True)
class FakeSlurm:
    """Programs in a folder that is to be on PATH."""

    folder: Path

    def says(self, program: str, *lines: str, error: str = "") -> None:
        """What a program prints from now on; it fails if there is an `error`."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / program
        path.write_text(PROGRAM)
        path.chmod(0o755)
        path.with_suffix(".out").write_text("".join(line + "\n" for line in lines))
        path.with_suffix(".err").write_text(error)

    def asked(self, program: str) -> list[str]:
        """The arguments of each call."""
        path = (self.folder / program).with_suffix(".asked")
        return path.read_text().splitlines() if path.exists() else []


def write_commands(folder: Path, bodies: Mapping[str, str]) -> str:
    """Write scripts of bash with these names and bodies; return a PATH that finds them first."""
    folder.mkdir()
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def write_heartbeat(job: JobDir, **changes: Any) -> None:
    """Write a fresh heartbeat of the first attempt of a job, at step 8 of 20."""
    now = time.time()
    beat = {
        "time": now, "progress": now, "attempt": 1, "phase": "step", "step": 8, "steps": 20,
        "seconds_per_step": 0.5, "world_size": 2, "node": "n1", "pid": 1,
    }  # fmt: skip
    job.heartbeat.write_text(json.dumps(beat | changes))
