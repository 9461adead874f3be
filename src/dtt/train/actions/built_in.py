"""The actions of dtt: log, checkpoint, validation, benchmark tasks and sample; and their order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dtt.artifacts.jobdir import JobDir
from dtt.base.log import log
from dtt.checkpoint import replicas
from dtt.checkpoint.mirror import SECONDS_AT_STOP
from dtt.checkpoint.store import Checkpoint
from dtt.config.run import RunConfig
from dtt.data.samples.dataset import Dataset
from dtt.data.samples.loader import BatchReader
from dtt.data.text.tokenizer import add_in_front, open_tokenizer
from dtt.data.text.unencodable import encoding
from dtt.evaluate.answers import AnswerEvaluator, chat_prompt, first_prompts
from dtt.evaluate.evaluation import open_evaluation
from dtt.evaluate.tasks.definition import load_tasks
from dtt.evaluate.tasks.encoding import QuestionEncoder
from dtt.evaluate.tasks.runner import TaskEvaluator, TaskRunner
from dtt.evaluate.tasks.scorer import Generator, Scorer
from dtt.evaluate.validation import Evaluator, Sampler, first_words, held_out
from dtt.mesh.sharding import on_this_rank
from dtt.parallel.sharded_model import whole_copy
from dtt.track import jsonl
from dtt.track.base import Record
from dtt.train.actions.action import Own, RunView, StepAction, Stop, every, states_of
from dtt.train.objectives.loss_function import make_loss
from dtt.train.objects import Run, StartedRun
from dtt.train.state import Position, check_ranks, rng_tensors
from dtt.train.trained_model import TrainState


class Log(StepAction):
    """Speed, epochs and finished saves, every `train.log_every` steps.

    Losses are logged by `Trainer.read_losses`, before any action.
    """

    name = "log"

    def rule(self, position: Position) -> bool:
        """Return True for each position after which it runs."""
        period = every(self.cfg.train.log_every, position)
        return position.step > 0 and (period or position.step == self.steps())

    def work(self, run: Run, stop: Stop) -> list[Record]:
        """Return the metrics since the last call."""
        step, meter = run.position.step, run.meter
        startup = run.times.startup_record()
        reading = meter.read()
        run.times.write(step)
        run.times.steps.append(reading["seconds_per_step"] or 0.0)
        steps = run.schedule.expected_steps(step)
        run.watchdog.expect(steps)
        epochs = run.dataset.epochs(run.position.samples)
        return [
            *([] if startup is None else [startup]),
            {"kind": "perf", "step": step, "steps": steps, **reading},
            {"kind": "data", "step": step, "epochs": epochs},
            *finished_saves(run),
        ]


def finished_saves(run: Run) -> list[Record]:
    """Return the `save` records of the saves that have finished since the last call."""
    saves, times = run.saver.finished(), run.times
    records = []
    for saved in saves:
        records.append({"kind": "save", **saved.record()})
        took = saved.blocked_seconds + saved.write_seconds + saved.verify_seconds
        times.saves.append(took)
    if saves and run.world.first:
        if run.schedule.budget is not None:
            run.schedule.budget.measured["whole_save"] = max(times.saves)
        times.write_lead(SECONDS_AT_STOP if run.cfg.checkpoint.mirror else 0.0)
    return records


class SaveCheckpoint(StepAction):
    """A checkpoint every `checkpoint.every` steps, at the end, and when one is requested."""

    name = pause = "save"

    def rule(self, position: Position) -> bool:
        """Return True for each position after which it runs."""
        period = every(self.cfg.checkpoint.every, position)
        return position.step > 0 and (period or position.step == self.steps())

    def work(self, run: Run, stop: Stop) -> list[Record]:
        """Start a checkpoint, which is written in the background."""
        position, dataset, world = run.position, run.dataset, run.world
        if position.step == run.schedule.steps:
            run.state.guard.check_trained(position)
        # Before anything is written: a checkpoint of ranks that read different files, or hold
        # different weights, must not exist.
        check_ranks(position, world)
        params, state = run.state.params.trainable(), run.state.tensors()
        replicas.check({**params, **state}, position.step, world)
        # One step earlier, so that a resume can read the last step's samples again and check their
        # hash.
        sources = dataset.state(dataset.first_sample(max(0, position.step - 1)))
        run.saver.begin(
            position.step,
            params,
            state | on_this_rank(rng_tensors(world.rank, world.device)),
            position.to_json()
            | {"run_id": run.run_id, "sources": sources}
            | {"own_actions": states_of(run.cfg.actions, position)}
            | {"fp8_gains": [[*shape, gain] for shape, gain in run.state.fp8_gains.items()]}
            | run.schedule.state(),
            # Trackers are flushed before a checkpoint is complete: a run that resumes from it finds
            # all records up to it.
            run.flush,
            run.state.base,
        )
        if position.step == run.schedule.steps:
            # Nothing is left to be trained meanwhile, and what follows may end the process.
            run.saver.wait()
        return []


@dataclass(frozen=True)
class Validate(StepAction):
    """Losses of held-out samples, every `train.eval_every` steps, at the start and at the end."""

    name = "validate"
    pause = "evaluate"
    kind = "eval"

    evaluator: Evaluator
    answers: AnswerEvaluator | None
    """None for a run without conversations, or without `train.eval_answers`."""

    def rule(self, position: Position) -> bool:
        """Return True for each position after which it runs."""
        return every(self.cfg.train.eval_every, position) or self.ends(position)

    def work(self, run: Run, stop: Stop) -> list[Record] | None:
        """Return the record of the losses, and of the share of answers that stop."""
        record = self.evaluator.record(run.position.step, stop, run.state.ema)
        if record is None:
            return None
        if self.answers is not None:
            mesh = run.state.mesh
            rate = self.answers.stop_rate(
                run.state.without_context(),
                stop,
                multiple=mesh.sizes.tensor,
                collective=mesh.sharded,
            )
            if rate is None:
                return None
            record["answer_stop_rate"] = rate
        if run.state.experts is not None:
            record |= run.state.experts.record()
        run.position.eval_loss = run.saver.losses[run.position.step] = record["loss"]
        return [record]


@dataclass(frozen=True)
class Tasks(StepAction):
    """Scores of `eval.tasks`, every `eval.every` steps and at the end."""

    name = pause = "tasks"
    kind = "task"

    evaluator: TaskEvaluator

    def rule(self, position: Position) -> bool:
        """Return True for each position after which it runs."""
        # A run with a time limit also does it once at its start, to measure how long it takes.
        first = self.cfg.train.timed and self.name not in position.done
        return every(self.cfg.eval.every, position) or position.step == self.steps() or first

    def work(self, run: Run, stop: Stop) -> list[Record] | None:
        """Return a record for each task, once a save of this step is on the disk."""
        # Their texts may need more memory than a step, and a kill would end the save as well.
        with run.watchdog.phase("save"):
            run.saver.wait()
        return self.evaluator.records(run.position.step, stop)


@dataclass(frozen=True)
class Sample(StepAction):
    """A continuation of a prompt, every `train.sample_every` steps, at the start and at the end."""

    name = pause = kind = "sample"

    sampler: Sampler

    def rule(self, position: Position) -> bool:
        """Return True for each position after which it runs."""
        return every(self.cfg.train.sample_every, position) or self.ends(position)

    def work(self, run: Run, stop: Stop) -> list[Record]:
        """Generate it on rank 0; if the model is sharded, on all ranks together."""
        state, step = run.state, run.position.step
        if not state.mesh.sharded:
            return [self.sampler.record(state.model, step)] if run.world.first else []
        if (whole := whole_copy(state.without_context(), run.world)) is not None:
            return [self.sampler.record(whole, step)]
        together = state.module, state.mesh.granularity, run.world.from_first
        return [self.sampler.record(state.model, step, together)]


def make_actions(
    inputs: StartedRun, state: TrainState, reader: BatchReader, steps: Callable[[], int]
) -> list[StepAction]:
    """Return the actions of a run in their order; those without their part are left out.

    `save` comes before those that take long, or more memory than a step: a process that ends in
    one of them, killed or out of memory, would lose all steps since the last save, and lose them
    again in the next attempt. `position_of` says which of them a checkpoint was followed by.
    """
    cfg, dataset = inputs.cfg, inputs.dataset
    actions: list[StepAction] = [Log(cfg, steps), SaveCheckpoint(cfg, steps)]
    parts = held_out(dataset, max(1, cfg.train.eval_tokens // cfg.train.seq_len))
    if parts:
        table = dataset.token_bytes()
        token_bytes = None if table is None else torch.from_numpy(table).to(inputs.world.device)
        loss_function = make_loss(cfg, inputs.plan, token_bytes, evaluates=True)
        measure = partial(state.passes.evaluate, loss_function=loss_function)
        in_pairs = cfg.objective.per_pair
        evaluator = Evaluator(parts, reader, state.passes.module, measure, state.mesh, in_pairs)
        actions.append(Validate(cfg, steps, evaluator, _answers(inputs)))
    else:
        log.warning("no validation: there is no held-out text, or less than one sequence")
    if cfg.eval.tasks:
        actions.append(Tasks(cfg, steps, _task_evaluator(inputs, state)))
    if cfg.train.sample_tokens:
        actions.append(Sample(cfg, steps, make_sampler(cfg, dataset)))
    # Last: they see the validation of their step. A checkpoint of the step has been saved before,
    # so a run that resumes from it runs them again, from the state that they had.
    view = RunView.of(inputs, state.mesh)
    return [*actions, *(Own(cfg, steps, own, view) for own in cfg.actions)]


def _answers(inputs: StartedRun) -> AnswerEvaluator | None:
    """Return the evaluator of answers to held-out conversations; None if there are none."""
    cfg, dataset = inputs.cfg, inputs.dataset
    sources = [source for source in dataset.validation if source is not None]
    if dataset.manifest.chat is None or not cfg.train.eval_answers:
        return None
    prompts = first_prompts(sources, cfg.train.eval_answers)
    if not prompts:
        return None
    limit, batch = cfg.train.eval_answer_tokens, cfg.train.micro_batch
    return AnswerEvaluator(prompts, dataset.manifest.until_ids, limit, batch, inputs.world)


def _task_evaluator(inputs: StartedRun, state: TrainState) -> TaskEvaluator:
    """Return the evaluator of benchmark tasks, which answers them with the current weights."""
    cfg, plan, world, dataset = inputs.cfg.eval, inputs.plan, inputs.world, inputs.dataset
    how: dict[str, Any] = {
        "batch_tokens": cfg.batch_tokens,
        "multiple": plan.sizes.tensor,
        "collective": state.mesh.sharded,
    }
    model, stages = state.without_context(), plan.sizes.pipeline
    runner = TaskRunner(
        Scorer(model, world, precision=plan.precision, pipeline=stages, **how),
        Generator(model, world, **how),
        QuestionEncoder(
            add_in_front(open_tokenizer(dataset.tokenizer), dataset.manifest.begin_of_document),
            dataset.manifest.end_of_document,
            plan.arch.max_seq_len,
            cfg.bos,
            None,
        ),
        world,
        until_ids=dataset.manifest.until_ids,
    )
    tasks = open_evaluation(cfg, world).tasks
    runner.check(tasks)
    return TaskEvaluator(tasks, runner)


def make_sampler(cfg: RunConfig, dataset: Dataset) -> Sampler:
    """Return the sampler of texts during training.

    In a run on conversations, it answers `train.sample_prompt` as the message of a user, or the
    first conversation of the held-out ones. In a run on text, it continues `train.sample_prompt`,
    or the first words of a held-out document.
    """
    train, manifest, text = cfg.train, dataset.manifest, cfg.train.sample_prompt
    end = manifest.end_of_document
    tokenizer = add_in_front(open_tokenizer(dataset.tokenizer), manifest.begin_of_document)
    sources = [source for source in dataset.validation if source is not None]
    if manifest.chat is None:
        # On-the-fly text has no beginning to go back to.
        read = sources or (dataset.sources if cfg.data.reads_token_files else ())
        text = text or first_words(read, tokenizer, end)
        with encoding(dataset.tokenizer):
            prompt = tokenizer.encode(text, add_special_tokens=True).ids or [end]
    elif text:
        prompt = chat_prompt(cfg, dataset)
    else:
        prompt = next(iter(first_prompts(sources or dataset.sources, 1)), [end])
    shown = text if manifest.chat is None else tokenizer.decode(prompt, skip_special_tokens=False)
    return Sampler(train, tokenizer, prompt, shown, manifest.until_ids, cfg.seed)


def position_of(checkpoint: Checkpoint, job: JobDir, cfg: RunConfig) -> Position:
    """Return the position in a checkpoint, with the actions of its step that are recorded since.

    The checkpoint is saved before them. Their records are in metrics.jsonl; an action without all
    of them is due again.
    """
    position = Position.from_json(checkpoint.position())
    found: dict[str, list[Any]] = defaultdict(list)
    for action in (Validate, Tasks, Sample):
        of_step = [r for r in jsonl.read(job.metrics, action.kind) if r["step"] == position.step]
        found[action.name] = [record.get("task") for record in of_step]
        if action is Validate and of_step:
            position.eval_loss = of_step[-1]["loss"]
    if found["tasks"] and {task.name for task in load_tasks(cfg.eval.tasks)} > {*found["tasks"]}:
        found["tasks"] = []  # it was killed between two of them
    position.done |= {action: position.step for action, records in found.items() if records}
    return position
