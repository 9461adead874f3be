"""The wiring of a training run: model, optimizers, data, trackers, evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dtt import __version__
from dtt.artifacts.manifest import fingerprint
from dtt.base import malloc
from dtt.base.log import log
from dtt.config.adapter import LoraConfig
from dtt.config.own import own_code, own_files
from dtt.config.run import RunConfig
from dtt.config.value_types import parse_averaging
from dtt.optim.lr_curves import WsdConfig
from dtt.train.initial import carry_optimizers, initialise_from
from dtt.train.inputs import StartedRun
from dtt.train.objectives.reference_logprobs import (
    check_reference,
    named_reference,
    write_reference,
)

if TYPE_CHECKING:
    from dtt.artifacts.manifests import Reference
    from dtt.checkpoint.mirror import Mirror
    from dtt.checkpoint.saver import Saver
    from dtt.checkpoint.store import Checkpoint
    from dtt.data.samples.loader import BatchReader
    from dtt.optim.ema import Ema
    from dtt.train.actions.action import StepAction
    from dtt.train.assemble import LaidOutModel
    from dtt.train.components import Observers, TrainState
    from dtt.train.expert_load import ExpertLoad
    from dtt.train.supervise.time_budget import TimeBudget
    from dtt.train.trainer import Trainer


def build(inputs: StartedRun) -> Trainer:
    """Build the trainer of a run; all ranks call it together."""
    from dtt.checkpoint.mirror import SECONDS_AT_STOP
    from dtt.data.samples.loader import training_batches
    from dtt.data.samples.reference import with_reference
    from dtt.train.actions.action_list import make_actions
    from dtt.train.objectives.loss_function import make_loss
    from dtt.train.run_schedule import RunSchedule
    from dtt.train.supervise.stop_lead import StopLead
    from dtt.train.trainer import Trainer

    cfg, plan, job, world = inputs.cfg, inputs.plan, inputs.job, inputs.world
    # The imports above take seconds, which `start` reports separately.
    inputs.attempt.startup.end_phase("imports")
    state, reader = make_state(inputs)
    if cfg.objective.needs_reference:
        # Only now: `make_state` has written the log-probabilities that this opens.
        inputs = replace(inputs, dataset=with_reference(inputs.dataset, job.reference))
    dataset, budget = inputs.dataset, make_budget(inputs)
    schedule = RunSchedule(plan.steps, plan.schedule, dataset.step_sizes, budget)
    saved_run_id = None if inputs.resume is None else inputs.resume.position()["run_id"]
    actions = make_actions(inputs, state, reader, lambda: schedule.steps)
    return Trainer(
        **vars(inputs),
        run_id=world.from_first(job.run_id(saved_run_id) if world.first else ""),
        loss_function=make_loss(cfg, plan),
        state=state,
        batches_from=partial(training_batches, dataset, reader),
        schedule=schedule,
        actions=actions,
        observers=make_observers(inputs, state, actions),
        saver=make_saver(inputs),
        stop_lead=StopLead(job, SECONDS_AT_STOP if cfg.checkpoint.mirror else 0.0),
    )


def make_state(inputs: StartedRun) -> tuple[TrainState, BatchReader]:
    """Return the model with its optimizers, its weight average and the anomaly guard.

    Also return the reader of this rank's samples.
    """
    from dtt.data.samples.loader import BatchReader
    from dtt.mesh.mesh import DATA
    from dtt.optim.built import check_weights
    from dtt.optim.rounding import StochasticRounding
    from dtt.train.anomaly_guard import Guard
    from dtt.train.assemble import assemble, make_optimizers
    from dtt.train.components import TrainState
    from dtt.train.contract_check import check_model
    from dtt.train.objectives.loss_function import RunView
    from dtt.train.pipelined_step import make_passes

    cfg, plan, world = inputs.cfg, inputs.plan, inputs.world
    if world.device.type == "cpu":
        # Before the first large tensor: malloc's thresholds apply to later allocations.
        malloc.keep_freed_memory()
    recorded = [] if inputs.resume is None else inputs.resume.position().get("fp8_gains", [])
    fp8_gains = {(n_in, n_out): gain for n_in, n_out, gain in recorded}
    laid_out = assemble(cfg, plan, world, fp8_gains)
    reader = BatchReader.of(cfg, laid_out.mesh.index(*DATA), plan.sizes.data, world.device)
    reader = reader.checking(world.rank, world.size)
    # After parallelisation, so that each rank fills its shards only.
    came_from, base = load_initial_weights(inputs, laid_out, reader)
    check_model(laid_out.model, world, separate=cfg.separates_documents)
    inputs.attempt.startup.end_phase("model")
    rounding = StochasticRounding.of(
        cfg.seed, plan.precision.weights, weights=cfg.train.stochastic_rounding
    )
    optimizers = make_optimizers(cfg, plan, laid_out, rounding)
    if inputs.resume is None:
        # A resumed job passed this check when it was new.
        check_weights(optimizers, world.gather)
    # After the optimizers exist, as carried moments replace their empty state.
    if came_from is not None and cfg.init.optimizer == "carry":
        carry_optimizers(optimizers, laid_out.params, came_from)
    with own_code(cfg.objective, "objective"):
        cfg.objective.setup(RunView.of(inputs, laid_out.mesh))
    state = TrainState(
        **vars(laid_out),
        passes=make_passes(
            laid_out.module,
            plan.precision,
            laid_out.mesh.gradient_replicas,
            reduce_each=cfg.parallel.reduce == "each",
        ),
        optimizers=optimizers,
        objective=cfg.objective,
        guard=Guard(cfg.guard, world, inputs.job.root),
        rounding=rounding,
        ema=make_ema(inputs, laid_out),
        experts=make_experts(cfg, laid_out),
        base=base,
    )
    inputs.attempt.startup.end_phase("optimizer")
    return state, reader


def make_experts(cfg: RunConfig, laid_out: LaidOutModel) -> ExpertLoad | None:
    """Return the load of the model's experts; None if it has none."""
    from dtt.train.expert_load import ExpertLoad

    if laid_out.model.arch.mixture is None:
        return None
    return ExpertLoad(laid_out.model, laid_out.mesh, cfg.train.balance_rate)


def make_ema(inputs: StartedRun, laid_out: LaidOutModel) -> Ema | None:
    """Return the average of the weights; None if the configuration asks for none."""
    from dtt.config.schedule import first_steps
    from dtt.optim.ema import Ema

    cfg, plan = inputs.cfg, inputs.plan
    if cfg.train.ema_decay is None:
        return None
    average = parse_averaging(cfg.train.ema_decay)
    tokens_before = inputs.dataset.step_sizes.tokens_before
    start = first_steps(average.start, plan.steps, tokens_before)
    return Ema(laid_out.params, average.decay, start, average.blend)


def load_initial_weights(
    inputs: StartedRun, laid_out: LaidOutModel, reader: BatchReader
) -> tuple[Checkpoint | None, Reference | None]:
    """Replace the fresh weights of a new job, which `assemble` made, by those of `init.from`.

    Return the checkpoint that they come from, if any.

    With an adapter, load the frozen weights, also on resume, and return a reference to them.
    With DPO, also compute the log-probabilities of the reference model, or, on resume, check that
    they are there.
    """
    from dtt.model.init import initialize

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
        from dtt.train.adapter import restore_base

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
            from dtt.train.adapter import load_adapter

            load_adapter(cfg.init.adapter, model, cfg.adapter, source, inputs.world)
        if cfg.objective.needs_reference and reference is None:
            write_reference(inputs, laid_out, reader, source, start)
    if not adapted:
        return start, None
    # Only here: it imports what reads Hugging Face folders, half a second of CPU time.
    from dtt.train.adapter import base_reference

    return start, base_reference(source, start, inputs.world, inputs.job.root)


def make_observers(
    inputs: StartedRun, state: TrainState, actions: Sequence[StepAction]
) -> Observers:
    """Return the measurements and the trackers of a run."""
    from dtt.model.adapted_layers import adapter_weights
    from dtt.parallel.pipelining import Pipeline
    from dtt.track.trackers import make_trackers
    from dtt.train.components import Observers
    from dtt.train.profiler import Profiler
    from dtt.train.recorded import position_of
    from dtt.train.supervise.time_breakdown import TimeBreakdown
    from dtt.train.throughput import ThroughputMeter

    cfg, plan, attempt, world = inputs.cfg, inputs.plan, inputs.attempt, inputs.world
    optimizers = list(state.optimizers.values())
    adapter = adapter_weights(cfg.adapter, plan.arch)
    meter = ThroughputMeter(
        plan.arch, plan.precision.compute_dtype, world, optimizers, adapter=adapter
    )
    if world.size > 1 and not state.mesh.sharded:
        # DDP reduces gradients in the reverse order of the parameters, so that of the first last.
        meter.watch_gradients(next(iter(state.params.trainable().values())).tensor)
    if isinstance(state.module, Pipeline):
        meter.watch_pipeline(state.module)
    step: int | None = None
    again: set[str] = set()
    if inputs.resume is not None and world.first:
        step, position = inputs.resume.step, position_of(inputs.resume, inputs.job, cfg)
        again = {a.kind for a in actions if a.kind is not None and a.due(position)}
    # Rank 0 alone has trackers; the others have an empty list, and no tests for rank.
    return Observers(
        trackers=make_trackers(cfg, inputs.job, step, again=again) if world.first else [],
        meter=meter,
        profiler=Profiler(cfg.profile, world, inputs.job.profiles, meter, inputs.watchdog),
        time_breakdown=TimeBreakdown(attempt.startup, attempt.clock),
    )


def make_saver(inputs: StartedRun) -> Saver:
    """Return the saver, with the facts that the manifest of each checkpoint records."""
    import torch

    from dtt.checkpoint.saver import Saver

    cfg, attempt = inputs.cfg, inputs.attempt
    facts = {
        "config_sha256": fingerprint(cfg.model_dump(mode="json")),
        "data_key": inputs.dataset.manifest.key,
        "versions": {"dtt": __version__, "torch": torch.__version__},
        "code": {name: file.sha256 for name, file in own_files(cfg).items()},
        "models": inputs.models,
    }
    stop_asked, mirror = attempt.requests.stop_asked_here, open_mirror(inputs)
    saver = Saver(
        inputs.job, attempt.number, inputs.world, cfg.checkpoint, facts, stop_asked, mirror
    )
    if mirror is not None:
        newest = None if inputs.resume is None else inputs.resume.step
        mirror.start(newest, lambda: dict(saver.losses))
    return saver


def open_mirror(inputs: StartedRun) -> Mirror | None:
    """Return the mirror of the checkpoints, on rank 0; None without `checkpoint.mirror`."""
    from dtt.checkpoint.mirror import Mirror, mirror_url

    cfg, job = inputs.cfg, inputs.job
    if cfg.checkpoint.mirror is None or not inputs.world.first:
        return None
    url = mirror_url(cfg.checkpoint.mirror, cfg.name)
    return Mirror(url, job, job.run_id(), cfg.checkpoint)


def make_budget(inputs: StartedRun) -> TimeBudget | None:
    """Return the time budget of a run with a time limit, on rank 0; None otherwise.

    Logs when the run will end, and restores the measured speed from the checkpoint.
    """
    from dtt.train.supervise.time_budget import TimeBudget

    cfg, resume, clock = inputs.cfg, inputs.resume, inputs.attempt.clock
    if clock is None or not cfg.train.timed:
        return None
    assert isinstance(cfg.schedule, WsdConfig), "the configuration was checked"
    budget = TimeBudget(
        cfg.train,
        cfg.schedule,
        cfg.checkpoint.every,
        inputs.dataset.step_sizes.tokens_before,
        inputs.dataset.steps,
        clock,
        cfg.eval.every,
    )
    log.info(budget.describe())
    if resume is not None and (speed := resume.position().get("speed")):
        budget.restore(speed)
    return budget
