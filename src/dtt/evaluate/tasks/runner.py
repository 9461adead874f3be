"""Evaluation of one task: blocks of questions are encoded, scored and appended to a result file.

Blocks are a function of the questions only, and so are the batches of a block (`scorer.py`), so the
result file does not depend on the number of ranks. Log-likelihoods are rounded to 1e-6 nats, and
all metrics are computed from the rounded values, so that they follow from the file. A float32 has
24 bits: beyond 8 nats its steps are larger than that, so rounding makes no options equal that
arithmetic tells apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from dtt.base.errors import ConfigError, Diverged
from dtt.base.log import progress
from dtt.base.patterns import find, replace
from dtt.data.text.continuation import Continuation
from dtt.evaluate.tasks.definition import Task
from dtt.evaluate.tasks.encoding import QuestionEncoder
from dtt.evaluate.tasks.metrics import (
    AnswerRecord,
    TaskResult,
    count_words,
    has_tie,
    task_result,
)
from dtt.evaluate.tasks.options import Option, OptionScore
from dtt.evaluate.tasks.prompts import Question
from dtt.evaluate.tasks.reasoning import opens_reasoning, without_reasoning
from dtt.evaluate.tasks.result_files import ResultContent, ResultFile, ResultWriter
from dtt.evaluate.tasks.scorer import Generator, Scorer, never
from dtt.evaluate.tasks.task_data import TaskData
from dtt.mesh.dist import World
from dtt.track.base import Record

DECIMALS = 6
FIRST_BLOCK, LARGEST_BLOCK = 2**14, 2**20
"""Tokens of the first block, and of the largest. Blocks double in size: the first answers appear
early, a kill loses no more work than was done before, and large blocks have a batch for every rank.
"""


@dataclass(frozen=True)
class _Block:
    """Consecutive questions, and what a model has to compute for them."""

    questions: Sequence[Question]
    options: Sequence[Sequence[Option]]
    """Options of each question; of rolling likelihood, its windows. Empty for generation."""
    prompts: Sequence[list[int]]
    """Prompts of generation; otherwise empty."""
    facts: Sequence[Mapping[str, Any]]
    """Fields of each record that are known before scoring."""


@dataclass(frozen=True)
class TaskRunner:
    """Evaluator of tasks on all ranks; rank 0 writes the result files."""

    scorer: Scorer
    generator: Generator
    encoder: QuestionEncoder
    world: World
    until_ids: tuple[int, ...] = ()
    """Ids that end a generated answer: of the end of a document or of a turn."""
    keep_samples: bool = False

    def run(
        self, data: TaskData, file: ResultFile | None, stop: Callable[[], bool] = never
    ) -> TaskResult | None:
        """Answer the questions that `file` lacks, seal it, and return the result; collective.

        Without a file, nothing is written. Return None as soon as `stop()`, which every rank calls
        between batches, is true; a later call continues after the last complete block. Raises
        InUse if another process writes the file, and Diverged if the model's
        log-probabilities are not finite.
        """
        task, total = data.task, len(data.questions)
        writer = ResultWriter(None, ResultContent(), {})
        with ExitStack() as stack:
            # Runs on rank 0. Its result or error reaches all ranks, so all continue or all stop.
            def open_file() -> tuple[TaskResult | None, int, int]:
                nonlocal writer
                if file is not None:
                    writer = stack.enter_context(file.writing())
                content = writer.content
                return content.result, len(content.records), content.blocks

            def seal() -> TaskResult:
                result = task_result(task.name, task.type, task.chance, writer.content.records)
                writer.seal(result)
                return result

            result, answered, blocks = self.world.on_first(open_file)
            if result is not None:
                return result
            with progress(task.name, total, "questions", shown=self.world.first) as advance:
                advance(answered)
                while answered < total:
                    # Asked between blocks as well, for tasks whose blocks have one batch.
                    records = None if stop() else self._next_block(data, answered, blocks, stop)
                    if records is None:
                        return None
                    # Written before the next block is computed, so a kill loses one block.
                    self.world.on_first(partial(writer.append, records))
                    answered, blocks = answered + len(records), blocks + 1
                    advance(len(records))
            return self.world.on_first(seal)

    def check(self, tasks: Sequence[TaskData]) -> None:
        """Raise ConfigError if the model has no room for the answers of one of `tasks`."""
        for data in tasks:
            if data.task.type == "generation":
                self.encoder.check_room(data.task.max_tokens, data.task.name)

    def _next_block(
        self, data: TaskData, answered: int, blocks: int, stop: Callable[[], bool]
    ) -> list[AnswerRecord] | None:
        """Return the records of the block after `blocks` blocks; None if `stop()` was true."""
        # The shift is limited, as the number of blocks of a damaged file could be anything.
        size = min(FIRST_BLOCK << min(blocks, 32), LARGEST_BLOCK)
        rest = (data.questions[i] for i in range(answered, len(data.questions)))
        return self._score(data.task, self._encode(data.task, rest, size), stop)

    def _encode(self, task: Task, questions: Iterable[Question], size: int) -> _Block:
        """Encode the first of `questions`, up to `size` tokens and at least one question."""
        chosen: list[Question] = []
        options: list[Sequence[Option]] = []
        prompts: list[list[int]] = []
        facts: list[Mapping[str, Any]] = []
        tokens = 0
        for question in questions:
            # At least one question, however long it is.
            if tokens >= size:
                break
            chosen.append(question)
            match task.type:
                case "rolling":
                    windows = self.encoder.windows(question.continuations[0])
                    options.append(windows)
                    facts.append({})
                    tokens += _count_tokens(windows)
                case "generation":
                    prompt, truncated = self.encoder.prompt_ids(question, task.max_tokens)
                    prompts.append(prompt)
                    facts.append({"truncated": truncated})
                    tokens += len(prompt) + task.max_tokens
                case _:
                    encoded = self.encoder.options(question)
                    options.append(encoded.options)
                    facts.append(
                        {
                            "answer_bytes": encoded.bytes[question.gold],
                            "truncated": encoded.truncated,
                            "separate": encoded.separate,
                        }
                    )
                    tokens += _count_tokens(encoded.options)
        return _Block(chosen, options, prompts, facts)

    def _score(
        self, task: Task, block: _Block, stop: Callable[[], bool]
    ) -> list[AnswerRecord] | None:
        """Return the records of a block; None if `stop()` was true."""
        records = []
        if task.type == "generation":
            replies = self._replies(task, block.prompts, stop)
            if replies is None:
                return None
            for question, reply, facts in zip(block.questions, replies, block.facts, strict=True):
                scored = _generated(task, question, reply.answer or "")
                record = {"id": question.id, **scored, **facts, "unfinished": reply.answer is None}
                records.append(record | ({"text": reply.text.content} if self.keep_samples else {}))
        else:
            asked = block.options
            if task.type == "rolling":  # windows have nothing to share, as options have
                # As questions of their own, so that windows of one document can go to different
                # ranks.
                asked = [[window] for windows in block.options for window in windows]
            scores = self.scorer.score(asked, stop)
            if scores is None:
                return None
            flat = chain.from_iterable(scores)
            for question, options, facts in zip(
                block.questions, block.options, block.facts, strict=True
            ):
                found = list(islice(flat, len(options)))
                answer = _rolled if task.type == "rolling" else _compared
                records.append({"id": question.id, **answer(task, question, found), **facts})
        if self.keep_samples:
            for record, question in zip(records, block.questions, strict=True):
                record["contexts"] = list(question.contexts)
                record["continuations"] = list(question.continuations)
        return records

    def _replies(
        self, task: Task, prompts: Sequence[list[int]], stop: Callable[[], bool]
    ) -> list[_Reply] | None:
        """Return the replies to prompts; None if `stop()` was true.

        A special token is text like any other, so that `until` can name one.
        """

        def unanswered() -> list[_Reply]:
            return [_Reply(task, self.encoder, prompt) for prompt in prompts]

        own, every = unanswered(), unanswered()
        answers = self.generator.generate(
            prompts, task.max_tokens, self.until_ids, stop, lambda i, token: own[i].add(token)
        )
        if answers is None:
            return None
        for reply, ids in zip(every, answers, strict=True):  # most are of other ranks
            for token in ids:
                reply.add(token)
            reply.text.end()
        return every


class _Reply:
    """A generated reply to a question: reasoning, if the model reasons, and the answer."""

    def __init__(self, task: Task, encoder: QuestionEncoder, prompt: list[int]) -> None:
        self.text = Continuation(encoder.tokenizer, prompt, show_special=True)
        self._until, self._in_chat = task.until, encoder.in_chat
        # More tokens than a mark has.
        end = encoder.tokenizer.decode(prompt[-16:], skip_special_tokens=False)
        self._opened = encoder.in_chat and opens_reasoning(end)

    def add(self, token: int) -> bool:
        """Append a token; return True if the answer is complete: it contains a text of `until`."""
        self.text.add(token)
        return bool(self._until) and self._ends() != []

    @property
    def answer(self) -> str | None:
        """The answer up to a text of `until`; None if the reply ended within its reasoning."""
        whole = self._answer()
        return whole if whole is None else whole[: min(self._ends(), default=len(whole))]

    def _answer(self) -> str | None:
        if not self._in_chat:
            return self.text.content
        return without_reasoning(self.text.content, opened=self._opened)

    def _ends(self) -> list[int]:
        whole = self._answer() or ""
        return [at for end in self._until if (at := whole.find(end)) >= 0]


def _count_tokens(options: Sequence[Option]) -> int:
    """Return the number of tokens to compute if the options share their context."""
    contexts = {option.context for option in options}
    return sum(map(len, contexts)) + sum(len(option.continuation) for option in options)


def _rounded(question: Question, log_likelihood: float) -> float:
    """Round a log-likelihood; raise Diverged if it is not finite."""
    # Before it is written: JSON, and so a result file, has no NaN.
    if not math.isfinite(log_likelihood):
        raise Diverged(
            "the model's log-probabilities are not finite", where=f"question {question.id}"
        )
    return round(log_likelihood, DECIMALS) + 0.0  # no -0.0


def _compared(task: Task, question: Question, scores: Sequence[OptionScore]) -> AnswerRecord:
    """Return the record of a question with options."""
    choices = [text.removeprefix(task.delimiter) for text in question.continuations]
    choices *= len(scores) // len(choices)  # schema: every context has the same continuation
    log_likelihoods = [_rounded(question, score.log_likelihood) for score in scores]
    return {
        "gold": question.gold,
        "log_likelihoods": log_likelihoods,
        "greedy": [score.greedy for score in scores],
        "characters": [len(text) for text in choices],
        "bytes": [len(text.encode()) for text in choices],
        "tie": has_tie(log_likelihoods),
    }


def _rolled(task: Task, question: Question, scores: Sequence[OptionScore]) -> AnswerRecord:
    """Return the record of a document, whose windows have `scores`."""
    text = question.answers[0] if question.answers else question.continuations[0]
    # fsum: the total must not depend on the order in which windows were scored.
    total = math.fsum(score.log_likelihood for score in scores)
    return {
        "log_likelihood": _rounded(question, total),
        "bytes": len(text.encode()),
        "words": count_words(text),
    }


def _generated(task: Task, question: Question, text: str) -> AnswerRecord:
    """Return the record of a generated text; an empty answer is never right."""
    answer = text
    try:
        if task.extract is not None:
            answer = find(task.extract, text, last=task.extract_last) or ""
        given, *accepted = (_normalised(task, one) for one in (answer, *question.answers))
    except ValueError as error:
        raise ConfigError(
            f"an answer to the task {task.name} cannot be compared",
            where=f"question {question.id}",
            why=str(error),
            next="simplify extract or ignore in the task",
        ) from None
    return {"answer": answer, "exact_match": given != "" and given in accepted}


def _normalised(task: Task, answer: str) -> str:
    """Return the part of an answer that is compared."""
    for pattern in task.ignore:
        answer = replace(pattern, "", answer)
    return (answer.lower() if task.ignore_case else answer).strip()


def task_record(step: int, result: TaskResult) -> Record:
    """Return the metrics record of a result: each metric, and its standard error."""
    record: Record = {"kind": "task", "step": step, "task": result.task, "n": result.n}
    for name, score in result.scores.items():
        record[name] = score.value
        if score.stderr is not None:
            record[f"{name}_stderr"] = score.stderr
    return record
