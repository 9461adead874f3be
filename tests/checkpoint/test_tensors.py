"""Any number of ranks writes, any other reads: the same tensors, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from dtt.base.errors import DamagedError
from dtt.checkpoint import tensors
from dtt.mesh.sharding import on_every_rank

SHAPES = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    st.tuples(
        st.lists(st.integers(1, 9), max_size=3).map(tuple),
        st.sampled_from(list(tensors.DTYPES)),
    ),
    min_size=1,
    max_size=8,
)


def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 2, shape).to(dtype) if dtype == torch.bool else (
        torch.randint(0, 100, shape).to(dtype)
    )  # fmt: skip


@settings(max_examples=60)
@given(SHAPES, st.integers(1, 7))
def test_checkpoints_of_any_number_of_ranks_are_read_back_completely(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]],
    size: int,
) -> None:
    folder = tmp_path_factory.mktemp("tensors")
    named = {name: random(*kind) for name, kind in shapes.items()}
    shuffled = dict(reversed(named.items()))  # another rank may have filled its dict otherwise
    for rank in range(size):
        pieces = tensors.cut(on_every_rank(named if rank % 2 else shuffled, size), rank)
        tensors.write(folder / f"x-{rank}.safetensors", pieces)
    found = tensors.read(sorted(folder.iterdir()))
    assert found.keys() == named.keys()
    for name, value in named.items():
        assert (found[name].shape, found[name].dtype) == (tuple(value.shape), value.dtype)
        assert torch.equal(found[name][()], value)
        part = tuple(slice(n // 3, n - n // 3) for n in value.shape)
        assert torch.equal(found[name][part], value[part])
        assert torch.equal(found[name][part[:1]], value[part[:1]])


def test_all_ranks_write_the_same_number_of_bytes_to_within_a_row() -> None:
    named = {"embed": torch.zeros(5000, 64), "norm": torch.zeros(64), "mlp": torch.zeros(256, 64)}
    for size in (2, 3, 8):
        shares = [
            sum(p.tensor.nbytes for p in tensors.cut(on_every_rank(named, size), r))
            for r in range(size)
        ]
        assert max(shares) - min(shares) <= 2 * 64 * 4


def test_the_files_are_safetensors_with_their_hash(tmp_path: Path) -> None:
    named = {"w": torch.randn(3, 4), "step": torch.tensor(7.0), "rng": torch.arange(9).byte()}
    path = tmp_path / "x.safetensors"
    record = tensors.write(path, tensors.cut(on_every_rank(named, 1), 0))
    theirs = load_file(path)
    assert theirs.keys() == named.keys()
    assert all(torch.equal(theirs[name], value) for name, value in named.items())
    assert record.bytes == path.stat().st_size
    assert record.sha256 == tensors.hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_missing_piece_is_reported(tmp_path: Path) -> None:
    named = {"embed": torch.randn(100, 4)}
    for rank in range(3):
        tensors.write(
            tmp_path / f"x-{rank}.safetensors", tensors.cut(on_every_rank(named, 3), rank)
        )
    (tmp_path / "x-1.safetensors").unlink()
    found = tensors.read(sorted(tmp_path.iterdir()))["embed"]
    with pytest.raises(DamagedError, match=r"not complete[\s\S]*1[0-9]{2} of 400 elements"):
        found[()]
    assert torch.equal(found[:30, 1:3], named["embed"][:30, 1:3])
