"""Evaluation of the checkpoints of a job: states, which are derived from files and never stored.

    evals/.watch.lock                               locked by the one watch of the job
    evals/step-000500/hellaswag-0123456789ab.jsonl  results; complete once they are sealed
    evals/step-000500/failures.jsonl                a line for each evaluation that failed, and why
    evals/step-000500/checkpoint/step-000500/       hard links of the checkpoint while it waits

`failures.jsonl` may be deleted: the evaluation is then repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import CheckpointManifest
from dtt.base.errors import DttError, ExitCode
from dtt.base.files import append, remove, sha256_file
from dtt.base.log import log
from dtt.base.reading import read_records
from dtt.checkpoint import store
from dtt.evaluate.tasks import result_files
from dtt.evaluate.tasks.result_files import ResultFile

RETRIES = 2
"""Number of times that a failed evaluation is repeated."""
LINKS = "checkpoint"
"""Name of the folder with hard links."""


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
    """Hash of what a failure depends on besides the weights: the tasks, and all options."""

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
        return store.folder_of(self.folder / LINKS, self.step)

    @property
    def failures_file(self) -> Path:
        """The record of failed evaluations; without it, they are repeated."""
        return self.folder / "failures.jsonl"

    @property
    def checkpoint(self) -> Path | None:
        """The folder to evaluate, unverified; None if the checkpoint was deleted."""
        return next((path for path in (self.linked, self.saved) if path.is_dir()), None)

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

    def protect(self) -> None:
        """Hard-link the checkpoint, so that it can be evaluated after its deletion.

        Replaces the links of another checkpoint of the same step, from which training started again
        at an earlier step. Does nothing if the checkpoint is deleted meanwhile.
        """
        if self.linked.is_dir() and weights_of(self.linked) == weights_of(self.saved):
            return
        staging = self.linked.with_name(".tmp")  # renamed at the end, so that links are complete
        remove(staging)
        staging.mkdir(parents=True)
        try:
            names = [file.name for file in self.saved.iterdir() if file.is_file()]
            if not names:  # deleted after it was listed
                raise FileNotFoundError(self.saved)
            if not store.link_files(self.saved, staging, names):
                log.warning("%s is copied: hard links are not possible here", self.saved)
            remove(self.linked)
            staging.rename(self.linked)
        except FileNotFoundError:
            log.debug("%s was deleted", self.saved)
        finally:
            remove(staging)

    def release(self) -> None:
        """Delete the hard links."""
        remove(self.linked.parent)

    def failures(self, weights: str | None = None) -> list[dict[str, Any]]:
        """Return the records of evaluations that failed with these options.

        With `weights`, return those of the weights with this hash.
        """
        fields = {"weights": str, "key": str, "reason": str, "code": int}
        return [
            record
            for record in read_records(self.failures_file, fields)
            if weights in (None, record["weights"]) and record["key"] == self.key
        ]

    def record_failure(self, weights: str, error: Exception) -> None:
        """Record that an evaluation has failed."""
        known = isinstance(error, DttError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        code = error.exit_code if isinstance(error, DttError) else ExitCode.BUG
        what = {"weights": weights, "key": self.key, "code": code, "reason": reason}
        record = {"time": round(time.time()), **what}
        append(self.failures_file, json.dumps(record) + "\n")


def weights_of(checkpoint: Path) -> str:
    """Return the hash that identifies the weights of a checkpoint; empty if it has no manifest."""
    try:
        return sha256_file(checkpoint / CheckpointManifest.filename)
    except OSError:
        return ""
