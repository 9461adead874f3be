"""The ids of shards: those in the files, whatever their types, with few of them mapped."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from dtt.base.errors import InputError
from dtt.data.samples import token_buffer as module
from dtt.data.samples.sample_layout import Ints, ShardPieces, Windows
from dtt.data.samples.token_buffer import ShardIds
from dtt.data.samples.token_shards import Ends, Shard


def write(folder: Path, lengths: list[int], dtypes: list[str]) -> tuple[list[Shard], list[Ints]]:
    """Files of random ids, none above 99, and these."""
    rng = np.random.default_rng(0)
    contents = [rng.integers(0, 100, length) for length in lengths]
    shards = []
    for number, ids in enumerate(contents):
        dtype, path = dtypes[number % len(dtypes)], folder / f"shard-{number}"
        ids.astype(dtype).tofile(path)
        ends = Ends(np.array([len(ids)]))
        shards.append(Shard(path, len(ids), dtype, "1", lambda ends=ends: ends))
    return shards, contents


def pieces_at_random(lengths: list[int], count: int) -> ShardPieces:
    rng = np.random.default_rng(1)
    size = np.array(lengths)
    shard = rng.choice(np.flatnonzero(size), count)
    start = rng.integers(0, size[shard])
    length = rng.integers(1, size[shard] - start + 1)
    return ShardPieces(shard, start, np.cumsum(length) - length, length)


def mapped(folder: Path) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"{folder}/shard-" in line]


@pytest.mark.parametrize("dtypes", [["<u2"], ["|u1", "<i4", "<u2", "<i8"]], ids=["one", "several"])
@pytest.mark.parametrize("lengths", [[3000, 1, 0, 70, 5000], [2_000_000, 5, 1_500_000]], ids=str)
def test_pieces_are_those_of_the_files(
    tmp_path: Path, lengths: list[int], dtypes: list[str]
) -> None:
    shards, contents = write(tmp_path, lengths, dtypes)
    pieces = pieces_at_random(lengths, 20)
    ids = np.full(int(pieces.length.sum()), -1, dtype=np.int64)
    ShardIds(shards).read(pieces, ids[None])
    for shard, start, place, length in zip(*pieces, strict=True):
        expected = contents[shard][start : start + length]
        assert np.array_equal(ids[place : place + length], expected)


@pytest.mark.parametrize("dtypes", [["<u2"], ["<u2", "<i4"]], ids=["one", "several"])
@pytest.mark.parametrize("seq_len", [1, 7, 500, 6000])
def test_rows_are_windows_over_all_shards(tmp_path: Path, seq_len: int, dtypes: list[str]) -> None:
    """Whether they lie in one shard or go on in others."""
    shards, contents = write(tmp_path, [3000, 1, 0, 70, 5000, 999], dtypes)
    layout = Windows(np.cumsum([shard.tokens for shard in shards]), seq_len)
    samples = np.random.default_rng(0).permutation(len(layout)).astype(np.uint64)
    rows = np.empty((len(samples), seq_len + 1), dtype=np.int64)
    ShardIds(shards).read(layout.pieces(samples), rows)
    stream = np.concatenate(contents)
    for sample, row in zip(samples.tolist(), rows, strict=True):
        assert np.array_equal(row, stream[sample * seq_len : sample * seq_len + seq_len + 1])


def test_empty_pieces_are_not_read(tmp_path: Path) -> None:
    """It may begin where a file ends, and there is nothing mapped behind it."""
    page = mmap.PAGESIZE // 2
    shards, contents = write(tmp_path, [page, page], ["<u2"])
    pieces = ShardPieces(*(np.array(column) for column in ([0, 0], [page, 3], [0, 0], [0, 5])))
    ids = np.empty(5, dtype=np.int64)
    ShardIds(shards).read(pieces, ids[None])
    assert np.array_equal(ids, contents[0][3:8])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_few_shards_are_mapped_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAPPED_SHARDS", 7)
    lengths = [50 + 10 * number for number in range(30)]
    shards, contents = write(tmp_path, lengths, ["<u2"])
    source = ShardIds(shards)
    for count in (1, 5, 7, 100):  # fewer and more than may be mapped
        pieces = pieces_at_random(lengths, count)
        ids = np.empty(int(pieces.length.sum()), dtype=np.int64)
        source.read(pieces, ids[None])
        parts = zip(pieces.shard, pieces.start, pieces.length, strict=True)
        assert np.array_equal(ids, np.concatenate([contents[s][a : a + n] for s, a, n in parts]))
        assert 1 <= len(mapped(tmp_path)) <= 7
    assert len(mapped(tmp_path)) == 7
    del source
    assert not mapped(tmp_path)


def test_more_than_a_process_may_map_is_reported(tmp_path: Path) -> None:
    shards, _ = write(tmp_path, [10], ["<u2"])
    huge = Shard(shards[0].path, 2**58, "<u2", "1", shards[0].documents)
    with pytest.raises(InputError, match=r"address space[\s\S]*ulimit"):
        ShardIds([huge])
