"""Training directly from text: a corpus that is tokenized on the fly.

The corpus is divided into units of about 16 MB of text (data/corpus/units.py), and each epoch
visits them in a keyed permutation. The documents of a unit that are not held out are concatenated
into a row, and the samples of the row are visited in a keyed permutation, too. The last sample of a
row may be short, so no token is dropped or carried over to the next row: in an epoch, every token
but the first of each row is a target exactly once. A unit that holds more text, because its file
can only be read from the start (a .gz), is processed in consecutive parts, each with its own row.

So the shuffle buffer is one unit, whereas token files are shuffled over the whole corpus. Every
rank encodes the whole stream, because all ranks must know the number of samples in each row, and
then reads only its own samples. The cost per rank, in CPU cores, is the text that the whole run
consumes per second divided by the throughput of the encoder.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from itertools import takewhile
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from dtt.artifacts.manifest import fingerprint
from dtt.base.errors import ConfigError, DamagedError
from dtt.base.files import sha256_file
from dtt.base.reading import fits
from dtt.config.data import GivenTokenizerConfig
from dtt.config.run import RunConfig
from dtt.data.corpus.described import read_corpus
from dtt.data.corpus.document_sampling import some_text
from dtt.data.corpus.units import Corpus
from dtt.data.samples.encoded_documents import (
    DocumentMasks,
    Documents,
    EncodedDocuments,
    TextSamples,
)
from dtt.data.samples.held_out import HeldOutText
from dtt.data.samples.protocol import Opened, Samples, Vocabulary
from dtt.data.samples.shuffle import permutation
from dtt.data.samples.text_stream import Cursor, TextStream, UnitPart
from dtt.data.text.encoder import Encoder
from dtt.data.text.side_files import tokenizer_content
from dtt.data.text.tokenizer import find_tokenizer

NAME = "text"
RECENT_PARTS = 2**16
"""Number of recent parts whose position is kept.

A loader that prefetches requests the state at a position behind the newest sample it has read."""


def open_text(cfg: RunConfig) -> Opened:
    """Open the corpus that `cfg` names and its held-out text, encoded with the given tokenizer."""
    assert isinstance(cfg.tokenizer, GivenTokenizerConfig)  # RunConfig validates this
    documents = Documents(Corpus(cfg.corpus_dir, read_corpus(cfg)))
    path = find_tokenizer(cfg.tokenizer)
    content, end = path.read_bytes(), cfg.tokenizer.end_of_document
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
    encoder.settle(encoder.doubt(some_text(documents.corpus, documents.units)))
    vocabulary = Vocabulary(
        path,
        sha256_file(path),
        encoder.vocab_size,
        encoder.end_of_document,
        encoder.begin_of_document,
    )
    masks = DocumentMasks(encoder.end_of_document, cfg.data.mask_documents, cfg.data.eod_mask_loss)
    train = TextSource(
        documents,
        encoder,
        name=NAME,
        seq_len=cfg.train.seq_len,
        seed=cfg.seed,
        validation_fraction=cfg.tokenize.validation_fraction,
        masks=masks,
        stop_on_bad_document=cfg.tokenize.on_bad_document == "stop",
    )
    assert train.bytes_per_token is not None
    validation = HeldOutText(
        documents,
        encoder,
        name=NAME,
        seq_len=cfg.train.seq_len,
        validation_fraction=cfg.tokenize.validation_fraction,
        text_bytes=int(cfg.train.eval_tokens * train.bytes_per_token),
        masks=masks,
    )
    return Opened(
        train,
        validation if len(validation) else None,
        fingerprint([train.identity, vocabulary.sha256]),
        vocabulary,
        documents.corpus.manifest.source,
    )


class TextSource(TextSamples):
    """The training documents of a corpus, those not held out.

    Implements `Source` and `Streamed` of dtt.data.samples.protocol. `read` is fast for the samples
    that `order` returned last; others may have to be encoded again.

    `order`, `read` and `state` may be called from different threads. A background thread
    encodes one part ahead. Two or three parts are in memory, more only if a single call needs them.
    """

    def __init__(
        self,
        documents: Documents,
        encoder: Encoder,
        *,
        name: str,
        seq_len: int,
        seed: int,
        validation_fraction: float,
        masks: DocumentMasks,
        stop_on_bad_document: bool = False,
    ) -> None:
        """Encode about 1 MB to estimate the number of tokens.

        Raises InputError if there is no text to train on. With `stop_on_bad_document`, `order`
        raises DamagedError at the first unreadable document.
        """
        super().__init__(documents, masks, seq_len)
        self.name = name
        self._key = f"{seed}/{name}"
        self._stream = TextStream(
            documents,
            encoder,
            key=self._key,
            seq_len=seq_len,
            validation_fraction=validation_fraction,
            stop_on_bad_document=stop_on_bad_document,
        )
        self.identity = self._stream.identity()
        """Facts that determine the samples, besides tokenizer, seq_len, seed and name."""
        beginning, self.tokens = self._stream.beginning()
        self.bytes_per_token: float | None = beginning.text_bytes / len(beginning.ids)
        self._lock = Lock()
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self.restore(asdict(Cursor()))

    def __len__(self) -> int:
        """Return the estimated number of samples in an epoch."""
        return max(1, self.tokens // self._seq_len)

    def order(self, first: int, count: int) -> Samples:
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
            self._parts = self._stream.parts(Cursor(**state))
            self._ahead: Future[tuple[UnitPart, EncodedDocuments]] | None = None
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

    def _order(self, part: UnitPart, start: int, stop: int) -> Samples:
        """Return the samples at positions start … stop - 1, which must all lie in `part`."""
        index = np.arange(start - part.begin.place, stop - part.begin.place, dtype=np.uint64)
        key = f"{self._key}/{part.begin.epoch}/{part.first}".encode()
        return permutation(index, part.samples, key) + np.uint64(part.first)

    def _by_row(
        self, samples: Samples
    ) -> Iterator[tuple[EncodedDocuments, npt.NDArray[np.intp], Samples]]:
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
            first, row = self._encoding.submit(self._stream.find, sample).result()
            self._rows[first] = row
            self._forget()
            return first, row

    def _forget(self) -> None:
        """Drop the oldest rows, but keep those that the last call of `order` needs."""
        while len(self._rows) > self._needed + 1:
            self._rows.popitem(last=False)
