"""The job directory: the only place that knows what lies where below `jobs/<name>/`."""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dtt.errors import ExitCode
from dtt.runtime.files import write_atomically

# Environment variables worth keeping with a job; never all of them: they hold secrets.
ENVIRONMENT = ("CUDA_", "DTT_", "MASTER_", "NCCL_", "OMP_", "RANK", "SLURM_", "TORCH", "WORLD_SIZE")
SECRET_WORDS = ("AUTH", "KEY", "PASS", "SECRET", "TOKEN", "JWT", "CREDENTIAL")
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
    def metrics(self) -> Path:
        """One JSON record a line: what training measured, by step."""
        return self.root / "metrics.jsonl"

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
    def tensorboard(self) -> Path:
        """Folder of event files."""
        return self.root / "tensorboard"

    def attempt(self) -> int:
        """Number of the newest attempt, from 1; 0 before the first."""
        taken = [int(p.name) for p in (self.root / "attempts").glob("*") if p.name.isdigit()]
        return max(taken, default=0)

    def begin_attempt(self) -> None:
        """Make the folder of a new attempt."""
        self.stop.parent.mkdir(parents=True, exist_ok=True)
        (self.root / "attempts" / str(self.attempt() + 1)).mkdir(parents=True)

    def end_attempt(self, code: ExitCode, reason: str, rank: int) -> None:
        """Write `exit.json`: the truth about an ending, which launchers flatten to 0 or 1.

        The first rank that fails is the cause; those that fail after it do not overwrite it.
        """
        folder = self.root / "attempts" / str(self.attempt())
        path = folder / "exit.json"
        if path.exists() or not folder.is_dir():
            return
        record = {
            "code": int(code),
            "reason": reason,
            "step": self.last_step(),
            "rank": rank,
            "node": socket.gethostname(),
            "checkpoint": self.newest_checkpoint_name(),
        }
        write_atomically(path, json.dumps(record, indent=1) + "\n")

    def newest_checkpoint_name(self) -> str | None:
        """Name of the newest checkpoint folder, for people; loading scans and verifies."""
        steps = [p.name.removeprefix("step-") for p in self.checkpoints.glob("step-*")]
        newest = max((step for step in steps if step.isdigit()), key=int, default=None)
        return newest and f"step-{newest}"

    def last_step(self) -> int | None:
        """Step of the newest record in metrics.jsonl."""
        if not self.metrics.exists():
            return None
        with self.metrics.open("rb") as file:
            file.seek(max(0, self.metrics.stat().st_size - 2**16))
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.startswith(b"{") and line.endswith(b"\n")]
        return json.loads(whole[-1])["step"] if whole else None

    def run_id(self) -> str:
        """The job's identity for trackers: made once, the same for every attempt."""
        path = self.root / "run_id"
        if not path.exists():
            write_atomically(path, secrets.token_hex(4) + "\n")
        return path.read_text().strip()

    def write_environment(self) -> None:
        """Write `env.json`: versions, the code's git state, and allow-listed variables."""
        record = {
            "command": sys.argv,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: metadata.version(name) for name in PACKAGES},
            "git": _git_state(Path(__file__).parent),
            "environment": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(ENVIRONMENT) and not any(w in name.upper() for w in SECRET_WORDS)
            },
        }
        write_atomically(self.root / "env.json", json.dumps(record, indent=1) + "\n")


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
        return {"commit": git("rev-parse", "HEAD").strip(), "diff": git("diff", "HEAD", "--", ".")}
    except (OSError, subprocess.CalledProcessError):
        return None
