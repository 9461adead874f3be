"""Greedy answers to held-out conversations, and the share of them that stop by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

import numpy as np

from dtt.base.errors import ConfigError, Diverged
from dtt.base.log import log
from dtt.base.targets import IGNORE_INDEX
from dtt.config.run import RunConfig
from dtt.data.conversations.dialects import parse_prompt
from dtt.data.conversations.rows import RefusedRow
from dtt.data.samples.dataset import Dataset
from dtt.data.samples.protocol import SampleSource
from dtt.data.samples.token_source import TokenSource
from dtt.evaluate.tasks.scorer import Generator
from dtt.hf.chat_format import ChatFormat
from dtt.mesh.dist import World
from dtt.model.contract import Model
from dtt.parallel.pipelining import Pipeline


def chat_prompt(cfg: RunConfig, dataset: Dataset) -> list[int]:
    """Return the ids of `train.sample_prompt` as the message of a user, up to the answer.

    Raises ConfigError if the chat template refuses such a conversation.
    """
    facts, template = dataset.manifest.chat, dataset.chat_template
    assert facts is not None, "the data has conversations"
    assert template is not None, "the data has conversations"
    chat_format = ChatFormat(template, "chat.template", facts, dataset.tokenizer)
    try:
        prompt = parse_prompt({"prompt": cfg.train.sample_prompt})
        return chat_format.encoder().prompt_ids(prompt)
    except RefusedRow as refused:
        raise ConfigError(
            "the chat template rejects train.sample_prompt",
            where="train.sample_prompt",
            why=refused.why,
            next='train.sample_prompt="": samples answer a held-out conversation',
        ) from None


def first_prompts(sources: Sequence[SampleSource], count: int) -> list[list[int]]:
    """Return the prompts of `count` conversations, taken from the sources in turn.

    A prompt is a conversation up to its first target, and so ends with the header of its first
    answer. Sources of text, and conversations without targets, are left out. The choice depends on
    the order of the samples only, which the seed determines.
    """
    rounds = zip_longest(*(_prompts(source, count) for source in sources))
    return list(islice((prompt for prompt in chain.from_iterable(rounds) if prompt), count))


def _prompts(source: SampleSource, count: int) -> Iterator[list[int]]:
    """Yield the prompts of a source until `count` were found."""
    found = 0
    if not (isinstance(source, TokenSource) and source.packing_counts is not None):  # text
        return
    # Also where attention needs none, as with a row for each conversation.
    source = source.with_doc_ids()
    for sample in source.order(0, len(source)):
        rows = source.read(np.array([sample], dtype=np.uint64))
        assert rows.doc_ids is not None
        ids, conversation = rows.ids[0], rows.doc_ids[0]
        targets = np.flatnonzero(rows.targets[0] != IGNORE_INDEX) + 1
        for number in np.unique(conversation[targets]).tolist():
            if found == count:
                return
            first = targets[conversation[targets] == number][0]
            yield ids[:first][conversation[:first] == number].tolist()
            found += 1


@dataclass(frozen=True)
class AnswerEvaluator:
    """Generator of greedy answers to held-out conversations, distributed over the ranks."""

    prompts: Sequence[Sequence[int]]
    stop_tokens: tuple[int, ...]
    max_new_tokens: int
    """Maximum tokens of an answer; a longer one counts as not stopping."""
    batch: int
    """Answers that a rank generates at once."""
    world: World

    def stop_rate(
        self,
        model: Model | Pipeline,
        stop: Callable[[], bool],
        *,
        multiple: int = 1,
        collective: bool = False,
    ) -> float | None:
        """Return the share of answers that end with a stop token.

        All ranks call this together; `multiple` and `collective` are those of `Generator`. Greedy
        decoding draws no random numbers, so training is not affected. Return None as soon as
        `stop()`, which every rank calls between batches, is true.
        """
        context = model.arch.max_seq_len
        generator = Generator(
            model,
            self.world,
            batch_tokens=self.batch * context,
            multiple=multiple,
            collective=collective,
        )
        try:
            answers = generator.generate(self.prompts, self.max_new_tokens, self.stop_tokens, stop)
        except Diverged as error:  # the guard decides what to do about it, on all ranks
            log.warning("no answers: %s", error)
            return 0.0
        if answers is None:
            return None
        limits = [min(self.max_new_tokens, context - len(prompt)) for prompt in self.prompts]
        stopped = sum(len(ids) < limit for ids, limit in zip(answers, limits, strict=True))
        return stopped / len(self.prompts)
