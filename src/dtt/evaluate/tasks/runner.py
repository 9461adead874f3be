"""Evaluation of one task: blocks of questions are encoded, scored and appended to a result file.

Blocks are a function of the questions only, and so are the batches of a block (`scorer.py`), so the
result file does not depend on the number of ranks. Log-likelihoods are rounded to 1e-6 nats, and
all metrics are computed from the rounded values, so that they follow from the file. A float32 has
24 bits: beyond 8 nats its steps are larger than that, so rounding makes no options equal that
arithmetic tells apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

from dtt.base.errors import ConfigError, Diverged
from dtt.base.log import log, progress
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
from dtt.evaluate.tasks.prompts import Question
from dtt.evaluate.tasks.result_files import ResultContent, ResultFile
from dtt.evaluate.tasks.scorer import Generator, Option, OptionScore, Scorer, never
from dtt.evaluate.tasks.task_data import TaskData
from dtt.mesh.dist import World
from dtt.track.base import Record

DECIMALS = 6
FIRST_BLOCK, LARGEST_BLOCK = 2**14, 2**20
"""Tokens of the first block, and of the largest. Blocks double in size: the first answers appear
early, a kill loses no more work than was done before, and large blocks have a batch for every rank.
"""

REASONING_MARKS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))
"""Texts around the reasoning: of Qwen3, DeepSeek-R1 and SmolLM3; of some tunings; of Magistral."""


class _Asked(NamedTuple):
    """A question, and what a model has to compute for it."""

    question: Question
    options: Sequence[Option]
    """Of rolling likelihood, its windows. Empty for generation."""
    prompt: list[int]
    """Of generation; otherwise empty."""
    facts: Mapping[str, Any]
    """Fields of the record that are known before scoring."""

    @property
    def tokens(self) -> int:
        """Number of tokens to compute if the options share their context."""
        contexts = {option.context for option in self.options}
        return sum(map(len, contexts)) + sum(len(one.continuation) for one in self.options)


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
        content = ResultContent()
        with ExitStack() as stack:
            # Runs on rank 0. Its result or error reaches all ranks, so all continue or all stop.
            def open_file() -> tuple[TaskResult | None, int, int]:
                nonlocal content
                if file is not None:
                    content = stack.enter_context(file.writing())
                return content.result, len(content.records), content.blocks

            def seal() -> TaskResult:
                result = task_result(task.name, task.type, task.chance, content.records)
                content.seal(result)
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
                    self.world.on_first(partial(content.append, records))
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
        task, tokens, block = data.task, 0, list[_Asked]()
        for i in range(answered, len(data.questions)):
            # At least one question, however long it is.
            if tokens >= size:
                break
            block.append(self._encode(task, data.questions[i]))
            tokens += block[-1].tokens
            tokens += len(block[-1].prompt) + task.max_tokens * (task.type == "generation")
        records = (self._answer if task.type == "generation" else self._score)(task, block, stop)
        if records is not None and self.keep_samples:
            for record, asked in zip(records, block, strict=True):
                record["contexts"] = list(asked.question.contexts)
                record["continuations"] = list(asked.question.continuations)
        return records

    def _encode(self, task: Task, question: Question) -> _Asked:
        if task.type == "rolling":
            return _Asked(question, self.encoder.windows(question.continuations[0]), [], {})
        if task.type == "generation":
            prompt, truncated = self.encoder.prompt_ids(question, task.max_tokens)
            return _Asked(question, (), prompt, {"truncated": truncated})
        encoded = self.encoder.options(question)
        facts: dict[str, Any] = {"answer_bytes": encoded.bytes[question.gold]}
        facts |= {"truncated": encoded.truncated, "separate": encoded.separate}
        return _Asked(question, encoded.options, [], facts)

    def _score(
        self, task: Task, block: Sequence[_Asked], stop: Callable[[], bool]
    ) -> list[AnswerRecord] | None:
        """Return the records of questions with options; None if `stop()` was true."""
        # Windows have nothing to share: as questions of their own, those of one document can go to
        # different ranks.
        rolling = task.type == "rolling"
        questions: list[Sequence[Option]] = [asked.options for asked in block]
        if rolling:
            questions = [[window] for windows in questions for window in windows]
        scores = self.scorer.score(questions, stop)
        if scores is None:
            return None
        flat = chain.from_iterable(scores)
        answer = _rolled if rolling else _compared
        records = []
        for question, options, _, facts in block:
            found = list(islice(flat, len(options)))
            records.append({"id": question.id, **answer(task, question, found), **facts})
        return records

    def _answer(
        self, task: Task, block: Sequence[_Asked], stop: Callable[[], bool]
    ) -> list[AnswerRecord] | None:
        """Return the records of questions that are answered by text; None if `stop()` was true."""
        replies = self._replies(task, [asked.prompt for asked in block], stop)
        if replies is None:
            return None
        records = []
        for asked, reply in zip(block, replies, strict=True):
            scored = _generated(task, asked.question, reply.answer or "")
            record = {"id": asked.question.id, **scored, **asked.facts}
            record["unfinished"] = reply.answer is None
            records.append(record | ({"text": reply.text.content} if self.keep_samples else {}))
        return records

    def _replies(
        self, task: Task, prompts: Sequence[list[int]], stop: Callable[[], bool]
    ) -> list[_Reply] | None:
        """Return the replies to prompts; None if `stop()` was true.

        A special token is text like any other, so that `until` can name one.
        """
        own, every = ([_Reply(task, self.encoder, prompt) for prompt in prompts] for _ in range(2))
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
        # Some templates end a prompt with the beginning of the reasoning.
        begins = tuple(begin for begin, _ in REASONING_MARKS)
        self._opened = encoder.in_chat and end.rstrip().endswith(begins)

    def add(self, token: int) -> bool:
        """Append a token; return True if the answer is complete: it contains a text of `until`."""
        self.text.add(token)
        return bool(self._until) and self._found()[1] != []

    @property
    def answer(self) -> str | None:
        """The answer up to a text of `until`; None if the reply ended within its reasoning."""
        whole, ends = self._found()
        return whole if whole is None else whole[: min(ends, default=len(whole))]

    def _found(self) -> tuple[str | None, list[int]]:
        """Return the text behind the reasoning, if that has ended, and the places of `until`."""
        text = self.text.content
        whole: str | None = text
        if self._in_chat:
            begun = [mark for mark in REASONING_MARKS if text.lstrip().startswith(mark[0])]
            ends = [end for _, end in (REASONING_MARKS if self._opened else begun) if end in text]
            if ends:
                whole = text.partition(ends[0])[2]
            elif self._opened or begun:
                whole = None
        return whole, [at for end in self._until if (at := (whole or "").find(end)) >= 0]


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
        compared = []
        for text in (answer, *question.answers):
            for pattern in task.ignore:
                text = replace(pattern, "", text)
            compared.append((text.lower() if task.ignore_case else text).strip())
    except ValueError as error:
        raise ConfigError(
            f"an answer to the task {task.name} cannot be compared",
            where=f"question {question.id}",
            why=str(error),
            next="simplify extract or ignore in the task",
        ) from None
    given, *accepted = compared
    return {"answer": answer, "exact_match": given != "" and given in accepted}


def task_record(step: int, result: TaskResult) -> Record:
    """Return the metrics record of a result: each metric, and its standard error."""
    record: Record = {"kind": "task", "step": step, "task": result.task, "n": result.n}
    for name, score in result.scores.items():
        record[name] = score.value
        if score.stderr is not None:
            record[f"{name}_stderr"] = score.stderr
    return record


@dataclass(frozen=True)
class TaskEvaluator:
    """The benchmark tasks of a run, answered with its current weights during training.

    Scoring draws no random numbers, so the weights and all other records are the same bits as
    without tasks. It writes no result files: these belong to a checkpoint, and most steps that are
    evaluated have none. It does not evaluate averaged weights either, as that would double the time
    for which training waits. `dtt eval` does both, with checkpoints.
    """

    tasks: Sequence[TaskData]
    runner: TaskRunner

    def records(self, step: int, stop: Callable[[], bool]) -> list[Record] | None:
        """Return one `task` record per task, without scores if the model has diverged.

        All ranks call this together. Return None as soon as `stop()`, which every rank calls
        between batches, is true.
        """
        records: list[Record] = []
        for data in self.tasks:
            try:
                result = self.runner.run(data, None, stop)
            except Diverged as error:  # the guard decides what to do about it, on all ranks
                log.warning("step %d: no scores of %s: %s", step, data.task.name, error)
                # Without scores, but recorded: a resume would evaluate it again.
                records.append({"kind": "task", "step": step, "task": data.task.name, "n": 0})
                continue
            if result is None:
                return None
            records.append(task_record(step, result))
        return records
