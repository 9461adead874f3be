"""Best fit: no token lost, nothing cut that fits, as tight as best fit decreasing; cached."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import on_ranks
from support.token_files import every, random_documents, write_folder, write_pair

from dtt.base.errors import DamagedError
from dtt.base.targets import IGNORE_INDEX
from dtt.config.sources import SourceConfig
from dtt.data.samples import sample_layout
from dtt.data.samples.packing import best_fit, pack
from dtt.data.samples.token_source import TokenSource
from dtt.mesh.dist import World

CAPACITY = st.integers(1, 40)
LENGTHS = st.lists(st.integers(0, 120), max_size=60)
GOLDEN = [0, 1, 2, 2, 0, 3, 3, 1]


def decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Room left in each bin after best fit decreasing: one item after another."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(capacity - length)
        else:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
    return sorted(rooms)


def bounds(lengths: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.cumsum([7, *lengths], dtype=np.int64)  # documents need not begin at 0


@given(lengths=LENGTHS, capacity=CAPACITY)
def test_without_packing_each_document_is_alone(lengths: list[int], capacity: int) -> None:
    packed, best = (pack(bounds(lengths), capacity, how) for how in ("none", "best-fit"))
    assert packed.first.tolist() == list(range(len(packed.start) + 1))
    pieces, all_pieces = (
        {*zip(one.start.tolist(), one.length.tolist(), strict=True)} for one in (packed, best)
    )
    assert pieces == {piece for piece in all_pieces if piece[1] > 1}


@settings(max_examples=300)
@given(lengths=LENGTHS, capacity=CAPACITY)
def test_only_documents_longer_than_a_bin_are_cut_and_no_bin_holds_too_many(
    lengths: list[int], capacity: int
) -> None:
    packed = pack(bounds(lengths), capacity)
    found = sorted(zip(packed.start.tolist(), packed.length.tolist(), strict=True))
    # Every token once, as documents of no tokens have no piece.
    expected = [
        (start + at, min(capacity, length - at))
        for start, length in zip(bounds(lengths).tolist(), lengths, strict=False)
        for at in range(0, length, capacity)
    ]
    assert found == expected
    assert packed.first[-1] == len(packed.start)
    for first, stop in pairwise(packed.first):
        assert 1 <= packed.length[first:stop].sum() <= capacity
        assert (np.diff(packed.start[first:stop]) > 0).all()  # in the order of the text


@settings(max_examples=500)
@given(lengths=st.lists(st.integers(1, 40), max_size=80), capacity=st.integers(40, 60))
def test_bins_are_those_of_best_fit_decreasing_item_by_item(
    lengths: list[int], capacity: int
) -> None:
    bins = best_fit(np.array(lengths, dtype=np.int64), capacity)
    rooms = capacity - np.bincount(bins, weights=np.array(lengths, dtype=float))
    assert sorted(rooms.tolist()) == decreasing(lengths, capacity)


def test_the_bins_are_the_same_in_every_version() -> None:
    """A golden value: to change it is to change what every resumed job is trained on."""
    lengths = np.array([8, 3, 5, 5, 2, 2, 4, 7], dtype=np.int64)
    assert best_fit(lengths, 10).tolist() == GOLDEN


# ---- packed token files --------------------------------------------------------------------------

SHARDS = {f"train-{i}": random_documents(40, 30, seed=i) for i in range(3)}


def opened(path: Path, seq_len: int = 15) -> TokenSource:
    cfg = SourceConfig(path=path, name="x")
    return TokenSource(cfg, "train", seq_len=seq_len, seed=0, packing="best-fit")


def read(source: TokenSource) -> Any:
    return source.read(every(source)).ids


def forbid(*_: object) -> None:
    raise AssertionError("packed again")


def test_bins_are_cached_next_to_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, SHARDS)
    ids = read(opened(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(sample_layout, "pack", forbid)
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
    monkeypatch.setattr(sample_layout, "pack", forbid)
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
