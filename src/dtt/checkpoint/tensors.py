"""Sharded tensors in safetensors files, resharded when read.

Every rank writes one file with its pieces. Data that several ranks replicate, whether full tensors
or shards, is divided along its first dimension so that these ranks write about the same number of
bytes. The header of each file describes the pieces that are not full tensors. So a checkpoint can
be read with any number of ranks and any sharding, and each rank reads only its own part.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtt.artifacts import FileRecord
from dtt.checkpoint import header
from dtt.errors import DamagedError
from dtt.runtime.files import named
from dtt.runtime.sharding import Box, Held, held

CHUNK = 2**24
"""Bytes hashed and written at a time; small enough to stay in the CPU cache in between."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor."""

    name: str
    tensor: Tensor
    """Elements of the box."""
    offset: tuple[int, ...]
    """Start of the box in the full tensor, in each dimension."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""

    @property
    def whole(self) -> bool:
        """True if the piece is the full tensor."""
        return tuple(self.tensor.shape) == self.shape


def cut(tensors: Mapping[str, Tensor], rank: int, size: int) -> list[Piece]:
    """Return the pieces that `rank` of `size` writes of tensors that all ranks save together.

    A DTensor contributes its local shard, which the ranks with a replica of that shard divide among
    them. Other tensors are replicated on all ranks. Tensors held by the same ranks are
    concatenated, and their bytes are divided evenly; a row belongs to the rank in whose range it
    starts. Tensors are ordered by name, so that the order of insertion, which may differ between
    ranks, does not matter. Those with larger elements come first, so that all data is aligned.
    """
    alike: dict[tuple[int, ...], list[tuple[str, Held]]] = defaultdict(list)
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        part = held(tensor.detach())
        if not isinstance(tensor, DTensor):
            part = part._replace(peers=tuple(range(size)), copy=rank)
        alike[part.peers].append((name, part))
    pieces = [piece for parts in alike.values() for piece in _divided(parts)]
    return sorted(pieces, key=lambda piece: -piece.tensor.itemsize)


def _divided(parts: Sequence[tuple[str, Held]]) -> Iterator[Piece]:
    """Yield the pieces that this rank writes of parts that the same ranks hold."""
    copy, copies = parts[0][1].copy, parts[0][1].copies
    total, position = sum(part.local.nbytes for _, part in parts), 0
    begin, end = total * copy // copies, total * (copy + 1) // copies
    for name, (local, box, shape, *_) in parts:
        rows = local.shape[0] if local.dim() else 1
        per_row = max(1, local.nbytes // max(1, rows))
        first, last = (min(max(-((position - b) // per_row), 0), rows) for b in (begin, end))
        if last > first and local.numel():
            share = local[first:last] if local.dim() else local
            offset = (box.offset[0] + first, *box.offset[1:]) if local.dim() else ()
            yield Piece(name, share, offset, shape)
        position += local.nbytes


def write(path: Path, pieces: Iterable[Piece]) -> FileRecord:
    """Write CPU pieces as one safetensors file, and fsync it.

    The hash in the returned record is computed from the bytes in memory, so verifying the file also
    detects corruption while it was written.
    """
    return write_bytes(path, _safetensors(list(pieces)))


def write_bytes(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write `chunks` to a file and fsync it; return its record with size and sha256."""
    digest, size = hashlib.sha256(), 0
    with named(path), path.open("wb", buffering=0) as file:
        for chunk in chunks:
            digest.update(chunk)
            view = memoryview(chunk)
            while view.nbytes:
                view = view[file.write(view) :]
            size += len(chunk)
        os.fsync(file.fileno())
    return FileRecord(path=path.name, bytes=size, sha256=digest.hexdigest())


def _safetensors(pieces: list[Piece]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: header length, header, tensors."""
    parts = {p.name: {"offset": p.offset, "shape": p.shape} for p in pieces if not p.whole}
    described: dict[str, object] = {"__metadata__": {"pieces": json.dumps(parts)}}
    position = 0
    for piece in pieces:
        end = position + piece.tensor.nbytes
        described[piece.name] = {
            "dtype": DTYPES[piece.tensor.dtype],
            "shape": list(piece.tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)  # the format aligns tensor data to 8 bytes
    yield len(text).to_bytes(8, "little") + text
    for piece in pieces:
        flat = piece.tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(flat), CHUNK):
            yield flat[start : start + CHUNK].data


@dataclass
class Stored:
    """A tensor in files, read lazily: `stored[10:20, :]` reads a part, `stored[()]` everything."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[Any, Box]] = field(default_factory=list)
    """Open files, each with the box of the tensor that it contains."""

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """Read a part of the tensor to the CPU; DamagedError if elements of it are in no file."""
        index = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        wanted = [s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True)]
        tensor = torch.empty([end - begin for begin, end in wanted], dtype=self.dtype)
        missing = tensor.numel()
        for file, (offset, shape) in self.pieces:
            ranges = zip(wanted, offset, shape, strict=True)
            common = [(max(b, o), min(e, o + n)) for (b, e), o, n in ranges]
            if all(begin < end for begin, end in common):
                there = _shifted(common, offset)
                here = _shifted(common, [begin for begin, _ in wanted])
                tensor[here] = file.get_slice(self.name)[there]
                missing -= math.prod(end - begin for begin, end in common)
        if missing:
            raise DamagedError(
                f"the checkpoint's {self.name} is not whole",
                why=f"{missing} of {tensor.numel()} elements are in none of its files",
            )
        return tensor


def _shifted(ranges: Iterable[tuple[int, int]], offset: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(b - o, e - o) for (b, e), o in zip(ranges, offset, strict=True))


def read(paths: Iterable[Path]) -> dict[str, Stored]:
    """Return the tensors in `paths` by name; reads and validates only the headers of the files."""
    found: dict[str, Stored] = {}
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    for path in paths:
        parts = header.read(path)
        try:
            file: Any = safetensors.safe_open(path, "pt")  # safetensors has no type annotations
        except safetensors.SafetensorError as error:
            why = f"{path.name}: {error}"
            raise DamagedError(f"checkpoint {path.parent} is damaged", why=why) from None
        for part in parts:
            stored = Stored(part.name, part.shape, dtypes[part.dtype])
            box = Box(part.offset, part.extent)
            found.setdefault(part.name, stored).pieces.append((file, box))
    return found
