"""Token files as samples: the stream as it is, wherever shards and documents end."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.token_files import END, every, random_documents, read_doc_ids, write_folder, write_pair

from dtt.base.errors import DamagedError
from dtt.config.sources import SourceConfig
from dtt.data.samples import token_source
from dtt.data.samples.token_source import TokenSource
from dtt.data.token_file import TokenFileWriter

Stream = npt.NDArray[np.int64]


def opened(path: Path, split: Any = "train", seq_len: int = 10, **options: Any) -> TokenSource:
    return TokenSource(SourceConfig(path=path), split, seq_len=seq_len, seed=0, **options)


def write_shards(folder: Path, sizes: list[int]) -> Stream:
    """Train shards of so many tokens, and one validation shard among them."""
    rng = np.random.default_rng(0)
    shards, stream = {}, []
    for number, size in enumerate(sizes):
        ids = rng.integers(1, 60_000, size).tolist()
        shards[f"train-{number}"] = [ids[: size // 3], ids[size // 3 :]]
        stream += ids
        if number == 0:
            shards["validation-0"] = [rng.integers(1, 60_000, 50).tolist()]
    write_folder(folder, shards)
    return np.array(stream)


@pytest.mark.parametrize("seq_len", [1, 7, 16, 64, 500])
@pytest.mark.parametrize("sizes", [[1000], [100, 3, 200, 64, 1, 133], [64, 64, 65]], ids=str)
def test_samples_are_slices_of_the_shards_in_a_row(
    tmp_path: Path, sizes: list[int], seq_len: int
) -> None:
    stream = write_shards(tmp_path, sizes)
    source = opened(tmp_path, seq_len=seq_len)
    assert source.tokens == len(stream)
    assert len(source) == (len(stream) - 1) // seq_len
    assert source.bytes_per_token == 4
    order = np.random.default_rng(1).permutation(len(source)).astype(np.uint64)
    batch = source.read(order).ids
    assert batch.shape == (len(source), seq_len + 1)
    assert source.counts(order).targets == len(source) * seq_len
    for sample_ids, sample in zip(batch, order.tolist(), strict=True):
        start = sample * seq_len
        assert np.array_equal(sample_ids, stream[start : start + seq_len + 1])


def test_a_shard_that_differs_from_the_manifest_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, [100, 100])
    with TokenFileWriter(tmp_path / "train-1", 60_000) as writer:
        writer.append(np.arange(90), np.array([90]))
        writer.close()
    with pytest.raises(DamagedError, match=r"train-1\.bin[\s\S]*180 bytes for 100 tokens"):
        opened(tmp_path).read(np.array([12], dtype=np.uint64))


@pytest.mark.parametrize("packing", ["concat", "best-fit", "none"])
@settings(max_examples=40)
@given(
    lengths=st.lists(st.lists(st.integers(0, 30), max_size=8), min_size=1, max_size=5),
    seq_len=st.integers(1, 25),
)
def test_documents_and_their_positions_equal_those_written(
    tmp_path_factory: pytest.TempPathFactory, packing: Any, lengths: list[list[int]], seq_len: int
) -> None:
    """By the end token, by the index, and piece by piece: all three say the same."""
    folder = tmp_path_factory.mktemp("t")
    shards = {
        f"train-{i}": [[1000 * i + 10 * j + 1] * n + [END] for j, n in enumerate(shard)]
        for i, shard in enumerate(lengths)
    }
    write_folder(folder / "dtt", shards)
    (folder / "others").mkdir()
    for name, documents in shards.items():
        write_pair(folder / "others" / name, documents)
    ours, theirs = (
        opened(folder / name, seq_len=seq_len, packing=packing) for name in ("dtt", "others")
    )
    assert len(ours) == len(theirs)
    ids = ours.read(every(ours)).ids
    assert np.array_equal(ids, theirs.read(every(theirs)).ids)
    documents = read_doc_ids(ours, every(ours))
    assert np.array_equal(documents, read_doc_ids(theirs, every(theirs)))
    for sample in range(len(ours)):
        pieces = ours.origin(sample)
        assert [p.file.name for p in pieces] == [p.file.name for p in theirs.origin(sample)]
        place = 0
        for number, piece in enumerate(pieces):
            assert piece.start == place < piece.stop
            place = piece.stop
            document = shards[piece.file.stem][piece.document]
            part = document[piece.offset : piece.offset + piece.stop - piece.start]
            assert ids[sample, piece.start : piece.stop].tolist() == part
            assert set(documents[sample, piece.start : piece.stop].tolist()) == {number}
        assert (ids[sample, place:] < 0).all()


@pytest.mark.parametrize("wrong", [700, -1])
def test_an_id_outside_the_vocabulary_is_reported_with_its_position(
    tmp_path: Path, wrong: int
) -> None:
    for name, ids in (("a", [5] * 40), ("b", [5] * 4015 + [wrong] + [5] * 20)):
        np.array(ids, np.int32).tofile(tmp_path / f"{name}.bin")
    cfg = SourceConfig(path=tmp_path, dtype="int32")
    source = TokenSource(cfg, "train", seq_len=10, seed=0, vocab_size=700)
    source.read(np.arange(10, dtype=np.uint64))
    with pytest.raises(DamagedError, match=rf"of 700[\s\S]*b\.bin, token 4015[\s\S]*{wrong}"):
        source.read(every(source))


def test_few_shards_are_mapped_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, {f"train-{i}": [d] for i, d in enumerate(random_documents(50, 30))})
    source = opened(tmp_path, seq_len=5)
    order = source.order(0, 3 * len(source))
    expected = source.read(order).ids
    places = [source.origin(sample) for sample in order.tolist()]
    for name in ("ids_of", "documents_of"):
        few = lru_cache(3)(getattr(token_source, name).__wrapped__)
        monkeypatch.setattr(token_source, name, few)
    before = len(list(Path("/dev/fd").iterdir()))
    assert np.array_equal(source.read(order).ids, expected)
    assert [source.origin(sample) for sample in order.tolist()] == places
    assert len(list(Path("/dev/fd").iterdir())) - before <= 6


@pytest.mark.parametrize("index", [True, False], ids=["with an index", "of ids alone"])
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "not ended"])
def test_documents_that_do_not_end_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, index: bool, ended: bool
) -> None:
    documents = [document if ended else document[:-1] for document in random_documents(50, 20)]
    if index:
        write_pair(tmp_path / "pile", [document for document in documents if document])
    else:
        ids = np.array([i for document in documents for i in document], dtype="<u2")
        ids.tofile(tmp_path / "pile.bin")
    path = tmp_path / ("pile" if index else "pile.bin")
    opened(path, vocab_size=60_000, end_of_document=END)
    assert ("do not" in caplog.text and f"id {END}" in caplog.text) != ended
