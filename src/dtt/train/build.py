"""The wiring of a training run: model, optimizers, data, trackers, evaluation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from dtt import __version__
from dtt.artifacts.manifest import fingerprint
from dtt.artifacts.manifests import Reference
from dtt.base import malloc
from dtt.base.log import log
from dtt.checkpoint.saver import Saver
from dtt.checkpoint.store import Checkpoint
from dtt.config.adapter import LoraConfig
from dtt.config.own import own_code, own_files
from dtt.data.samples.loader import BatchReader, training_batches
from dtt.data.samples.reference import with_reference
from dtt.mesh.mesh import DATA
from dtt.model.adapted_layers import adapter_weights
from dtt.model.init import initialize
from dtt.optim import built, groups
from dtt.optim.ema import Ema
from dtt.optim.lr_curves import WsdConfig
from dtt.optim.rounding import StochasticRounding
from dtt.parallel.pipelining import Pipeline
from dtt.track.trackers import make_trackers
from dtt.train.actions.action import RunView
from dtt.train.actions.built_in import make_actions, position_of
from dtt.train.anomaly_guard import Guard
from dtt.train.contract_check import check_model
from dtt.train.expert_load import ExpertLoad
from dtt.train.initial import carry_optimizers, initialise_from
from dtt.train.objectives.loss_function import make_loss
from dtt.train.objectives.reference_pass import check_reference, write_reference
from dtt.train.objects import StartedRun, named_reference
from dtt.train.pipelined_step import make_passes
from dtt.train.profiler import Profiler
from dtt.train.run_schedule import MEASURED, RunSchedule, TimeBudget
from dtt.train.state import Position
from dtt.train.throughput import AttemptTimes, ThroughputMeter
from dtt.train.trained_model import LaidOutModel, TrainState, assemble
from dtt.train.trainer import Trainer


def build(inputs: StartedRun) -> Trainer:
    """Build the trainer of a run; all ranks call it together."""
    cfg, plan, job, world = inputs.cfg, inputs.plan, inputs.job, inputs.world
    attempt, resume = inputs.attempt, inputs.resume
    state, reader = make_state(inputs)
    if cfg.objective.needs_reference:
        # Only now: `make_state` has written the log-probabilities that this opens.
        inputs = replace(inputs, dataset=with_reference(inputs.dataset, job.reference))
    dataset = inputs.dataset
    schedule = RunSchedule(plan.steps, plan.schedule, make_budget(inputs))
    saved_run_id = None if resume is None else resume.position()["run_id"]
    actions = make_actions(inputs, state, reader, lambda: schedule.steps)
    meter = _meter(inputs, state)
    # Rank 0 alone has trackers; the others have an empty list, and no tests for rank.
    trackers = []
    if world.first:
        again: set[str] = set()
        if resume is not None:
            position = position_of(resume, job, cfg)
            again = {a.kind for a in actions if a.kind is not None and a.due(position)}
        trackers = make_trackers(cfg, job, None if resume is None else resume.step, again=again)
    return Trainer(
        **vars(inputs),
        run_id=world.from_first(job.run_id(saved_run_id) if world.first else ""),
        loss_function=make_loss(cfg, plan),
        state=state,
        batches_from=partial(training_batches, dataset, reader),
        schedule=schedule,
        actions=actions,
        saver=make_saver(inputs),
        trackers=trackers,
        meter=meter,
        profiler=Profiler(cfg.profile, world, job.profiles, meter, inputs.watchdog),
        times=AttemptTimes(job, meter, attempt.startup, attempt.clock),
        position=Position(),
    )


def make_state(inputs: StartedRun) -> tuple[TrainState, BatchReader]:
    """Return the model with its optimizers, its weight average and the anomaly guard.

    Also return the reader of this rank's samples.
    """
    cfg, plan, world = inputs.cfg, inputs.plan, inputs.world
    if world.device.type == "cpu":
        # Before the first large tensor: malloc's thresholds apply to later allocations.
        malloc.keep_freed_memory()
    recorded = [] if inputs.resume is None else inputs.resume.position().get("fp8_gains", [])
    fp8_gains = {(n_in, n_out): gain for n_in, n_out, gain in recorded}
    laid_out = assemble(cfg, plan, world, fp8_gains)
    model, mesh = laid_out.model, laid_out.mesh
    reader = BatchReader.of(cfg, mesh.index(*DATA), plan.sizes.data, world.device)
    reader = reader.checking(world.rank, world.size)
    # After parallelisation, so that each rank fills its shards only.
    came_from, base = load_initial_weights(inputs, laid_out, reader)
    check_model(model, world, separate=cfg.separates_documents)
    inputs.attempt.startup.end_phase("model")
    weights = plan.precision.weights
    rounding = StochasticRounding.of(cfg.seed, weights, weights=cfg.train.stochastic_rounding)
    optimizers = built.build(cfg.optim, laid_out.params, plan.facts(rounding))
    log.info("parameter groups:\n%s", groups.describe(optimizers))
    # After the optimizers exist, as carried moments replace their empty state.
    if came_from is not None and cfg.init.optimizer == "carry":
        carry_optimizers(optimizers, laid_out.params, came_from)
    with own_code(cfg.objective, "objective"):
        cfg.objective.setup(RunView.of(inputs, mesh))
    has_experts = model.arch.mixture is not None
    state = TrainState(
        **vars(laid_out),
        passes=make_passes(
            laid_out.module, plan.precision, mesh.gradient_replicas, reduce_each=plan.reduce_each
        ),
        optimizers=optimizers,
        objective=cfg.objective,
        guard=Guard(cfg.guard, world, inputs.job.root),
        rounding=rounding,
        ema=None if (decay := cfg.train.ema_decay) is None else Ema(laid_out.params, decay),
        experts=ExpertLoad(model, mesh, cfg.train.balance_rate) if has_experts else None,
        base=base,
    )
    inputs.attempt.startup.end_phase("optimizer")
    return state, reader


def load_initial_weights(
    inputs: StartedRun, laid_out: LaidOutModel, reader: BatchReader
) -> tuple[Checkpoint | None, Reference | None]:
    """Replace the fresh weights of a new job, which `assemble` made, by those of `init.from`.

    Return the checkpoint that they come from, if any.

    With an adapter, load the frozen weights, also on resume, and return a reference to them.
    With DPO, also compute the log-probabilities of the reference model, or, on resume, check that
    they are there.
    """
    cfg, source, start = inputs.cfg, inputs.source_of_weights, None
    # The tokenizer of ids that stand for no text only gives them names.
    tokenizer = inputs.dataset.tokenizer if cfg.data.has_text else None
    model, data = laid_out.model, (tokenizer, inputs.world)
    adapted = isinstance(cfg.adapter, LoraConfig)
    reference = named_reference(cfg)
    if inputs.resume is not None:
        if cfg.objective.needs_reference:
            check_reference(inputs)
        if not adapted:
            return None, None
        # Only here: it imports what reads Hugging Face folders, half a second of CPU time.
        from dtt.train.frozen import restore_base

        average = cfg.init.average
        return None, restore_base(inputs.resume, model, inputs.world, average=average)
    if reference is not None:
        checkpoint = initialise_from(reference, model, *data)
        write_reference(inputs, laid_out, reader, reference, checkpoint)
        # The policy starts from fresh weights: those of the reference were only borrowed.
        initialize(model, cfg.seed, inputs.plan.scaling.base)
    if source is not None:
        start = initialise_from(source, model, *data, average=cfg.init.average)
        if cfg.init.adapter is not None and isinstance(cfg.adapter, LoraConfig):
            from dtt.train.frozen import load_adapter

            load_adapter(cfg.init.adapter, model, cfg.adapter, source, inputs.world)
        if cfg.objective.needs_reference and reference is None:
            write_reference(inputs, laid_out, reader, source, start)
    if not adapted:
        return start, None
    from dtt.train.frozen import base_reference

    return start, base_reference(source, start, inputs.world, inputs.job.root)


def _meter(inputs: StartedRun, state: TrainState) -> ThroughputMeter:
    """Return the measurement of the speed of a run."""
    plan, world = inputs.plan, inputs.world
    optimizers = list(state.optimizers.values())
    adapter = adapter_weights(inputs.cfg.adapter, plan.arch)
    dtype = plan.precision.compute_dtype
    meter = ThroughputMeter(plan.arch, dtype, world, optimizers, adapter=adapter)
    if world.size > 1 and not state.mesh.sharded:
        # DDP reduces gradients in the reverse order of the parameters, so that of the first last.
        meter.watch_gradients(next(iter(state.params.trainable().values())).tensor)
    if isinstance(state.module, Pipeline):
        meter.watch_pipeline(state.module)
    return meter


def make_saver(inputs: StartedRun) -> Saver:
    """Return the saver, with the facts that the manifest of each checkpoint records."""
    cfg, attempt = inputs.cfg, inputs.attempt
    facts = {
        "config_sha256": fingerprint(cfg.model_dump(mode="json")),
        "data_key": inputs.dataset.manifest.key,
        "versions": {"dtt": __version__, "torch": torch.__version__},
        "code": {name: file.sha256 for name, file in own_files(cfg).items()},
        "models": inputs.models,
    }
    stop_asked, mirror = attempt.requests.stop_asked_here, inputs.open_mirror()
    saver = Saver(
        inputs.job, attempt.number, inputs.world, cfg.checkpoint, facts, stop_asked, mirror
    )
    if mirror is not None:
        newest = None if inputs.resume is None else inputs.resume.step
        mirror.start(newest, lambda: dict(saver.losses))
    return saver


def make_budget(inputs: StartedRun) -> TimeBudget | None:
    """Return the time budget of a run with a time limit, on rank 0; None otherwise.

    Logs when the run will end, and restores the measured speed from the checkpoint.
    """
    cfg, resume, clock = inputs.cfg, inputs.resume, inputs.attempt.clock
    if clock is None or not cfg.train.timed:
        return None
    assert isinstance(cfg.schedule, WsdConfig), "the configuration was checked"
    sizes, limit = inputs.dataset.step_sizes, inputs.dataset.steps
    budget = TimeBudget(cfg, cfg.schedule, sizes.tokens_before, limit, clock)
    log.info(budget.describe())
    if resume is not None and (speed := resume.position().get("speed")):
        budget.measured |= {name: speed[name] for name in MEASURED if name in speed}
    return budget
