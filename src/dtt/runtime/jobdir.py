"""The job directory: the only place that knows what lies where below `jobs/<name>/`."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import secrets
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dtt.errors import ExitCode
from dtt.reading import Kind, read_record, read_records, read_text, retrying
from dtt.runtime.files import remove, write_atomically, write_once
from dtt.secrets import holds_secret, named_secret, redacted

# Environment variables worth keeping with a job; never all of them: they hold secrets.
ENVIRONMENT = ("CUDA_", "DTT_", "MASTER_", "NCCL_", "OMP_", "RANK", "SLURM_", "TORCH", "WORLD_SIZE")
SHORTEST_LEAD = 60
NONE = type(None)
ENDING: dict[str, Kind] = {
    "code": int, "reason": str, "step": (int, NONE), "rank": int, "node": str,
}  # fmt: skip
"""Fields of exit.json."""
HEARTBEAT: dict[str, Kind] = {
    "time": float, "attempt": int, "phase": str, "step": int, "steps": int,
    "seconds_per_step": (float, NONE), "world_size": int, "node": str, "pid": int,
}  # fmt: skip
"""Fields of heartbeat.json."""
ANSWER: dict[str, Kind] = {"request": str, "by": str, "step": int, "time": float}
"""Fields of control/acknowledged.json."""
TAIL = 2**16
"""Bytes at the end of metrics.jsonl that are looked at."""
LITTER_SECONDS = 60
"""Age at which a temporary file that another command may be writing belongs to nobody."""
PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "transformers")


@dataclass(frozen=True)
class JobDir:
    """Paths of one job, and the small files that dtt itself keeps there."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, with origins."""
        return self.root / "config.yaml"

    @property
    def exists(self) -> bool:
        """Whether there is such a job."""
        return self.config.is_file()

    @property
    def metrics(self) -> Path:
        """One JSON record a line: what training measured, by step."""
        return self.root / "metrics.jsonl"

    @property
    def parent(self) -> Path:
        """Of a branch: the job it began from, the step, and the sha256 of the checkpoint."""
        return self.root / "parent.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer.json of what the job trains on."""
        return self.root / "tokenizer.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    @property
    def stop(self) -> Path:
        """Whoever touches this asks the job to save and stop."""
        return self.root / "control" / "stop"

    @property
    def save(self) -> Path:
        """Whoever touches this asks the job for a checkpoint now."""
        return self.root / "control" / "save"

    @property
    def profile(self) -> Path:
        """Whoever touches this asks the job for a profile of its next steps."""
        return self.root / "control" / "profile"

    @property
    def acknowledged(self) -> Path:
        """Which request the job has heard last, and at which step."""
        return self.root / "control" / "acknowledged.json"

    @property
    def lead(self) -> Path:
        """Seconds, in one line, that the job needs between a stop request and its end."""
        return self.root / "lead"

    @property
    def heartbeat(self) -> Path:
        """What the job is doing, rewritten every few seconds while it runs."""
        return self.root / "heartbeat.json"

    @property
    def tensorboard(self) -> Path:
        """Folder of event files."""
        return self.root / "tensorboard"

    @property
    def profiles(self) -> Path:
        """Folder of profiles and memory snapshots."""
        return self.root / "profiles"

    @property
    def logs(self) -> Path:
        """Folder of what the processes said, a file for each attempt and node."""
        return self.root / "logs"

    @property
    def script(self) -> Path:
        """The job script that `dtt submit` wrote."""
        return self.root / "slurm.sh"

    @property
    def decision(self) -> Path:
        """Decision of the job script after the newest attempt: `again: …` or `over: …`."""
        return self.root / "decision"

    @property
    def submissions(self) -> Path:
        """One JSON record a line: each time this job was handed to Slurm, with its job id."""
        return self.root / "submissions.jsonl"

    def attempt_dir(self, number: int) -> Path:
        """Folder of one attempt."""
        return self.root / "attempts" / str(number)

    def parent_record(self) -> dict[str, Any] | None:
        """Where a branch begins; None for a job of its own."""
        return read_record(self.parent, {"job": str, "step": int})

    def clock(self, number: int) -> Path:
        """How long an attempt has run so far."""
        return self.attempt_dir(number) / "clock.json"

    def exit_record(self, number: int) -> dict[str, Any] | None:
        """How an attempt ended; None while it runs, or when nobody was left to write it."""
        return read_record(self.attempt_dir(number) / "exit.json", ENDING)

    def attempt(self) -> int:
        """Number of the newest attempt, from 1; 0 before the first."""
        names = (path.name for path in (self.root / "attempts").glob("*"))
        taken = [int(name) for name in names if name.isdecimal()]
        return max(taken, default=0)

    def begin_attempt(self) -> int:
        """Make the folder of a new attempt; returns its number."""
        retrying(lambda: self.stop.parent.mkdir(parents=True, exist_ok=True))
        number = self.attempt() + 1
        retrying(lambda: self.attempt_dir(number).mkdir(parents=True, exist_ok=True))
        return number

    def end_attempt(
        self,
        code: ExitCode,
        reason: str,
        rank: int,
        *,
        attempt: int,
        node: str | None = None,
        asked_by: str = "",
    ) -> None:
        """Write `exit.json`: the truth about an ending, which launchers flatten to 0 or 1.

        The first rank that fails is the cause; those that fail after it do not overwrite it.
        `node`: where `rank` runs, by default this one. `asked_by`: who asked for a stop, if
        somebody did: a signal's name, or the first line of `control/stop`.
        """
        folder = self.attempt_dir(attempt)
        path = folder / "exit.json"
        if path.exists() or not folder.is_dir():
            return
        record = {
            "code": int(code),
            "reason": reason,
            "step": self.last_step(),
            "rank": rank,
            "node": node or socket.gethostname(),
            "checkpoint": self.newest_checkpoint_name(),
            "asked_by": asked_by,
        }
        write_once(path, json.dumps(record, indent=1) + "\n")

    def newest_checkpoint_name(self) -> str | None:
        """Name of the newest checkpoint folder, for people; loading scans and verifies."""
        steps = [p.name.removeprefix("step-") for p in self.checkpoints.glob("step-*")]
        newest = max((step for step in steps if step.isdecimal()), key=int, default=None)
        return newest and f"step-{newest}"

    def last_step(self) -> int | None:
        """The newest step in metrics.jsonl."""
        records = read_records(self.metrics, {"kind": str, "step": int}, last=TAIL)
        return max((record["step"] for record in records), default=None)

    def run_id(self, known: str | None = None) -> str:
        """The job's identity for trackers: made once, the same for every attempt.

        `known` is what a checkpoint says it is: that counts when the file is lost.
        """
        path = self.root / "run_id"
        found = (read_text(path) or "").strip()
        if not re.fullmatch(r"[\w.-]{1,64}", found):
            found = known or secrets.token_hex(4)
            write_atomically(path, found + "\n")
        return found

    def remove_litter(self) -> None:
        """Delete temporary files of processes that were killed; only whoever holds the job may.

        What another command may just be writing is left alone until it is a minute old.
        """
        old = time.time() - LITTER_SECONDS
        for pattern in (".*.tmp", "attempts/*/.*.tmp", "attempts/*/*/.*.tmp", "control/.*.tmp"):
            for path in self.root.glob(pattern):
                others = path.parent == self.stop.parent or path.name.startswith(".slurm.sh.")
                with suppress(OSError):
                    if not others or path.lstat().st_mtime < old:
                        remove(path)

    def write_lead(self, step: float, save: float) -> None:
        """Write `lead` for a job whose slowest step and save take so many seconds."""
        write_atomically(self.lead, f"{lead_seconds(step, save)}\n")

    def diverged_after(self) -> int | None:
        """The last step before the latest divergence, whose own is the last on record, or None."""
        records = (self.exit_record(n) for n in range(1, self.attempt() + 1))
        steps = [r["step"] for r in records if r is not None and r["code"] == ExitCode.DIVERGED]
        return max((step - 1 for step in steps if step is not None), default=None)

    def write_environment(self) -> None:
        """Write `env.json`: versions, the code's git state, and allow-listed variables."""
        record = {
            "command": [redacted(argument) for argument in sys.argv],
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: metadata.version(name) for name in PACKAGES},
            "git": _git_state(Path(__file__).parent),
            "environment": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(ENVIRONMENT) and not (named_secret(name) or holds_secret(value))
            },
        }
        write_atomically(self.root / "env.json", json.dumps(record, indent=1) + "\n")


def lead_seconds(step: float, save: float) -> int:
    """How long before a time limit to ask for a stop: twice a step and a save, and half a minute in
    which Slurm may be early or late."""
    return max(SHORTEST_LEAD, math.ceil(30 + 2 * (step + save)))


def _git_state(folder: Path) -> dict[str, str] | None:
    """Commit and uncommitted changes of dtt's own code; None outside a clone."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout

    try:
        if git("ls-files", ".").strip() == "":
            return None
        diff = redacted(git("diff", "HEAD", "--", "."))
        return {"commit": git("rev-parse", "HEAD").strip(), "diff": diff}
    except (OSError, subprocess.CalledProcessError):
        return None
