"""`dtt train`: build all parts of a training run and run it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, ExitCode, Preempted
from dtt.base.launcher import typed_torchrun
from dtt.base.log import log
from dtt.base.ranks import Ranks
from dtt.base.reading import outages_limited, waiting_for_space
from dtt.checkpoint import retention
from dtt.config.load import stage_names
from dtt.config.merging import Resolved
from dtt.config.source import Layer
from dtt.data.samples import compatibility
from dtt.jobs import branch
from dtt.jobs.attempt import Attempt, after_rank_0, holding, recorded_attempt
from dtt.jobs.phase_timer import PhaseTimer
from dtt.jobs.stages import Stage, report_shadowed
from dtt.jobs.stop import Requests
from dtt.report import run as report
from dtt.track import summary
from dtt.train import garbage_collection
from dtt.train.build import build, open_mirror
from dtt.train.description import (
    warn_of_decay_change,
    warn_of_early_end,
    warn_of_rate_jump,
    write_description,
    write_provenance,
)
from dtt.train.find_job import find_job
from dtt.train.initial import describe_adopted
from dtt.train.inputs import PreparedRun, StartedRun
from dtt.train.start import prepare, recorded_refusal
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


def unchanged(trainer: Trainer) -> Trainer:
    """Return the trainer itself."""
    return trainer


@garbage_collection.scheduled()
def run(
    config: str | Layer | None,
    arguments: Sequence[str],
    allow_change: Sequence[str],
    from_step: int | None,
    branch_of: str | None = None,
    *,
    stage: str | None = None,
    as_json: bool = False,
    instrument: Instrument = unchanged,
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
            of_stage = _stage_of(config, arguments, stage, resolved, job)
            if of_stage is not None and ranks.first:
                report_shadowed([of_stage], arguments)
            start = prepare(resolved, job, ranks, from_step, branched, startup, of_stage)
        run_attempt(start, ranks, requests, startup, instrument)
    finally:
        requests.defer()  # ends the thread of signals, of a start that failed
    if as_json and ranks.first:
        print(json.dumps({"job": str(job.root)} | summary.summarize(job.metrics).facts()))


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
    waits = cfg.checkpoint.on_full == "wait"
    attempt = None
    try:
        with (
            outages_limited(),
            waiting_for_space(requests.stop_asked_here if waits else None),
            holding(job, ranks),
            recorded_attempt(
                job, ranks, requests, timed=cfg.train.timed, startup=startup, announced=True
            ) as attempt,
            lost_rank_named(attempt),
        ):
            # Inside, every rank that fails for the same reason as rank 0 stays silent.
            with after_rank_0(ranks, requests):
                # Of collectives: rank 0 may wait for space for days. The watchdog covers steps
                # only, so a hang in the start, an evaluation or a save lasts this long.
                timeout = timedelta(days=7) if waits else timedelta(minutes=30)
                world = dist.start(ranks, cfg.train.device, timeout)
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


def _stage_of(
    config: str | Layer | None,
    arguments: Sequence[str],
    stage: str | None,
    resolved: Resolved,
    job: JobDir,
) -> Stage | None:
    """Return the stage of a job; None if it is not a stage."""
    if stage is None:
        return Stage.of_job(job, resolved)
    return Stage(job, stage_names(config, arguments), resolved)


def build_and_train(
    start: PreparedRun, attempt: Attempt, world: World, instrument: Instrument
) -> None:
    """Build the trainer, resume from a checkpoint if there is one, and run to the end.

    Raises Preempted if a stop was requested before the last step.
    """
    from dtt.train.process_memory import exhaustion_explained

    attempt.startup.end_phase("imports")
    cfg, job, dataset = start.cfg, attempt.job, start.dataset
    if start.branch is not None and world.first:
        start.branch.create_job(job)
    hang_seconds = cfg.train.hang_seconds
    with Watchdog(
        job, world.ranks, start.plan.steps, attempt=attempt.number, hang_seconds=hang_seconds
    ) as watchdog:
        resume = find_checkpoint(attempt, dataset, world, start.from_step)
        attempt.startup.end_phase("data")
        # Again: `prepare` assumed the newest checkpoint, which may have been rejected.
        compatibility.check_batches(cfg.train, start.plan.sizes, resume.step if resume else 0)
        if resume is not None and cfg.train.timed:
            plan = start.plan.with_decay(branch.timed_decay(job, resume))
            start = replace(start, plan=plan)
            watchdog.expect(plan.steps)
        inputs = StartedRun(
            **vars(start), attempt=attempt, world=world, watchdog=watchdog, resume=resume
        )
        if world.first:
            # An error here ends rank 0; the others report PeerLost with its reason.
            write_run_files(inputs)
        done = resume is not None and world.first and is_done(inputs, resume)
        # Rank 0 reads the records for all: a file server may show them late on another node.
        if resume is not None and world.from_first(done):
            log.info("%s is done: the last checkpoint is %s", job.root, resume.path)
            complete_mirror(inputs, resume.step)
            attempt.requests.forget(world)
            return
        if world.first:
            announce(inputs)
        with ExitStack() as stack:
            stack.enter_context(exhaustion_explained(cfg, job, world))
            trainer = instrument(build(inputs))
            for tracker in trainer.observers.trackers:
                stack.callback(tracker.close)
            stack.callback(trainer.saver.close)
            watchdog.before_end = trainer.saver.close
            if world.first and start.from_step is not None:
                # Only now: a run that cannot be built must leave the newer checkpoints.
                set_aside(attempt, start.from_step)
            # Called first, before the trackers are closed.
            stack.push(attempt.requests.note_failure)
            finished = trainer.run()
    if not finished:
        raise Preempted(
            f"stopped at step {trainer.position.step} of {trainer.schedule.steps}, with a "
            "checkpoint",
            why=attempt.requests.reason or "another rank received a stop request",
            next=typed_torchrun() or f"dtt train {job.root}",
        )


def complete_mirror(inputs: StartedRun, newest: int) -> None:
    """Upload the checkpoints up to step `newest` that the mirror of a job that is done lacks."""
    if (mirror := open_mirror(inputs)) is not None:
        mirror.start(newest, lambda: retention.eval_losses(inputs.job))
        mirror.finish(SECONDS_FOR_MIRROR, inputs.attempt.requests.stop_asked_here)


def write_run_files(inputs: StartedRun) -> None:
    """Write the files that describe the run, and warn of what a resume changes, on rank 0."""
    if inputs.resume is not None:
        warn_of_rate_jump(inputs.job, inputs.resume, inputs.plan)
        warn_of_decay_change(inputs.job, inputs.cfg)
    write_description(inputs, inputs.resume)


def announce(inputs: StartedRun) -> None:
    """Log what is about to be trained, and record the command and its environment, on rank 0."""
    if inputs.resume is None and (adopted := describe_adopted(inputs.resolved)):
        log.info("%s", adopted)
    if inputs.resume is None and (mirror := open_mirror(inputs)) is not None:
        # A wrong bucket of a new run is an error now. A run that resumes does not depend on it.
        mirror.check()
    log.info("%s", inputs.plan.describe(inputs.world))
    warn_of_early_end(inputs.dataset, inputs.cfg.train.steps)
    write_provenance(inputs.job)


def find_checkpoint(
    attempt: Attempt, dataset: Dataset, world: World, from_step: int | None
) -> Checkpoint | None:
    """Return the checkpoint to resume from, the same on every rank, or None for a new job.

    Rank 0 chooses it, and all ranks verify it, each some of its files. Raises ConfigError on all
    ranks if it was trained on other data, and DamagedError if the data is not the same on every
    rank.
    """
    from dtt.checkpoint import verified_by_all
    from dtt.train.data_hash import check_nodes

    check_nodes(dataset, world)
    resume = verified_by_all.find(world, partial(choose_checkpoint, attempt, from_step))
    if resume is not None:
        compatibility.check_data(resume.manifest, dataset.manifest.named_keys, attempt.job)
    return resume


def choose_checkpoint(attempt: Attempt, from_step: int | None, verify: Verify) -> Checkpoint | None:
    """Return the newest checkpoint that `verify` accepts, or that of `from_step`; None if none.

    Before, delete the folders of saves that did not finish.
    """
    from dtt.checkpoint import store
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


def set_aside(attempt: Attempt, from_step: int) -> None:
    """Rename the checkpoints after `from_step`: this attempt writes new ones for these steps."""
    from dtt.checkpoint import store

    for path in store.supersede(attempt.job.checkpoints, from_step, attempt.number):
        log.info("renamed newer checkpoint: %s", path)


def is_done(inputs: StartedRun, resume: Checkpoint) -> bool:
    """Return True if the last step is saved and its evaluation is recorded."""
    from dtt.evaluate.tasks.definition import load_tasks

    steps = inputs.plan.steps
    if resume.step < steps:
        return False
    found = summary.summarize(inputs.job.metrics)
    # A run without held-out text has no evaluation.
    validated = found.last_eval is None or found.last_eval["step"] >= steps
    if not validated or resume.position().get("tasks_evaluated") == resume.step:
        return validated
    # Tasks may have been added, and evaluated after the last checkpoint.
    recorded = {record["task"] for record in found.last_tasks if record["step"] >= steps}
    return recorded >= {task.name for task in load_tasks(inputs.cfg.eval.tasks)}
