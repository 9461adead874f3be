"""A model of dtt as a language model of lm-evaluation-harness."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from dtt.base.errors import ConfigError
from dtt.base.log import Advance, progress
from dtt.data.conversations.rows import Conversation, RefusedRow
from dtt.evaluate.tasks.prompts import Question
from dtt.evaluate.tasks.runner import FIRST_BLOCK, LARGEST_BLOCK, tokens_that_begin_with

if TYPE_CHECKING:
    from dtt.evaluate.tasks.options import Option, OptionScore
    from dtt.evaluate.tasks.runner import TaskRunner
    from dtt.hf.chat_format import ChatFormat

T = TypeVar("T")


def language_model(runner: TaskRunner, chat: ChatFormat | None, name: str) -> Any:
    """Return a `HarnessModel` that is an instance of lm-eval's `LM`."""
    from lm_eval.api.model import LM

    class LanguageModel(HarnessModel, LM):  # type: ignore[misc]
        """A `HarnessModel` with the defaults of lm-eval's own models."""

    return LanguageModel(runner, chat, name)


class HarnessModel:
    """The model that lm-eval sends its requests to.

    All ranks receive all requests and return all answers; the scorer and the generator divide the
    work. `language_model` adds lm-eval's base class, which takes seconds to import.
    """

    MAX_NEW_TOKENS = 256
    """Tokens of an answer if a task sets no limit, as in lm-eval's own models."""

    def __init__(self, runner: TaskRunner, chat: ChatFormat | None, name: str) -> None:
        """Answer with the scorer, generator and encoder of `runner`.

        `chat` is the format of conversations if lm-eval renders its prompts with it. `name`
        identifies the tokenizer.
        """
        super().__init__()
        self._runner, self._name = runner, name
        self._encoder = runner.encoder
        self._chat = None if chat is None else chat.encoder()
        stops = () if chat is None else chat.facts.stop_tokens
        own = () if self._chat is None else self._chat.stop_tokens
        self._until_ids = (*runner.until_ids, *own, *stops)
        added = self._encoder.tokenizer.get_added_tokens_decoder().values()
        special = [re.escape(token.content) for token in added if token.special]
        self._special = re.compile("|".join(special) or "(?!)")

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one.

        Neighbouring requests of a document with the same context, such as the choices of a
        question, are scored together.
        """
        questions = (
            self._encoder.options(Question("", (context,), tuple(one.args[1] for one in group), 0))
            for (*_, context), group in groupby(
                requests, lambda one: (one.task_name, one.doc_id, one.args[0])
            )
        )
        found = []
        with self._progress("log-likelihoods", len(requests)) as advance:
            for block in _blocks((question.options for question in questions), _count_tokens):
                scores = [one for options in self._scores(block) for one in options]
                found += [(one.log_likelihood, one.greedy) for one in scores]
                advance(len(scores))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each text, each of its tokens scored once."""
        texts = (self._encoder.windows(one.args[0]) for one in requests)
        found = []
        with self._progress("log-likelihoods of texts", len(requests)) as advance:
            for block in _blocks(texts, _count_tokens):
                scores = iter(self._scores([[window] for windows in block for window in windows]))
                found += [sum(next(scores)[0].log_likelihood for _ in text) for text in block]
                advance(len(block))
        return found

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the greedy answer to each prompt, without the string that ends it.

        Raises ConfigError if a task samples.
        """
        answers: list[str] = []
        with self._progress("answers", len(requests)) as advance:
            for (until, count), group in groupby(requests, self._generation):
                answers += self._answers([one.args[0] for one in group], until, count, advance)
        return answers

    def _answers(
        self, prompts: Sequence[str], until: tuple[str, ...], count: int, advance: Advance
    ) -> list[str]:
        """Return the answers of up to `count` tokens, which end before any of `until`."""
        from lm_eval.models.utils import postprocess_generated_text

        tokenizer = self._encoder.tokenizer
        until_ids = (*self._until_ids, *tokens_that_begin_with(tokenizer, until))
        encoded = (
            self._encoder.prompt_ids(Question("", (text,), (), 0), count)[0] for text in prompts
        )
        answers: list[str] = []
        for block in _blocks(encoded, lambda prompt: len(prompt) + count):
            replies = self._runner.generator.generate(block, count, until_ids)
            assert replies is not None  # no stop is requested
            for ids in replies:
                text = tokenizer.decode(ids, skip_special_tokens=False)
                ended = postprocess_generated_text(text, list(until), None)
                answers.append(self._special.sub("", ended))  # as in lm-eval's own models
            advance(len(block))
        return answers

    def _progress(self, what: str, total: int) -> AbstractContextManager[Advance]:
        return progress(what, total, "requests", shown=self._runner.world.first)

    def _scores(self, questions: Sequence[Sequence[Option]]) -> list[list[OptionScore]]:
        scores = self._runner.scorer.score(questions)
        assert scores is not None  # no stop is requested
        return scores

    def _generation(self, request: Any) -> tuple[tuple[str, ...], int]:
        """Return the strings that end an answer, and its maximum number of tokens."""
        from lm_eval.models.utils import normalize_gen_kwargs

        options = normalize_gen_kwargs(request.args[1], self.MAX_NEW_TOKENS)
        if options["do_sample"]:
            raise ConfigError(
                f"the task {request.task_name} draws its answers",
                why=f"do_sample with temperature {options.get('temperature')}; dtt generates "
                "greedily, so that an evaluation can be repeated",
                next="choose a task without do_sample, or export the model and use lm-eval itself",
            )
        return tuple(filter(None, options["until"])), options["max_gen_toks"]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation; without the prompt, its last message stays open."""
        assert self._chat is not None
        conversation = Conversation(tuple(dict(message) for message in chat_history))
        try:
            text = self._chat.template.render(conversation, add_generation_prompt)
        except RefusedRow as refused:
            raise ConfigError(
                "the chat template cannot render a prompt of lm-eval", why=refused.why
            ) from None
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    @property
    def tokenizer_name(self) -> str:
        """The name under which lm-eval may cache rendered requests."""
        return self._name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the text of the chat template."""
        return self._chat.template.text if self._chat is not None and chat_template else None


def _blocks(requests: Iterable[T], tokens: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield encoded requests in blocks, which double in size as those of a `TaskRunner`.

    The memory of a run depends on the size of a block, and progress is shown after each.
    """
    block: list[T] = []
    size, limit = 0, FIRST_BLOCK
    for request in requests:
        block.append(request)
        size += tokens(request)
        if size >= limit:
            yield block
            block, size, limit = [], 0, min(2 * limit, LARGEST_BLOCK)
    if block:
        yield block


def _count_tokens(options: Sequence[Option]) -> int:
    """Return an upper bound of the number of tokens to compute."""
    return sum(len(option.context) + len(option.continuation) for option in options)
