"""The wiring of a training run: model, optimizers, data, trackers, evaluation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dtt import __version__
from dtt.artifacts import fingerprint
from dtt.commands.begin import begin_with
from dtt.config.run import RunConfig
from dtt.config.schedule import WsdConfig
from dtt.runtime import pages
from dtt.runtime.log import log
from dtt.runtime.watchdog import Watchdog
from dtt.train.attempt import Attempt

if TYPE_CHECKING:
    from dtt.checkpoint.store import Checkpoint
    from dtt.data.dataset import Dataset
    from dtt.data.loader import Share
    from dtt.runtime.dist import World
    from dtt.train.budget import Budget
    from dtt.train.evaluate import Evaluator, Sampler
    from dtt.train.plan import Plan
    from dtt.train.trainer import Trainer


def build(
    cfg: RunConfig,
    plan: Plan,
    this: Attempt,
    world: World,
    dataset: Dataset,
    watchdog: Watchdog,
    resume: Checkpoint | None,
) -> Trainer:
    """Build the model, optimizers, data loaders, trackers and all other parts of the trainer."""
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
    share = Share.of(cfg, layout.data_rank, plan.sizes.data, world.device)
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
    """Return the evaluator on held-out text; None, with a warning, if it has no full sequence."""
    from dtt.train.evaluate import Evaluator, held_out

    parts = held_out(dataset, max(1, cfg.train.eval_tokens // cfg.train.seq_len))
    if not parts:
        log.warning("no validation: the held-out text is shorter than one sequence")
        return None
    return Evaluator(parts, share, plan.precision, world, plan.sizes.context, dataset.token_bytes())


def make_budget(
    cfg: RunConfig, dataset: Dataset, this: Attempt, resume: Checkpoint | None
) -> Budget | None:
    """Return the time budget of a run with a time limit, on rank 0; None otherwise.

    Logs when the run will end, and restores the measured speed from the checkpoint.
    """
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
    """Return the sampler of texts during training, or None if `train.sample_tokens` is 0."""
    from dtt.train.evaluate import Sampler

    if cfg.train.sample_tokens == 0:
        return None
    return Sampler(cfg.train, dataset.tokenizer, dataset.manifest.end_of_document, cfg.seed)
