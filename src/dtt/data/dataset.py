"""The dataset of a run, opened from its configuration: sources, mixture and held-out text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from dtt.artifacts import DataManifest, SourceFacts, fingerprint
from dtt.config.data import SourceConfig, TextDataConfig, TokensDataConfig
from dtt.config.run import RunConfig
from dtt.data import fit
from dtt.data.encoder import Encoder
from dtt.data.mixture import Mixture, Weights
from dtt.data.source import SOURCE_SHIFT, Opened, Piece, Samples, Source, Vocabulary
from dtt.data.sources.tokens import open_tokens
from dtt.data.stages import Stages, resolve
from dtt.data.tokenizer import token_bytes
from dtt.errors import ConfigError, InputError
from dtt.runtime.files import sha256_file

OWN = np.uint64((1 << SOURCE_SHIFT) - 1)
"""Mask of the bits of a sample number that are its number within its source."""


@dataclass(frozen=True)
class Dataset:
    """The samples of a run, by position.

    The bits of a sample number from SOURCE_SHIFT on are the index of its source.
    """

    sources: tuple[Source, ...]
    validation: tuple[Source | None, ...]
    """Held-out text of each source; None for a source without any."""
    mixture: Mixture
    stages: Stages
    """Batch-size and context-length schedules: samples and context length of each step."""
    tokenizer: Path
    manifest: DataManifest
    """Description of the data that is stored in the job directory."""

    @property
    def steps(self) -> int:
        """Number of optimizer steps with a full batch of samples; at most `train.steps`."""
        return self.stages.step_of(self.mixture.end)

    def first_sample(self, step: int) -> int:
        """Return the position of the first sample of a step; steps count from 0."""
        return self.stages.first_sample(step)

    def samples_at(self, first: int, count: int) -> Samples:
        """Return the sample numbers at positions first … first + count - 1 of the run."""
        sources, places = self.mixture.places(first, count)
        samples = np.empty(count, dtype=np.uint64)
        for number in np.unique(sources).tolist():
            mine = sources == number
            # The places of one source are consecutive, however the mixture interleaves them.
            own = self.sources[number].samples_at(int(places[mine][0]), int(mine.sum()))
            samples[mine] = own | np.uint64(number << SOURCE_SHIFT)
        return samples

    def read(self, samples: Samples) -> npt.NDArray[np.int64]:
        """Return token ids [len(samples), seq_len + 1].

        PADDING fills the rest of a sample that is shorter than seq_len + 1.
        """
        ids: npt.NDArray[np.int64] = self._gather(samples, lambda source, own, _: source.read(own))
        return ids

    def documents(self, samples: Samples, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return the document index, within its sample, of each id of `read(samples)`, from 0."""
        documents: npt.NDArray[np.int32] = self._gather(
            samples, lambda source, own, rows: source.documents(own, ids[rows])
        )
        return documents

    def _gather(self, samples: Samples, part: Callable[[Source, Samples, Any], Any]) -> Any:
        """Call `part(source, its samples, row mask)` for each source and merge the returned rows.

        The rows of the result are in the order of `samples`.
        """
        gathered: npt.NDArray[Any] | None = None
        for source, own, rows in self._by_source(samples):
            made = part(source, own, rows)
            if len(made) == len(samples):
                return made
            if gathered is None:
                gathered = np.empty((len(samples), *made.shape[1:]), made.dtype)
            gathered[rows] = made
        return gathered

    def _by_source(
        self, samples: Samples
    ) -> Iterator[tuple[Source, Samples, npt.NDArray[np.bool_]]]:
        numbers = samples >> np.uint64(SOURCE_SHIFT)
        for number in np.unique(numbers).tolist():
            rows = numbers == number
            yield self.sources[number], samples[rows] & OWN, rows

    def targets(self, samples: Samples) -> int:
        """Return the number of targets in these samples that are not PADDING."""
        return sum(source.targets(own) for source, own, _ in self._by_source(samples))

    def locate(self, sample: int) -> tuple[Source, list[Piece]]:
        """Return the source of a sample and the pieces of documents in it, in order."""
        source = self.sources[sample >> SOURCE_SHIFT]
        return source, source.locate(sample & int(OWN))

    def epochs(self, position: int) -> dict[str, float]:
        """Return the number of epochs, as a float, of each source before a position, by name."""
        counts = self.mixture.counts(position).tolist()
        return {s.name: n / len(s) for s, n in zip(self.sources, counts, strict=True)}

    def shares(self) -> dict[str, float]:
        """Return the fraction of the run's samples that come from each source, by name."""
        counts = self.mixture.counts(self.mixture.end).tolist()
        return {s.name: n / self.mixture.end for s, n in zip(self.sources, counts, strict=True)}

    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        """Return the bytes of text of each id, [vocab_size], or None if they are not known."""
        return token_bytes(self.tokenizer, self.manifest.vocab_size, self.manifest.end_of_document)

    def rounded_weights(self) -> list[str]:
        """Return a line for each source whose share of the samples rounding changed by over 1 %."""
        lines = []
        for one in self.mixture.rounded():
            name, step = self.sources[one.source].name, self.stages.step_of(one.phase.first) + 1
            shares = f"{float(one.taken):.4g}, not {float(one.asked):.4g}"
            lines.append(f"rounded weight: {name} has a share of {shares}, from step {step} on")
        return lines

    def state(self, position: int) -> dict[str, Any]:
        """Return the state from which `restore` resumes at `position`, by source name.

        Sources without state are absent.
        """
        counts = self.mixture.counts(position).tolist()
        states = {s.name: s.state(n) for s, n in zip(self.sources, counts, strict=True)}
        return {name: state for name, state in states.items() if state is not None}

    def restore(self, states: dict[str, Any]) -> None:
        """Resume at the position for which `state` was called."""
        for source in self.sources:
            if source.name in states:
                source.restore(states[source.name])

    def describe(self) -> str:
        """Return one line per source: its share, its tokens and its epochs in this run."""
        shares, epochs = self.shares(), self.epochs(self.mixture.end)
        width = max(map(len, shares))
        return "\n".join(
            f"  {s.name:<{width}}  {100 * shares[s.name]:5.1f}%  {s.tokens / 1e6:.1f}M tokens, "
            f"{epochs[s.name]:.2f} epochs"
            for s in self.sources
        )


def open_dataset(cfg: RunConfig) -> Dataset:
    """Open all data that `cfg` trains on.

    No token ids are read from token files. A text source reads some text to estimate its size.

    Raises ConfigError if the sources, schedules and tokenizers do not fit together, and InputError
    or DamagedError for missing or damaged files.
    """
    train, data = cfg.train, cfg.data
    stages = resolve(train)
    opened = _open_sources(cfg)
    for source in opened:
        fit.check_length(source.train.name, source.train.tokens, len(source.train), train.seq_len)
    mixture = Mixture(
        [len(source.train) for source in opened],
        [(stages.first_sample(step - 1), weights) for step, weights in _weights(cfg, opened)],
        data.on_exhausted if isinstance(data, TokensDataConfig) else "repeat",
        stages.first_sample(train.steps),
    )
    vocabularies = [(source.train.name, source.vocabulary) for source in opened]
    fit.check_one_tokenizer([(name, its.tokenizer, its.sha256) for name, its in vocabularies])
    return Dataset(
        sources=tuple(source.train for source in opened),
        validation=tuple(source.validation for source in opened),
        mixture=mixture,
        stages=stages,
        tokenizer=opened[0].vocabulary.tokenizer,
        manifest=_manifest(cfg, opened),
    )


def _manifest(cfg: RunConfig, opened: Sequence[Opened]) -> DataManifest:
    paths = [source.path for source in cfg.token_sources] or [cfg.corpus_dir]
    sources = tuple(
        SourceFacts(
            name=source.train.name,
            path=str(path),
            key=source.key,
            corpus=source.corpus,
            tokens=source.train.tokens,
            samples=len(source.train),
            bytes_per_token=source.train.bytes_per_token,
        )
        for path, source in zip(paths, opened, strict=True)
    )
    vocabulary = opened[0].vocabulary
    return DataManifest(
        key=fit.data_key((source.name, source.key) for source in sources),
        tokenizer_sha256=vocabulary.sha256,
        vocab_size=vocabulary.size,
        end_of_document=vocabulary.end_of_document,
        sources=sources,
    )


def _open_sources(cfg: RunConfig) -> list[Opened]:
    match cfg.data:
        case TokensDataConfig(tokenizer=path):
            given = None if path is None else read_vocabulary(path)
            return [_open_token_files(cfg, source, given) for source in cfg.token_sources]
        case TextDataConfig():
            from dtt.data.sources.text import open_text

            return [open_text(cfg)]
        case _:
            assert_never(cfg.data)


def _open_token_files(cfg: RunConfig, source: SourceConfig, given: Vocabulary | None) -> Opened:
    """Open the token files of one source.

    `given` is the vocabulary of `data.tokenizer`. It is needed for token files without a dtt
    manifest, as they do not name their tokenizer.
    """
    assert isinstance(cfg.data, TokensDataConfig)
    options: dict[str, Any] = {
        "seq_len": cfg.train.seq_len,
        "seed": cfg.seed,
        "packing": cfg.data.packing,
        "vocab_size": given and given.size,
        "end_of_document": given and given.end_of_document,
    }
    train = open_tokens(source, "train", **options)
    validation = open_tokens(source, "validation", **options)
    manifest, key = train.files.manifest, train.files.key
    if manifest is not None:
        vocabulary = Vocabulary(
            source.path / "tokenizer.json",
            manifest.tokenizer_sha256,
            manifest.vocab_size,
            manifest.end_of_document,
        )
        if given is not None:
            named = [("data.tokenizer", given), (train.name, vocabulary)]
            fit.check_one_tokenizer([(name, its.tokenizer, its.sha256) for name, its in named])
    elif given is not None:
        vocabulary, key = given, fingerprint([key, given.sha256])
    else:
        raise ConfigError(
            f"nothing says which tokenizer made the token files of {train.name}",
            where=source.path,
            why="those that dtt did not make do not tell",
            next="data.tokenizer=PATH/tokenizer.json",
        )
    return Opened(
        train,
        validation if len(validation) else None,
        key,
        vocabulary,
        None if manifest is None else manifest.corpus,
    )


def _weights(cfg: RunConfig, opened: Sequence[Opened]) -> list[tuple[int, Weights]]:
    """Return the mixture weights with the step, counted from 1, from which they hold.

    Weights are converted to fractions through their decimal form, so that 0.1 means exactly 1/10.
    A source without a weight is weighted by its number of samples.
    """
    data = cfg.data
    if isinstance(data, TextDataConfig) or not data.sources:
        return [(1, (Fraction(1),))]
    given = [source.weight for source in data.sources]
    sizes = [float(len(source.train)) for source in opened]
    first = {s.train.name: g or n for s, g, n in zip(opened, given, sizes, strict=True)}
    changes = [(1, first), *((change.step, change.weights) for change in data.weights)]
    return [
        (step, tuple(Fraction(str(weights[source.train.name])) for source in opened))
        for step, weights in changes
    ]


def read_vocabulary(path: Path) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json.

    Raises InputError if the file does not exist, and ConfigError if it has no end-of-document
    token.
    """
    try:
        encoder = Encoder(path.read_bytes(), None, path)
    except FileNotFoundError:
        raise InputError(
            "there is no tokenizer", where=path.absolute(), next="data.tokenizer=FILE"
        ) from None
    return Vocabulary(path, sha256_file(path), encoder.vocab_size, encoder.end_of_document)
