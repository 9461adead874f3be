"""Tensors in safetensors files: cut over ranks when written, put together when read.

Every rank writes one file of its pieces. A tensor that lies on every rank is cut along its first
dimension so that all ranks write the same number of bytes; one that is sharded already would be
written as its shards. A piece that is not the whole tensor is described in the file's own header,
so any number of ranks can read what any other number wrote.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from dtt.artifacts import FileRecord
from dtt.errors import DamagedError

CHUNK = 2**24
"""Bytes hashed and written at once: few enough to stay in a cache between the two."""

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
    """The elements themselves."""
    offset: tuple[int, ...]
    """Where in the whole tensor they begin, in each dimension."""
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @property
    def whole(self) -> bool:
        """Whether there are no other pieces."""
        return tuple(self.tensor.shape) == self.shape


def cut(tensors: Mapping[str, Tensor], rank: int, size: int) -> list[Piece]:
    """The pieces that `rank` of `size` writes of tensors that every rank holds in full.

    All bytes, one tensor after the other, are divided evenly; a row belongs to the rank in whose
    part it begins. The order is of names, as dicts that were filled otherwise have another; large
    elements come first, so that all are aligned.
    """
    total = sum(tensor.nbytes for tensor in tensors.values())
    begin, end = total * rank // size, total * (rank + 1) // size
    pieces, position = [], 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        rows = tensor.shape[0] if tensor.dim() else 1
        per_row = max(1, tensor.nbytes // max(1, rows))
        first, last = (min(max(-((position - b) // per_row), 0), rows) for b in (begin, end))
        if last > first:
            part = tensor[first:last] if tensor.dim() else tensor
            offset = (first, *[0] * (tensor.dim() - 1)) if tensor.dim() else ()
            pieces.append(Piece(name, part, offset, tuple(tensor.shape)))
        position += tensor.nbytes
    return pieces


def write(path: Path, pieces: Iterable[Piece]) -> FileRecord:
    """Write CPU pieces as one safetensors file; on return it is on the disk.

    The hash is that of the bytes in memory, computed as they are written: what differs from it
    when the file is read was damaged on the way.
    """
    return write_bytes(path, _safetensors(list(pieces)))


def write_bytes(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write `chunks`; on return they are on the disk."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for chunk in chunks:
            digest.update(chunk)
            view = memoryview(chunk)
            while view.nbytes:
                view = view[file.write(view) :]
            size += len(chunk)
        os.fsync(file.fileno())
    return FileRecord(path=path.name, bytes=size, sha256=digest.hexdigest())


def _safetensors(pieces: list[Piece]) -> Iterator[bytes | memoryview]:
    """The bytes of a file: length of the header, header, tensors."""
    parts = {p.name: {"offset": p.offset, "shape": p.shape} for p in pieces if not p.whole}
    header: dict[str, object] = {"__metadata__": {"pieces": json.dumps(parts)}}
    position = 0
    for piece in pieces:
        end = position + piece.tensor.nbytes
        header[piece.name] = {
            "dtype": DTYPES[piece.tensor.dtype],
            "shape": list(piece.tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight, as the format asks
    yield len(text).to_bytes(8, "little") + text
    for piece in pieces:
        flat = piece.tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(flat), CHUNK):
            yield flat[start : start + CHUNK].data


def read(paths: Iterable[Path]) -> dict[str, Tensor]:
    """All tensors of some files, put together, on the CPU; DamagedError when a piece is absent."""
    tensors: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for path in paths:
        with safetensors.safe_open(path, "pt") as file:
            parts = json.loads((file.metadata() or {}).get("pieces", "{}"))
            for name in file.keys():  # noqa: SIM118  not a dict
                piece = file.get_tensor(name)
                if name not in parts:
                    tensors[name] = piece
                    continue
                offset, shape = parts[name]["offset"], parts[name]["shape"]
                whole = tensors.setdefault(name, torch.empty(shape, dtype=piece.dtype))
                box = tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))
                whole[box] = piece
                missing[name] = missing.get(name, math.prod(shape)) - piece.numel()
    for name, elements in missing.items():
        if elements:
            raise DamagedError(
                f"the checkpoint's {name} is not whole",
                why=f"{elements} of {tensors[name].numel()} elements are in none of its files",
            )
    return tensors
