"""The dataset of a run, opened from its configuration: sources, mixture and held-out text."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtt.artifacts.manifests import CHAT_TEMPLATE, DataManifest, SourceFacts
from dtt.artifacts.token_folders import MatchedSource, all_sources
from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.base.reading import read_whole
from dtt.config.run import RunConfig
from dtt.config.sources import AnySource
from dtt.data.samples import compatibility
from dtt.data.samples.mixture import Mixture, Weights
from dtt.data.samples.open_sources import open_sources
from dtt.data.samples.own_source import OwnSource
from dtt.data.samples.protocol import (
    SOURCE_SHIFT,
    Counts,
    DocumentSpan,
    OpenedSource,
    SampleNumbers,
    SampleRows,
    SampleSource,
    Streamed,
)
from dtt.data.samples.step_sizes import StepSizes, step_sizes_of, steps_of_epochs
from dtt.data.samples.token_source import TokenSource
from dtt.data.text.tokenizer import begin_of_document, open_tokenizer, token_bytes

NUMBER_MASK = np.uint64((1 << SOURCE_SHIFT) - 1)
"""Bit mask that extracts the number of a sample within its source."""


@dataclass(frozen=True)
class Dataset:
    """The samples of a run, by position.

    The bits of a sample number from SOURCE_SHIFT on are the index of its source.
    """

    sources: tuple[SampleSource, ...]
    validation: tuple[SampleSource | None, ...]
    """Held-out text of each source; None for a source without any."""
    mixture: Mixture
    step_sizes: StepSizes
    """Samples and context length of each step, by the batch-size and context-length schedules."""
    requested_steps: int
    """`train.steps`, or the number of steps that `train.epochs` resolves to."""
    tokenizer: Path
    manifest: DataManifest
    """Description of the data that is stored in the job directory."""

    @property
    def chat_template(self) -> str | None:
        """The chat template of the conversations; None if there are none.

        Raises InputError if it is missing, DamagedError if it is not the one that rendered them.
        """
        if self.manifest.chat is None:
            return None
        path = self.tokenizer.with_name(CHAT_TEMPLATE)
        try:
            content = read_whole(path)
        except FileNotFoundError:
            raise InputError(
                "the chat template is missing", where=path, next="run dtt tokenize again"
            ) from None
        if hashlib.sha256(content).hexdigest() != self.manifest.chat.template_sha256:
            raise DamagedError(
                "the chat template is not the one that rendered the conversations",
                where=path,
                next="run dtt tokenize again: it restores the file",
            )
        return content.decode()

    def left_out(self) -> list[str]:
        """Return a line for each reason why conversations of a source are not (entirely) used."""
        return [
            f"{source.name}: {line}"
            for source in self.sources
            if isinstance(source, TokenSource) and source.packing_counts is not None
            for line in source.packing_counts.lines(self.step_sizes.sample_tokens)
        ]

    @property
    def steps(self) -> int:
        """Number of optimizer steps with a full batch of samples; at most `requested_steps`."""
        return self.step_sizes.step_of(self.mixture.end)

    def first_sample(self, step: int) -> int:
        """Return the position of the first sample of a step; steps count from 0."""
        return self.step_sizes.first_sample(step)

    def order(self, first: int, count: int) -> SampleNumbers:
        """Return the sample numbers at positions first … first + count - 1 of the run."""
        # Sources first: which samples a source gives follows from how many of its own came before.
        sources, places = self.mixture.places(first, count)
        samples = np.empty(count, dtype=np.uint64)
        for number in np.unique(sources).tolist():
            where = sources == number
            # The positions of one source are consecutive, although the mixture interleaves sources.
            numbers = self.sources[number].order(int(places[where][0]), int(where.sum()))
            # The source is part of the number, so the data hash covers it.
            samples[where] = numbers | np.uint64(number << SOURCE_SHIFT)
        return samples

    def read(self, samples: SampleNumbers) -> SampleRows:
        """Return the samples, one per row in the given order; see `SampleSource.read`."""
        parts = [
            (source.read(numbers), where) for source, numbers, where in self.by_source(samples)
        ]
        # The usual case of one source costs no copy.
        return parts[0][0] if len(parts) == 1 else _merged(parts)

    def by_source(
        self, samples: SampleNumbers
    ) -> Iterator[tuple[SampleSource, SampleNumbers, npt.NDArray[np.bool_]]]:
        """Yield each source in `samples`, its sample numbers, and a mask of their indices."""
        sources = samples >> np.uint64(SOURCE_SHIFT)
        for source in np.unique(sources).tolist():
            where = sources == source
            yield self.sources[source], samples[where] & NUMBER_MASK, where

    def counts(self, samples: SampleNumbers) -> Counts:
        """Return the sizes of these samples; see `SampleSource.counts`."""
        parts = [source.counts(numbers) for source, numbers, _ in self.by_source(samples)]
        return Counts(*map(sum, zip((0, 0, 0), *parts, strict=True)))

    def origin(self, sample: int) -> tuple[SampleSource, list[DocumentSpan]]:
        """Return the source of a sample and the documents in it, in order."""
        source = self.sources[sample >> SOURCE_SHIFT]
        return source, source.origin(sample & int(NUMBER_MASK))

    def epochs(self, position: int) -> dict[str, float]:
        """Return the number of epochs, as a float, of each source before a position, by name."""
        # Counts follow from the position alone: nothing is stored, and nothing can drift.
        counts = self.mixture.counts(position).tolist()
        return {s.name: n / len(s) for s, n in zip(self.sources, counts, strict=True)}

    def shares(self) -> dict[str, float]:
        """Return the fraction of the run's samples that come from each source, by name."""
        counts = self.mixture.counts(self.mixture.end).tolist()
        return {s.name: n / self.mixture.end for s, n in zip(self.sources, counts, strict=True)}

    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        """Return the bytes of text of each id, [vocab_size], or None if they are not known."""
        return token_bytes(self.tokenizer, self.manifest.vocab_size, self.manifest.end_of_document)

    def state(self, position: int) -> dict[str, Any]:
        """Return the state from which `restore` resumes at `position`, by source name.

        Sources without state are absent.
        """
        counts = self.mixture.counts(position).tolist()
        # Each source has its own position, which the mixture knows.
        return {
            s.name: s.state(n)
            for s, n in zip(self.sources, counts, strict=True)
            if isinstance(s, Streamed)
        }

    def restore(self, states: dict[str, Any]) -> None:
        """Resume at the position for which `state` was called."""
        for source in self.sources:
            if isinstance(source, Streamed) and source.name in states:
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


def _merged(parts: Sequence[tuple[SampleRows, npt.NDArray[np.bool_]]]) -> SampleRows:
    """Merge the rows of several sources; each comes with a mask of its rows in the result."""

    def merged(columns: Sequence[npt.NDArray[Any] | None]) -> Any:
        first = columns[0]
        if first is None:
            return None
        whole = np.empty((len(parts[0][1]), first.shape[1]), first.dtype)
        for values, (_, where) in zip(columns, parts, strict=True):
            whole[where] = values
        return whole

    return SampleRows(
        merged([rows.ids for rows, _ in parts]),
        merged([rows.targets for rows, _ in parts]),
        merged([rows.doc_ids for rows, _ in parts]),
        {name: merged([rows.extra[name] for rows, _ in parts]) for name in parts[0][0].extra},
    )


def open_dataset(cfg: RunConfig) -> Dataset:
    """Open all data that `cfg` trains on.

    No token ids are read from token files. A text source reads some text to estimate its size.

    Raises ConfigError if the sources, schedules and tokenizers are incompatible, and InputError
    or DamagedError for missing or damaged files.
    """
    train, data = cfg.train, cfg.data
    given = all_sources(cfg)
    opened = open_sources(cfg, given)
    for source in opened:
        _check_length(source, train.seq_len)
    if train.epochs is not None:
        # `train.epochs` needs the number of samples, which is known only now.
        steps = steps_of_epochs(train, sum(len(source.train) for source in opened))
        train = train.model_copy(update={"steps": steps})
    step_sizes = step_sizes_of(train)
    mixture = Mixture(
        [len(source.train) for source in opened],
        # Weights change at steps, and the mixture works on samples: steps may have different sizes.
        [
            (step_sizes.first_sample(step - 1), weights)
            for step, weights in _weights(cfg, given, opened)
        ],
        data.on_exhausted,
        step_sizes.first_sample(train.steps),
    )
    talks = [source for source in opened if source.chat is not None]
    _check_templates(talks)
    # Beside that of conversations is their template.
    described = next(iter(talks), opened[0])
    return Dataset(
        sources=tuple(source.train for source in opened),
        validation=tuple(source.validation for source in opened),
        mixture=mixture,
        step_sizes=step_sizes,
        requested_steps=train.steps,
        tokenizer=described.vocabulary.tokenizer,
        manifest=_manifest(cfg, given, opened),
    )


def _check_templates(talks: Sequence[OpenedSource]) -> None:
    """Raise ConfigError unless all conversations have the same template and stop tokens."""
    for one, other in pairwise(talks):
        differing = [
            key
            for key in ("template_sha256", "stop_tokens")
            if getattr(one.chat, key) != getattr(other.chat, key)
        ]
        if differing:
            name, path = other.train.name, one.vocabulary.tokenizer
            raise ConfigError(
                f"{one.train.name} and {name} have different chat templates or stop tokens",
                where=f"{path}, {other.vocabulary.tokenizer}",
                why=f"{', '.join(differing)}: a model uses only one conversation format",
                next=f"tokenize {name} again with chat.template={path / CHAT_TEMPLATE}",
            )


def _check_length(source: OpenedSource, seq_len: int) -> None:
    """Raise ConfigError if a source has no sample."""
    train = source.train
    counts = train.packing_counts if isinstance(train, TokenSource) else None
    if counts is None:
        compatibility.check_length(train.name, train.tokens, len(train), seq_len)
    elif not len(train):
        raise ConfigError(
            f"no conversation of {train.name} can be used",
            why="; ".join(counts.lines(seq_len)) or "its training split is empty",
            next=f"train.seq_len={counts.longest - 1} fits the longest, {counts.shortest - 1} "
            "the shortest"
            if counts.too_long
            else "check chat.train_on, and `train: false` in the rows",
        )


def _manifest(
    cfg: RunConfig, given: Sequence[AnySource], opened: Sequence[OpenedSource]
) -> DataManifest:
    paths = [source.place for source in given]
    paths = paths or [*cfg.data.input_paths(cfg), Path(cfg.data.type)][:1]
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
        key=compatibility.data_key((source.name, source.key) for source in sources),
        tokenizer_sha256=vocabulary.sha256,
        vocab_size=vocabulary.size,
        end_of_document=vocabulary.end_of_document,
        begin_of_document=_begin_of_document(cfg, opened),
        chat=next((source.chat for source in opened if source.chat is not None), None),
        sources=sources,
    )


def _begin_of_document(cfg: RunConfig, opened: Sequence[OpenedSource]) -> int | None:
    """Return the token before documents of text; None if they begin without one.

    Raises ConfigError if those of two sources begin differently.

    In a run on conversations only, it is what the tokenizer adds: the base model was trained so,
    and plain text, as in benchmark tasks, must not change with the tuning.
    """
    # The samples of a class begin as they do.
    plain = [s for s in opened if s.chat is None and not isinstance(s.train, OwnSource)]
    found = {s.train.name: s.vocabulary.begin_of_document for s in plain}
    if len({*found.values()}) > 1:  # the model could be used with neither
        raise ConfigError(
            "the documents of the sources begin differently",
            where="data.sources",
            why=", ".join(f"{name}: {begin or 'no'} token" for name, begin in found.items()),
            next="create them again with one value of tokenizer.bos: dtt tokenize --overwrite",
        )
    if found or getattr(cfg.tokenizer, "bos", "tokenizer") == "never":
        return next(iter(found.values()), None)
    path = opened[0].vocabulary.tokenizer
    try:
        return begin_of_document(open_tokenizer(path), path)
    except ConfigError:  # it also adds tokens after a text, which cannot be continued then
        return None


def _weights(
    cfg: RunConfig, given: Sequence[AnySource], opened: Sequence[OpenedSource]
) -> list[tuple[int, Weights]]:
    """Return the mixture weights with the step, counted from 1, from which they hold.

    Weights are converted to fractions through their decimal form, so that 0.1 means exactly 1/10.
    A source without a weight is weighted by its number of samples. The weight of a pattern is split
    among its folders in proportion to their numbers of samples.
    """
    if not given:  # text or synthetic data
        return [(1, (Fraction(1),))]
    entries = [s.entry if isinstance(s, MatchedSource) else s.label for s in given]
    sizes = [len(source.train) for source in opened]
    totals: Counter[str] = Counter()
    for entry, size in zip(entries, sizes, strict=True):
        totals[entry] += size
    first = {s.label: s.weight or float(totals[s.label]) for s in cfg.sources}
    changes = [(1, first), *((change.step, change.weights) for change in cfg.data.weights)]
    return [
        (
            step,
            tuple(
                # Through the text of the number: Fraction(0.1) would be 3602879701896397/2**55,
                # with a period beyond the limit.
                Fraction(str(weights[entry])) * Fraction(size, totals[entry])
                for entry, size in zip(entries, sizes, strict=True)
            ),
        )
        for step, weights in changes
    ]
