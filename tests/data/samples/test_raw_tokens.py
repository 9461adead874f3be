"""Files of ids with a header and without: read, or refused by name before a step is trained."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.token_files import END, every, read_doc_ids, stream

from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.config.sources import SourceConfig
from dtt.data.samples.token_source import TokenSource

BY_OTHERS = Path(__file__).with_name("written_by_others")
"""chunk-0-2.bin by litdata 0.2.76 (TokensLoader), shard.00000.mds by mosaicml-streaming 0.13.0."""
LLM_C = {"<u2": (20240520, 1), "<u4": (20240801, 7)}


def some_ids(count: int = 3000, vocab_size: int = 50_257) -> Any:
    """Token ids as text has them: mostly small, and documents that end."""
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.2, count), vocab_size - 1)
    ids[rng.integers(0, vocab_size, count) % 7 == 0] = vocab_size - 5
    ids[::50] = END
    return ids


def write_llm_c(path: Path, ids: Any, dtype: str = "<u2", *, count: int | None = None) -> None:
    """As `write_datafile` of llm.c's dev/data/data_common.py."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = *LLM_C[dtype], len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())


def opened(path: Path, split: Any = "train", **options: Any) -> TokenSource:
    dtype = {"dtype": options.pop("dtype")} if "dtype" in options else {}
    options = {"vocab_size": 50_257, "end_of_document": END} | options
    cfg = SourceConfig(path=path, name="x", **dtype)
    return TokenSource(cfg, split, seq_len=options.pop("seq_len", 9), seed=0, **options)


@pytest.mark.parametrize("dtype", LLM_C)
def test_llm_c_files_are_read_without_their_header(tmp_path: Path, dtype: str) -> None:
    """Two shards in the names of modded-nanogpt, the second held out; samples cross no header."""
    vocab_size = {"<u2": 50_257, "<u4": 128_256}[dtype]
    first, second, held_out = (some_ids(n, vocab_size) for n in (1000, 801, 91))
    write_llm_c(tmp_path / "fineweb_train_000001.bin", first, dtype)
    write_llm_c(tmp_path / "fineweb_train_000002.bin", second, dtype)
    write_llm_c(tmp_path / "fineweb_val_000000.bin", held_out, dtype)
    source = opened(tmp_path, vocab_size=vocab_size)
    assert source.files.format == "llm.c"
    assert stream(source) == [*first.tolist(), *second.tolist()]
    assert stream(opened(tmp_path, "validation", vocab_size=vocab_size)) == held_out.tolist()
    ids = source.read(every(source)).ids
    documents = read_doc_ids(source, every(source))
    assert np.array_equal(np.diff(documents, axis=1), ids[:, :-1] == END)
    pieces = source.origin(len(source) - 1)
    assert pieces[-1].file.name == "fineweb_train_000002.bin"
    assert pieces[-1].document == int((second[:-1] == END).sum())
    packed = opened(tmp_path, vocab_size=vocab_size, packing="best-fit")
    rows = packed.read(every(packed)).ids
    assert sorted(rows[rows >= 0].tolist()) == sorted([*first.tolist(), *second.tolist()])


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<i4", "<u4", "<i8", "<u8"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_arrays_of_numpy_are_read(tmp_path: Path, dtype: str, version: tuple[int, int]) -> None:
    """By path, and as the folder of build-nanogpt's edu_fineweb."""
    ids = (some_ids() % 251).astype(dtype)
    for name in ("edufineweb_train_000001", "edufineweb_val_000000"):
        with (tmp_path / f"{name}.npy").open("wb") as file:
            np.lib.format.write_array(file, ids, version)
    for path in (tmp_path, tmp_path / "edufineweb_train_000001.npy"):
        source = opened(path, vocab_size=251)
        assert source.files.format == "numpy"
        found = [(shard.path.name, shard.tokens) for shard in source.files.shards]
        assert found == [("edufineweb_train_000001.npy", len(ids))]
        assert stream(source) == ids[: len(stream(source))].tolist()
    assert len(opened(tmp_path, "validation", vocab_size=251).files.shards) == 1


def _llm_c(path: Path, version: int = 1, more: bytes = b"", count: int | None = None) -> None:
    """A file of llm.c with another version, more or fewer bytes, or another number of ids."""
    write_llm_c(path, some_ids(), count=count)
    content = bytearray(path.read_bytes() + more)
    content[4:8] = version.to_bytes(4, "little")
    path.write_bytes(content)


REFUSED: dict[str, Callable[[Path], object]] = {
    # Of llm.c.
    r"7,026 bytes; 3,000 ids": lambda path: _llm_c(path, more=bytes(2)),
    r"7,024 bytes; 5,000 ids": lambda path: _llm_c(path, count=5000),
    "version 2": lambda path: _llm_c(path, version=2),
    # Of numpy.
    r"shape \(4, 9\)": lambda path: _npy(path, np.zeros((4, 9), np.uint16)),
    r"float32": lambda path: _npy(path, np.zeros(9, np.float32)),
    r"big-endian": lambda path: _npy(path, np.zeros(9, ">u2")),
    r"object": lambda path: _npy(path, np.array([{}, {}])),
    r"shape \(\)": lambda path: _npy(path, np.uint16(7)),
    # Of others.
    "a chunk of litdata": lambda path: shutil.copy(BY_OTHERS / "chunk-0-2.bin", path),
    "MosaicML": lambda path: shutil.copy(BY_OTHERS / "shard.00000.mds", path),
    "an evaluation file of llm.c": lambda path: np.array(
        [20240522, 1, 5, 7] + [0] * 252, np.int32
    ).tofile(path),
    "zip": lambda path: np.savez(path.open("wb"), ids=some_ids()),
    "gzip": lambda path: path.write_bytes(gzip.compress(some_ids().tobytes())),
    "pickle": lambda path: path.write_bytes(pickle.dumps(some_ids().tolist())),
    "safetensors": lambda path: save_file({"x": np.zeros(100, np.float32)}, path),
    "HDF5": lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100)),
    "text": lambda path: path.write_text(json.dumps({"text": "Düsseldorf, Ærø: " * 300}) + "\n"),
}
"""Files that are no ids, or not whole, by what is said."""


def _npy(path: Path, array: Any) -> None:
    np.save(path.open("wb"), array, allow_pickle=True)


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_a_file_of_ids_is_refused_by_name(tmp_path: Path, why: str) -> None:
    """Also with a vocabulary in which every id would be one."""
    REFUSED[why](tmp_path / "train.bin")
    for path in (tmp_path, tmp_path / "train.bin"):
        with pytest.raises((InputError, DamagedError), match=rf"train\.bin[\s\S]*{why}") as refused:
            opened(path, vocab_size=2**32, dtype="uint32")
        if refused.type is InputError:
            assert "numpy.save" in str(refused.value)


def test_a_folder_of_several_formats_or_of_streaming_is_refused(tmp_path: Path) -> None:
    """A file that lost its header is not read as ids among those that have one."""
    write_llm_c(tmp_path / "a.bin", some_ids())
    some_ids().astype(np.uint16).tofile(tmp_path / "b.bin")
    with pytest.raises(InputError, match=r"several formats[\s\S]*a\.bin is llm\.c, b\.bin is raw"):
        opened(tmp_path)
    shutil.copy(BY_OTHERS / "shard.00000.mds", tmp_path)
    with pytest.raises(InputError, match="MosaicML"):
        opened(tmp_path)


@pytest.mark.parametrize("vocab_size", [50_257, 128_256, None])
@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("<u4", "uint16"), ("<i8", "uint16"), ("<i8", "uint32"), ("<i8", "int32"),
        (">u4", "uint16"), (">i8", "uint16"),
    ],
)  # fmt: skip
def test_ids_read_with_too_narrow_a_dtype_are_refused(
    tmp_path: Path, written: str, read: str, vocab_size: int | None
) -> None:
    some_ids(vocab_size=vocab_size or 128_256).astype(written).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"a wider type[\s\S]*a\.bin[\s\S]*dtype: uint32"):
        opened(tmp_path, dtype=read, vocab_size=vocab_size)


def _with_sparse_ids() -> Any:
    ids = some_ids()
    ids[::2] = 0
    ids[77] = 0  # both places hold something else than 0 in 64 ids of text; here at one alone
    ids[78] = 9
    return ids


@pytest.mark.parametrize(
    "ids",
    [
        np.zeros(3000, int), np.full(3000, 5), np.arange(3000), np.full(3000, 65_535),
        some_ids()[:40], np.tile([7, END], 8), _with_sparse_ids(),
    ],
    ids=["zeros", "fives", "ascending", "largest", "short", "short documents", "one at both"],
)  # fmt: skip
@pytest.mark.parametrize("vocab_size", [65_536, 128_256, None])
def test_correct_ids_are_accepted(tmp_path: Path, ids: Any, vocab_size: int | None) -> None:
    """However poor they are."""
    for dtype in ("uint16", "uint32", "int64"):
        ids.astype(dtype).tofile(tmp_path / "a.bin")
        found = opened(tmp_path, dtype=dtype, vocab_size=vocab_size)
        assert found.files.format == "raw"
        assert found.tokens == len(ids)
