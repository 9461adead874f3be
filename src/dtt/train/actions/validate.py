"""The validation loss, and the share of answers that stop by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from dtt.base.log import log
from dtt.data.samples.loader import BatchReader
from dtt.evaluate.answers import AnswerEvaluator, first_prompts
from dtt.evaluate.validation import Evaluator, held_out
from dtt.track.base import Record
from dtt.train.actions.action import StepAction, Stop, every
from dtt.train.components import Run, TrainState
from dtt.train.inputs import StartedRun
from dtt.train.objectives.loss_function import make_loss
from dtt.train.state import Position


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


def make_evaluator(inputs: StartedRun, state: TrainState, reader: BatchReader) -> Evaluator | None:
    """Return the evaluator on held-out text; None, with a warning, if it has no full sequence."""
    cfg, plan = inputs.cfg, inputs.plan
    parts = held_out(inputs.dataset, max(1, cfg.train.eval_tokens // cfg.train.seq_len))
    if not parts:
        log.warning("no validation: there is no held-out text, or less than one sequence")
        return None
    table = inputs.dataset.token_bytes()
    token_bytes = None if table is None else torch.from_numpy(table).to(inputs.world.device)
    loss_function = make_loss(cfg, plan, token_bytes, evaluates=True)
    measure = partial(state.passes.evaluate, loss_function=loss_function)
    in_pairs = cfg.objective.per_pair
    return Evaluator(parts, reader, state.passes.module, measure, state.mesh, in_pairs)


def make_answers(inputs: StartedRun) -> AnswerEvaluator | None:
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
