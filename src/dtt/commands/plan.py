"""`dtt plan`: what a run will take, before it is started: memory, time, disk, money."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dtt.config.data import GivenTokenizerConfig, TextDataConfig, TrainedTokenizerConfig
from dtt.config.run import RunConfig
from dtt.data.dataset import open_dataset
from dtt.data.encoder import Encoder
from dtt.data.tokenizer import find_tokenizer
from dtt.errors import ConfigError, InputError
from dtt.model import count
from dtt.runtime.log import log
from dtt.train.estimate import advice, gpus
from dtt.train.estimate.case import Case, make_case
from dtt.train.estimate.communication import LINK
from dtt.train.estimate.duration import ACHIEVED, Run, Step, run_of, step_of
from dtt.train.estimate.memory import FP32, GIB, SPARE, Memory, memory, optimizer_state_whole


@dataclass(frozen=True)
class Told:
    """All that is told of a run."""

    case: Case
    memory: Memory
    step: Step
    run: Run
    change: advice.Change | None
    """That makes it fit, if it does not."""
    price: float | None

    @property
    def room(self) -> float:
        """Bytes of a device's memory that the peak may take."""
        return (1 - SPARE[self.case.gpu.kind]) * self.case.gpu.memory

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.memory.total <= self.room


def run(
    cfg: RunConfig,
    gpu: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    price: float | None,
    *,
    as_json: bool,
) -> None:
    """Work it out and print it; nothing is built, and no token is read."""
    per_node = gpus_per_node or cfg.launch.processes
    device = gpus.find(gpu or gpus.here(), per_node)
    vocab_size, steps = known_of_the_data(cfg)
    case = make_case(cfg, device, nodes or cfg.launch.nodes, per_node, vocab_size, steps)
    peak, one = memory(case), step_of(case)
    told = Told(case, peak, one, run_of(case, one), None, price)
    if not told.fits:
        told = Told(case, peak, one, told.run, advice.remedy(case), price)
    if as_json:
        print(json.dumps(facts(told), indent=1))
    else:
        print("\n".join(lines(told)))


def known_of_the_data(cfg: RunConfig) -> tuple[int, int]:
    """Entries of the vocabulary, and steps that there are tokens for; from the data, if it is there
    already. ConfigError if nothing says how large the vocabulary is."""
    if not isinstance(cfg.data, TextDataConfig):
        try:
            dataset = open_dataset(cfg)
        except InputError:
            log.info("there are no token files yet: the plan is of what the configuration says")
        else:
            return dataset.manifest.vocab_size, dataset.steps
    return cfg.model.vocab_size or _tokenizer_size(cfg), cfg.train.steps


def _tokenizer_size(cfg: RunConfig) -> int:
    match cfg.tokenizer:
        case TrainedTokenizerConfig(vocab_size=size):
            return size
        case GivenTokenizerConfig():
            path = find_tokenizer(cfg.tokenizer)
            return Encoder(path.read_bytes(), None, path).vocab_size
