"""Texts that the model writes while it trains."""

from __future__ import annotations

from dataclasses import dataclass

from dtt.config.run import RunConfig
from dtt.data.samples.dataset import Dataset
from dtt.data.text.encoding_errors import encoding
from dtt.data.text.tokenizer import add_in_front, open_tokenizer
from dtt.evaluate.answers import chat_prompt, first_prompts
from dtt.evaluate.validation import Sampler, first_words
from dtt.parallel.sharded_model import whole_copy
from dtt.track.base import Record
from dtt.train.actions.action import StepAction, Stop, every
from dtt.train.components import Run
from dtt.train.state import Position


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
        state = run.state
        if not (run.world.first or state.mesh.sharded):
            return []
        step = run.position.step
        if not state.mesh.sharded:
            return [self.sampler.record(state.model, step)]
        if (whole := whole_copy(state.without_context(), run.world)) is not None:
            return [self.sampler.record(whole, step)]
        together = state.module, state.mesh.granularity, run.world.from_first
        return [self.sampler.record(state.model, step, together)]


def make_sampler(cfg: RunConfig, dataset: Dataset) -> Sampler | None:
    """Return the sampler of texts during training, or None if `train.sample_tokens` is 0.

    In a run on conversations, it answers `train.sample_prompt` as the message of a user, or the
    first conversation of the held-out ones. In a run on text, it continues `train.sample_prompt`,
    or the first words of a held-out document.
    """
    train, manifest, text = cfg.train, dataset.manifest, cfg.train.sample_prompt
    end = manifest.end_of_document
    if train.sample_tokens == 0:
        return None
    tokenizer = add_in_front(open_tokenizer(dataset.tokenizer), manifest.begin_of_document)
    held_out = [source for source in dataset.validation if source is not None]
    if manifest.chat is None:
        # On-the-fly text has no beginning to go back to.
        read = held_out or (dataset.sources if cfg.data.reads_token_files else ())
        text = text or first_words(read, tokenizer, end)
        with encoding(dataset.tokenizer):
            prompt = tokenizer.encode(text, add_special_tokens=True).ids or [
                manifest.end_of_document
            ]
    elif text:
        prompt = chat_prompt(cfg, dataset)
    else:
        prompt = next(iter(first_prompts(held_out or dataset.sources, 1)), [end])
    shown = text if manifest.chat is None else tokenizer.decode(prompt, skip_special_tokens=False)
    return Sampler(train, tokenizer, prompt, shown, manifest.until_ids, cfg.seed)
