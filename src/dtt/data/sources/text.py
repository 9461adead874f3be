"""Training straight from text: a corpus, tokenized on the way.

The corpus is cut into units of about 16 MB of text (data/corpus.py), and an epoch visits them in a
keyed permutation. The documents of a unit that are not held out stand in a row, and the samples of
the row are visited in a keyed permutation, too. The last one is short, so nothing is dropped and
nothing carried over: in an epoch every token but the first of each row is a target exactly once.
A unit that holds more, because it must be read from its start (a .gz), is worked through in parts,
one after the other, each with a row of its own.

So the shuffle is as wide as a unit; that of token files is as wide as the corpus. Every process
encodes the whole stream, since all must know how many samples a row gives, and reads its share of
the samples: what the run needs of text in a second, divided by the speed of the encoder, is the
part of a core that this takes of every process.
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

from dtt.artifacts import fingerprint
from dtt.config.data import GivenTokenizerConfig
from dtt.config.run import RunConfig
from dtt.data.corpus import Corpus
from dtt.data.encoder import Encoder
from dtt.data.order import permutation
from dtt.data.sampling import some_text
from dtt.data.source import Opened, Piece, Samples, Vocabulary
from dtt.data.sources.held_out import HeldOutText
from dtt.data.sources.row import Documents, Row, documents_of
from dtt.data.sources.stream import Cursor, Part, TextStream
from dtt.data.tokenizer import find_tokenizer
from dtt.errors import DamagedError
from dtt.reading import fits
from dtt.runtime.files import sha256_file

NAME = "text"
RECENT_PARTS = 2**16
"""Parts whose place is remembered; a loader that works ahead asks for the state of one of them."""


def open_text(cfg: RunConfig) -> Opened:
    """The corpus that `cfg` names, and what is held out of it, by the given tokenizer."""
    assert isinstance(cfg.tokenizer, GivenTokenizerConfig)  # RunConfig sees to it
    documents = Documents(Corpus(cfg.corpus_dir))
    path = find_tokenizer(cfg.tokenizer)
    encoder = Encoder(path.read_bytes(), cfg.tokenizer.end_of_document, path, cfg.tokenize.engine)
    encoder.settle(encoder.doubt(some_text(documents.corpus, documents.units)))
    vocabulary = Vocabulary(path, sha256_file(path), encoder.vocab_size, encoder.end_of_document)
    train = TextSource(
        documents,
        encoder,
        name=NAME,
        seq_len=cfg.train.seq_len,
        seed=cfg.seed,
        validation_fraction=cfg.tokenize.validation_fraction,
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
    )
    return Opened(
        train,
        validation if len(validation) else None,
        fingerprint([train.identity, vocabulary.sha256]),
        vocabulary,
        documents.corpus.manifest.source,
    )


class TextSource:
    """The documents of a corpus that are not held out; see dtt.data.source.Source.

    `samples_at`, `read` and `state` may be called from different threads. A thread of this object
    encodes one part ahead: two or three are in memory, more only when a single call needs more.
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
        stop_on_bad_document: bool = False,
    ) -> None:
        """Encode about 1 MB to estimate the size; InputError when there is no text to train on.

        What TextStream raises for a document that cannot be read comes from `samples_at`.
        """
        self.name = name
        self._documents, self._encoder, self._seq_len = documents, encoder, seq_len
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
        """What decides the samples, beside tokenizer, seq_len, seed and name."""
        beginning, self.tokens = self._stream.beginning()
        self.bytes_per_token: float | None = beginning.text_bytes / len(beginning.ids)
        self._lock = Lock()
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self.restore(asdict(Cursor()))

    def __len__(self) -> int:
        """Samples in an epoch, estimated."""
        return max(1, self.tokens // self._seq_len)

    def samples_at(self, first: int, count: int) -> Samples:
        """The samples at places first … first + count - 1; encodes what is not there yet."""
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

    def read(self, samples: Samples) -> npt.NDArray[np.int64]:
        """Ids [len(samples), seq_len + 1]; quick for what `samples_at` gave last."""
        ids = np.empty((len(samples), self._seq_len + 1), dtype=np.int64)
        for row, where, numbers in self._by_row(samples):
            ids[where] = row.read(numbers)
        return ids

    def documents(self, samples: Samples, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Which document of its sample each id is in, counted from 0."""
        return documents_of(ids, self._encoder.end_of_document)

    def targets(self, samples: Samples) -> int:
        """How many targets these samples have."""
        return sum(row.targets(numbers) for row, _, numbers in self._by_row(samples))

    def locate(self, sample: int) -> list[Piece]:
        """The documents of a sample, numbered among those of the file that can be read."""
        ((row, _, numbers),) = self._by_row(np.array([sample], dtype=np.uint64))
        return self._documents.locate(row, int(numbers[0]))

    def state(self, consumed: int) -> Any:
        """Where the part begins in which sample `consumed` lies: a few integers."""
        with self._lock:
            self._reach(consumed + 1)
            return asdict(self._since(consumed)[0].begin)

    def restore(self, state: Any) -> None:
        """Go on where `state` was taken; what lies before it in its part is encoded once more."""
        sound = fits(state, dict.fromkeys(asdict(Cursor()), int)) and min(state.values()) >= 0
        if not sound or len(state) > len(asdict(Cursor())):
            raise DamagedError(f"{state} is no place in the order of a source")
        with self._lock:
            self._parts = self._stream.parts(Cursor(**state))
            self._ahead: Future[tuple[Part, Row]] | None = None
            self._recent: deque[Part] = deque(maxlen=RECENT_PARTS)
            self._rows: OrderedDict[int, Row] = OrderedDict()
            """By the number of the first sample."""
            self._needed = 0

    def _reach(self, place: int) -> None:
        """Take up parts until all samples before `place` are known."""
        while not self._recent or self._recent[-1].end < place:
            coming = self._ahead or self._encoding.submit(next, self._parts)
            part, row = coming.result()
            self._ahead = self._encoding.submit(next, self._parts)
            self._recent.append(part)
            self._rows[part.first] = row
            self._rows.move_to_end(part.first)  # it may be there from the epoch before

    def _since(self, place: int) -> list[Part]:
        """The parts from that which `place` lies in to the newest."""
        parts = [*takewhile(lambda part: part.end > place, reversed(self._recent))][::-1]
        if not parts or parts[0].begin.place > place:
            raise IndexError(f"place {place} lies too far back")
        return parts

    def _order(self, part: Part, start: int, stop: int) -> Samples:
        """The samples at places start … stop - 1, all of them in `part`."""
        index = np.arange(start - part.begin.place, stop - part.begin.place, dtype=np.uint64)
        key = f"{self._key}/{part.begin.epoch}/{part.first}".encode()
        return permutation(index, part.samples, key) + np.uint64(part.first)

    def _by_row(self, samples: Samples) -> Iterator[tuple[Row, npt.NDArray[np.intp], Samples]]:
        """Each row that has some of `samples`: where these are, and their numbers in the row."""
        left = np.arange(len(samples))
        while left.size:
            first, row = self._row_of(int(samples[left[0]]))
            numbers = samples[left] - np.uint64(first)  # those below `first` wrap and are large
            here = numbers < len(row)
            yield row, left[here], numbers[here]
            left = left[~here]

    def _row_of(self, sample: int) -> tuple[int, Row]:
        """The row a sample is in, with the number of its first; encoded again if need be."""
        with self._lock:
            for first, row in self._rows.items():
                if first <= sample < first + len(row):
                    return first, row
            # In the thread that encodes, for two may not use an encoder at once.
            first, row = self._encoding.submit(self._stream.find, sample).result()
            self._rows[first] = row
            self._forget()
            return first, row

    def _forget(self) -> None:
        """Drop the oldest rows, except those that the last call of `samples_at` needs."""
        while len(self._rows) > self._needed + 1:
            self._rows.popitem(last=False)
