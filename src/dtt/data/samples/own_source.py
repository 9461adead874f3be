"""Samples of a user's own: a class reads them, dtt shuffles, pads and counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtt.artifacts.manifest import fingerprint
from dtt.base.targets import IGNORE_INDEX
from dtt.config.own import OwnCodeError, own_code
from dtt.config.run import RunConfig
from dtt.config.sources import Source, SourceEntry
from dtt.data.samples.named_tokenizer import read_vocabulary
from dtt.data.samples.protocol import (
    Counts,
    DocumentSpan,
    OpenedSource,
    SampleNumbers,
    SampleRows,
    Vocabulary,
    targets_of,
)
from dtt.data.samples.shuffle import Order


def key_of(config: Source) -> str:
    """Return the key of the section, or of the list that it is an entry of."""
    return "data.sources" if isinstance(config, SourceEntry) else "data"


def keys_of(config: Source) -> dict[str, Any]:
    """Return the keys that decide what a class yields."""
    # Not the path of the tokenizer: a job keeps its own copy. Nor what an entry of a mixture has
    # beside the keys of the class.
    beside = set(SourceEntry.model_fields) if isinstance(config, SourceEntry) else set()
    return config.model_dump(mode="json", exclude={"tokenizer", *beside} - {"type"})


def wrong_result(
    config: Source, method: str, said: str, next: str = "correct it in your file"
) -> OwnCodeError:
    """Return the error for what a method of a class returned, with the line of the method."""
    code = getattr(getattr(type(config), method), "__code__", None)
    line = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}, "
    where = f"{line}{key_of(config)}.type={config.type}"
    return OwnCodeError(f"{type(config).__name__}: {said}", where=where, next=next)


class OwnSource:
    """Some samples of a class of a user's own. Implements `SampleSource`."""

    bytes_per_token: float | None = None

    def __init__(
        self, name: str, config: Source, numbers: range, vocabulary: Vocabulary, cfg: RunConfig
    ) -> None:
        """Make samples of those with these `numbers`, for the run that `cfg` describes."""
        self.name = name
        self._config, self._numbers, self._vocabulary = config, numbers, vocabulary
        self._width = cfg.train.seq_len + 1
        self._with_doc_ids = cfg.data.mask_documents
        self.tokens = len(numbers) * cfg.train.seq_len
        self._shuffle = Order(f"{cfg.seed}/{self.name}", len(numbers))

    def __len__(self) -> int:
        """See SampleSource."""
        return len(self._numbers)

    def order(self, first: int, count: int) -> SampleNumbers:
        """See SampleSource."""
        return self._shuffle.order(first, count)

    def read(self, samples: SampleNumbers) -> SampleRows:
        """See SampleSource. Raises OwnCodeError for what is no sample."""
        shape = len(samples), self._width
        ids = np.full(shape, IGNORE_INDEX, np.int64)
        mask = np.zeros(shape, np.bool_)
        for row, sample in enumerate(samples):
            given, counted = self.sample(int(sample))
            ids[row, : len(given)], mask[row, : len(given)] = given, counted
        # A sample is one document. Those of other sources in the batch may have several.
        doc_ids = np.zeros(shape, np.int32) if self._with_doc_ids else None
        return SampleRows(ids, targets_of(ids, mask[:, 1:]), doc_ids)

    def sample(self, sample: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the ids of a sample, and which of them are targets."""
        number = self._numbers[sample]
        with own_code(self._config, key_of(self._config), f"sample {number}"):
            found = self._config.read(number, self._width)
            given, counted = found if isinstance(found, tuple) else (found, None)
            ids = np.asarray(given)
            mask = np.ones(len(ids), np.bool_) if counted is None else np.asarray(counted, np.bool_)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not 1 < len(ids) <= self._width:
            said = f"{ids.dtype} of shape {list(ids.shape)}"
            raise self._wrong(number, f"is {said}, not 2 to {self._width} token ids")
        if not 0 <= ids.min() <= ids.max() < self._vocabulary.size:
            said = f"ids from {ids.min()} to {ids.max()}"
            raise self._wrong(number, f"has {said}, of {self._vocabulary.size} tokens")
        if mask.shape != ids.shape:
            raise self._wrong(number, f"has {len(ids)} ids and a mask of {mask.size}")
        return ids.astype(np.int64), mask

    def check_repeatable(self) -> None:
        """Raise OwnCodeError if a sample differs when it is read again.

        A resumed run and the other ranks read it again, and would train on something else.
        """
        one, other = (self.sample(0)[0].tolist() for _ in range(2))
        if one != other:
            said = "differs when it is read again: derive it from its number"
            raise self._wrong(self._numbers[0], said)

    def _wrong(self, number: int, said: str) -> OwnCodeError:
        said = f"sample {number} {said}"
        return wrong_result(self._config, "read", said)

    def counts(self, samples: SampleNumbers) -> Counts:
        """See SampleSource."""
        rows = self.read(samples)
        targets = int((rows.targets != IGNORE_INDEX).sum())
        return Counts(targets, targets, int((rows.ids != IGNORE_INDEX).sum()))

    def origin(self, sample: int) -> list[DocumentSpan]:
        """See SampleSource. Each sample is one document."""
        length = len(self.sample(sample)[0])
        return [DocumentSpan(Path(self.name), self._numbers[sample], 0, 0, length)]


def open_own(config: Source, cfg: RunConfig, name: str) -> OpenedSource:
    """Return the source of a class of a user's own; raise OwnCodeError if it cannot be used.

    `name` is its own, or that of the source whose held-out samples it has.
    """
    vocabulary = read_vocabulary(config.tokenizer)
    with own_code(config, key_of(config)):
        count, version = config.samples(), config.version()
    if type(count) is not int or count <= config.held_out:
        said = f"`samples` returned {count!r}, and held_out={config.held_out}"
        raise wrong_result(config, "samples", said)
    train = OwnSource(name, config, range(count - config.held_out), vocabulary, cfg)
    train.check_repeatable()
    held_out = range(count - config.held_out, count)
    validation = OwnSource(name, config, held_out, vocabulary, cfg) if held_out else None
    # Not the file of the class, which a resume compares by itself: `--allow-change` takes another.
    key = fingerprint([keys_of(config), count, version, vocabulary.sha256])
    return OpenedSource(train, validation, key, vocabulary, None)
