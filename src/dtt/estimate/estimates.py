"""The complete estimate of a run: memory, step and duration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dtt.base.errors import ConfigError, InputError
from dtt.base.log import log
from dtt.base.reading import read_whole
from dtt.config.data import GivenTokenizerConfig, TrainedTokenizerConfig
from dtt.config.run import RunConfig
from dtt.config.sources import Source
from dtt.config.value_types import seconds
from dtt.data.samples.dataset import open_dataset
from dtt.data.samples.protocol import Vocabulary
from dtt.data.text.encoder import Encoder
from dtt.data.text.tokenizer import find_tokenizer
from dtt.estimate import gpus
from dtt.estimate.case import Case, make_case
from dtt.estimate.duration import (
    RunEstimate,
    StepEstimate,
    run_of,
    seconds_of,
    slowest_like,
    step_of,
)
from dtt.estimate.memory import SPARE, MemoryEstimate, by_rank


@dataclass(frozen=True)
class Estimate:
    """The complete estimate of a run."""

    case: Case
    ranks: list[MemoryEstimate]
    """The memory of each rank of a pipeline; one without a pipeline."""
    step: StepEstimate
    run: RunEstimate
    share: float
    """Share of the estimated speed that the slowest published run that is divided alike reached."""
    price: float | None
    """Price of a device hour, in any currency; None: no cost is printed."""

    @property
    def memory(self) -> MemoryEstimate:
        """The memory of the rank that needs most."""
        return max(self.ranks, key=lambda one: one.total)

    @property
    def room(self) -> float:
        """Bytes of device memory that the run may use at its peak."""
        return (1 - SPARE[self.case.gpu.kind]) * self.case.gpu.memory

    @property
    def fits(self) -> bool:
        """True if the peak fits into the memory of a device."""
        return self.memory.total <= self.room

    @property
    def slow_seconds(self) -> float:
        """Duration of the run at that share of the speed, at most that of `train.budget`."""
        budget = self.case.cfg.train.budget
        limit = math.inf if budget is None else seconds(budget)
        return min(self.run.seconds / self.share, limit)

    @property
    def device_hours(self) -> float:
        """Device hours of the run: number of devices times hours."""
        return self.case.devices * self.run.seconds / 3600


def make_estimate(
    cfg: RunConfig,
    device: gpus.Gpu,
    price: float | None,
    expected_size: int | None = None,
) -> Estimate:
    """Return the estimate of a run on GPUs of one kind.

    `expected_size` is the vocabulary size if neither token files nor a tokenizer exist yet. A time
    budget ends the run after the steps that it leaves time for.
    """
    vocab_size, steps, cfg = vocabulary_and_steps(cfg, expected_size)
    return estimate_of(cfg, device, price, vocab_size, steps)


def estimate_of(
    cfg: RunConfig, device: gpus.Gpu, price: float | None, vocab_size: int, steps: int
) -> Estimate:
    """Return the estimate of a run whose vocabulary and number of steps are known."""
    case = make_case(cfg, device, cfg.launch.nodes, cfg.launch.processes, vocab_size, steps)
    step = step_of(case)
    if (budget := cfg.train.budget) is not None:
        within = max(1, int(seconds(budget) * steps / seconds_of(case, step)))
        case = replace(case, steps=min(steps, within))
        step = step_of(case)
    like = slowest_like(case)
    share = 1.0 if like is None else like.share
    return Estimate(case, by_rank(case), step, run_of(case, step), share, price)


def vocabulary_and_steps(
    cfg: RunConfig, expected_size: int | None = None
) -> tuple[int, int, RunConfig]:
    """Return the vocabulary size, the number of steps and `cfg` with `train.epochs` resolved.

    They come from the token files if they exist, otherwise from the configuration; the size is
    `expected_size` if the tokenizer does not exist either. Raises ConfigError if one of them cannot
    be determined.
    """
    # Samples of a class are counted only where their number decides that of the steps.
    if cfg.data.reads_token_files or (cfg.data.is_counted and cfg.train.steps == 0):
        try:
            dataset = open_dataset(cfg)
        except InputError:
            log.info("no token files yet: the plan is based on the configuration alone")
        else:
            train = cfg.train.model_copy(update={"steps": dataset.requested_steps})
            cfg = cfg.model_copy(update={"train": train})
            return dataset.manifest.vocab_size, dataset.steps, cfg
    if cfg.train.steps == 0:
        raise ConfigError(
            f"the number of steps of train.epochs={cfg.train.epochs:g} is not known",
            why="it is derived from the number of samples, and there are no token files",
            next="dtt tokenize, or plan with train.steps=N",
        )
    try:
        size = cfg.data.known_vocab_size() or cfg.model.vocab_size or _tokenizer_size(cfg)
        return size, cfg.train.steps, cfg
    except InputError:
        if expected_size is None:
            raise
        return expected_size, cfg.train.steps, cfg


def _tokenizer_size(cfg: RunConfig) -> int:
    if isinstance(cfg.data, Source):
        return Vocabulary.read(cfg.data.tokenizer).size
    match cfg.tokenizer:
        case TrainedTokenizerConfig(vocab_size=size):
            return size
        case GivenTokenizerConfig():
            path = find_tokenizer(cfg.tokenizer)
            return Encoder(read_whole(path), None, path).vocab_size
