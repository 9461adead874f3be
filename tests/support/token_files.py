"""Token files made for tests: of dtt and of Megatron, from given documents."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Sized
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dtt.artifacts.corpus import CorpusSource
from dtt.artifacts.manifests import ChatFacts, TokenShard, TokensManifest
from dtt.data.token_file import TokenFile, TokenFileWriter, bin_path, map_file

if TYPE_CHECKING:
    from dtt.data.samples.loader import SampleReader
    from dtt.data.samples.protocol import SampleNumbers
    from dtt.data.samples.token_source import TokenSource

END = 0
VOCAB_SIZE = 60_000
Document = list[int]
Conversation = tuple[list[int], list[bool]]
"""Token ids, and which of them are targets."""
FACTS = ChatFacts(template_sha256="t", kwargs={}, stop_tokens=(1,))


def random_documents(count: int, longest: int, seed: int = 0) -> list[Document]:
    """Documents of 1 … `longest` tokens, the last of which ends them."""
    rng = np.random.default_rng(seed)
    return [[*rng.integers(1, VOCAB_SIZE, n - 1), END] for n in rng.integers(1, longest + 1, count)]


def write_pair(stem: Path, documents: Sequence[Document]) -> TokenShard:
    """A pair of files, and what a manifest says of it."""
    with TokenFileWriter(stem, VOCAB_SIZE) as writer:
        ids = row(documents)
        lengths = np.array([len(d) for d in documents], dtype=np.int64)
        writer.append(ids, lengths, text_bytes=4 * len(ids))
        return writer.close("validation" if stem.name.startswith("validation") else "train")


def write_folder(folder: Path, shards: dict[str, Sequence[Document]]) -> TokensManifest:
    """A folder as `dtt tokenize` makes it; a shard's split is the first word of its name."""
    folder.mkdir(exist_ok=True)
    manifest = TokensManifest(
        key="k", key_parts={}, corpus=CorpusSource(kind="stdlib", id="x"), tokenizer_sha256="t",
        vocab_size=VOCAB_SIZE, dtype="uint16", end_of_document=END,
        shards=tuple(write_pair(folder / name, documents) for name, documents in shards.items()),
        skipped_documents=0, empty_documents=0,
    )  # fmt: skip
    (folder / manifest.filename).write_text(manifest.dump())
    return manifest


def write_conversations(
    folder: Path,
    shards: list[list[Conversation]],
    facts: ChatFacts = FACTS,
    *,
    pairs: bool = False,
) -> None:
    """Write a folder as `dtt tokenize` makes it of conversations."""
    folder.mkdir(exist_ok=True)
    records = []
    for number, conversations in enumerate(shards):
        stem = folder / f"train-{number:05d}"
        ids = np.array([i for one, _ in conversations for i in one], dtype=np.int64)
        mask = np.array([m for _, one in conversations for m in one], dtype=np.bool_)
        with TokenFileWriter(stem, VOCAB_SIZE, has_mask=True) as writer:
            writer.append(ids, np.array([len(one) for one, _ in conversations]), mask)
            records.append(writer.close())
    manifest = TokensManifest(
        key="k", key_parts={}, corpus=CorpusSource(kind="local", id="x"), tokenizer_sha256="t",
        vocab_size=VOCAB_SIZE, dtype="uint16", end_of_document=0, shards=tuple(records),
        skipped_documents=0, empty_documents=0, chat=facts, pairs=pairs,
    )  # fmt: skip
    (folder / manifest.filename).write_text(manifest.dump())


def read_documents(stem: Path) -> list[npt.NDArray[Any]]:
    """The token ids of each document of a pair of files."""
    file = TokenFile(stem)
    ids = map_file(bin_path(stem)).view(file.dtype)
    return [ids[start:stop] for start, stop in pairwise(file.bounds().tolist())]


def row(documents: Sequence[Document]) -> npt.NDArray[np.int64]:
    """All their tokens in a row."""
    return np.array([token for document in documents for token in document], dtype=np.int64)


def read_doc_ids(source: SampleReader, samples: SampleNumbers) -> npt.NDArray[np.int32]:
    """Return the document id, within its sample, of each token of `samples`."""
    doc_ids = source.read(samples).doc_ids
    assert doc_ids is not None
    return doc_ids


def sums(folder: Path) -> dict[str, str]:
    """Sha256 of each file, but markers, which have the times of others."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock" and path.parent.name != ".units"
    }


def every(source: Sized) -> SampleNumbers:
    """Return the numbers of all samples of a source."""
    return np.arange(len(source), dtype=np.uint64)


def stream(source: TokenSource) -> list[int]:
    """Return all tokens up to the end of the last sample."""
    ids = source.read(every(source)).ids
    return [*ids[:, :-1].ravel().tolist(), int(ids[-1, -1])]
