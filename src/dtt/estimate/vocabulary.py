"""The sizes of a run that its data decides: those of the vocabulary, and the number of steps."""

from __future__ import annotations

from dtt.base.errors import ConfigError, InputError
from dtt.base.log import log
from dtt.base.reading import read_whole
from dtt.config.data import GivenTokenizerConfig, TrainedTokenizerConfig
from dtt.config.run import RunConfig
from dtt.config.sources import Source
from dtt.data.samples.dataset import open_dataset
from dtt.data.samples.protocol import Vocabulary
from dtt.data.text.encoder import Encoder
from dtt.data.text.tokenizer import find_tokenizer


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
