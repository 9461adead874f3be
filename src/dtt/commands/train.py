"""`dtt train`: the whole wiring of a training run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dtt import __version__
from dtt.artifacts import fingerprint
from dtt.commands import branch
from dtt.commands.begin import begin_with
from dtt.commands.home import enter
from dtt.config import explain
from dtt.config.load import Resolved, changes_on_resume, load_job, resolve
from dtt.config.run import RunConfig
from dtt.config.schedule import WsdConfig
from dtt.config.source import Layer
from dtt.data import fit
from dtt.errors import ConfigError, DttError, Preempted
from dtt.runtime import pages
from dtt.runtime.files import write_atomically
from dtt.runtime.jobdir import JobDir
from dtt.runtime.log import log
from dtt.runtime.ranks import Ranks
from dtt.runtime.watchdog import Watchdog
from dtt.secrets import redacted
from dtt.track import summary
from dtt.train import garbage
from dtt.train.attempt import Attempt, after_the_first, attempt, holding
from dtt.train.stop import Requests

if TYPE_CHECKING:
    from dtt.checkpoint.store import Checkpoint
    from dtt.data.dataset import Dataset
    from dtt.data.loader import Share
    from dtt.runtime.dist import World
    from dtt.train.budget import Budget
    from dtt.train.evaluate import Evaluator, Sampler
    from dtt.train.plan import Plan
    from dtt.train.trainer import Trainer


@garbage.scheduled()
def run(
    config: str | None,
    arguments: Sequence[str],
    allow_change: Sequence[str],
    from_step: int | None,
    branch_of: str | None = None,
) -> None:
    """Train the job that `config` names, or the job directory among `arguments`, to its end.

    `branch_of` (JOB@STEP): or a child of that job.
    """
    requests = Requests()  # from here on signals are heard; what follows is slow to import
    ranks = Ranks.detect()
    here = Path.cwd()  # a job is entered, which changes the current folder
    try:
        begun = None
        with after_the_first(ranks, requests):
            if branch_of is None:
                resolved, job = find_job(config, arguments, allow_change)
            else:
                resolved, job, begun = branch.find(
                    branch_of, config, arguments, allow_change, from_step
                )
    except DttError:
        alone = config is None and branch_of is None and len(arguments) == 1
        if alone and (named := JobDir(here / arguments[0])).exists:
            with holding(named, ranks), attempt(named, ranks, requests):
                raise  # a job script reads exit.json, not what we say
        raise
    requests.watch(job)
    from dtt.runtime import dist

    try:
        with (
            holding(job, ranks),
            attempt(job, ranks, requests, timed=resolved.config.train.timed) as this,
            dist.lost_peers_told(),
        ):
            if ranks.first:
                fit.check_files(resolved.config.token_paths)
            this.start.lap("imports")
            with after_the_first(ranks, requests):
                world = dist.start(ranks, resolved.config.train.device)
            this.number = world.from_first(this.number)
            this.start.lap("process group")
            train(resolved, this, world, from_step, begun)
    finally:
        dist.stop()  # after exit.json was written: the others now see that this process has ended


def find_job(
    config: str | Layer | None, arguments: Sequence[str], allow_change: Sequence[str]
) -> tuple[Resolved, JobDir]:
    """The checked configuration and the job it belongs to.

    Once a job has a checkpoint, its own config lies below the file and the arguments; ConfigError
    if they would change what is being trained and `allow_change` does not name the key.
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
        load_job(job.root)  # InputError if it is none
    else:
        job = JobDir(resolve(config, overrides).config.job_dir)
    for key in allow_change:
        close = explain.nearest(key)
        if close != key:
            raise ConfigError(f"--allow-change {key}: no such key", next=f"--allow-change {close}")
    begun = job.newest_checkpoint_name() is not None
    if not folders and not (begun and job.exists):
        return resolve(config, overrides), job
    resolved = resolve(config, overrides, job_config=job.config)
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


def train(
    resolved: Resolved,
    this: Attempt,
    world: World,
    from_step: int | None,
    begun: branch.Branch | None = None,
) -> None:
    """Make every part, put them together, run; Preempted when asked to stop before the end."""
    from dtt.data.dataset import open_dataset
    from dtt.train.memory import exhaustion_told
    from dtt.train.plan import make_plan

    this.start.lap("imports")
    cfg, job = resolved.config, this.job
    with after_the_first(world.ranks, this.requests):
        dataset = open_dataset(cfg)
        plan = make_plan(cfg, dataset, world)
    if begun is not None:
        begun.check(plan.schedule.decay, plan.steps)  # again: now it is known what the data allows
        if world.first:
            begun.begin(job)
    hang_seconds = cfg.train.hang_seconds
    with Watchdog(
        job, world.ranks, plan.steps, attempt=this.number, hang_seconds=hang_seconds
    ) as watchdog:
        resume = find_checkpoint(this, dataset, world, from_step)
        this.start.lap("data")
        if resume is not None and cfg.train.timed:
            plan = plan.going_on(branch.own_decay(job, resume))
            watchdog.steps = plan.steps
        if world.first:
            write_atomically(job.config, explain.show(resolved.config, resolved.layer))
            keep_data(job, dataset)
        if resume is not None and is_done(job, resume, plan.steps):
            log.info("%s is done: %s holds step %d", job.root, resume.path, resume.step)
            this.requests.forget(world)
            return
        if world.first:
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
            if world.first and from_step is not None:
                set_aside(this, from_step)
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
    """What to resume from, the same on every rank; the first one verifies it for all."""
    resume = world.from_first(first_choice(this, from_step) if world.first else None)
    if resume is not None:
        fit.check_data_key(resume.manifest, dataset.manifest.key, this.job)
    return resume


def first_choice(this: Attempt, from_step: int | None) -> Checkpoint | None:
    """The newest checkpoint that is whole, or that of `from_step`."""
    from dtt.checkpoint import retain, store

    folder = this.job.checkpoints
    if folder.exists():
        retain.sweep_staging(folder)
    if from_step is None:
        return store.newest(folder)
    return store.at_step(folder, from_step)


def set_aside(this: Attempt, from_step: int) -> None:
    """From now on the checkpoints after `from_step` are those that this attempt writes."""
    from dtt.checkpoint import store

    for path in store.supersede(this.job.checkpoints, from_step, this.number):
        log.info("set aside: %s", path)


def is_done(job: JobDir, resume: Checkpoint, steps: int) -> bool:
    """Whether nothing is left to do: the last step is saved, and its evaluation is on record."""
    if resume.step < steps:
        return False
    last = summary.summarize(job.metrics).last_eval
    return last is None or last["step"] >= steps


def keep_data(job: JobDir, dataset: Dataset) -> None:
    """Keep what the model's numbers mean: it can be used without the token files."""
    fit.check_tokenizer(dataset.tokenizer, dataset.manifest.tokenizer_sha256)
    write_atomically(job.tokenizer, dataset.tokenizer.read_bytes())
    write_atomically(job.root / dataset.manifest.filename, dataset.manifest.dump())


def write_provenance(job: JobDir) -> None:
    """Keep what this attempt was started with, and where."""
    job.write_environment()
    with (job.root / "overrides.txt").open("a", encoding="utf-8") as file:
        file.write(redacted(shlex.join(sys.argv[1:])) + "\n")


def build(
    cfg: RunConfig,
    plan: Plan,
    this: Attempt,
    world: World,
    dataset: Dataset,
    watchdog: Watchdog,
    resume: Checkpoint | None,
) -> Trainer:
    """Model, optimizers, data, trackers: each made here and nowhere else."""
    import torch

    from dtt.checkpoint.saver import Saver
    from dtt.data.loader import Share, training_batches
    from dtt.optim.ema import Ema
    from dtt.optim.rounding import StochasticRounding
    from dtt.track.trackers import make_trackers
    from dtt.train.account import Account
    from dtt.train.assemble import assemble, make_optimizers
    from dtt.train.evaluate import evaluation_due
    from dtt.train.guard import Guard
    from dtt.train.meter import Meter
    from dtt.train.profiler import Profiler
    from dtt.train.state import Position
    from dtt.train.trainer import Trainer

    this.start.lap("imports")
    if world.device.type == "cpu":
        pages.keep()
    made = assemble(cfg, plan, world)
    model, layout = made.model, made.layout
    if resume is None and cfg.init.source is not None:
        begin_with(cfg.init.source, model, dataset.tokenizer, world)
    this.start.lap("model")
    rounding = StochasticRounding(cfg.seed) if cfg.train.stochastic_rounding else None
    optimizers = make_optimizers(cfg, plan, made, rounding)
    this.start.lap("optimizer")
    meter = Meter(plan.arch, plan.precision.products, world, list(optimizers.values()))
    if world.size > 1 and not layout.sharded:
        meter.watch_gradients(made.parameters["embed.weight"])
    share = Share(
        layout.data_rank,
        plan.sizes.data,
        cfg.train.micro_batch,
        world.device,
        cfg.data.mask_documents,
    )
    known, unfinished = None, False
    evaluator = make_evaluator(cfg, plan, world, dataset, share)
    if resume is not None:
        known = resume.position()["run_id"]
        position = Position.from_json(resume.position())
        unfinished = evaluator is not None and evaluation_due(cfg.train, plan.steps, position)
    run_id = world.from_first(this.job.run_id(known) if world.first else "")
    facts = {
        "config_sha256": fingerprint(cfg.model_dump(mode="json")),
        "data_key": dataset.manifest.key,
        "versions": {"dtt": __version__, "torch": torch.__version__},
    }
    return Trainer(
        cfg=cfg,
        plan=plan,
        world=world,
        layout=layout,
        job=this.job,
        model=model,
        parameters=made.parameters,
        module=made.module,
        optimizers=optimizers,
        rounding=rounding,
        ema=Ema(made.parameters, decay) if (decay := cfg.train.ema_decay) else None,
        dataset=dataset,
        guard=Guard(cfg.guard, world, this.job.root),
        batches_from=partial(training_batches, dataset, share),
        evaluator=evaluator,
        sampler=make_sampler(cfg, dataset),
        trackers=make_trackers(
            cfg, this.job, resume.step if resume else None, evaluated=not unfinished
        )
        if world.first
        else [],
        requests=this.requests,
        watchdog=watchdog,
        saver=Saver(
            this.job, this.number, world, cfg.checkpoint, facts, this.requests.stop_asked_here
        ),
        meter=meter,
        profiler=Profiler(cfg.profile, world, this.job.profiles, meter, watchdog),
        account=Account(this.start, this.clock),
        start=this.start,
        budget=make_budget(cfg, dataset, this, resume),
        run_id=run_id,
    )


def make_evaluator(
    cfg: RunConfig, plan: Plan, world: World, dataset: Dataset, share: Share
) -> Evaluator | None:
    """Validation on held-out text; None, said aloud, when it has no whole sequence."""
    from dtt.train.evaluate import Evaluator, held_out

    parts = held_out(dataset, max(1, cfg.train.eval_tokens // cfg.train.seq_len))
    if not parts:
        log.warning("no validation: the held-out text is shorter than one sequence")
        return None
    return Evaluator(parts, share, plan.precision, world, plan.sizes.context)


def make_budget(
    cfg: RunConfig, dataset: Dataset, this: Attempt, resume: Checkpoint | None
) -> Budget | None:
    """On the first rank of a run that the clock ends; says when it will."""
    from dtt.train.budget import Budget

    if this.clock is None or not cfg.train.timed:
        return None
    assert isinstance(cfg.schedule, WsdConfig), "the configuration was checked"
    budget = Budget(
        cfg.train,
        cfg.schedule,
        cfg.checkpoint.every,
        dataset.stages.tokens_before,
        dataset.steps,
        this.clock,
    )
    log.info(budget.describe())
    if resume is not None and (speed := resume.position().get("speed")):
        budget.restore(speed)
    return budget


def make_sampler(cfg: RunConfig, dataset: Dataset) -> Sampler | None:
    """None when no samples are wanted."""
    from dtt.train.evaluate import Sampler

    if cfg.train.sample_tokens == 0:
        return None
    return Sampler(cfg.train, dataset.tokenizer, dataset.manifest.end_of_document, cfg.seed)
