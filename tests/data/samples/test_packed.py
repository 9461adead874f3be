"""Packed samples: whole documents, every token once, worked out once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import on_ranks
from support.token_files import random_documents, write_folder, write_pair

from dtt.base.errors import DamagedError
from dtt.base.targets import IGNORE_INDEX
from dtt.config.sources import SourceConfig
from dtt.data.samples import packed
from dtt.data.samples.token_source import TokenSource, open_tokens
from dtt.mesh.dist import World

SHARDS = {f"train-{i}": random_documents(40, 30, seed=i) for i in range(3)}


def opened(path: Path, seq_len: int = 15) -> TokenSource:
    cfg = SourceConfig(path=path, name="x")
    return open_tokens(cfg, "train", seq_len=seq_len, seed=0, packing="best-fit")


def read(source: TokenSource) -> Any:
    return source.read(np.arange(len(source), dtype=np.uint64)).ids


def forbid(*_: object) -> None:
    raise AssertionError("packed again")


def test_no_document_that_fits_is_cut(tmp_path: Path) -> None:
    write_folder(tmp_path, SHARDS)
    source = opened(tmp_path)
    cuts: dict[tuple[Path, int], list[tuple[int, int]]] = {}
    for sample in range(len(source)):
        for piece in source.origin(sample):
            place = (piece.offset, piece.stop - piece.start)
            cuts.setdefault((piece.file, piece.document), []).append(place)
    assert len(cuts) == 120
    for (file, number), pieces in cuts.items():
        length = len(SHARDS[file.stem][number])
        full = [(start, 16) for start in range(0, length - 15, 16)]
        rest = [(16 * len(full), length % 16)] if length % 16 else []
        assert sorted(pieces) == full + rest


def test_bins_are_cached_next_to_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, SHARDS)
    ids = read(opened(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(packed, "pack", forbid)
        assert np.array_equal(read(opened(tmp_path)), ids)
        with pytest.raises(AssertionError, match="packed again"):
            opened(tmp_path, seq_len=16)
    assert len(read(opened(tmp_path, seq_len=16))) < len(ids)


def test_changed_documents_are_packed_again(tmp_path: Path) -> None:
    """Also where only the lengths changed, and no file's size."""
    for documents in ([[1] * 5, [2] * 10], [[1] * 10, [2] * 5]):
        write_pair(tmp_path / "a", documents)
        os.utime(tmp_path / "a.idx", ns=(0, len(documents[0])))
        assert read(opened(tmp_path / "a", seq_len=9)).tolist() == [
            *([d + [IGNORE_INDEX] * (10 - len(d)) for d in sorted(documents, key=len)][::-1])
        ]


def test_if_the_token_folder_is_read_only_the_user_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "t", SHARDS)
    (tmp_path / "t/.packing").write_text("not a folder, so nothing can be put into it")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ids = read(opened(tmp_path / "t"))
    monkeypatch.setattr(packed, "pack", forbid)
    assert np.array_equal(read(opened(tmp_path / "t")), ids)
    assert (tmp_path / "cache/dtt/packing").is_dir()


@pytest.mark.parametrize("lengths", [[5, 6, 10], [12, -2, 10]], ids=["too long", "backwards"])
def test_an_index_that_does_not_match_its_file_is_refused(
    tmp_path: Path, lengths: list[int]
) -> None:
    """Its last document ends where it should, so that the file looks whole."""
    write_folder(tmp_path, {"train-0": [[1] * n for n in (5, 5, 10)]})
    index = bytearray((tmp_path / "train-0.idx").read_bytes())
    starts = np.cumsum([0, *lengths[:-1]]) + (20 - sum(lengths))
    index[34 + 12 : 34 + 12 + 24] = (2 * starts).astype("<i8").tobytes()
    (tmp_path / "train-0.idx").write_bytes(index)
    with pytest.raises(DamagedError, match=r"are not contiguous[\s\S]*train-0\.bin"):
        opened(tmp_path)


def _pack(_world: World | None, path: Path) -> bytes:
    ids: np.ndarray[Any, Any] = read(opened(path))
    return ids.tobytes()


def test_processes_that_start_together_get_the_same(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", SHARDS)
    write_folder(tmp_path / "b", SHARDS)
    assert {*on_ranks(3, _pack, tmp_path / "a")} == {_pack(None, tmp_path / "b")}
