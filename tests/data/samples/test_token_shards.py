"""Token files of others: told apart by what is there, and read as their own programs read them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.token_files import (
    END,
    random_documents,
    read_doc_ids,
    row,
    stream,
    write_folder,
    write_pair,
)

from dtt.base.errors import DamagedError, InputError
from dtt.config.sources import SourceConfig
from dtt.data.samples.token_source import TokenSource
from dtt.data.token_file import TokenFile, bin_path

BY_DATATROVE = Path(__file__).with_name("written_by_datatrove")
"""By DocumentTokenizer and MegatronDocumentTokenizer of datatrove 0.9.0, whose dependencies exclude
ours: documents `one two three`, `four`, none, `five four three two one zero`, each with its end."""
DATATROVES = [[2, 3, 4, 0], [5, 0], [0], [6, 5, 4, 3, 2, 1, 0]]


def opened(path: Path, split: Any = "train", **options: Any) -> TokenSource:
    cfg = SourceConfig(path=path, **{k: options.pop(k) for k in ("dtype",) if k in options})
    return TokenSource(cfg, split, seq_len=options.pop("seq_len", 3), seed=0, **options)


def documents(source: TokenSource) -> list[list[int]]:
    """The documents of the samples by their index, in order, from the pieces of samples of 1."""
    found: dict[tuple[Path, int], list[int]] = {}
    for sample in range(len(source)):
        ids = source.read(np.array([sample], dtype=np.uint64)).ids[0]
        for piece in source.origin(sample):
            tokens = found.setdefault((piece.file, piece.document), [])
            assert len(tokens) in (piece.offset, piece.offset + 1)
            tokens[piece.offset :] = ids[piece.start : piece.stop].tolist()
    return list(found.values())


@pytest.mark.parametrize("kind", ["ds", "megatron"])
def test_files_written_by_datatrove_are_read(kind: str) -> None:
    source = opened(BY_DATATROVE / kind, seq_len=1)
    assert source.files.format == {"ds": "datatrove", "megatron": "megatron"}[kind]
    assert source.tokens == 14
    assert stream(source) == row(DATATROVES).tolist()
    assert documents(source) == DATATROVES
    whole = opened(BY_DATATROVE / kind, seq_len=13)
    only = np.array([0], dtype=np.uint64)
    assert read_doc_ids(whole, only).tolist() == [[0] * 4 + [1] * 2 + [2] + [3] * 7]


def test_megatrons_reader_reads_files_written_by_dtt(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    written = random_documents(50, 40)
    write_pair(tmp_path / "a", written)
    dataset = IndexedDataset(str(tmp_path / "a"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == written
    assert dataset.document_indices.tolist() == list(range(51))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_files_written_by_megatron_are_read(tmp_path: Path, dtype: type) -> None:
    """Documents of several sequences, and of none, as its preprocessing leaves them."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    written = [[[5, 6], [7, 0]], [], [[8, 0]], [[]], [[9], [], [1, 2, 0]], [], []]
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=dtype)
    for document in written:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "a.idx"))
    flat = [[token for sequence in document for token in sequence] for document in written]
    source = opened(tmp_path / "a", seq_len=1, vocab_size=10)
    assert stream(source) == [5, 6, 7, 0, 8, 0, 9, 1, 2, 0]
    assert documents(source) == [document for document in flat if document]
    assert TokenFile(tmp_path / "a").bounds().tolist() == [0, 4, 4, 6, 6, 10, 10, 10]
    whole = opened(tmp_path / "a", seq_len=9)
    only = np.array([0], dtype=np.uint64)
    assert read_doc_ids(whole, only).tolist() == [[0] * 4 + [1] * 2 + [2] * 4]
    assert [p.document for p in whole.origin(0)] == [0, 2, 4]


def test_a_pair_is_named_by_its_stem_or_by_either_file(tmp_path: Path) -> None:
    written = random_documents(10, 9)
    write_pair(tmp_path / "a.text", written)
    for name in ("a.text", "a.text.bin", "a.text.idx"):
        source = opened(tmp_path / name)
        assert source.files.format == "megatron"
        assert documents(opened(tmp_path / name, seq_len=1)) == written
        assert len(opened(tmp_path / name, "validation")) == 0


def test_a_folder_of_pairs_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    a, b = random_documents(10, 9), random_documents(10, 9, seed=1)
    write_pair(tmp_path / "b", b)
    write_pair(tmp_path / "a", a)
    (tmp_path / "README.md").write_text("ours")
    assert stream(opened(tmp_path, seq_len=1)) == row([*a, *b]).tolist()
    bin_path(tmp_path / "b").unlink()
    with pytest.raises(InputError, match=r"missing[\s\S]*b\.bin"):
        opened(tmp_path)


def test_raw_ids_are_read(tmp_path: Path) -> None:
    """As nanoGPT's prepare.py leaves them: train.bin and val.bin."""
    train, val = (np.arange(n, dtype=np.uint16) for n in (100, 40))
    train[[30, 60]] = END
    train.tofile(tmp_path / "train.bin")
    val.tofile(tmp_path / "val.bin")
    assert stream(opened(tmp_path, seq_len=9)) == train.tolist()
    assert stream(opened(tmp_path, "validation", seq_len=13)) == val.tolist()
    assert stream(opened(tmp_path / "train.bin", seq_len=9)) == train.tolist()
    cfg = SourceConfig(path=tmp_path / "train.bin", validation=tmp_path / "val.bin")
    assert TokenSource(cfg, "validation", seq_len=3, seed=0).tokens == 40
    train.astype(np.uint32).tofile(tmp_path / "train.bin")
    assert stream(opened(tmp_path / "train.bin", seq_len=9, dtype="uint32")) == train.tolist()


def test_raw_ids_have_documents_if_the_end_token_is_known(tmp_path: Path) -> None:
    ids = np.array([END, 5, 6, END, 7, 8, END, END, 9], dtype=np.uint16)
    ids.tofile(tmp_path / "a.bin")
    only = np.array([0], dtype=np.uint64)
    source = opened(tmp_path / "a.bin", seq_len=8)
    assert read_doc_ids(source, only).tolist() == [[0] * 9]
    assert [(p.document, p.stop) for p in source.origin(0)] == [(0, 9)]
    source = opened(tmp_path / "a.bin", seq_len=8, end_of_document=END)
    assert read_doc_ids(source, only).tolist() == [[0, 1, 1, 1, 2, 2, 2, 3, 4]]
    assert [p.stop for p in source.origin(0)] == [1, 4, 7, 8, 9]


def test_ends_are_found_across_the_parts_a_file_is_read_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtt.data.samples import token_shards

    monkeypatch.setattr(token_shards, "SCAN_TOKENS", 7)
    written = random_documents(30, 9)
    row(written).astype(np.uint16).tofile(tmp_path / "a.bin")
    source = opened(tmp_path / "a.bin", seq_len=1, end_of_document=END)
    assert documents(source) == written


def test_only_whole_words_of_a_name_mark_a_file_as_held_out(tmp_path: Path) -> None:
    for name in ("fineweb_val_000000", "text-validation", "valley_01", "interval", "VAL2", "x.val"):
        np.arange(10, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    held_out = {s.path.stem for s in opened(tmp_path, "validation").files.shards}
    assert held_out == {"fineweb_val_000000", "text-validation", "VAL2", "x.val"}
    assert len(opened(tmp_path).files.shards) == 2


def test_named_validation_files_are_read_whole(tmp_path: Path) -> None:
    train, held_out = random_documents(30, 9), random_documents(30, 9, seed=1)
    write_folder(tmp_path / "a", {"train-0": train, "validation-0": held_out})
    write_folder(tmp_path / "b", {"train-0": train, "validation-0": held_out})
    cfg = SourceConfig(path=tmp_path / "a", validation=tmp_path / "b")
    sizes = [TokenSource(cfg, s, seq_len=3, seed=0).tokens for s in ("train", "validation")]
    assert sizes == [len(row(train)), len(row(train)) + len(row(held_out))]


def test_a_datatrove_file_must_fit_its_index(tmp_path: Path) -> None:
    ids, index = tmp_path / "a.ds", tmp_path / "a.ds.index"
    ids.write_bytes(bytes(20))
    with pytest.raises(InputError, match=r"a\.ds\.index"):
        opened(ids)
    for tokens, dtype in ((10, "<u2"), (5, "<u4")):
        index.write_bytes(struct.pack("<2Q", 2, tokens))
        assert opened(ids).files.shards[0].dtype == dtype
    index.write_bytes(struct.pack("<2Q", 2, 11))
    with pytest.raises(DamagedError, match=r"a\.ds[\s\S]*20 bytes[\s\S]*11 tokens"):
        opened(ids)
