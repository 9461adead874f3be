"""Sharded tensors in safetensors files, resharded when read.

Every rank writes one file with its shards. Data that several ranks replicate, whether full tensors
or shards, is divided along its first dimension so that these ranks write about the same number of
bytes. The header of each file describes the shards that are not full tensors. So a checkpoint can
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
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtt.artifacts.manifest import FileRecord
from dtt.base.errors import DamagedError
from dtt.base.files import named
from dtt.checkpoint import header
from dtt.checkpoint.header import HeaderEntry
from dtt.mesh.sharding import LaidOut, TensorSlice, local

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
class TensorShard:
    """A box of a tensor, to be written by one rank."""

    name: str
    tensor: Tensor
    """Elements of the box."""
    offset: tuple[int, ...]
    """Start of the box in the full tensor, in each dimension."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""

    @property
    def full(self) -> bool:
        """True if the shard is the full tensor."""
        return tuple(self.tensor.shape) == self.shape


def cut(tensors: Mapping[str, LaidOut], rank: int) -> list[TensorShard]:
    """Return the shards that `rank` writes of the tensors that it holds.

    Ranks that hold the same part of a tensor divide it among them. Parts held by the
    same ranks are concatenated, and their bytes are divided evenly; a row belongs to the rank in
    whose range it starts. Tensors are ordered by name, so that the order of insertion, which may
    differ between ranks, does not matter. Those with larger elements come first, so that all data
    is aligned.
    """
    # Only ranks that hold the same part can divide it. Under HSDP these are the replicas of a
    # shard, under DDP all ranks.
    by_ranks: dict[tuple[int, ...], list[tuple[str, Tensor, TensorSlice]]] = defaultdict(list)
    # Names break ties, so that all ranks divide the same list: each derives its part without a
    # message.
    for name, held in sorted(tensors.items(), key=lambda item: (-item[1].tensor.itemsize, item[0])):
        part = name, held.tensor.detach(), held.layout.box(rank)
        by_ranks[held.layout.replica_ranks(rank)].append(part)
    shards = [
        shard
        for ranks, parts in by_ranks.items()
        for shard in _divided(parts, ranks.index(rank), len(ranks))
    ]
    # Stable, so tensors keep their order within one element size.
    return sorted(shards, key=lambda shard: -shard.tensor.itemsize)


def _divided(
    parts: Sequence[tuple[str, Tensor, TensorSlice]], replica: int, replicas: int
) -> Iterator[TensorShard]:
    """Yield the shards that replica `replica` of `replicas` writes of parts that all of them hold.

    Each part is a name, a tensor, and the box of it that these ranks hold.
    """
    total, position = sum(local(tensor).nbytes for _, tensor, _ in parts), 0
    # Bytes, not tensors: a large embedding would otherwise make one rank write most of the time.
    begin, end = total * replica // replicas, total * (replica + 1) // replicas
    for name, tensor, box in parts:
        part = local(tensor)
        # A scalar is one row, which cannot be cut.
        rows = part.shape[0] if part.dim() else 1
        per_row = max(1, part.nbytes // max(1, rows))
        # Index of the first row that starts at or after a bound: rounded up, and clamped to this
        # part. So each row has one writer, however the bounds fall.
        first, last = (min(max(-((position - b) // per_row), 0), rows) for b in (begin, end))
        # A part without rows of this rank would be an empty entry in the file.
        if last > first and part.numel():
            written = part[first:last] if part.dim() else part
            offset = (box.offset[0] + first, *box.offset[1:]) if part.dim() else ()
            yield TensorShard(name, written, offset, tuple(tensor.shape))
        position += part.nbytes


def write(path: Path, shards: Iterable[TensorShard]) -> FileRecord:
    """Write CPU shards as one safetensors file, and fsync it.

    The hash in the returned record is computed from the bytes in memory, so verifying the file also
    detects corruption while it was written.
    """
    return write_bytes(path, _safetensors(list(shards)))


def write_bytes(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write `chunks` to a file and fsync it; return its record with size and sha256."""
    digest, size = hashlib.sha256(), 0
    # Unbuffered: chunks are large, and a buffer would copy them once more.
    with named(path), path.open("wb", buffering=0) as file:
        for chunk in chunks:
            # In the same pass as the write, while the chunk is in the cache.
            digest.update(chunk)
            view = memoryview(chunk)
            # A write may be short, for example where a signal arrives.
            while view.nbytes:
                view = view[file.write(view) :]
            size += len(chunk)
        os.fsync(file.fileno())
    return FileRecord(path=path.name, bytes=size, sha256=digest.hexdigest())


def _safetensors(shards: list[TensorShard]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: header length, header, tensors."""
    # safetensors describes no shards; its metadata holds text only, so they are JSON in it.
    boxes = {s.name: {"offset": s.offset, "shape": s.shape} for s in shards if not s.full}
    described: dict[str, object] = {"__metadata__": {"pieces": json.dumps(boxes)}}
    position = 0
    for shard in shards:
        end = position + shard.tensor.nbytes
        described[shard.name] = {
            "dtype": DTYPES[shard.tensor.dtype],
            "shape": list(shard.tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)  # the format aligns tensor data to 8 bytes
    yield len(text).to_bytes(8, "little") + text
    for shard in shards:
        # numpy has no bf16, so the bytes are viewed as uint8.
        flat = shard.tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(flat), CHUNK):
            yield flat[start : start + CHUNK].data


@dataclass
class TensorFile:
    """A safetensors file that is opened when a tensor of it is first read."""

    path: Path

    @cached_property
    def opened(self) -> Any:
        """The open file, which is mapped into memory."""
        return header.opened(self.path, "pt")


@dataclass
class Stored:
    """A tensor in files, read lazily: `stored[10:20, :]` reads a part, `stored[()]` everything."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[tuple[TensorFile, TensorSlice]] = field(default_factory=list)
    """Files, each with the box of the tensor that it contains."""

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """Read a part of the tensor to the CPU; DamagedError if elements of it are in no file."""
        index = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        wanted = [s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True)]
        # Only the part that was asked for: a rank never holds a full sharded tensor.
        tensor = torch.empty([end - begin for begin, end in wanted], dtype=self.dtype)
        missing = tensor.numel()
        for file, (offset, shape) in self._near(wanted):
            ranges = zip(wanted, offset, shape, strict=True)
            common = [(max(b, o), min(e, o + n)) for (b, e), o, n in ranges]
            # Boxes of other ranks are not read at all.
            if all(begin < end for begin, end in common):
                there = _shifted(common, offset)
                here = _shifted(common, [begin for begin, _ in wanted])
                tensor[here] = file.opened.get_slice(self.name)[there]
                missing -= math.prod(end - begin for begin, end in common)
        # Counted instead of marked: boxes do not overlap, as `header.check` has found.
        if missing:
            raise DamagedError(
                f"the checkpoint's {self.name} is not complete",
                why=f"{missing} of {tensor.numel()} elements are not in any of its files",
            )
        return tensor

    def _near(self, wanted: Sequence[tuple[int, ...]]) -> Iterable[tuple[TensorFile, TensorSlice]]:
        """Return the boxes that share an index of the first dimension with `wanted`."""
        if not wanted:
            return self.boxes
        # A thousand ranks have a thousand boxes of each tensor, and each rank reads one of them:
        # two comparisons for each of the others.
        first, end = wanted[0]
        return [
            one for one in self.boxes if first < one[1][0][0] + one[1][1][0] and one[1][0][0] < end
        ]


def _shifted(ranges: Iterable[tuple[int, int]], offset: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(b - o, e - o) for (b, e), o in zip(ranges, offset, strict=True))


def read(
    paths: Iterable[Path], known: Mapping[str, Sequence[HeaderEntry]] | None = None
) -> dict[str, Stored]:
    """Return the tensors in `paths` by name; reads and validates only the headers of the files.

    `known` holds the entries of headers that have been read already, by the names of the files.
    """
    found: dict[str, Stored] = {}
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    for path in paths:
        file = TensorFile(path)
        entries = (known or {}).get(path.name)
        for entry in header.read(path, file.opened) if entries is None else entries:
            stored = found.get(entry.name)
            if stored is None:
                stored = found[entry.name] = Stored(entry.name, entry.shape, dtypes[entry.dtype])
            stored.boxes.append((file, TensorSlice(entry.offset, entry.extent)))
    return found
