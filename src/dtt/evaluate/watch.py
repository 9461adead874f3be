"""`dtt eval JOB --watch`: evaluate every checkpoint of a job as it appears.

A thread looks for new checkpoints every second, also during an evaluation, and hard-links their
files, so retention may delete a checkpoint that waits. After an error that concerns one checkpoint,
such as damaged files, the others are evaluated; any other error ends the watch. After an error of
CUDA other than a lack of memory, every later call may fail, so it ends the watch, too.

    evals/.watch.lock                               locked by the one watch of the job
    evals/step-000500/hellaswag-0123456789ab.jsonl  results; complete once they are sealed
    evals/step-000500/checkpoint/step-000500/       hard links of the checkpoint while it waits

What is left to do follows from these files, so the next watch also repeats what failed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import (
    ConfigError,
    DttError,
    EnvironmentUnfit,
    ExitCode,
    InUse,
    Preempted,
    StorageError,
)
from dtt.base.files import exclusive, remove
from dtt.base.log import log
from dtt.base.ranks import Ranks
from dtt.base.reading import fits
from dtt.checkpoint import store
from dtt.config.load import load_job
from dtt.config.train import WandbConfig
from dtt.evaluate import result_table
from dtt.evaluate.evaluation import Evaluation, configured, open_evaluation
from dtt.evaluate.models import checkpoint_model
from dtt.evaluate.tasks import result_files
from dtt.evaluate.tasks.result_files import weights_of
from dtt.hf.model_source import find_chat_format, find_folder
from dtt.jobs import job_state
from dtt.jobs.job_files import JobFiles
from dtt.jobs.job_state import State
from dtt.track import jsonl

if TYPE_CHECKING:
    from dtt.evaluate.tasks.result_files import ResultFile
    from dtt.track.wandb import WandbTracker

SECONDS_BETWEEN_SCANS = 1.0
"""Seconds between scans for new checkpoints; each scan lists one folder."""
SECONDS_BETWEEN_QUERIES = 30.0
"""Seconds between questions to Slurm about the job."""
SECONDS_UNKNOWN = 3600.0
"""Seconds after which a job of unknown state that shows no sign of life counts as over."""
NOT_A_FAILURE = (ConfigError, EnvironmentUnfit, StorageError, Preempted, OSError)
"""Errors that say nothing about a checkpoint: they end the watch, and it can be started again."""

CONTINUES = {State.NEW, State.QUEUED, State.RUNNING, State.STOPPING, State.SUSPENDED, State.UNKNOWN}
"""States in which a job may still save checkpoints."""
RETRIES = 2
"""Number of times that a failed evaluation is repeated."""
LINKS = "checkpoint"
"""Name of the folder with hard links."""
DONE, FAILED, GONE = "done", "failed", "gone"
"""Ends of an evaluation; gone: the checkpoint was deleted before it was evaluated."""


def run(
    arguments: Sequence[str],
    *,
    step: str | None = None,
    ema: bool = False,
    chat: bool = False,
    as_json: bool = False,
    **options: Any,
) -> None:
    """Evaluate every checkpoint of a job as it appears, until the job has ended.

    Of the folder of several stages, watches those with tasks, each until it has ended. Raises the
    first error that concerns a single checkpoint at the end; Preempted on a stop request, after
    which the same command continues; InUse if another watch evaluates the job.
    """
    from dtt.jobs.stop import Requests

    requests, ranks = Requests(), Ranks.detect()
    requests.act_at_once(ranks)
    try:
        jobs = watched_jobs(arguments, ranks, step)
        found = []
        for job in jobs:
            source = str(job.root)
            chat_format = find_chat_format(source, None) if chat else None
            found.append(open_evaluation(configured(source, options), None, chat_format))
    finally:
        requests.defer()
    errors: list[DttError] = []
    with ExitStack() as stack:
        watches: list[Watch] = []
        for job, evaluation in zip(jobs, found, strict=True):
            stack.enter_context(exclusive(job.evals, "dtt eval --watch", name=".watch.lock"))
            watch = Watch(job, evaluation, lambda: bool(requests.reason), ema, as_json)
            # A later stage may save while the checkpoints of an earlier one are still evaluated.
            stack.enter_context(watch.protecting())
            watches.append(watch)
        for watch in watches:
            with _tracked(watch.job, ema=ema) as watch.tracker:
                watch.run()
            try:
                watch.report_end()
            except DttError as error:  # the checkpoints of later stages are evaluated all the same
                errors.append(error)
    if errors:
        raise errors[0]


def watched_jobs(arguments: Sequence[str], ranks: Ranks, step: str | None) -> list[JobDir]:
    """Return the job to watch, or the stages with tasks.

    Raises ConfigError for arguments that make no sense with --watch.
    """
    stages = job_state.stages(Path(arguments[0])) if len(arguments) == 1 else []
    one = bool(stages) or (len(arguments) == 1 and find_folder(arguments[0]) is None)
    checkpoints, at = store.parse(arguments[0]) if one else (Path(), None)
    if not one or at is not None or step is not None:
        raise ConfigError(
            "--watch takes one job, without a step",
            why=f"it evaluates all checkpoints (got {' '.join(arguments)}"
            + (")" if step is None else f" --step {step})"),
            next=f"dtt eval {checkpoints.parent if one else 'jobs/run'} --watch",
        )
    if ranks.size > 1:
        raise ConfigError(
            f"--watch runs in one process, not in {ranks.size}",
            next="start it without torchrun; torchrun … dtt eval JOB --step all uses several GPUs",
        )
    asked = [stage for stage in stages if load_job(stage.root).eval.tasks]
    return asked or stages[-1:] or [JobDir(checkpoints.parent)]


@contextmanager
def _tracked(job: JobDir, *, ema: bool) -> Iterator[WandbTracker | None]:
    """Yield the W&B tracker of the results, plotted over tokens, if the job uses W&B; else None.

    It is a run of its own in the group of the job: W&B refuses steps before the newest of a run.
    Every watch sends all results, also those that exist already, so none can be missing.
    """
    cfg = load_job(job.root)
    config = next((one for one in cfg.track if isinstance(one, WandbConfig)), None)
    if config is None:
        yield None
        return
    from dtt.track.wandb import WandbTracker

    suffix = "eval-ema" if ema else "eval"
    tracker = WandbTracker(
        config,
        f"{cfg.name}-{suffix}",
        f"{job.run_id()}-{suffix}",
        job.root,
        cfg.model_dump(mode="json"),
        group=cfg.name,
        axis="tokens",
    )
    with closing(tracker):
        yield tracker


class Watch:
    """The evaluation of all checkpoints of a job; only one watch of a job changes the links."""

    def __init__(
        self,
        job: JobDir,
        evaluation: Evaluation,
        stop_wanted: Callable[[], bool],
        ema: bool = False,
        as_json: bool = False,
    ) -> None:
        self.job, self.evaluation, self.stop_wanted = job, evaluation, stop_wanted
        self.ema, self.as_json = ema, as_json
        self.tracker: WandbTracker | None = None
        self.tokens: dict[int, int] = {}  # that the weights of each step were trained on
        self.waiting: set[int] = set()
        self.ended: dict[int, str] = {}  # how the evaluation of each step ended
        self.failures: dict[int, list[tuple[str, ExitCode]]] = {}  # of each step, per attempt
        self._seen: dict[int, tuple[int, int]] = {}
        """Inode and time of the checkpoint folder of each step that was found; 0 if there are only
        links."""
        self._lock = threading.Lock()
        self._asked = -SECONDS_BETWEEN_QUERIES
        self._sign_of_life = time.monotonic()
        """Time at which the job was last in a known state, or a new checkpoint was found."""
        self._reported: set[State] = set()

    def run(self) -> None:
        """Evaluate until the job has ended and nothing waits; raise Preempted on a stop request."""
        log.info("watching %s", self.job.root)
        while True:
            over = self.job_over()  # before the scan, which then finds the last checkpoint
            self.scan()
            if over and not self.waiting:
                break
            if self.stop_wanted():
                raise Preempted(
                    f"stopped while {len(self.waiting)} checkpoints of {self.job.root} wait",
                    next=f"dtt eval {self.job.root} --watch",
                )
            if not self.evaluate_next():
                time.sleep(SECONDS_BETWEEN_SCANS)
        saved = {record["step"] for record in jsonl.read(self.job.metrics, "save")}
        for step in sorted(saved - self._seen.keys()):  # deleted, perhaps after its evaluation
            weights = self.evaluated(step)
            self.end(step, GONE if weights is None else DONE, weights)

    @contextmanager
    def protecting(self) -> Iterator[None]:
        """Scan for new checkpoints in a thread inside the context."""
        for folder in self.job.evals.glob(f"step-*/{LINKS}"):  # of a watch that was interrupted
            for step in store.steps(folder):
                self._seen[step] = 0, 0
                self.waiting.add(step)
        over = threading.Event()

        def scan() -> None:
            while not over.wait(SECONDS_BETWEEN_SCANS):
                try:
                    self.scan()
                except (OSError, DttError) as error:
                    log.warning("cannot scan %s: %s", self.job.root, error)

        thread = threading.Thread(target=scan, name="protect", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def scan(self) -> None:
        """Find new checkpoints, and protect those that are not evaluated yet from retention."""
        folder = self.job.checkpoints
        with self._lock:
            for step in store.steps(folder):
                try:
                    status = self.saved(step).stat()
                except FileNotFoundError:
                    continue  # deleted meanwhile
                # Others: training started again at an earlier step, and its weights are others. A
                # new folder may have the inode of the deleted one, but not its time.
                version = status.st_ino, status.st_mtime_ns
                if self._seen.get(step) == version:
                    continue
                if self.evaluated(step) is None:
                    self.protect(step)
                self._sign_of_life = time.monotonic()
                self._seen[step] = version
                self.failures.pop(step, None)  # of other weights
                self.waiting.add(step)

    def job_over(self) -> bool:
        """Return True if the job will save no more checkpoints."""
        files, whole = JobFiles.read(self.job), JobDir(self.job.root.parent)
        in_slurm = files.slurm_ids or (files.is_stage and whole.submission_record() is not None)
        if in_slurm and not files.decided_to_end:
            if time.monotonic() - self._asked < SECONDS_BETWEEN_QUERIES:
                return False
            self._asked = time.monotonic()
        [status] = job_state.examine([self.job])
        waits = status.state is State.NEW and self.job.stage_record()
        if waits and whole.submission_record() is not None:  # the Slurm job of all stages
            [status] = job_state.examine([whole])
        state = status.state
        if state in (State.NEW, State.UNKNOWN) and state not in self._reported:
            self._reported.add(state)
            facts = ", ".join(filter(None, (state, status.detail)))
            log.warning("the state of %s is: %s; the watch waits", self.job.root, facts)
        if state is State.UNKNOWN:
            return time.monotonic() - self._sign_of_life > SECONDS_UNKNOWN
        self._sign_of_life = time.monotonic()
        if state is State.LOST and status.slurm is not None and status.slurm.live:
            return False  # its Slurm job may still start it again
        return state not in CONTINUES and not status.alive and not status.queued

    def folder(self, step: int) -> Path:
        """Return the folder of the results of a step."""
        return store.folder_of(self.job.evals, step)

    def saved(self, step: int) -> Path:
        """Return the checkpoint of the job, which retention may delete."""
        return store.folder_of(self.job.checkpoints, step)

    def linked(self, step: int) -> Path:
        """Return the hard links of a checkpoint, which retention does not delete."""
        return store.folder_of(self.folder(step) / LINKS, step)

    def checkpoint(self, step: int) -> Path | None:
        """Return the folder to evaluate, unverified; None if the checkpoint was deleted."""
        return next((path for path in (self.linked(step), self.saved(step)) if path.is_dir()), None)

    def files(self, step: int, weights: str) -> Sequence[ResultFile]:
        """Return the result file of each task, for the weights with a hash."""
        model = checkpoint_model(self.job, step, ema=self.ema)
        return self.evaluation.files(replace(model, identity=lambda: weights))

    def evaluated(self, step: int) -> str | None:
        """Return the hash of weights of a step with all results; None if there are no such ones."""
        checkpoint = self.checkpoint(step)
        if checkpoint is not None:
            hashes = {weights_of(checkpoint)}
        else:  # deleted: of all weights of this step whose evaluation was started
            paths = self.folder(step).glob("*-*.jsonl")
            headers = [result_files.read(path).header for path in paths]
            hashes = {header["weights"] for header in headers if header}
        for weights in hashes:
            if all(file.result() is not None for file in self.files(step, weights)):
                return weights
        return None

    def protect(self, step: int) -> None:
        """Hard-link a checkpoint, so that it can be evaluated after its deletion.

        Replaces the links of another checkpoint of the step, of training that was started again at
        an earlier one. Does nothing if the checkpoint is deleted meanwhile.
        """
        saved, linked = self.saved(step), self.linked(step)
        if linked.is_dir() and weights_of(linked) == weights_of(saved):
            return
        staging = linked.with_name(".tmp")  # renamed at the end, so that links are complete
        remove(staging)
        staging.mkdir(parents=True)
        try:
            names = [file.name for file in saved.iterdir() if file.is_file()]
            if not names:  # deleted after it was listed
                raise FileNotFoundError(saved)
            if not store.link_files(saved, staging, names):
                log.warning("%s is copied: hard links are not possible here", saved)
            remove(linked)
            staging.rename(linked)
        except FileNotFoundError:
            log.debug("%s was deleted", saved)
        finally:
            remove(staging)

    def evaluate_next(self) -> bool:
        """Evaluate one waiting checkpoint; return False if none waits or others evaluate them."""
        with self._lock:
            waiting = list(self.waiting)
        # Checkpoints that failed come last: what they lacked, such as memory, may be there by then.
        for step in sorted(waiting, key=lambda step: (len(self.failures.get(step, ())), step)):
            weights, checkpoint = self.evaluated(step), self.checkpoint(step)
            if weights is None and checkpoint is not None:
                try:
                    self.try_to_evaluate(step, checkpoint)
                except InUse:  # `dtt eval JOB@STEP` writes one of its result files
                    continue
                weights = self.evaluated(step)
            if weights is not None:
                self.end(step, DONE, weights)
            elif checkpoint is None:
                self.end(step, GONE)
            elif len(self.failures.get(step, ())) > RETRIES:
                self.end(step, FAILED)
            return True
        return False

    def try_to_evaluate(self, step: int, checkpoint: Path) -> None:
        """Evaluate a checkpoint; remember an error that concerns only this checkpoint."""
        try:
            self.evaluate(step, checkpoint)
        except NOT_A_FAILURE:
            raise
        except Exception as error:  # such as a lack of GPU memory
            # Not the exception, whose traceback would keep the model in memory.
            failure = f"{type(error).__name__}: {error}", ExitCode.BUG
            if isinstance(error, DttError):
                failure = str(error), error.exit_code
            self.failures.setdefault(step, []).append(failure)
            log.warning("the evaluation of step %d failed: %s", step, error)
            import torch

            # With an error of a GPU, this process cannot continue.
            of_torch = isinstance(error, RuntimeError) and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            if of_torch and not isinstance(error, torch.OutOfMemoryError):
                raise EnvironmentUnfit(
                    f"the evaluation of step {step} of {self.job.root} failed on the GPU",
                    where=checkpoint,
                    why=str(error),
                    next=f"dtt eval {self.job.root} --watch continues in a new process",
                ) from error

    def evaluate(self, step: int, checkpoint: Path) -> None:
        """Evaluate the checkpoint in a folder, and print the results."""
        model = checkpoint_model(self.job, step, ema=self.ema, path=checkpoint)
        results = self.evaluation.run(model, None, self.stop_wanted)
        files = self.evaluation.files(model)
        result_table.show(model, files, results, as_json=self.as_json)

    def end(self, step: int, how: str, weights: str | None = None) -> None:
        """Note that nothing is left to do for a checkpoint; send its results to W&B."""
        with self._lock:
            self.waiting.discard(step)
        self.ended[step] = how
        if how == GONE:
            log.warning("step %d was deleted before it could be evaluated", step)
        if weights is not None and self.tracker is not None:
            from dtt.evaluate.tasks.runner import task_record

            if step not in self.tokens:  # trained since they were read
                train = jsonl.read(self.job.metrics, "train")
                whole = (record for record in train if fits(record, {"tokens": int}))
                self.tokens = {record["step"]: record["tokens"] for record in whole}
            for file in self.files(step, weights):
                result = file.result()
                assert result is not None, "the step is done"
                axes = {"tokens": self.tokens.get(step, 0)}
                self.tracker.log(task_record(step, result) | axes)
        # Links to damaged files are useless; others are kept, as another watch may evaluate them.
        damaged = how == FAILED and self.failures[step][-1][1] == ExitCode.DAMAGED
        if how == DONE or damaged:
            remove(self.folder(step) / LINKS)

    def report_end(self) -> None:
        """Log the number of checkpoints by outcome; raise the error of one that failed, if any."""
        job, outcomes = self.job, sorted(Counter(self.ended.values()).items())
        counts = ", ".join(f"{count} {how}" for how, count in outcomes)
        log.info("%s has ended: %s", job.root, counts or "no checkpoints")
        if failed := [step for step, how in self.ended.items() if how == FAILED]:
            why, code = self.failures[failed[0]][-1]
            error = DttError(
                f"{len(failed)} checkpoints of {job.root} could not be evaluated: "
                f"{', '.join(f'step {step}' for step in failed)}",
                why=why,
                next=f"dtt eval {job.root} --watch tries again",
            )
            error.exit_code = code
            raise error
