"""Training directly from text: a corpus that is tokenized on the fly.

The corpus is divided into units of about 16 MB of text (data/corpus/units.py), and each epoch
visits them in a keyed permutation. The documents of a unit that are not held out are concatenated
into a row, and the samples of the row are visited in a keyed permutation, too. The last sample of a
row may be short, so no token is dropped or carried over to the next row: in an epoch, every token
but the first of each row is a target exactly once. A unit that holds more text, because its file
can only be read from the start (a .gz), is processed in consecutive parts, each with its own row.
With a section `clean` the units are those of the selection, up to 256 MB, as it numbers documents
by unit.

So the shuffle buffer is one unit or part, whereas token files are shuffled over the whole corpus.
Every rank encodes the whole stream, because all ranks must know the number of samples in each row,
and then reads only its own samples. The cost per rank, in CPU cores, is the text that the whole run
consumes per second divided by the throughput of the encoder.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain, count, islice, takewhile
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from dtt.artifacts.manifest import fingerprint
from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.base.files import sha256_file
from dtt.base.log import log
from dtt.base.reading import fits, read_whole
from dtt.config.data import GivenTokenizerConfig
from dtt.config.run import RunConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.described import read_corpus
from dtt.data.corpus.document_sampling import HELD_OUT_BY, check_usable, held_out, some_text
from dtt.data.corpus.documents import batches
from dtt.data.corpus.selection import removals_key
from dtt.data.corpus.units import Corpus, Unit
from dtt.data.samples.encoded_documents import (
    CorpusDocuments,
    Document,
    EncodedDocuments,
    TextSamples,
)
from dtt.data.samples.protocol import OpenedSource, SampleNumbers, Vocabulary
from dtt.data.samples.shuffle import permutation
from dtt.data.text.encoder import Encoder
from dtt.data.text.side_files import tokenizer_content
from dtt.data.text.tokenizer import find_tokenizer

PART_BYTES = 2**24
"""Text per part, including held-out documents; bounds the memory."""
ESTIMATE_BYTES = 2**20
SEARCHED_BYTES = 2**29
"""Maximum bytes of the corpus to search for held-out text; this takes seconds at each start."""
UNIT_SHIFT = 26
"""A sample's number is (unit index << UNIT_SHIFT) + index of the sample within the unit."""
RECENT_PARTS = 2**16
"""Number of recent parts whose position is kept.

A loader that prefetches requests the state at a position behind the newest sample it has read."""


def open_text(cfg: RunConfig) -> OpenedSource:
    """Open the corpus that `cfg` names and its held-out text, encoded with the given tokenizer."""
    assert isinstance(cfg.tokenizer, GivenTokenizerConfig)  # RunConfig validates this
    documents = CorpusDocuments(Corpus(cfg.corpus_dir, read_corpus(cfg), clean=cfg.clean))
    path = find_tokenizer(cfg.tokenizer)
    content, end = read_whole(path), cfg.tokenizer.end_of_document
    # Exports and resumes of such a job would use other ids than training did.
    if tokenizer_content(path) != content:
        raise ConfigError(
            "the files beside tokenizer.json change its ids",
            where=path,
            why="a job that trains on text keeps tokenizer.json alone",
            next="dtt tokenize merges them: data.type=tokens",
        )
    encoder = Encoder(content, end, path, cfg.tokenize.engine, cfg.tokenizer.bos)
    # Before the first document: a run that changed engines midway would mix their ids.
    encoder.choose_engine(encoder.engine_problem(some_text(documents.corpus, documents.units)))
    vocabulary = Vocabulary(
        path,
        sha256_file(path),
        encoder.vocab_size,
        encoder.end_of_document,
        encoder.begin_of_document,
    )
    options: dict[str, Any] = {
        "seq_len": cfg.train.seq_len,
        "doc_ids": cfg.data.mask_documents,
        "eod_mask_loss": cfg.data.eod_mask_loss,
        "validation_fraction": cfg.tokenize.validation_fraction,
    }
    stop = cfg.tokenize.on_bad_document == "stop"
    train = TextSource(documents, encoder, seed=cfg.seed, stop_on_bad_document=stop, **options)
    assert train.bytes_per_token is not None
    text_bytes = int(cfg.train.eval_tokens * train.bytes_per_token)
    validation = HeldOutText(documents, encoder, text_bytes=text_bytes, **options)
    return OpenedSource(
        train,
        validation if len(validation) else None,
        fingerprint([train.identity, vocabulary.sha256]),
        vocabulary,
        documents.corpus.manifest.source,
    )


class HeldOutText(TextSamples):
    """The first held-out documents of a corpus, encoded at the start. Implements SampleSource."""

    def __init__(
        self,
        documents: CorpusDocuments,
        encoder: Encoder,
        *,
        validation_fraction: float,
        text_bytes: int,
        **options: Any,
    ) -> None:
        """Encode about `text_bytes` of UTF-8, or less if the first SEARCHED_BYTES hold less.

        `options` are those of TextSamples.
        """
        super().__init__(documents, encoder, **options)
        found: list[Document] = []
        missing, room, bad = text_bytes, SEARCHED_BYTES, BadDocuments()
        for document in chain.from_iterable(documents.of(unit, bad) for unit in documents.units):
            if validation_fraction == 0 or missing <= 0 or room <= 0:
                break
            if document.text and held_out(document.text, validation_fraction):
                found.append(document)
                missing -= len(document.text)
            room -= len(document.text) + 1
        self._row = EncodedDocuments(found, encoder, self._seq_len)
        self.tokens = len(self._row.ids)
        self.bytes_per_token: float | None = self._row.text_bytes / max(self.tokens, 1)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._row)

    def order(self, first: int, count: int) -> SampleNumbers:
        """Return the samples in their stored order, starting over after the last one."""
        return np.arange(first, first + count, dtype=np.uint64) % np.uint64(len(self))

    def _by_row(
        self, samples: SampleNumbers
    ) -> Iterator[tuple[EncodedDocuments, npt.NDArray[np.intp], SampleNumbers]]:
        """See TextSamples."""
        yield self._row, np.arange(len(samples)), samples


@dataclass(frozen=True)
class Cursor:
    """The start of a part in training order, sufficient to resume from there."""

    place: int = 0
    """Number of samples before the part, over all epochs."""
    epoch: int = 0
    unit_place: int = 0
    """Number of units before the part's unit in this epoch."""
    part: int = 0
    """Number of parts before this one in its unit."""
    sample: int = 0
    """Number of samples before this part in its unit."""


@dataclass(frozen=True)
class UnitPart:
    """A group of a unit's documents whose samples are consecutive in training order."""

    begin: Cursor
    first: int
    """Number of the part's first sample."""
    samples: int

    @property
    def end(self) -> int:
        """Position after the part's last sample."""
        return self.begin.place + self.samples


class TextSource(TextSamples):
    """The training documents of a corpus, those not held out.

    Implements `SampleSource` and `Streamed` of dtt.data.samples.protocol. `read` is fast for the
    samples that `order` returned last; others may have to be encoded again.

    `order`, `read` and `state` may be called from different threads. A background thread
    encodes one part ahead. Two or three parts are in memory, more only if a single call needs them.
    """

    def __init__(
        self,
        documents: CorpusDocuments,
        encoder: Encoder,
        *,
        seed: int,
        validation_fraction: float,
        stop_on_bad_document: bool = False,
        **options: Any,
    ) -> None:
        """Encode about 1 MB to estimate the number of tokens; `options` are those of TextSamples.

        Raises InputError if there is no text to train on. Unreadable documents are skipped and
        counted; with `stop_on_bad_document`, `order` raises DamagedError at the first one.
        """
        super().__init__(documents, encoder, **options)
        self._fraction, self._stop = validation_fraction, stop_on_bad_document
        self._key = f"{seed}/{self.name}"
        self.identity = {
            "corpus": documents.corpus.manifest.content_key(),
            "validation_fraction": validation_fraction,
            "held_out_by": HELD_OUT_BY,
            "unit_bytes": documents.unit_bytes,
            "part_bytes": PART_BYTES,
        }
        text_bytes = sum(unit.text_bytes for unit in documents.units) * (1 - validation_fraction)
        if (selection := documents.corpus.selection) is not None:
            text_bytes *= selection.kept_share
            if (removed := removals_key(selection.removals)) is not None:
                self.identity["removed"] = removed
        """Facts that determine the samples, besides tokenizer, seq_len and seed."""
        beginning = self._beginning()
        self.bytes_per_token: float | None = beginning.text_bytes / len(beginning.ids)
        estimate = int(text_bytes * len(beginning.ids) / beginning.text_bytes)
        self.tokens = max(estimate, len(beginning.ids))
        self._lock = Lock()
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self.restore(asdict(Cursor()))

    def __len__(self) -> int:
        """Return the estimated number of samples in an epoch."""
        return max(1, self.tokens // self._seq_len)

    def order(self, first: int, count: int) -> SampleNumbers:
        """Return the samples at positions first … first + count - 1; encode new parts as needed."""
        stop = first + count
        with self._lock:
            self._reach(stop)
            parts = self._since(first)
            self._needed = len(parts)
            self._forget()
        orders = (
            self._order(part, max(first, part.begin.place), min(stop, part.end))
            for part in parts
            if part.begin.place < stop
        )
        return np.concatenate([np.empty(0, dtype=np.uint64), *orders])

    def state(self, consumed: int) -> Any:
        """Return the Cursor, a few integers, of the part that contains the sample at `consumed`."""
        with self._lock:
            self._reach(consumed + 1)
            return asdict(self._since(consumed)[0].begin)

    def restore(self, state: Any) -> None:
        """Resume from `state`, which encodes its part again from the start of the part.

        Raises DamagedError if `state` is not a valid Cursor.
        """
        sound = fits(state, dict.fromkeys(asdict(Cursor()), int)) and min(state.values()) >= 0
        if not sound or len(state) > len(asdict(Cursor())):
            raise DamagedError(f"{state} is not a valid position in a data source")
        with self._lock:
            self._parts = self._parts_from(Cursor(**state))
            self._ahead: Future[tuple[UnitPart, EncodedDocuments]] | None = None
            # Without the rows, which would fill the memory.
            self._recent: deque[UnitPart] = deque(maxlen=RECENT_PARTS)
            self._rows: OrderedDict[int, EncodedDocuments] = OrderedDict()
            """Rows in memory, by the number of their first sample, oldest first."""
            self._needed = 0

    def _reach(self, place: int) -> None:
        """Encode parts until all samples before `place` are known."""
        while not self._recent or self._recent[-1].end < place:
            coming = self._ahead or self._encoding.submit(next, self._parts)
            part, row = coming.result()
            self._ahead = self._encoding.submit(next, self._parts)
            self._recent.append(part)
            self._rows[part.first] = row
            self._rows.move_to_end(part.first)  # it may be present from the previous epoch

    def _since(self, place: int) -> list[UnitPart]:
        """Return the parts from the one that contains `place` to the newest.

        Raises IndexError if that part is no longer among the recent ones.
        """
        parts = [*takewhile(lambda part: part.end > place, reversed(self._recent))][::-1]
        if not parts or parts[0].begin.place > place:
            raise IndexError(f"position {place} is no longer in memory")
        return parts

    def _order(self, part: UnitPart, start: int, stop: int) -> SampleNumbers:
        """Return the samples at positions start … stop - 1, which must all lie in `part`."""
        index = np.arange(start - part.begin.place, stop - part.begin.place, dtype=np.uint64)
        key = f"{self._key}/{part.begin.epoch}/{part.first}".encode()
        return permutation(index, part.samples, key) + np.uint64(part.first)

    def _by_row(
        self, samples: SampleNumbers
    ) -> Iterator[tuple[EncodedDocuments, npt.NDArray[np.intp], SampleNumbers]]:
        """See TextSamples."""
        left = np.arange(len(samples))
        while left.size:
            first, row = self._row_of(int(samples[left[0]]))
            numbers = samples[left] - np.uint64(first)  # those below `first` wrap around
            here = numbers < len(row)
            yield row, left[here], numbers[here]
            left = left[~here]

    def _row_of(self, sample: int) -> tuple[int, EncodedDocuments]:
        """Return the number of the first sample in the row of `sample`, and that row.

        Encodes the row again if it is no longer in memory.
        """
        with self._lock:
            for first, row in self._rows.items():
                if first <= sample < first + len(row):
                    return first, row
            # Runs in the encoder thread: two threads must not use one encoder at once.
            first, row = self._encoding.submit(self._find, sample).result()
            self._rows[first] = row
            self._forget()
            return first, row

    def _forget(self) -> None:
        """Drop the oldest rows, but keep those that the last call of `order` needs."""
        while len(self._rows) > self._needed + 1:
            self._rows.popitem(last=False)

    def _beginning(self) -> EncodedDocuments:
        """Return the first megabyte of text, without groups that have no sample, or no word.

        Raises InputError if the corpus has no text to train on, or only white space.
        """
        corpus, bad = self._documents.corpus, BadDocuments()
        for unit in self._documents.units:
            for documents in batches(self._documents.of(unit, bad), ESTIMATE_BYTES, _size):
                row = self._encode(documents)
                if len(row) and not all(document.text.isspace() for document in documents):
                    return row
        check_usable(corpus, self._documents.units, stop_at_bad=False)
        raise InputError(
            "every document with text is held out for validation",
            where=corpus.folder,
            why=f"tokenize.validation_fraction={self._fraction:g}",
            next="tokenize.validation_fraction=0 holds out none",
        )

    def _parts_from(self, cursor: Cursor) -> Iterator[tuple[UnitPart, EncodedDocuments]]:
        """Yield all non-empty parts from `cursor` on, epoch after epoch, without end."""
        bad, logged = BadDocuments(stop=self._stop), 0
        units = self._documents.units
        place, skip, sample = cursor.place, cursor.part, cursor.sample
        unit_places = range(cursor.unit_place, len(units))
        for epoch in count(cursor.epoch):
            before = place
            index = permutation(
                np.arange(len(units), dtype=np.uint64), len(units), f"{self._key}/{epoch}".encode()
            )
            for unit_place in unit_places:
                unit = units[int(index[unit_place])]
                for part, row in enumerate(self._rows_of(unit, skip, bad), skip):
                    if sample + len(row) > 1 << UNIT_SHIFT:
                        raise InputError(
                            "a file holds too much text to train from it directly",
                            where=self._documents.corpus.path(unit.spans[0].file),
                            why=f"more than {1 << UNIT_SHIFT} sequences, and it must be read from "
                            "its start",
                            next="create token files from it: dtt tokenize",
                        )
                    if len(row):
                        begin = Cursor(place, epoch, unit_place, part, sample)
                        yield UnitPart(begin, (unit.index << UNIT_SHIFT) + sample, len(row)), row
                    place, sample = place + len(row), sample + len(row)
                skip = sample = 0
                if bad.count > 2 * logged:
                    logged = bad.count
                    log.info("skipped %d documents, such as %s", logged, bad.examples[0])
            if place == before:  # the files have changed since the start
                raise InputError(
                    "the corpus has no documents to train on any more",
                    where=self._documents.corpus.folder,
                )
            unit_places = range(len(units))

    def _find(self, sample: int) -> tuple[int, EncodedDocuments]:
        """Return the number of the first sample in the row that contains `sample`, and that row.

        Encodes the sample's unit from its start. Raises IndexError if there is no such sample.
        """
        unit = self._documents.units[sample >> UNIT_SHIFT]
        first = unit.index << UNIT_SHIFT
        for row in self._rows_of(unit, 0, BadDocuments()):
            if sample < first + len(row):
                return first, row
            first += len(row)
        raise IndexError(f"there is no sample {sample}")

    def _rows_of(self, unit: Unit, skip: int, bad: BadDocuments) -> Iterator[EncodedDocuments]:
        """Yield the rows of a unit; its first `skip` parts are read, but not encoded."""
        parts = batches(self._documents.of(unit, bad), PART_BYTES, _size)
        return map(self._encode, islice(parts, skip, None))

    def _encode(self, documents: list[Document]) -> EncodedDocuments:
        train = [d for d in documents if d.text and not held_out(d.text, self._fraction)]
        return EncodedDocuments(train, self._encoder, self._seq_len)


def _size(document: Document) -> int:
    return len(document.text)
