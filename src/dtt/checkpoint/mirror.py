"""Copies of verified checkpoints in a bucket or on another disk, made by a thread of rank 0.

The folder `<checkpoint.mirror>/<name>/` of a job has

    run_id              the run to which it belongs
    writer              the process that was the last one to begin to copy
    job/config.yaml, …  the files of the job with which it can continue
    step-000500/        a copy, complete once it has MANIFEST.json
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifest import FileRecord
from dtt.artifacts.manifests import CheckpointManifest
from dtt.base.errors import ConfigError, DamagedError, DttError
from dtt.base.files import write_atomically
from dtt.base.log import log
from dtt.base.reading import read_whole
from dtt.base.remote_folder import RemoteFolder
from dtt.checkpoint import retention, store
from dtt.config.own import CODE
from dtt.config.train import CheckpointConfig

NICENESS = 10
PARALLEL_FILES = 4
"""Files of a checkpoint in flight; each holds up to 50 MB of host memory."""
DELAYS = (5, 10, 20, 40, 80, 160, 300)
"""Seconds between attempts to upload; the last one repeats."""
SECONDS_AT_END, SECONDS_AT_STOP = 600.0, 30.0
"""Time that a run waits for uploads at its end, and when it has to stop. A scheduler kills a job
soon after it has asked it to stop; the next attempt uploads what is missing."""
RUN_ID, WRITER, JOB = "run_id", "writer", "job"
JOB_FILES = (
    "config.yaml", "data.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja",
    "released.json", "parent.json", "stage.json", "run_id", "metrics.jsonl", f"{CODE}/*",
)  # fmt: skip
"""Files that a job needs to continue where its folder is lost, besides a checkpoint."""
MARKER = CheckpointManifest.filename


def mirror_url(mirror: str, name: str) -> str:
    """Return the folder of the job `name` below `checkpoint.mirror`."""
    return f"{mirror.rstrip('/')}/{name}"


def copies(sizes: dict[str, int]) -> tuple[list[int], list[str]]:
    """Return the steps of the complete copies in a mirror, and the files of incomplete ones.

    `sizes` are the files in it, as `RemoteFolder.sizes` returns them.
    """
    files: dict[str, list[str]] = {}
    for name in sizes:
        folder, slash, file = name.partition("/")
        if slash and "/" not in file and folder.removeprefix(store.PREFIX).isdecimal():
            files.setdefault(folder, []).append(file)
    whole = {folder for folder, names in files.items() if MARKER in names}
    torn = [f"{folder}/{name}" for folder in files.keys() - whole for name in files[folder]]
    return sorted(int(folder.removeprefix(store.PREFIX)) for folder in whole), torn


class Mirror:
    """The copies of one job's checkpoints, and the thread that makes them. Rank 0 has one."""

    def __init__(self, url: str, job: JobDir, run_id: str, rules: CheckpointConfig) -> None:
        """Prepare to copy the checkpoints of `job` into the folder `url`."""
        self.url = url
        self._remote = RemoteFolder(url)
        self._job, self._run_id, self._rules = job, run_id, rules
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._uploading: int | None = None
        self._finishing = self._saved = self._writes = False
        # Random, too: in two containers the same name and id may mean different processes.
        self._process = f"{socket.gethostname()}, process {os.getpid()}, {uuid4().hex}"
        self._failure: dict[str, Any] | None = None
        self._done: list[int] = []
        self._sent: dict[str, tuple[int, int]] = {}
        self._losses: Callable[[], dict[int, float]] = dict
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def start(self, newest: int | None, losses: Callable[[], dict[int, float]]) -> None:
        """Start to copy the checkpoints up to step `newest` that the mirror lacks.

        `losses` returns the validation losses by step, which `checkpoint.keep_best` needs.
        """
        self._losses = losses
        known = store.steps(self._job.checkpoints) if newest is not None else []
        self._pending = {step for step in known if newest is not None and step <= newest}
        self._thread.start()

    def add(self, step: int) -> None:
        """Copy the verified checkpoint of a step, in the background."""
        with self._changed:
            self._pending = {older for older in self._pending if older < step} | {step}
            self._saved = True
            self._changed.notify()

    @property
    def needed(self) -> set[int]:
        """The step that is being copied, whose files must stay until it is."""
        uploading = self._uploading
        return set() if uploading is None else {uploading}

    def finish(self, seconds: float, stop_wanted: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all is copied, at most `seconds`; return False and log what is missing.

        After `stop_wanted`, waits SECONDS_AT_STOP at most.
        """
        with self._changed:
            if self._finishing:
                return not self._missing()
            self._finishing = True
            self._changed.notify()
        until, stopping = time.monotonic() + seconds, False
        if self._thread.is_alive() and (self._pending or self._uploading is not None):
            log.info("waiting up to %.0f s for the mirror of step %s", seconds, self._missing())
        while self._thread.is_alive() and time.monotonic() < until:
            self._thread.join(timeout=0.5)
            if not stopping and stop_wanted():
                until, stopping = min(until, time.monotonic() + SECONDS_AT_STOP), True
        missing = self._missing()
        if missing:
            why = f": {self._failure['reason']}" if self._failure else ""
            log.warning(
                "not in the mirror %s: step %s%s\n  next:  dtt train %s uploads it",
                self.url, missing, why, self._job.root,
            )  # fmt: skip
            self._write_state()
        return not missing

    def _missing(self) -> str:
        return ", ".join(map(str, sorted(self._pending | self.needed)))

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        if sys.platform == "linux":  # training has priority where cores are scarce
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        failures, superseded = 0, False
        while True:
            with self._changed:
                while not self._pending:
                    if self._finishing:
                        return
                    self._changed.wait()
                # The newest first: it is what a lost machine costs.
                step = max(self._pending)
                self._uploading = step
                self._pending.discard(step)
            try:
                self._copy(step)
                failures, self._failure = 0, None
            except Exception as error:  # noqa: BLE001  an upload never stops training
                failures = self._failed(step, error, failures)
                superseded = isinstance(error, _Superseded)
            finally:
                self._uploading = None
            self._write_state()
            if superseded:
                return
            if failures:
                with self._changed:
                    # A new checkpoint, or the end of the run, is a reason to try at once.
                    self._changed.wait(DELAYS[min(failures, len(DELAYS)) - 1])

    def _failed(self, step: int, error: Exception, failures: int) -> int:
        """Report a failed upload; return the number of failures in a row, 0 if it is given up."""
        folder = store.folder_of(self._job.checkpoints, step)
        if not folder.exists():
            log.warning("step %d is not in the mirror: it was deleted before it was copied", step)
            return 0
        text = str(error) if isinstance(error, DttError) else f"{type(error).__name__}: {error}"
        reason, *more = text.splitlines()
        whys = (line.partition("why:")[2] for line in more if line.strip().startswith("why:"))
        reason = ": ".join([reason, *map(str.strip, whys)])
        given_up = isinstance(error, _ChangedHere)
        if isinstance(error, _Superseded):
            log.warning("no checkpoint is copied to the mirror any more: %s", reason)
        elif given_up:
            log.warning("step %d is not copied to the mirror: %s", step, reason)
        elif self._failure is None or self._failure["reason"] != reason:
            log.warning("the mirror of step %d failed, and is tried again: %s", step, reason)
        tries = 1 + (self._failure["tries"] if self._failure else 0)
        self._failure = {"step": step, "reason": reason, "tries": tries, "time": time.time()}
        with self._changed:
            if not given_up:
                self._pending.add(step)
        return 0 if given_up else failures + 1

    def _copy(self, step: int) -> None:
        """Copy a checkpoint, unless it is there, then delete what the retention does not keep."""
        started = time.perf_counter()
        self._write_state()
        self.claim()
        self._take_turn()
        folder = store.folder_of(self._job.checkpoints, step)
        manifest = CheckpointManifest.read(folder)
        text = read_whole(folder / MARKER)
        if self._remote.content(f"{folder.name}/{MARKER}") != text:
            # A copy of another timeline of this step stops being one before its files change.
            self._remote.delete([f"{folder.name}/{MARKER}"])
            with ThreadPoolExecutor(PARALLEL_FILES, thread_name_prefix="mirror") as pool:
                list(pool.map(partial(self._put, folder), manifest.files))
            self._put_job()
            self._remote.write(f"{folder.name}/{MARKER}", text)
            size = sum(file.bytes for file in manifest.files)
            log.info(
                "mirrored %s to %s (%.3g GB, %.0f s)",
                folder.name, self.url, size / 1e9, time.perf_counter() - started,
            )  # fmt: skip
        self._prune()

    def _put(self, folder: Path, record: FileRecord) -> None:
        if self._remote.put(folder / record.path, f"{folder.name}/{record.path}") != record.sha256:
            raise _ChangedHere(
                f"{folder.name}/{record.path} has changed since it was verified",
                next="inspect that disk",
            )

    def _put_job(self) -> None:
        """Copy the files of the job that have changed since this process copied them."""
        found = chain.from_iterable(map(self._job.root.glob, JOB_FILES))
        for path in filter(Path.is_file, found):
            with suppress(FileNotFoundError):
                name = str(path.relative_to(self._job.root))
                state = path.stat().st_size, path.stat().st_mtime_ns
                if self._sent.get(name) == state:
                    continue
                if path == self._job.metrics:  # of any size, and still growing
                    self._remote.put(path, f"{JOB}/{name}")
                else:
                    self._remote.write(f"{JOB}/{name}", read_whole(path))
                self._sent[name] = state

    def claim(self) -> None:
        """Write the id of this run into the folder; ConfigError if it has that of another run."""
        found = self._remote.content(RUN_ID)
        if found is None:
            self._remote.write(RUN_ID, f"{self._run_id}\n".encode())
        elif (other := found.decode(errors="replace").strip()) != self._run_id:
            raise ConfigError(
                f"{self.url} holds the checkpoints of another run",
                where="checkpoint.mirror",
                why=f"its run_id is {other}, that of {self._job.root} is {self._run_id}",
                next="set another name, or another folder; dtt ckpt fetch brings that run back",
            )

    def _take_turn(self) -> None:
        """Write this process into the folder at its first copy; _Superseded if another did later.

        Two processes have one run id if a job is fetched or copied to another machine while it
        trains. Each would overwrite and delete the copies of the other.
        """
        found = self._remote.content(WRITER) if self._writes else None
        if found is None:
            self._remote.write(WRITER, self._process.encode())
            self._writes = True
        elif found != self._process.encode():
            raise _Superseded(
                f"another process copies this run to {self.url}",
                why=found.decode(errors="replace").rpartition(",")[0],
                next="stop one of the two; the one that starts last copies",
            )

    def _prune(self) -> None:
        """Delete incomplete copies, those of a superseded timeline, and those out of retention."""
        whole, torn = copies(self._remote.sizes())
        local = store.steps(self._job.checkpoints)
        newest = max(local, default=0)
        # Until this run has saved, a newer copy may be all that is left of a damaged checkpoint.
        current = [step for step in whole if step <= newest or not self._saved]
        diverged = self._job.diverged_after()
        places = self._job.checkpoints
        keep = retention.kept(places, self._rules, diverged, self._losses(), current)
        gone = [step for step in whole if step not in keep]
        for step in gone:
            folder = store.folder_of(Path(), step).name
            # The marker first: an interrupted deletion leaves no copy that looks complete.
            self._remote.delete([f"{folder}/{MARKER}"])
            torn += [name for name in self._remote.sizes() if name.startswith(f"{folder}/")]
        self._remote.delete(torn)
        self._done = sorted(keep)

    def _write_state(self) -> None:
        """Write mirror.json, for `dtt job status`."""
        with self._changed:
            record = {
                "url": self.url, "time": time.time(), "steps": self._done,
                "uploading": self._uploading, "pending": sorted(self._pending),
                "failure": self._failure,
            }  # fmt: skip
        try:
            write_atomically(self._job.mirror, json.dumps(record, indent=1) + "\n")
        except OSError as error:
            log.warning("cannot write %s: %s", self._job.mirror, error)


class _ChangedHere(DamagedError):
    """A file of a checkpoint that is not as it was when it was verified; no copy of it is made."""


class _Superseded(ConfigError):
    """A mirror into which another process copies the same run."""
