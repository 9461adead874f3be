"""Windows: equal to slices of the whole stream, wherever shards and documents end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dtt.artifacts import CorpusSource, SplitCounts, TokenShard, TokensManifest
from dtt.data.tokenfile import TokenFileWriter, bin_path
from dtt.data.windows import Windows
from dtt.errors import DamagedError, InputError

Stream = npt.NDArray[np.int64]


def write_shards(folder: Path, sizes: list[int]) -> tuple[TokensManifest, Stream]:
    """Train shards of so many tokens, and one validation shard among them."""
    rng = np.random.default_rng(0)
    shards, stream = [], []
    for number, size in enumerate([*sizes, 50]):
        ids = rng.integers(0, 60_000, size)
        split = "train" if number < len(sizes) else "validation"
        with TokenFileWriter(folder / f"{split}-{number}", 60_000) as writer:
            cut = size // 3
            writer.append(ids, np.array([cut, size - cut]))
            written = writer.close()
        shards.append(
            TokenShard(
                split=split,
                stem=f"{split}-{number}",
                counts=SplitCounts(documents=2, tokens=size, bytes=4 * size),
                bin_sha256=written.bin_sha256,
                idx_sha256=written.idx_sha256,
            )
        )
        stream.append(ids)
    shards.insert(1, shards.pop())  # the splits need not be in a row
    manifest = TokensManifest(
        key="k", key_parts={}, corpus=CorpusSource(kind="stdlib", id="x"), tokenizer_sha256="t",
        vocab_size=60_000, dtype="uint16", end_of_document=0, shards=tuple(shards),
        skipped_documents=0, empty_documents=0,
    )  # fmt: skip
    return manifest, np.concatenate(stream[:-1])


@pytest.mark.parametrize("seq_len", [1, 7, 16, 64, 500])
@pytest.mark.parametrize("sizes", [[1000], [100, 3, 200, 64, 1, 133], [64, 64, 65]], ids=str)
def test_windows_are_slices_of_the_shards_in_a_row(
    tmp_path: Path, sizes: list[int], seq_len: int
) -> None:
    manifest, stream = write_shards(tmp_path, sizes)
    windows = Windows(tmp_path, manifest, "train", seq_len)
    assert windows.tokens == len(stream)
    assert len(windows) == (len(stream) - 1) // seq_len
    order = np.random.default_rng(1).permutation(len(windows)).astype(np.uint64)
    batch = windows.read(order)
    assert batch.shape == (len(windows), seq_len + 1)
    for row, window in zip(batch, order.tolist(), strict=True):
        start = window * seq_len
        assert np.array_equal(row, stream[start : start + seq_len + 1])


def test_every_token_but_the_first_is_a_target_exactly_once(tmp_path: Path) -> None:
    manifest, stream = write_shards(tmp_path, [100, 30, 31])  # 161 = 1 + 16 windows of 10
    windows = Windows(tmp_path, manifest, "train", 10)
    batch = windows.read(np.arange(len(windows), dtype=np.uint64))
    assert np.array_equal(batch[:, 1:].ravel(), stream[1:])
    assert np.array_equal(batch[:, :-1].ravel(), stream[:-1])


def test_a_split_shorter_than_a_window_has_none(tmp_path: Path) -> None:
    manifest, _ = write_shards(tmp_path, [10])
    assert len(Windows(tmp_path, manifest, "train", 10)) == 0
    assert len(Windows(tmp_path, manifest, "train", 9)) == 1
    assert len(Windows(tmp_path, manifest, "validation", 49)) == 1


def test_no_file_is_opened_before_it_is_read(tmp_path: Path) -> None:
    manifest, _ = write_shards(tmp_path, [100, 100])
    bin_path(tmp_path / "train-1").unlink()
    windows = Windows(tmp_path, manifest, "train", 10)
    windows.read(np.array([0, 8], dtype=np.uint64))
    with pytest.raises(InputError, match=r"missing[\s\S]*train-1\.bin"):
        windows.read(np.array([9], dtype=np.uint64))  # its last token is in the second file


def test_a_shard_that_is_not_the_manifests_is_refused(tmp_path: Path) -> None:
    manifest, _ = write_shards(tmp_path, [100, 100])
    with TokenFileWriter(tmp_path / "train-1", 60_000) as writer:
        writer.append(np.arange(90), np.array([90]))
        writer.close()
    with pytest.raises(DamagedError, match=r"train-1\.bin[\s\S]*90 tokens, the manifest says 100"):
        Windows(tmp_path, manifest, "train", 10).read(np.array([12], dtype=np.uint64))


def test_a_folder_made_by_dtt_reads_as_its_manifest_counts(tokens: Path) -> None:
    manifest = TokensManifest.read(tokens)
    for split in ("train", "validation"):
        windows = Windows(tokens, manifest, split, 32)
        assert windows.tokens == manifest.counts(split).tokens > 0
        batch = windows.read(np.arange(len(windows), dtype=np.uint64))
        assert 0 <= batch.min() <= batch.max() < manifest.vocab_size
        assert (batch == manifest.end_of_document).any()
