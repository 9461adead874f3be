"""`dtt train`: find the job, check it, join the ranks, build the run, and train it to its end.

All checks of `prepare` come before dtt touches the job directory, so a start that is refused
neither creates a job nor turns a finished job into a failed one. One of `dtt train JOB` is recorded
as an attempt, unless the job is done.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import CheckpointManifest
from dtt.artifacts.token_folders import token_paths
from dtt.base.errors import ConfigError, DttError, ExitCode, Preempted
from dtt.base.log import log
from dtt.base.ranks import Ranks
from dtt.base.reading import outages_limited
from dtt.checkpoint import retention, store
from dtt.config.layers import Layer
from dtt.config.load import stage_names, with_steps
from dtt.config.merging import Resolved
from dtt.config.run import RunConfig
from dtt.data.samples import compatibility
from dtt.evaluate.evaluation import open_evaluation
from dtt.jobs import branch
from dtt.jobs.attempt import Attempt, after_rank_0, holding, recorded_attempt
from dtt.jobs.branch import Branch
from dtt.jobs.clock import PhaseTimer
from dtt.jobs.stages import Stage, report_shadowed
from dtt.jobs.stop import Requests
from dtt.report import run as report
from dtt.track import jsonl
from dtt.train.description import announce, write_description
from dtt.train.find_job import find_job
from dtt.train.initial import check_source, check_vocabulary_of_stage
from dtt.train.objects import PreparedRun, StartedRun, named_reference
from dtt.train.supervise.lost_rank import lost_rank_named
from dtt.train.supervise.watchdog import Watchdog

if TYPE_CHECKING:
    from dtt.checkpoint.store import Checkpoint, Verify
    from dtt.data.samples.dataset import Dataset
    from dtt.mesh.dist import World
    from dtt.train.trainer import Trainer

SECONDS_FOR_MIRROR = 86_400.0
"""Time for the uploads of a job that is done, when its command is run again."""
Instrument = Callable[["Trainer"], "Trainer"]
"""Function that returns the trainer to run in place of the one that was built."""


@contextmanager
def garbage_collected_by_loop() -> Iterator[None]:
    """Disable automatic garbage collection inside, so that only the training loop collects.

    By default it runs whenever enough objects were created. That takes a sixth of the time of
    imports, and in training it stops each rank at a different time, while all others wait for it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


@garbage_collected_by_loop()
def run(
    config: str | Layer | None,
    arguments: Sequence[str],
    allow_change: Sequence[str],
    from_step: int | None,
    branch_of: str | None = None,
    *,
    stage: str | None = None,
    as_json: bool = False,
    instrument: Instrument = lambda trainer: trainer,
    requests: Requests | None = None,
) -> None:
    """Train a job to its end.

    The job is the one that `config` describes, or a `stage` of it, the job directory among
    `arguments`, or a branch of `branch_of` (JOB@STEP). `from_step` resumes from that step
    instead of the newest checkpoint. With `as_json`, prints a summary at the end. `dtt verify`
    records the steps through `instrument`; `requests` are those of a caller that continues.
    """
    requests = requests or Requests()  # handle signals before the slow imports
    ranks, startup = Ranks.detect(), PhaseTimer()
    requests.act_at_once(ranks)
    try:
        with (
            recorded_refusal(config, branch_of, arguments, ranks, requests),
            after_rank_0(ranks, requests),
        ):
            branched = None
            if branch_of is not None and stage is not None:
                raise ConfigError(
                    f"--branch and --stage {stage} are mutually exclusive",
                    why="a branch continues the job of one stage",
                    next="leave out --stage",
                )
            if branch_of is None:
                resolved, job = find_job(config, arguments, allow_change, stage)
            else:
                assert not isinstance(config, dict), "a command line names a file"
                resolved, job, branched = branch.find(
                    branch_of, config, arguments, allow_change, from_step
                )
            requests.watch(job)
            if stage is None:
                of_stage = Stage.of_job(job, resolved)
            else:
                of_stage = Stage(job, stage_names(config, arguments), resolved)
            if of_stage is not None and ranks.first:
                report_shadowed([of_stage], arguments)
            start = prepare(resolved, job, ranks, from_step, branched, startup, of_stage)
        run_attempt(start, ranks, requests, startup, instrument)
    finally:
        requests.defer()  # ends the thread of signals, of a start that failed
    if as_json and ranks.first:
        print(json.dumps({"job": str(job.root)} | jsonl.summarize(job.metrics).facts()))


@contextmanager
def recorded_refusal(
    config: str | Layer | None,
    branch_of: str | None,
    arguments: Sequence[str],
    ranks: Ranks,
    requests: Requests,
) -> Iterator[None]:
    """Record a refused start as an attempt of the job, if the command is only `dtt train JOB`.

    Job scripts run that command and read `attempt.json`, because torchrun exits with 1 for every
    failure. A job that is done stays done, and a job that does not exist is not created.
    """
    here = Path.cwd()  # saved because `enter` changes the current folder
    try:
        yield
    except DttError:
        if config is not None or branch_of is not None or len(arguments) != 1:
            raise
        job = JobDir(here / arguments[0])
        ended = job.exit_record(job.attempt()) if job.exists else {"code": ExitCode.DONE}
        if ended is not None and ended["code"] == ExitCode.DONE:
            raise
        with holding(job, ranks), recorded_attempt(job, ranks, requests):
            raise


# ---- checks before the job directory is touched --------------------------------------------------


def prepare(
    resolved: Resolved,
    job: JobDir,
    ranks: Ranks,
    from_step: int | None,
    branch: Branch | None,
    startup: PhaseTimer,
    stage: Stage | None = None,
) -> PreparedRun:
    """Check a start, and return what it found; raise the same DttError on all ranks.

    Each rank checks on its own, because there is no process group yet.
    """
    cfg = resolved.config
    predecessor = None
    if ranks.first:
        compatibility.check_files(token_paths(cfg))
        predecessor = stage.start_from() if stage is not None else None
    # Only here, after the checks that need no torch: importing it takes two seconds.
    from dtt.data.samples.dataset import open_dataset
    from dtt.mesh import dist
    from dtt.track.trackers import check_installed
    from dtt.train.run_plan import make_plan

    if ranks.first:
        check_installed(cfg)
    startup.end_phase("imports")
    device = dist.choose_device(ranks, cfg.train.device, gpus_asked=cfg.launch.gpus)
    dataset = open_dataset(cfg)
    doubts = dataset.left_out()
    if job.newest_checkpoint_name() is None:
        doubts += compatibility.check_vocabulary(resolved, job, dataset.manifest.vocab_size)
    for doubt in doubts if ranks.first else ():
        log.warning("%s", doubt)
    resolved = with_steps(resolved, dataset.requested_steps)
    cfg = resolved.config
    if ranks.first:
        if cfg.eval.tasks:
            open_evaluation(cfg.eval)  # downloads what is missing
        compatibility.check_tokenizer(dataset.tokenizer, dataset.manifest.tokenizer_sha256)
    newest = store.steps(job.checkpoints)[-1:] or [0 if branch is None else branch.step]
    done = newest[0] if from_step is None else from_step
    plan = make_plan(cfg, dataset, dist.World(ranks, device, None), done)  # without collectives
    if branch is not None:
        # Again, now that the length of the data is known.
        branch.check(plan.schedule.decay, plan.steps)
    if ranks.first:
        if branch is None or store.steps(job.checkpoints):
            staged = predecessor is not None
            _check_starting_weights(cfg, job, dataset, from_step, staged=staged)
        if predecessor is not None:
            check_vocabulary_of_stage(dataset.tokenizer, predecessor.job.tokenizer)
    startup.end_phase("data")
    return PreparedRun(resolved, job, dataset, plan, from_step, branch, stage, predecessor)


def _check_starting_weights(
    cfg: RunConfig, job: JobDir, dataset: Dataset, from_step: int | None, *, staged: bool
) -> None:
    """Raise DttError if the checkpoint to resume from does not match the data.

    For a new job, raises DttError if the weights that the configuration names cannot be found, or
    if it names none for preference pairs; if `staged`, it starts from those of the stage before.
    Reads only the manifest of the checkpoint, which is verified later, when the job is locked.
    """
    steps = store.steps(job.checkpoints)
    if not steps and from_step is None:
        if cfg.objective.per_pair and cfg.init.source is None and not staged:
            raise ConfigError(
                f"objective.type={cfg.objective.type} needs the weights of a fine-tuned model",
                where="init.from",
                why="it is null, so the model would start from random weights",
                next="init.from=JOB, or init.from=hf:FOLDER",
            )
        for source in (cfg.init.source, named_reference(cfg)):
            if source is not None:
                check_source(source)
        return
    path = store.existing(job.checkpoints, steps[-1] if from_step is None else from_step)
    try:
        manifest = CheckpointManifest.read(path)
    except (DttError, OSError):
        # Damaged. Not an error here: it is verified again under the lock, and older ones are tried.
        return
    compatibility.check_data(manifest, dataset.manifest.named_keys, job)


# ---- an attempt ----------------------------------------------------------------------------------


def under_time_pressure(job: JobDir) -> bool:
    """Return True if Slurm may be about to end this process, so that a report must wait.

    The job script then writes it, or the next attempt.
    """
    ending = job.exit_record(job.attempt())
    return "SLURM_JOB_ID" in os.environ and (ending is None or ending["code"] != ExitCode.DONE)


def run_attempt(
    start: PreparedRun,
    ranks: Ranks,
    requests: Requests,
    startup: PhaseTimer,
    instrument: Instrument,
) -> None:
    """Lock the job, join the other ranks and train; `startup` has timed the start so far."""
    from dtt.mesh import dist

    job, cfg = start.job, start.cfg
    attempt = None
    try:
        with (
            outages_limited(),
            holding(job, ranks),
            recorded_attempt(job, ranks, requests, startup=startup, announced=True) as attempt,
            lost_rank_named(attempt),
        ):
            # Inside, every rank that fails for the same reason as rank 0 stays silent.
            with after_rank_0(ranks, requests):
                # The watchdog covers steps only: a collective that hangs in the start, an
                # evaluation or a save lasts half an hour.
                world = dist.start(ranks, cfg.train.device)
            # Ranks that start late may see a newer attempt folder. The number of rank 0 counts.
            attempt.number = world.from_first(attempt.number)
            attempt.startup.end_phase("process group")
            build_and_train(start, attempt, world, instrument)
    finally:
        dist.stop()  # after attempt.json is written, because it makes the other ranks end
        if attempt is not None and ranks.first and not under_time_pressure(job):
            page = report.write_at_end([job], job.root)
            if page is not None:
                log.info("report: %s", page)


def build_and_train(
    start: PreparedRun, attempt: Attempt, world: World, instrument: Instrument
) -> None:
    """Build the trainer, resume from a checkpoint if there is one, and run to the end.

    Raises Preempted if a stop was requested before the last step.
    """
    from dtt.train.process_memory import exhaustion_explained

    attempt.startup.end_phase("imports")
    cfg, job = start.cfg, attempt.job
    if start.branch is not None and world.first:
        start.branch.create_job(job)
    hang_seconds = cfg.train.hang_seconds
    with Watchdog(
        job, world.ranks, start.plan.steps, attempt=attempt.number, hang_seconds=hang_seconds
    ) as watchdog:
        # Ranks whose devices differ in memory would otherwise call other collectives, and wait.
        each = bool(world.maximum(start.plan.reduce_each))
        start = replace(start, plan=replace(start.plan, reduce_each=each))
        inputs = _with_checkpoint(start, attempt, world, watchdog)
        if world.first:
            # An error here ends rank 0; the others report PeerLost with its reason.
            write_description(inputs)
        resume = inputs.resume
        done = resume is not None and world.first and is_done(inputs, resume)
        # Rank 0 reads the records for all: a file server may show them late on another node.
        if resume is not None and world.from_first(done):
            log.info("%s is done: the last checkpoint is %s", job.root, resume.path)
            if (mirror := inputs.open_mirror()) is not None:  # it may lack some checkpoints
                mirror.start(resume.step, lambda: retention.eval_losses(job))
                mirror.finish(SECONDS_FOR_MIRROR, attempt.requests.stop_asked_here)
            attempt.requests.forget(world)
            return
        if world.first:
            announce(inputs)
        # It takes seconds to import, which `start` reports separately, and a done job is spared.
        from dtt.train.build import build

        attempt.startup.end_phase("imports")
        with ExitStack() as stack:
            stack.enter_context(exhaustion_explained(cfg, job, world))
            trainer = instrument(build(inputs))
            for tracker in trainer.trackers:
                stack.callback(tracker.close)
            stack.callback(trainer.saver.close)
            watchdog.before_end = trainer.saver.close
            if world.first and start.from_step is not None:
                # Only now: a run that cannot be built must leave the newer checkpoints. This
                # attempt writes new ones for these steps.
                for path in store.supersede(job.checkpoints, start.from_step, attempt.number):
                    log.info("renamed newer checkpoint: %s", path)
            finished = trainer.run()
    if not finished:
        raise Preempted(
            f"stopped at step {trainer.position.step} of {trainer.schedule.steps}, with a "
            "checkpoint",
            why=attempt.requests.reason or "another rank received a stop request",
            next=f"run the same command again, or dtt train {job.root}",
        )


def _with_checkpoint(
    start: PreparedRun, attempt: Attempt, world: World, watchdog: Watchdog
) -> StartedRun:
    """Return the run with the checkpoint that it resumes from, the same on every rank.

    Rank 0 chooses it, and all ranks verify it, each some of its files. Raises ConfigError on all
    ranks if it was trained on other data, and DamagedError if the data is not the same on every
    rank.
    """
    from dtt.checkpoint import verified_by_all
    from dtt.train.state import check_nodes

    dataset, train = start.dataset, start.cfg.train
    check_nodes(dataset, world)
    resume = verified_by_all.find(world, partial(choose_checkpoint, attempt, start.from_step))
    if resume is not None:
        compatibility.check_data(resume.manifest, dataset.manifest.named_keys, attempt.job)
    attempt.startup.end_phase("data")
    # Again: `prepare` assumed the newest checkpoint, which may have been rejected.
    compatibility.check_batches(train, start.plan.sizes, resume.step if resume else 0)
    if resume is not None and train.timed:
        plan = start.plan.with_decay(branch.timed_decay(attempt.job, resume))
        start = replace(start, plan=plan)
        watchdog.expect(plan.steps)
    return StartedRun(**vars(start), attempt=attempt, world=world, watchdog=watchdog, resume=resume)


def choose_checkpoint(attempt: Attempt, from_step: int | None, verify: Verify) -> Checkpoint | None:
    """Return the newest checkpoint that `verify` accepts, or that of `from_step`; None if none.

    Before, delete the folders of saves that did not finish.
    """
    from dtt.train.state import check_position

    folder = attempt.job.checkpoints
    if folder.exists():
        retention.sweep_staging(folder)
        log.info("verifying a checkpoint in %s", folder)
    if from_step is None:
        return store.newest(folder, check_position, verify)
    checkpoint = store.at_step(folder, from_step, verify)
    check_position(checkpoint)
    retention.check_dependents(attempt.job, after=from_step)  # later ones are renamed
    return checkpoint


def is_done(inputs: StartedRun, resume: Checkpoint) -> bool:
    """Return True if the attempt before this one did everything that is due after the last step.

    The checkpoint of that step is no proof: it is saved before the actions of its step, some of
    which leave no record. An attempt that was killed among them is completed by this one.
    """
    from dtt.evaluate.tasks.definition import load_tasks

    job, earlier = inputs.job, [n for n in inputs.job.attempts() if n < inputs.attempt.number]
    ended = job.exit_record(earlier[-1]) if earlier else None
    if resume.step < inputs.plan.steps or ended is None or ended["code"] != ExitCode.DONE:
        return False
    # Tasks may have been added since.
    scores = jsonl.summarize(job.metrics).last_tasks
    recorded = {record["task"] for record in scores if record["step"] >= resume.step}
    return recorded >= {task.name for task in load_tasks(inputs.cfg.eval.tasks)}
