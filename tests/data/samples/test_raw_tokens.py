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
from support.token_files import END, read_doc_ids

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


def stream(source: TokenSource) -> list[int]:
    ids = source.read(np.arange(len(source), dtype=np.uint64)).ids
    return [*ids[:, :-1].ravel().tolist(), int(ids[-1, -1])]


def by_file(source: TokenSource) -> list[tuple[str, int]]:
    return [(shard.path.name, shard.tokens) for shard in source.files.shards]


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
    every = np.arange(len(source), dtype=np.uint64)
    ids = source.read(every).ids
    documents = read_doc_ids(source, every)
    assert np.array_equal(np.diff(documents, axis=1), ids[:, :-1] == END)
    pieces = source.origin(len(source) - 1)
    assert pieces[-1].file.name == "fineweb_train_000002.bin"
    assert pieces[-1].document == int((second[:-1] == END).sum())
    packed = opened(tmp_path, vocab_size=vocab_size, packing="best-fit")
    rows = packed.read(np.arange(len(packed), dtype=np.uint64)).ids
    assert sorted(rows[rows >= 0].tolist()) == sorted([*first.tolist(), *second.tolist()])


@pytest.mark.parametrize(("bytes_", "count"), [(-2, None), (2, None), (0, 5000)])
def test_an_llm_c_file_must_have_the_number_of_ids_in_its_header(
    tmp_path: Path, bytes_: int, count: int | None
) -> None:
    path = tmp_path / "fineweb_train_000001.bin"
    write_llm_c(path, some_ids(), count=count)
    content = path.read_bytes()
    path.write_bytes(content[:bytes_] if bytes_ < 0 else content + bytes(bytes_))
    with pytest.raises(DamagedError, match=r"fineweb_train_000001\.bin[\s\S]*bytes; [\d,]+ ids"):
        opened(tmp_path)


def test_an_unknown_version_of_llm_c_is_refused(tmp_path: Path) -> None:
    write_llm_c(tmp_path / "a.bin", some_ids())
    with (tmp_path / "a.bin").open("r+b") as file:
        file.seek(4)
        file.write((2).to_bytes(4, "little"))
    with pytest.raises(InputError, match=r"a\.bin[\s\S]*version 2"):
        opened(tmp_path)


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
        assert by_file(source) == [("edufineweb_train_000001.npy", len(ids))]
        assert stream(source) == ids[: len(stream(source))].tolist()
    assert len(opened(tmp_path, "validation", vocab_size=251).files.shards) == 1


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.zeros((4, 9), np.uint16), r"shape \(4, 9\)"),
        (np.zeros(9, np.float32), "float32"),
        (np.zeros(9, ">u2"), "big-endian"),
        (np.array([{}, {}]), "object"),
        (np.uint16(7), r"shape \(\)"),
    ],
    ids=["2-D", "floats", "big-endian", "objects", "a number"],
)
def test_arrays_of_something_else_are_refused(tmp_path: Path, array: Any, why: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(InputError, match=rf"a\.npy[\s\S]*{why}[\s\S]*numpy\.save"):
        opened(tmp_path / "a.npy")


def test_a_folder_of_several_formats_is_refused(tmp_path: Path) -> None:
    """A file that lost its header is not read as ids among those that have one."""
    write_llm_c(tmp_path / "a.bin", some_ids())
    some_ids().astype(np.uint16).tofile(tmp_path / "b.bin")
    with pytest.raises(InputError, match=r"several formats[\s\S]*a\.bin is llm\.c, b\.bin is raw"):
        opened(tmp_path)


def _safetensors(path: Path) -> None:
    save_file({"x": np.zeros(100, np.float32)}, path)


def _h5(path: Path) -> None:
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))


OTHERS: dict[str, Callable[[Path], object]] = {
    "a chunk of litdata": lambda path: shutil.copy(BY_OTHERS / "chunk-0-2.bin", path),
    "MosaicML": lambda path: shutil.copy(BY_OTHERS / "shard.00000.mds", path),
    "an evaluation file of llm.c": lambda path: np.array(
        [20240522, 1, 5, 7] + [0] * 252, np.int32
    ).tofile(path),
    "zip": lambda path: np.savez(path.open("wb"), ids=some_ids()),
    "gzip": lambda path: path.write_bytes(gzip.compress(some_ids().tobytes())),
    "pickle": lambda path: path.write_bytes(pickle.dumps(some_ids().tolist())),
    "safetensors": _safetensors,
    "HDF5": _h5,
    "text": lambda path: path.write_text(json.dumps({"text": "Düsseldorf, Ærø: " * 300}) + "\n"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_other_programs_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """Also with a vocabulary in which every id would be one."""
    OTHERS[name](tmp_path / "train.bin")
    for path in (tmp_path, tmp_path / "train.bin"):
        with pytest.raises(InputError, match=rf"train\.bin[\s\S]*{name}[\s\S]*numpy\.save"):
            opened(path, vocab_size=2**32, dtype="uint32")


def test_a_folder_of_streaming_is_refused_by_name(tmp_path: Path) -> None:
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
