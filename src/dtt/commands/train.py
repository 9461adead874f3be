"""`dtt train`: build all parts of a training run and run it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtt.commands import branch
from dtt.commands.begin import describe_adopted, model_of
from dtt.commands.build import build
from dtt.commands.home import enter
from dtt.commands.prepare import Start, prepare, recorded_refusal
from dtt.config import explain
from dtt.config.load import Resolved, changes_on_resume, load_job, resolve
from dtt.config.source import Layer
from dtt.data import fit
from dtt.errors import ConfigError, Preempted
from dtt.reading import waiting_for_space
from dtt.runtime.files import append, write_atomically
from dtt.runtime.jobdir import JobDir
from dtt.runtime.laps import Laps
from dtt.runtime.log import log
from dtt.runtime.ranks import Ranks
from dtt.runtime.watchdog import Watchdog
from dtt.secrets import redacted
from dtt.track import summary
from dtt.train import garbage
from dtt.train.attempt import Attempt, after_the_first, attempt, holding
from dtt.train.lost import peers_named
from dtt.train.stop import Requests

LEAP = 1.1
"""Factor by which the learning rate must rise on resume to cause a warning. Schedules rise less
between two steps."""

if TYPE_CHECKING:
    from dtt.checkpoint.store import Checkpoint
    from dtt.data.dataset import Dataset
    from dtt.runtime.dist import World
    from dtt.train.plan import Plan


@garbage.scheduled()
def run(
    config: str | None,
    arguments: Sequence[str],
    allow_change: Sequence[str],
    from_step: int | None,
    branch_of: str | None = None,
    *,
    as_json: bool = False,
) -> None:
    """Train a job to its end.

    The job is the one that `config` describes, the job directory among `arguments`, or a branch of
    `branch_of` (JOB@STEP). `from_step` resumes from that step instead of the newest checkpoint.
    With `as_json`, prints a summary at the end.
    """
    requests = Requests()  # handle signals from here on: the following imports are slow
    ranks, laps = Ranks.detect(), Laps()
    requests.act_at_once(ranks)
    try:
        with (
            recorded_refusal(config, branch_of, arguments, ranks, requests),
            after_the_first(ranks, requests),
        ):
            begun = None
            if branch_of is None:
                resolved, job = find_job(config, arguments, allow_change)
            else:
                resolved, job, begun = branch.find(
                    branch_of, config, arguments, allow_change, from_step
                )
            start = prepare(resolved, job, ranks, from_step, begun, laps)
        requests.watch(job)
        start_attempt(start, ranks, requests)
    finally:
        requests.defer()
    if as_json and ranks.first:
        print(json.dumps({"job": str(job.root)} | summary.summarize(job.metrics).facts()))


def start_attempt(start: Start, ranks: Ranks, requests: Requests) -> None:
    """Lock the job, join the other ranks and train."""
    from dtt.runtime import dist

    job, cfg = start.job, start.resolved.config
    waits = cfg.checkpoint.on_full == "wait"
    try:
        with (
            waiting_for_space(requests.stop_asked_here if waits else None),
            holding(job, ranks),
            attempt(job, ranks, requests, timed=cfg.train.timed, start=start.laps) as this,
            peers_named(this),
        ):
            with after_the_first(ranks, requests):
                # Rank 0 may wait for space for days; the watchdog ends runs that hang.
                patience = timedelta(days=7) if waits else timedelta(minutes=30)
                world = dist.start(ranks, cfg.train.device, patience)
            this.number = world.from_first(this.number)
            this.start.lap("process group")
            train(start, this, world)
    finally:
        dist.stop()  # after exit.json is written: now the other ranks see that this one has ended


def find_job(
    config: str | Layer | None, arguments: Sequence[str], allow_change: Sequence[str]
) -> tuple[Resolved, JobDir]:
    """Return the validated configuration and the job it belongs to.

    If the job has a checkpoint, `config` and `arguments` override the job's own configuration.
    Raises ConfigError if they change a key that determines the training and `allow_change` does not
    name that key.
    """
    folders = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    named = len(folders) + (config is not None)
    if named > 1 or not (named or overrides):
        raise ConfigError(
            "train takes either a config (-c FILE) or one job directory to resume",
            why=f"got {' and '.join([*folders, *(f'-c {c}' for c in [config] if c)]) or 'neither'}",
            next="dtt train -c quickstart, or dtt train jobs/quickstart",
        )
    if folders:
        root, overrides = enter(Path(folders[0]), overrides)
        job = JobDir(root)
        load_job(job.root)  # InputError if it is not a job
    else:
        job = JobDir(resolve(config, overrides).config.job_dir)
    for key in allow_change:
        close = explain.nearest(key)
        if close != key:
            raise ConfigError(f"--allow-change {key}: no such key", next=f"--allow-change {close}")
    begun = job.newest_checkpoint_name() is not None
    if not folders and not (begun and job.exists):
        return resolve(config, overrides, model_of=model_of), job
    # A job with a checkpoint has recorded its `model` section: the weights that `init.from` names
    # may have been deleted since.
    of_source = partial(own_model, job) if begun else model_of
    resolved = resolve(config, overrides, job_config=job.config, model_of=of_source)
    changed = changes_on_resume(load_job(job.root), resolved.config) if begun else []
    refused = [key for key in changed if key not in allow_change]
    if refused:
        raise ConfigError(
            f"{job.root} was started with other values of: {', '.join(refused)}",
            where=", ".join(resolved.origin(key) for key in refused),
            why="resuming with these would change what is being trained",
            next="name=ANOTHER starts a new job; "
            + " ".join(f"--allow-change {key}" for key in refused)
            + " insists",
        )
    return resolved, job


def own_model(job: JobDir, source: str) -> Mapping[str, Any]:
    """Return the `model` section of a job, as `model_of` would for the `source` of its weights."""
    section = load_job(job.root).model.model_dump(mode="json")
    return {key: value for key, value in section.items() if key not in ("init_std", "dropout")}


def train(start: Start, this: Attempt, world: World) -> None:
    """Build the trainer, resume from a checkpoint if there is one, and run to the end.

    Raises Preempted if a stop was requested before the last step.
    """
    from dtt.train.memory import exhaustion_told

    this.start.lap("imports")
    cfg, job, dataset, plan = start.resolved.config, this.job, start.dataset, start.plan
    if start.begun is not None and world.first:
        start.begun.begin(job)
    hang_seconds = cfg.train.hang_seconds
    with Watchdog(
        job, world.ranks, plan.steps, attempt=this.number, hang_seconds=hang_seconds
    ) as watchdog:
        resume = find_checkpoint(this, dataset, world, start.from_step)
        this.start.lap("data")
        if resume is not None and cfg.train.timed:
            plan = plan.going_on(branch.own_decay(job, resume))
            watchdog.steps = plan.steps
        if resume is not None and world.first:
            warn_of_jump(job, resume, plan)
        if world.first:
            write_atomically(job.config, explain.show(cfg, start.resolved.layer))
            keep_data(job, dataset)
        if resume is not None and is_done(job, resume, plan.steps):
            log.info("%s is done: %s holds step %d", job.root, resume.path, resume.step)
            this.requests.forget(world)
            return
        if world.first:
            if resume is None and (adopted := describe_adopted(start.resolved)):
                log.info("%s", adopted)
            log.info("%s", plan.describe(world))
            if dataset.steps < cfg.train.steps:
                log.warning(
                    "the run ends at step %d, not %d: then the data is exhausted",
                    dataset.steps,
                    cfg.train.steps,
                )
            write_provenance(job)
        with ExitStack() as stack:
            stack.enter_context(exhaustion_told(cfg, job, world))
            trainer = build(cfg, plan, this, world, dataset, watchdog, resume)
            for tracker in trainer.trackers:
                stack.callback(tracker.close)
            stack.callback(trainer.saver.close)
            watchdog.before_end = trainer.saver.close
            if world.first and start.from_step is not None:
                set_aside(this, start.from_step)
            stack.push(this.requests.note_failure)  # called first, before the trackers are closed
            finished = trainer.run(resume)
    if not finished:
        raise Preempted(
            f"stopped at step {trainer.position.step} of {plan.steps}, everything is saved",
            why=this.requests.reason or "another rank was asked to stop",
            next=f"dtt train {job.root}",
        )


def find_checkpoint(
    this: Attempt, dataset: Dataset, world: World, from_step: int | None
) -> Checkpoint | None:
    """Return the checkpoint to resume from, the same on every rank, or None for a new job.

    Rank 0 chooses and verifies it. Raises ConfigError on all ranks if its data hash differs.
    """
    resume = world.from_first(first_choice(this, from_step) if world.first else None)
    if resume is not None:
        fit.check_data_key(resume.manifest, dataset.manifest.key, this.job)
    return resume


def first_choice(this: Attempt, from_step: int | None) -> Checkpoint | None:
    """Return the newest verified checkpoint, or that of `from_step`; None if there are none."""
    from dtt.checkpoint import retain, store
    from dtt.train.state import check_position

    folder = this.job.checkpoints
    if folder.exists():
        retain.sweep_staging(folder)
    if from_step is None:
        return store.newest(folder, check_position)
    found = store.at_step(folder, from_step)
    check_position(found)
    return found


def set_aside(this: Attempt, from_step: int) -> None:
    """Rename the checkpoints after `from_step`: this attempt writes new ones for these steps."""
    from dtt.checkpoint import store

    for path in store.supersede(this.job.checkpoints, from_step, this.number):
        log.info("set aside: %s", path)


def is_done(job: JobDir, resume: Checkpoint, steps: int) -> bool:
    """Return True if the last step is saved and its evaluation is recorded in metrics.jsonl."""
    if resume.step < steps:
        return False
    last = summary.summarize(job.metrics).last_eval
    return last is None or last["step"] >= steps


def warn_of_jump(job: JobDir, resume: Checkpoint, plan: Plan) -> None:
    """Warn if the learning rate rises again after the decay during which `resume` was taken.

    A finished run that is given more steps gets a new, later decay, so its rate jumps from the
    annealed value up to the new schedule. A branch from before the decay avoids this.
    """
    from dtt.checkpoint import store
    from dtt.optim.schedule import Decay

    decayed = resume.position().get("decay")
    if decayed is None:
        return
    decay = Decay(**decayed)
    earlier = replace(plan.schedule, decay=decay)
    before, after = earlier.multiplier(resume.step - 1), plan.schedule.multiplier(resume.step)
    if resume.step <= decay.begin or resume.step >= plan.steps or after <= LEAP * before:
        return
    steps = [step for step in store.steps(job.checkpoints) if step <= decay.begin]
    advice = "no checkpoint from before the decay is left: the loss rises before it falls"
    if steps:
        advice = (
            f"dtt train --branch {job.root}@{steps[-1]} train.steps={plan.steps} name=ANOTHER, or "
            f"dtt train {job.root} --from-step {steps[-1]} train.steps={plan.steps} "
            "--allow-change train.steps"
        )
    log.warning(
        "the learning rate leaps from %.3g%% to %.3g%% of its peak after step %d\n"
        "  why:   the decay from step %d to %d is over, and now there are %d steps\n"
        "  next:  %s",
        *(100 * before, 100 * after, resume.step),
        *(decay.begin + 1, decay.end, plan.steps, advice),
    )


def keep_data(job: JobDir, dataset: Dataset) -> None:
    """Copy the tokenizer and the data manifest into the job directory.

    With them, the model can be used without the token files.
    """
    fit.check_tokenizer(dataset.tokenizer, dataset.manifest.tokenizer_sha256)
    write_atomically(job.tokenizer, dataset.tokenizer.read_bytes())
    write_atomically(job.root / dataset.manifest.filename, dataset.manifest.dump())


def write_provenance(job: JobDir) -> None:
    """Record the environment and the command line of this attempt in the job directory."""
    job.write_environment()
    append(job.root / "overrides.txt", redacted(shlex.join(sys.argv[1:])) + "\n")
