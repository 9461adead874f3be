"""Data of a user's own: a class reads samples, which dtt shuffles, pads and counts, or gives rows.

Rows are kept encoded, as token files:

    data/rows/<class>-<key>/    token files as those of `dtt tokenize`, with tokenizer and template
              train-00000.rows  int64[sequences]: the row that each sequence was made from

Packing needs the length of every row, so all are read once. They are kept because reading and
encoding them again at each start, on each rank, would take as long as the class takes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtt.artifacts.corpus import CorpusSource
from dtt.artifacts.manifest import fingerprint
from dtt.artifacts.manifests import LostText, TokenShard, TokensManifest
from dtt.base.files import sha256_file
from dtt.base.log import Advance, log, progress
from dtt.base.targets import IGNORE_INDEX
from dtt.config.data import GivenTokenizerConfig
from dtt.config.own import OwnCodeError, own_code, own_file_of
from dtt.config.run import RunConfig
from dtt.config.sources import Rows, Source, SourceEntry
from dtt.data.conversations.row_encoder import Conversations
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import JsonRow
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
from dtt.data.text.tokenizer import given_tokenizer
from dtt.data.text.unencodable import check_lost
from dtt.data.text.unit_encoder import DocumentKind, EncodedPart, PlainText, UnitEncoder
from dtt.data.token_file import TokenFileWriter, token_dtype
from dtt.data.tokenize.markers import Split
from dtt.data.write_once import write_once

FOLDER, NUMBERS = Path("data/rows"), ".rows"
AT_ONCE = 256
"""Rows per call of the encoder; its results take many times the memory of the ids."""
READ_AGAIN = 8
"""Number of rows that each start compares with those that were encoded."""

Row = str | npt.NDArray[np.int64] | dict[str, Any]
"""A text, token ids, or a conversation as a row with `messages`."""


def _key_of(config: Source) -> str:
    """Return the key of the section, or of the list that it is an entry of."""
    return "data.sources" if isinstance(config, SourceEntry) else "data"


def _keys_of(config: Source) -> dict[str, Any]:
    """Return the keys that decide what a class yields."""
    # Not the path of the tokenizer: a job keeps its own copy. Nor what an entry of a mixture has
    # beside the keys of the class.
    beside = set(SourceEntry.model_fields) if isinstance(config, SourceEntry) else set()
    return config.model_dump(mode="json", exclude={"tokenizer", *beside} - {"type"})


def _wrong_result(
    config: Source, method: str, said: str, next: str = "correct it in your file"
) -> OwnCodeError:
    """Return the error for what a method of a class returned, with the line of the method."""
    code = getattr(getattr(type(config), method), "__code__", None)
    line = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}, "
    where = f"{line}{_key_of(config)}.type={config.type}"
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
        with own_code(self._config, _key_of(self._config), f"sample {number}"):
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

    def _wrong(self, number: int, said: str) -> OwnCodeError:
        return _wrong_result(self._config, "read", f"sample {number} {said}")

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
    vocabulary = Vocabulary.read(config.tokenizer)
    with own_code(config, _key_of(config)):
        count, version = config.samples(), config.version()
    if type(count) is not int or count <= config.held_out:
        said = f"`samples` returned {count!r}, and held_out={config.held_out}"
        raise _wrong_result(config, "samples", said)
    train = OwnSource(name, config, range(count - config.held_out), vocabulary, cfg)
    one, other = (train.sample(0)[0].tolist() for _ in range(2))
    if one != other:  # a resumed run and the other ranks would train on something else
        said = "sample 0 differs when it is read again: derive it from its number"
        raise _wrong_result(config, "read", said)
    held_out = range(count - config.held_out, count)
    validation = OwnSource(name, config, held_out, vocabulary, cfg) if held_out else None
    # Not the file of the class, which a resume compares by itself: `--allow-change` takes another.
    key = fingerprint([_keys_of(config), count, version, vocabulary.sha256])
    return OpenedSource(train, validation, key, vocabulary, None)


def encoded(rows: Rows, cfg: RunConfig) -> Path:
    """Return the folder of the token files of all rows; encode them if they are not there.

    They are encoded again if the file of the class, its keys, `__len__` or `version` change, or the
    tokenizer, or the keys of `chat` that decide how conversations are rendered.

    Raises OwnCodeError for a row that is none, and for one that differs when it is read again.
    """
    with own_code(rows, _key_of(rows)):
        count, version = rows.__len__(), rows.version()
    if type(count) is not int or count <= rows.held_out:
        said = f"`__len__` returned {count!r}, and held_out={rows.held_out}"
        raise _wrong_result(rows, "__len__", said)
    tokenizer = GivenTokenizerConfig(
        path=str(rows.tokenizer), bos=getattr(cfg.tokenizer, "bos", "tokenizer")
    )
    talks = isinstance(_row(rows, 0), dict)
    kind: DocumentKind = Conversations(cfg.chat, engine="hf") if talks else PlainText("hf")
    content, file = given_tokenizer(tokenizer), own_file_of(rows)
    encoding, files = kind.prepare(tokenizer)
    parts = {
        "rows": [_keys_of(rows), count, version, file and file.sha256],
        "tokenizer": hashlib.sha256(content).hexdigest(),
        **encoding,
    }
    # A template may print the date: of the day on which the rows were encoded, not of a resume.
    undated = parts | {"chat": {**parts.get("chat", {}), "date": None}}
    name = rows.type.rpartition(":")[2]
    folder = FOLDER.absolute() / f"{name}-{fingerprint(undated)[:16]}"

    def write(aside: Path) -> None:
        for file_name, text in {"tokenizer.json": content.decode(), **files}.items():
            (aside / file_name).write_text(text, encoding="utf-8")
        encoder = kind.open(tokenizer, aside / "tokenizer.json", parts)
        _write(aside, rows, count, encoder, parts)

    write_once(folder, write)
    again = TokensManifest.read(folder).key_parts["read_again"]
    for number, sha256 in again.items():
        if _sha256(_row(rows, int(number))) != sha256:
            next = "derive it from its number; if the rows have changed, return another `version`"
            raise _wrong(rows, int(number), "differs when it is read again", next=next)
    return folder


def row_numbers(folder: Path) -> npt.NDArray[np.int64]:
    """Return the number of the row that each training sequence was made from, [sequences]."""
    return np.fromfile(folder / f"train-00000{NUMBERS}", np.int64)


def _row(rows: Rows, number: int, vocab_size: int | None = None) -> Row:
    """Return a row; raise OwnCodeError for what is none."""
    with own_code(rows, _key_of(rows), f"row {number}"):
        given: Any = rows[number]
    if isinstance(given, Mapping):
        if set(given) == {"text"}:
            raise _wrong(rows, number, "is a mapping with `text`", next="return the text itself")
        return dict(given)
    if not isinstance(given, str | list | tuple | np.ndarray):
        kinds = "a text, token ids, messages or a row with `messages`"
        kind = type(given).__name__
        raise _wrong(rows, number, f"is of the type {kind}, not {kinds}: {given!r:.80}")
    if not len(given):
        raise _wrong(rows, number, "is empty")
    if isinstance(given, str):
        return given
    if isinstance(given[0], Mapping):
        return {"messages": list(given)}
    ids = np.empty(0)
    with suppress(ValueError):  # lists of several lengths
        ids = np.asarray(given)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise _wrong(rows, number, f"is a list of neither token ids nor messages: {given!r:.80}")
    if vocab_size is not None and not 0 <= ids.min() <= ids.max() < vocab_size:
        said = f"has ids from {ids.min()} to {ids.max()}"
        raise _wrong(rows, number, f"{said}, of {vocab_size} tokens")
    return ids.astype(np.int64)


def _wrong(rows: Rows, number: int, said: str, **more: str) -> OwnCodeError:
    return _wrong_result(rows, "__getitem__", f"row {number} {said}", **more)


def _sha256(row: Row) -> str:
    plain = row.tolist() if isinstance(row, np.ndarray) else row
    return hashlib.sha256(json.dumps(plain, default=str).encode()).hexdigest()


def _write(
    folder: Path, rows: Rows, count: int, encoder: UnitEncoder[Any], parts: dict[str, Any]
) -> None:
    """Write the token files of all rows, and the manifest that makes them complete."""
    some = np.linspace(0, count - 1, READ_AGAIN).astype(int).tolist()
    again = {str(number): _sha256(_row(rows, number)) for number in some}
    writer, last = _RowWriter(rows, encoder), count - rows.held_out
    splits: dict[Split, range] = {"train": range(last), "validation": range(last, count)}
    with progress("encoding", count, "rows") as advance:
        shards = [
            writer.write(folder, split, numbers, advance)
            for split, numbers in splits.items()
            if numbers
        ]
    tokenizer = folder / "tokenizer.json"
    check_lost(writer.lost, tokenizer)
    sha256 = sha256_file(tokenizer)
    content = [[shard.model_dump(mode="json") for shard in shards], sha256]
    manifest = TokensManifest(
        key=fingerprint([*content, encoder.chat and encoder.chat.model_dump(mode="json")]),
        key_parts=parts | {"read_again": again},
        corpus=CorpusSource(kind="own", id=rows.type),
        tokenizer_sha256=sha256,
        vocab_size=encoder.vocab_size,
        dtype=token_dtype(encoder.vocab_size),
        end_of_document=encoder.end_of_document,
        begin_of_document=encoder.begin_of_document,
        shards=tuple(shards),
        skipped_documents=0,
        empty_documents=0,
        unread=dict(writer.unread),
        lost=writer.lost if writer.lost.of else None,
        chat=encoder.chat,
    )
    (folder / TokensManifest.filename).write_text(manifest.dump(), encoding="utf-8")
    tokens = sum(shard.counts.tokens for shard in shards)
    log.info("encoded %d rows of %s: %d tokens", count, rows.type, tokens)
    if writer.unread:
        log.warning("%s: keys of rows that are not used: %s", rows.type, ", ".join(writer.unread))


class _RowWriter:
    """A writer of the token files of rows."""

    def __init__(self, rows: Rows, encoder: UnitEncoder[Any]) -> None:
        self._rows, self._encoder = rows, encoder
        self.lost = LostText()
        """What the tokenizer has had no token for."""
        self.unread: Counter[str] = Counter()
        """Number of rows by key that nothing uses."""

    def write(self, folder: Path, split: Split, numbers: range, advance: Advance) -> TokenShard:
        """Write the shard of the rows with these `numbers`."""
        owners = [np.empty(0, np.int64)]
        vocab_size = self._encoder.vocab_size
        stem = folder / f"{split}-00000"
        with TokenFileWriter(stem, vocab_size, has_mask=self._encoder.has_mask) as writer:
            for first in range(0, len(numbers), AT_ONCE):
                some = numbers[first : first + AT_ONCE]
                batch = {number: _row(self._rows, number, vocab_size) for number in some}
                advance(len(batch))
                for encoded_rows, part in self._encoded(batch):
                    writer.append(part.ids, part.lengths, part.mask, part.text_bytes)
                    # Several sequences are of one row: then it was encoded alone.
                    each = len(part.lengths) // len(encoded_rows)
                    owners.append(np.repeat(encoded_rows, each))
                    self.lost += part.lost or LostText()
            shard = writer.close(split)
        np.concatenate(owners).tofile(stem.with_suffix(NUMBERS))
        return shard

    def _encoded(self, batch: Mapping[int, Row]) -> Iterator[tuple[list[int], EncodedPart]]:
        """Yield the encoded rows of a batch, a few at a time, with their numbers."""
        for kind, items in groupby(batch.items(), key=lambda item: type(item[1])):
            numbers, found = map(list, zip(*items, strict=True))
            if (kind is dict) != (self._encoder.chat is not None):
                said = "is a conversation" if kind is dict else "is no conversation"
                next = "a class for each kind, as entries of data.sources"
                raise _wrong(self._rows, numbers[0], f"{said}, unlike row 0", next=next)
            if kind is np.ndarray:
                # Documents end with this token everywhere: packing and masks rely on it.
                end = self._encoder.end_of_document
                ended = [ids if ids[-1] == end else np.append(ids, end) for ids in found]
                lengths = np.fromiter(map(len, ended), np.int32, len(ended))
                yield numbers, EncodedPart(np.concatenate(ended), lengths, None, 0)
            else:
                yield from self._documents(numbers, found)

    def _documents(
        self, numbers: list[int], found: list[Any]
    ) -> Iterator[tuple[list[int], EncodedPart]]:
        """Yield encoded texts or conversations; raise OwnCodeError for the first that cannot be."""
        refused = BadDocuments(shown=1)
        with refused.guard(str):  # a text may hold half a character, which has no UTF-8
            part = self._encoder.encode([*map(_document, found)], refused)
        if not refused.count and (len(part.lengths) == len(numbers) or len(numbers) == 1):
            self.unread += refused.unread
            yield numbers, part
            return
        if len(numbers) == 1:
            why = refused.examples[0].lstrip(": ")
            raise _wrong(self._rows, numbers[0], f"cannot be used: {why}")
        # One by one: either one of them is wrong, or one becomes several sequences.
        for number, row in zip(numbers, found, strict=True):
            yield from self._documents([number], [row])


def _document(row: str | dict[str, Any]) -> bytes | JsonRow:
    """Return a row as the encoders of text and of conversations take it."""
    if isinstance(row, str):
        return row.encode()
    return JsonRow(str, json.dumps(row, default=str).encode(), row)
