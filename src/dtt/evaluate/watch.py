"""`dtt eval JOB --watch`: evaluate every checkpoint of a job as it appears.

A job has one watch at a time, which holds a lock. A thread looks for new checkpoints every second,
also during an evaluation, and hard-links their files into `evals/step-000500/checkpoint/`. So
retention may delete a checkpoint that waits. The links are removed when it is done. Errors that
concern one checkpoint, such as damaged files, are recorded, and the others are evaluated; any other
error ends the watch. After an error of CUDA other than a lack of memory, every later call may fail,
so it is recorded, and the watch ends, too. With W&B, the results are a run of its own in the group
of the job, plotted over tokens, because W&B refuses steps before the newest one of a run.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifest import fingerprint
from dtt.base.errors import (
    ConfigError,
    DttError,
    EnvironmentUnfit,
    ExitCode,
    InUse,
    Preempted,
    StorageError,
)
from dtt.base.files import exclusive
from dtt.base.log import log
from dtt.base.ranks import Ranks
from dtt.base.reading import fits
from dtt.checkpoint import store
from dtt.config.load import load_job
from dtt.config.train import WandbConfig
from dtt.evaluate import result_table
from dtt.evaluate.evaluation import Evaluation, configured, open_evaluation
from dtt.evaluate.models import checkpoint_model
from dtt.evaluate.states import LINKS, EvalState, EvaluatedStep, weights_of
from dtt.hf.model_source import find_chat_format, find_folder
from dtt.jobs import job_state
from dtt.jobs.job_files import JobFiles
from dtt.jobs.job_state import State, Status
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

CONTINUES = (
    *(State.NEW, State.UNSENT, State.QUEUED, State.RUNNING, State.STOPPING, State.SUSPENDED),
    State.UNKNOWN,
)
"""States in which a job may still save checkpoints."""


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

    Of the folder of several stages, watches those with tasks, each until it has ended. The options
    are those of `dtt eval`, without `step`. Errors that concern a single checkpoint are recorded;
    the others are evaluated, and the first such error is raised at the end. Raises Preempted on a
    stop request: the same command continues. Raises InUse if another watch evaluates the job.
    """
    from dtt.jobs.stop import Requests

    requests, ranks = Requests(), Ranks.detect()
    requests.act_at_once(ranks)
    try:
        jobs = _watched_jobs(arguments, ranks, step)
        found = [_evaluation_of(job, options, chat=chat) for job in jobs]
    finally:
        requests.defer()
    errors: list[DttError] = []
    with ExitStack() as stack:
        watches: list[Watch] = []
        for job, evaluation in zip(jobs, found, strict=True):
            stack.enter_context(exclusive(job.evals, "dtt eval --watch", name=".watch.lock"))
            watch = Watch(job, evaluation, None, lambda: bool(requests.reason), ema, as_json)
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


def _evaluation_of(job: JobDir, options: dict[str, Any], *, chat: bool) -> Evaluation:
    cfg = configured(str(job.root), options)
    return open_evaluation(cfg, None, find_chat_format(str(job.root), None) if chat else None)


def _watched_jobs(arguments: Sequence[str], ranks: Ranks, step: str | None) -> list[JobDir]:
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
    """Yield the W&B tracker of the results if the job uses W&B, else None.

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


@dataclass
class Watch:
    """The evaluation of all checkpoints of a job, until the job has ended.

    A thread protects new checkpoints from retention while the main thread evaluates. No other watch
    works on the job, so only this one changes the hard links.
    """

    job: JobDir
    evaluation: Evaluation
    tracker: WandbTracker | None
    stop_wanted: Callable[[], bool]
    ema: bool = False
    as_json: bool = False
    waiting: dict[int, EvaluatedStep] = field(default_factory=dict)
    ended: dict[EvalState, list[int]] = field(default_factory=dict)
    """Steps whose evaluation has ended, by state."""
    _seen: dict[int, int] = field(default_factory=dict)
    """Inode of the checkpoint folder of each step that was found; 0 if there are only links."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _asked: float = -SECONDS_BETWEEN_QUERIES
    _sign_of_life: float = field(default_factory=time.monotonic)
    """Time at which the job was last in a known state, or a new checkpoint was found."""
    _reported: set[State] = field(default_factory=set)

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
            one = self.open(step)
            self.end(one, one.ended() or EvalState.GONE)

    @contextmanager
    def protecting(self) -> Iterator[None]:
        """Scan for new checkpoints in a thread inside the context."""
        for folder in self.job.evals.glob(f"step-*/{LINKS}"):  # of a watch that was interrupted
            for step in store.steps(folder):
                self._seen[step], self.waiting[step] = 0, self.open(step)
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
            # A long job has many checkpoints: listed once, and only new ones are looked into.
            listed = list(os.scandir(folder)) if folder.is_dir() else []
            inodes = {entry.name: entry.inode() for entry in listed}
            for step in store.steps(folder):
                inode = inodes.get(store.folder_of(folder, step).name)
                # None: it appeared just now, and the next scan finds it. Another inode: training
                # started again at an earlier step, and its weights are others.
                if inode is None or self._seen.get(step) == inode:
                    continue
                one = self.open(step)
                if one.ended() is None:
                    one.protect()
                self._sign_of_life = time.monotonic()
                self._seen[step], self.waiting[step] = inode, one

    def job_over(self) -> bool:
        """Return True if the job will save no more checkpoints."""
        files, whole = JobFiles.read(self.job), JobDir(self.job.root.parent)
        in_slurm = files.slurm_ids or (files.is_stage and whole.submission_record() is not None)
        if in_slurm and not files.decided_to_end:
            if time.monotonic() - self._asked < SECONDS_BETWEEN_QUERIES:
                return False
            self._asked = time.monotonic()
        status = self._status()
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

    def _status(self) -> Status:
        """Return the state of the job, of a stage that has not started that of its Slurm job."""
        [status] = job_state.examine([self.job])
        whole = JobDir(self.job.root.parent)
        waits = status.state is State.NEW and self.job.stage_record() is not None
        if waits and whole.submission_record() is not None:
            [status] = job_state.examine([whole])
        return status

    def open(self, step: int) -> EvaluatedStep:
        """Return the evaluation of a step."""

        def files(weights: str) -> Sequence[ResultFile]:
            model = checkpoint_model(self.job, step, ema=self.ema)
            return self.evaluation.files(replace(model, identity=lambda: weights))

        return EvaluatedStep(self.job, step, files, self.key)

    @cached_property
    def key(self) -> str:
        """The hash that tells failures of one watch from those of others."""
        cfg, chat = self.evaluation.cfg, self.evaluation.chat
        what = {
            "tasks": [
                [data.task.name, data.task.identity(), data.sha256, data.shots]
                for data in self.evaluation.tasks
            ],
            # Also the tokens of a batch: with fewer, there may be enough memory.
            **cfg.model_dump(mode="json", include={"limit", "bos", "keep_samples", "batch_tokens"}),
            "chat": None if chat is None else chat.facts.model_dump(),
            "ema": self.ema,
        }
        return fingerprint(what)[:8]

    def evaluate_next(self) -> bool:
        """Evaluate one waiting checkpoint; return False if none waits or others evaluate them."""
        with self._lock:
            waiting = list(self.waiting.values())
        for one in sorted(waiting, key=lambda one: (len(one.failures()), one.step)):
            state = one.ended()
            if state is None:
                try:
                    self.try_to_evaluate(one)
                except InUse:  # `dtt eval JOB@STEP` writes one of its result files
                    continue
                state = one.ended()
            if state is not None:
                self.end(one, state)
            return True
        return False

    def try_to_evaluate(self, one: EvaluatedStep) -> None:
        """Evaluate a checkpoint; record an error that concerns only this checkpoint.

        Raises EnvironmentUnfit after an error of a GPU, with which this process cannot continue.
        """
        checkpoint = one.checkpoint
        assert checkpoint is not None, "its evaluation would have ended"
        try:
            self.evaluate(one.step, checkpoint)
        except NOT_A_FAILURE:
            raise
        except Exception as error:  # such as a lack of GPU memory
            one.record_failure(weights_of(checkpoint), error)
            log.warning("the evaluation of step %d failed: %s", one.step, error)
            if _breaks_gpu(error):
                raise EnvironmentUnfit(
                    f"the evaluation of step {one.step} of {self.job.root} failed on the GPU",
                    where=one.failures_file,
                    why=str(error),
                    next=f"dtt eval {self.job.root} --watch continues in a new process",
                ) from error

    def evaluate(self, step: int, checkpoint: Path) -> None:
        """Evaluate the checkpoint in a folder, and print the results."""
        model = checkpoint_model(self.job, step, ema=self.ema, path=checkpoint)
        results = self.evaluation.run(model, None, self.stop_wanted)
        files = self.evaluation.files(model)
        result_table.show(model, files, results, as_json=self.as_json)

    def end(self, one: EvaluatedStep, state: EvalState) -> None:
        """Note that nothing is left to do for a checkpoint."""
        with self._lock:
            self.waiting.pop(one.step, None)
        self.ended.setdefault(state, []).append(one.step)
        if state is EvalState.GONE:
            log.warning("step %d was deleted before it could be evaluated", one.step)
        if (weights := one.done_weights()) is not None:
            self.report(one, weights)
        # Other failed checkpoints are kept: perhaps they can be evaluated with other options.
        if state is EvalState.DONE or (
            state is EvalState.FAILED and one.failures()[-1]["code"] == ExitCode.DAMAGED
        ):
            one.release()

    @cached_property
    def tokens(self) -> dict[int, int]:
        """Number of tokens that the weights of each step were trained on."""
        train = jsonl.read(self.job.metrics, "train")
        whole = (record for record in train if fits(record, {"tokens": int}))
        return {record["step"]: record["tokens"] for record in whole}

    def report(self, one: EvaluatedStep, weights: str) -> None:
        """Send the results of a step that is done to W&B, plotted over the number of tokens."""
        from dtt.evaluate.tasks.runner import task_record

        if self.tracker is None:
            return
        if one.step not in self.tokens:
            del self.tokens  # trained since they were read
        for file in one.files(weights):
            result = file.result()
            assert result is not None, "the step is done"
            axes = {"tokens": self.tokens.get(one.step, 0)}
            self.tracker.log(task_record(one.step, result) | axes)

    def report_end(self) -> None:
        """Log the number of checkpoints by state; raise the error of one that failed, if any."""
        job = self.job
        counts = ", ".join(f"{len(steps)} {state}" for state, steps in sorted(self.ended.items()))
        log.info("%s has ended: %s", job.root, counts or "no checkpoints")
        failed = [self.open(step) for step in self.ended.get(EvalState.FAILED, [])]
        if failed:
            record = failed[0].failures()[-1]
            error = DttError(
                f"{len(failed)} checkpoints of {job.root} could not be evaluated: "
                f"{', '.join(f'step {one.step}' for one in failed)}",
                where=failed[0].failures_file,
                why=record["reason"],
                next=f"rm {job.evals}/step-*/failures.jsonl, and run the same command to try again",
            )
            error.exit_code = ExitCode(record["code"])
            raise error


def _breaks_gpu(error: Exception) -> bool:
    """Return True for an error after which CUDA may fail at every call, such as an illegal access.

    Not for a lack of memory.
    """
    import torch

    survived = isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError)
    return not survived and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
