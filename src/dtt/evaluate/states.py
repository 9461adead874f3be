"""Evaluation of the checkpoints of a job: states, which are derived from files and never stored.

    evals/step-000500/hellaswag-0123456789ab.jsonl  results; complete once they are sealed
    evals/step-000500/.lock                         locked by the process that evaluates this step
    evals/step-000500/failures.jsonl                a line for each evaluation that failed, and why
    evals/step-000500/checkpoint-KEY/step-000500/   hard links of the checkpoint while it waits

KEY stands for the tasks and the options, so watches of other tasks have links of their own.
`failures.jsonl` may be deleted: the evaluation is then repeated.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import CheckpointManifest
from dtt.base.errors import DttError, ExitCode, InUse
from dtt.base.files import append, exclusive, remove, sha256_file
from dtt.base.log import log
from dtt.base.reading import read_records
from dtt.checkpoint import store
from dtt.evaluate.tasks import result_files
from dtt.evaluate.tasks.result_files import ResultFile
from dtt.track import jsonl

RETRIES = 2
"""Number of times that a failed evaluation is repeated."""
LINKS = "checkpoint-"
"""Prefix of the folders with hard links; the rest of the name is the key of the watch."""


class EvalState(StrEnum):
    """Outcome of the evaluation of a checkpoint."""

    DONE = "done"
    FAILED = "failed"
    GONE = "gone"
    """The checkpoint was deleted before it was evaluated."""


@dataclass(frozen=True)
class EvaluatedStep:
    """A checkpoint of a job and its evaluation."""

    job: JobDir
    step: int
    files: Callable[[str], Sequence[ResultFile]]
    """Function that returns the result file of each task, for the weights with a hash."""
    key: str
    """Hash of what determines the results besides the weights."""
    batch_tokens: int
    """Affects no result, but whether there is enough memory: failures with another do not count."""

    @property
    def folder(self) -> Path:
        """The folder of its results."""
        return store.folder_of(self.job.evals, self.step)

    @property
    def saved(self) -> Path:
        """The checkpoint of the job, which retention may delete."""
        return store.folder_of(self.job.checkpoints, self.step)

    @property
    def linked(self) -> Path:
        """The hard links of the checkpoint, which retention does not delete."""
        return store.folder_of(self.folder / f"{LINKS}{self.key}", self.step)

    @property
    def failures_file(self) -> Path:
        """The record of failed evaluations; without it, they are repeated."""
        return self.folder / "failures.jsonl"

    @property
    def checkpoint(self) -> Path | None:
        """The folder to evaluate, unverified; None if the checkpoint was deleted.

        The links of other watches are used if there is nothing else.
        """
        others = sorted(self.folder.glob(f"{LINKS}*/{self.saved.name}"))
        return next((path for path in (self.linked, self.saved, *others) if path.is_dir()), None)

    def ended(self) -> EvalState | None:
        """Return how the evaluation has ended; None if something is left to do."""
        if self.done_weights() is not None:
            return EvalState.DONE
        if any(len(self.failures(weights)) > RETRIES for weights in self._weights()):
            return EvalState.FAILED
        return EvalState.GONE if self.checkpoint is None else None

    def done_weights(self) -> str | None:
        """Return the hash of the weights if the evaluation is done, else None."""
        for weights in self._weights():
            if all(file.result() is not None for file in self.files(weights)):
                return weights
        return None

    def _weights(self) -> set[str]:
        """Return the hash of the weights of the checkpoint.

        If it was deleted, return those of all weights of this step whose evaluation was started.
        """
        if self.checkpoint is not None:
            return {weights_of(self.checkpoint)}
        headers = [result_files.read(path).header for path in self.folder.glob("*-*.jsonl")]
        started = {header["weights"] for header in headers if header}
        return started | {record["weights"] for record in self.failures()}

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Lock the evaluation of this step; yield False if another process holds the lock."""
        with ExitStack() as stack:
            free = True
            try:
                stack.enter_context(exclusive(self.folder, "dtt eval"))
            except InUse:
                free = False
            yield free

    # ---- protection from retention ---------------------------------------------------------------

    def protect(self, checkpoint: Path) -> None:
        """Hard-link a folder with the checkpoint, so that it can be evaluated after its deletion.

        Replaces the links of another checkpoint of the same step, from which training started again
        at an earlier step. Does nothing if the checkpoint is deleted meanwhile.
        """
        if self.linked.is_dir() and weights_of(self.linked) == weights_of(checkpoint):
            return
        staging = self.linked.with_name(f".tmp-{secrets.token_hex(4)}")
        staging.mkdir(parents=True)
        try:
            names = [file.name for file in checkpoint.iterdir() if file.is_file()]
            if not names:  # deleted after it was listed
                raise FileNotFoundError(checkpoint)
            if not store.link_files(checkpoint, staging, names):
                log.warning("%s is copied: hard links are not possible here", checkpoint)
            remove(self.linked)
            staging.rename(self.linked)
        except FileNotFoundError:
            log.debug("%s was deleted", checkpoint)
        except OSError:
            if not self.linked.is_dir():  # otherwise another process was faster
                raise
        finally:
            remove(staging)

    def release(self) -> None:
        """Delete the hard links."""
        remove(self.linked.parent)

    # ---- failures --------------------------------------------------------------------------------

    def failures(self, weights: str | None = None) -> list[dict[str, Any]]:
        """Return the records of evaluations that failed with these options.

        With `weights`, return those of the weights with this hash.
        """
        records = read_records(self.failures_file, {"weights": str, "reason": str, "code": int})
        options = self._options()
        return [
            record
            for record in records
            if weights in (None, record["weights"]) and options.items() <= record.items()
        ]

    def _options(self) -> dict[str, Any]:
        return {"key": self.key, "batch_tokens": self.batch_tokens}

    def record_failure(self, weights: str, error: Exception) -> None:
        """Record that an evaluation has failed."""
        known = isinstance(error, DttError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        code = error.exit_code if isinstance(error, DttError) else ExitCode.BUG
        what = {"weights": weights, **self._options()}
        record = {"time": round(time.time()), **what, "code": code, "reason": reason}
        append(self.failures_file, json.dumps(record) + "\n")


def weights_of(checkpoint: Path) -> str:
    """Return the hash that identifies the weights of a checkpoint; empty if it has no manifest."""
    try:
        return sha256_file(checkpoint / CheckpointManifest.filename)
    except OSError:
        return ""


def saved_steps(job: JobDir) -> list[int]:
    """Return the steps of all checkpoints that exist or have existed, in ascending order."""
    recorded = {record["step"] for record in jsonl.read(job.metrics, "save")}
    linked = {step for path in job.evals.glob(f"step-*/{LINKS}*") for step in store.steps(path)}
    return sorted(recorded | linked | {*store.steps(job.checkpoints)})
