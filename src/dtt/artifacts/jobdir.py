"""The layout of a job directory, `jobs/<name>/`. Only this module knows its paths."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dtt.artifacts.manifests import CHAT_TEMPLATE
from dtt.base.errors import ExitCode
from dtt.base.files import fsync_folder, remove, write_atomically
from dtt.base.ranks import slurm_id
from dtt.base.reading import (
    Kind,
    fits,
    read_record,
    read_records,
    read_text,
    retrying,
)
from dtt.base.secrets import holds_secret, named_secret, redacted

# Prefixes of environment variables to record with a job. Never all of them: they hold secrets.
ENVIRONMENT = ("CUDA_", "DTT_", "MASTER_", "NCCL_", "OMP_", "RANK", "SLURM_", "TORCH", "WORLD_SIZE")
PACKAGE = Path(__file__).parents[1]
SHORTEST_LEAD = 60
NONE = type(None)
STARTED: dict[str, Kind] = {"started": float, "slurm": (str, NONE), "launch": str, "ranks": int}
"""Fields of attempt.json from the start of the attempt on."""
ENDED: dict[str, Kind] = {
    "ended": float, "code": int, "reason": str, "step": (int, NONE), "rank": int, "node": str,
    "checkpoint": (str, NONE), "asked_by": str,
}  # fmt: skip
"""Fields of attempt.json that the end of the attempt adds."""
SUBMITTED: dict[str, Kind] = {"time": float, "job_id": (str, NONE), "argv": list, "directory": str}
"""Fields of submission.json. `job_id` is None if sbatch did not answer."""
HEARTBEAT: dict[str, Kind] = {
    "time": float, "attempt": int, "phase": str, "step": int, "steps": int,
    "seconds_per_step": (float, NONE), "world_size": int, "node": str, "pid": int,
}  # fmt: skip
"""Fields of heartbeat.json."""
ANSWER: dict[str, Kind] = {"request": str, "by": str, "step": int, "time": float}
"""Fields of control/acknowledged.json."""
MIRRORED: dict[str, Kind] = {
    "url": str, "time": float, "steps": list, "uploading": (int, NONE), "pending": list,
    "failure": (dict, NONE),
}  # fmt: skip
"""Fields of mirror.json. `steps` are those with a complete copy."""
STAGE: dict[str, Kind] = {"stages": list, "data_key": (str, NONE), "predecessor": (dict, NONE)}
"""Fields of stage.json. Before the first start, only `stages` is known."""
NUMBER = re.compile(r"[1-9][0-9]{0,8}")
"""Name of the folder of an attempt."""
TAIL = 2**16
"""Bytes at the end of metrics.jsonl that are read."""
HEADER = re.compile(r"^(Name|Version): *(.*?) *$", re.MULTILINE)
"""A header of a package's metadata that env.json records."""
LITTER_SECONDS = 60
"""Age in seconds at which a temporary file of another command counts as abandoned."""


class _Below:
    """A path below the root of a job directory, as an attribute of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, job: JobDir, cls: type[JobDir]) -> Path:
        return job.root / self._name


@dataclass(frozen=True)
class JobDir:
    """The paths of one job, and the small files that dtt itself writes there."""

    root: Path

    config = _Below("config.yaml")
    """The resolved configuration, with the origin of each value."""
    metrics = _Below("metrics.jsonl")
    """Training metrics by step, one JSON record per line."""
    parent = _Below("parent.json")
    """Record of a branch's parent: job, step, and sha256 of the checkpoint."""
    stage = _Below("stage.json")
    """Record of a stage of training: names of all stages, and what this one started from."""
    tokenizer = _Below("tokenizer.json")
    """The tokenizer.json of the job's training data."""
    chat_template = _Below(CHAT_TEMPLATE)
    """The chat template of the job's conversations; absent if it trains on text."""
    released = _Below("released.json")
    """Settings of the released model that the job started from, which its export carries over."""
    sentencepiece = _Below("tokenizer.model")
    """The SentencePiece model of that tokenizer, if the release has one."""
    dependents = _Below("dependents")
    """Folder of records of other jobs whose adapters need a checkpoint of this one."""
    checkpoints = _Below("checkpoints")
    """Folder of the checkpoints."""
    mirror = _Below("mirror.json")
    """Record of the copies of checkpoints in `checkpoint.mirror`."""
    reference = _Below("reference")
    """Folder of the log-probabilities of the reference model of DPO."""
    stop = _Below("control/stop")
    """Request file: touch it to make the job save and stop."""
    save = _Below("control/save")
    """Request file: touch it to make the job save a checkpoint now."""
    profile = _Below("control/profile")
    """Request file: touch it to make the job profile its next steps."""
    acknowledged = _Below("control/acknowledged.json")
    """Record of the last request that the job has acknowledged, and of the step."""
    lead = _Below("lead")
    """File with the number of seconds that the job needs between a stop request and its end."""
    heartbeat = _Below("heartbeat.json")
    """State of the running job, rewritten every few seconds."""
    tensorboard = _Below("tensorboard")
    """Folder of TensorBoard event files."""
    evals = _Below("evals")
    """Folder of the results of benchmark tasks, in one folder per checkpoint."""
    profiles = _Below("profiles")
    """Folder of profiles and memory snapshots."""
    logs = _Below("logs")
    """Folder of the processes' output, one file per attempt and node."""
    report = _Below("report.html")
    """The page that shows the run, which `dtt train` writes when it ends."""
    script = _Below("slurm.sh")
    """The job script that `dtt submit` wrote."""
    supervisor = _Below("supervisor")
    """The copy of the supervisor that the job script executes."""
    submission = _Below("submission.json")
    """Record of the newest submission to Slurm: its id, the script and the command."""

    @property
    def exists(self) -> bool:
        """True if the job exists."""
        return self.config.is_file()

    def attempt_dir(self, number: int) -> Path:
        """Folder of one attempt."""
        return self.root / "attempts" / str(number)

    def trained_config(self, number: int) -> Path:
        """File of the configuration of an attempt; `config.yaml` may have been edited since."""
        return self.attempt_dir(number) / "config.yaml"

    def parent_record(self) -> dict[str, Any] | None:
        """Return the parent record of a branch; None if the job is not a branch."""
        return read_record(self.parent, {"job": str, "step": int})

    def stage_record(self) -> dict[str, Any] | None:
        """Return the record of a stage of training; None if the job is not a stage."""
        return read_record(self.stage, STAGE)

    def clock(self, number: int) -> Path:
        """Return the path of the file that records how long an attempt has run."""
        return self.attempt_dir(number) / "clock.json"

    def attempt_record(self, number: int) -> dict[str, Any] | None:
        """Return `attempt.json` of an attempt; None if there is no such attempt.

        It has at least the fields of `STARTED`, and those of `ENDED` once the attempt has ended.
        """
        folder = self.attempt_dir(number)
        if not folder.is_dir():
            return None
        record = read_record(folder / "attempt.json", {}) or {}
        if not fits(record, STARTED):  # the disk was full when it started
            # Of its oldest file: the time of the folder changes with each file in it.
            started = min(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            record |= {"started": started, "slurm": None, "launch": "", "ranks": 1}
        return record

    def exit_record(self, number: int) -> dict[str, Any] | None:
        """Return how an attempt ended: the fields of `ENDED`.

        None while it runs, or if it was killed before it could record that.
        """
        return ending_of(self.attempt_record(number) or {})

    def submission_record(self) -> dict[str, Any] | None:
        """Return the record of the newest submission; None if the job was never submitted."""
        return read_record(self.submission, SUBMITTED)

    def attempt(self) -> int:
        """Return the number of the newest attempt, from 1; 0 before the first."""
        return max(self.attempts(), default=0)

    def attempts(self) -> list[int]:
        """Return the numbers of all attempts in order.

        Numbers between them may be missing, and a folder of another name is no attempt: a count up
        to a number that somebody made up would not end.
        """
        names = (path.name for path in (self.root / "attempts").glob("*"))
        return sorted(int(name) for name in names if NUMBER.fullmatch(name))

    def make_control(self) -> None:
        """Create the folder of requests; in a team's folder, its group may write there.

        A team's folder has the setgid bit, which lets new files belong to its group: clusters set
        project folders up so. Without the bit, the group of a user may be everyone on the cluster,
        who must not stop the job. The folder keeps the bit, because setting the mode clears it.
        """
        control = self.stop.parent
        retrying(lambda: control.mkdir(parents=True, exist_ok=True))
        inherited = self.root.parent.stat()
        if inherited.st_mode & stat.S_ISGID and control.stat().st_uid == os.geteuid():
            retrying(lambda: control.chmod(0o2775 if inherited.st_mode & 0o005 else 0o2770))

    def next_attempt(self) -> int:
        """Return the number of the attempt to begin, from 1.

        That is the newest one if the supervisor of this Slurm job started it for these processes.
        """
        newest = self.attempt()
        record = self.attempt_record(newest) or {}
        started = record.get("ranks") == 0 and not fits(record, ENDED)
        ours = started and record["slurm"] is not None and record["slurm"] == own_slurm_id()
        return newest if ours else newest + 1

    def begin_attempt(self, launch: str = "", ranks: int = 1) -> int:
        """Record the start of an attempt in its folder; return its number.

        `launch` is the name by which other ranks of the same launch find the attempt.
        """
        self.make_control()
        number = self.next_attempt()
        path = self.attempt_dir(number) / "attempt.json"
        retrying(lambda: path.parent.mkdir(parents=True, exist_ok=True))
        record = {
            "started": time.time(),
            "slurm": own_slurm_id(),
            "restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            # With what the supervisor has recorded before the set-up of the nodes.
            **(read_record(path, STARTED) or {}),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "ranks": ranks,
            "launch": launch,
        }
        # A full disk is for the checkpoints to report; readers then use the time of the folder.
        with suppress(OSError):
            write_atomically(path, json.dumps(record, indent=1) + "\n")
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
        """Record in `attempt.json` how an attempt ended: launchers reduce exit codes to 0 or 1.

        The rank that fails first is the cause; ranks that fail later do not overwrite it. `node`:
        node of `rank`, by default this one. `asked_by`: origin of a stop request, if there was one:
        a signal's name, or the first line of `control/stop`.
        """
        path = self.attempt_dir(attempt) / "attempt.json"
        if not path.parent.is_dir() or self.exit_record(attempt) is not None:
            return
        record = (read_record(path, {}) or {}) | {
            "ended": time.time(),
            "code": int(code),
            "reason": reason,
            "step": self.last_step(),
            "rank": rank,
            "node": node or socket.gethostname(),
            "checkpoint": self.newest_checkpoint_name(),
            "asked_by": asked_by,
        }
        # Who creates this link ends the attempt; the file server decides. To replace the record at
        # once would let the last rank win, and to create it under its own name is impossible,
        # because it exists. It is a link to a whole file, so a rank that is killed here leaves
        # either nothing in the way of the others, or all of its record.
        aside = path.with_name(".ending.tmp")
        own = aside.with_name(f".ending.{secrets.token_hex(4)}.tmp")
        try:
            write_atomically(own, json.dumps(record, indent=1) + "\n")
            retrying(lambda: os.link(own, aside))
        except FileExistsError:
            # With two names it is the link of this call, whose first answer got lost.
            if own.stat().st_nlink != 2:
                return
        finally:
            own.unlink(missing_ok=True)
        # Another rank may have ended, and removed its own file, since the look above.
        if self.exit_record(attempt) is None:
            retrying(lambda: aside.replace(path))
            retrying(lambda: fsync_folder(path.parent))
        aside.unlink(missing_ok=True)

    def newest_checkpoint_name(self) -> str | None:
        """Return the name of the newest checkpoint folder, for messages only.

        Unlike loading, this does not verify the checkpoint.
        """
        steps = [p.name.removeprefix("step-") for p in self.checkpoints.glob("step-*")]
        newest = max((step for step in steps if step.isdecimal()), key=int, default=None)
        return newest and f"step-{newest}"

    def last_step(self) -> int | None:
        """Return the newest step in metrics.jsonl, or None."""
        records = read_records(self.metrics, {"kind": str, "step": int}, last=TAIL)
        return max((record["step"] for record in records), default=None)

    def run_id(self, known: str | None = None) -> str:
        """Return the job's run id for trackers, created once and the same in every attempt.

        `known` is the id in a checkpoint, which is used if the file is lost.
        """
        path = self.root / "run_id"
        found = (read_text(path) or "").strip()
        if not re.fullmatch(r"[\w.-]{1,64}", found):
            found = known or secrets.token_hex(4)
            write_atomically(path, found + "\n")
        return found

    def remove_litter(self) -> None:
        """Delete temporary files of killed processes; call this only while holding the job's lock.

        Files that another command may still be writing are kept until they are a minute old.
        """
        old = time.time() - LITTER_SECONDS
        for pattern in (".*.tmp", "attempts/*/.*.tmp", "attempts/*/*/.*.tmp", "control/.*.tmp"):
            for path in self.root.glob(pattern):
                others = path.parent == self.stop.parent or path.name.startswith(".slurm.sh.")
                with suppress(OSError):
                    if not others or path.lstat().st_mtime < old:
                        remove(path)

    def write_lead(self, step: float, save: float) -> None:
        """Write `lead` for a job whose slowest step and save take `step` and `save` seconds.

        It is twice their time, plus 30 s because Slurm may be early or late.
        """
        seconds = max(SHORTEST_LEAD, math.ceil(30 + 2 * (step + save)))
        write_atomically(self.lead, f"{seconds}\n")

    def diverged_after(self) -> int | None:
        """Return the last step before the latest divergence, or None.

        An attempt's exit record holds the step that diverged; this is the step before it.
        """
        records = map(self.exit_record, self.attempts())
        steps = [r["step"] for r in records if r is not None and r["code"] == ExitCode.DIVERGED]
        return max((step - 1 for step in steps if step is not None), default=None)

    def write_environment(self) -> None:
        """Write `env.json`: packages, nodes, GPUs, dtt's git state, and allow-listed variables."""
        record = {
            "command": [redacted(argument) for argument in sys.argv],
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": installed_packages(),
            "nodes": os.environ.get("SLURM_JOB_NODELIST", socket.gethostname()),
            "gpus": gpu_state(),
            "git": git_state(),
            "environment": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(ENVIRONMENT) and not (named_secret(name) or holds_secret(value))
            },
        }
        write_atomically(self.root / "env.json", json.dumps(record, indent=1) + "\n")


def ending_of(attempt: dict[str, Any]) -> dict[str, Any] | None:
    """Return how the attempt with this record ended; None if the record has no end."""
    return {name: attempt[name] for name in ENDED} if fits(attempt, ENDED) else None


def own_slurm_id() -> str | None:
    """Return the id of the Slurm job whose script runs this process, for an array that of the task.

    None outside Slurm, and in an allocation for work by hand: the end of an allocation of salloc,
    of `srun --pty` or of a notebook says nothing about a run that somebody started in it, and
    cancelling it would end all other work there.
    """
    env = os.environ
    id = env.get("SLURM_JOB_ID")
    # sbatch sets ENVIRONMENT; a notebook is a batch job in which people work.
    by_hand = "SLURM_PTY_PORT" in env or any(n.startswith(("JPY_", "JUPYTER")) for n in env)
    batch = env.get("ENVIRONMENT") == "BATCH" and not by_hand
    # srun may start the ranks with another environment, so dtt's supervisor names its job, too.
    if not batch and env.get("DTT_SUPERVISED") != id:
        return None
    return slurm_id(env)


def installed_packages() -> dict[str, str]:
    """Return the versions of all installed packages by name, in the order of the names.

    `name` and `version` of a distribution would each parse its whole metadata, with the text of
    its README: 0.1 s of CPU time for 180 packages, and 0.01 s for the headers alone.
    """
    found = []
    for distribution in metadata.distributions():
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        headers = dict(HEADER.findall(text.partition("\n\n")[0]))
        if headers.keys() >= {"Name", "Version"}:
            found.append((headers["Name"], headers["Version"]))
    return dict(sorted(found))


def gpu_state() -> str | None:
    """Return what `nvidia-smi` prints about this node; None without it, or without an answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout


def git_state(folder: Path = PACKAGE) -> dict[str, str] | None:
    """Return the commit and the uncommitted changes of dtt's own code; None outside a clone."""

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
