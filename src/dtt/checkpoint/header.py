"""Validation of safetensors headers, before anything is allocated or read according to them.

A manifest with a matching hash proves that a file is unchanged, not that dtt wrote it.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtt.base.errors import DamagedError
from dtt.base.reading import STRICT, fits, is_kind, open_regular, parse

LARGEST = 100_000_000
"""Maximum bytes of a header; the safetensors library has the same limit."""
ITEM_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element for each dtype that a checkpoint may contain, by its safetensors name."""


@dataclass(frozen=True)
class HeaderEntry:
    """A box of a tensor as described by a header."""

    name: str
    dtype: str
    extent: tuple[int, ...]
    offset: tuple[int, ...]
    """Start of the box in the full tensor, in each dimension."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""


def read(path: Path) -> list[HeaderEntry]:
    """Return the entries of a file's header; raise DamagedError if it is invalid.

    The data of the tensors must fill the rest of the file without gap or overlap.
    """
    try:
        return _entries(*_header(path))
    except ValueError as error:
        raise _damaged(path, str(error)) from None


def check(paths: Iterable[Path]) -> None:
    """Raise DamagedError unless the boxes in `paths` cover every tensor exactly once."""
    by_name: dict[str, list[tuple[Path, HeaderEntry]]] = defaultdict(list)
    for path in paths:
        for entry in read(path):
            by_name[entry.name].append((path, entry))
    for name, entries in by_name.items():
        path, first = entries[0]
        # Ranks that disagree would otherwise be joined into one tensor.
        if any((entry.dtype, entry.shape) != (first.dtype, first.shape) for _, entry in entries):
            raise _damaged(path, f"{name} has a different dtype or shape in another file")
        # Elements are counted first: overlaps are only looked for if the number fits.
        elements = sum(math.prod(entry.extent) for _, entry in entries)
        missing = math.prod(first.shape) - elements
        if missing > 0:
            raise _damaged(path, f"{missing} elements of {name} are in none of the files")
        if missing < 0 or _overlap([entry for _, entry in entries]):
            raise _damaged(path, f"elements of {name} are stored more than once")


def _header(path: Path) -> tuple[Any, int]:
    """Return the parsed header and the number of bytes after it."""
    # The descriptor of a regular file: opening a FIFO would wait forever.
    with open(open_regular(path), "rb") as file:  # noqa: PTH123  a descriptor, not a path
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        # Checked before reading, so that a forged length allocates nothing.
        if size < 8 or length > min(LARGEST, size - 8):
            raise ValueError(f"its header would have {length:,} bytes, the file has {size:,}")
        return parse(file.read(length), STRICT), size - 8 - length


def _entries(header: Any, data: int) -> list[HeaderEntry]:
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    described = metadata.get("pieces", "{}") if isinstance(metadata, dict) else None
    pieces = parse(described.encode(), STRICT) if isinstance(described, str) else None
    # A description of a tensor that is not in the file could hide another one.
    if not isinstance(pieces, dict) or not pieces.keys() <= header.keys():
        raise ValueError("its `pieces` do not describe the tensors in it")
    entries, ends = [], []
    for name, entry in header.items():
        extent = _extent(name, entry)
        begin, end = entry["data_offsets"]
        # Before any tensor is created from these numbers.
        if end - begin != math.prod(extent) * ITEM_SIZES[entry["dtype"]]:
            raise ValueError(f"the data of {name!r} does not have the size of its shape")
        offset, shape = _position(name, pieces.get(name), extent)
        entries.append(HeaderEntry(name, entry["dtype"], extent, offset, shape))
        ends.append((begin, end))
    position = 0
    for begin, end in sorted(ends):
        # Sorted, data must follow without a gap. Two tensors may not share bytes.
        if begin != position:
            raise ValueError(f"its tensors overlap or leave a gap at byte {position:,}")
        position = end
    if position != data:
        raise ValueError(f"its tensors have {position:,} bytes, the file has {data:,} for them")
    return entries


def _extent(name: str, entry: Any) -> tuple[int, ...]:
    """Validate an entry of a header and return its shape; ValueError if it is invalid."""
    if not fits(entry, {"dtype": str, "shape": list, "data_offsets": list}):
        raise ValueError(f"its header does not describe {name!r}")
    if entry["dtype"] not in ITEM_SIZES:
        raise ValueError(f"{name!r} has the unknown dtype {entry['dtype']!r}")
    if not _sizes(entry["shape"]) or not _sizes(entry["data_offsets"], 2):
        raise ValueError(f"{name!r} has an impossible shape or position")
    return tuple(entry["shape"])


def _position(
    name: str, piece: Any, extent: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offset of a box in its full tensor, and the shape of the full tensor."""
    if piece is None:
        return (0,) * len(extent), extent
    if (
        not fits(piece, {"offset": list, "shape": list})
        or not _sizes(piece["offset"], len(extent))
        or not _sizes(piece["shape"], len(extent))
        or any(o + n > s for o, n, s in zip(piece["offset"], extent, piece["shape"], strict=True))
    ):
        raise ValueError(f"`pieces` places {name!r} outside of its tensor")
    return tuple(piece["offset"]), tuple(piece["shape"])


def _sizes(values: Any, count: int | None = None) -> bool:
    """Return True if `values` are non-negative integers, `count` of them if it is given."""
    return all(is_kind(n, int) and n >= 0 for n in values) and count in (None, len(values))


def _overlap(entries: Sequence[HeaderEntry]) -> bool:
    """Return True if two boxes share an element.

    A sweep along the first dimension, along which most tensors are sharded.
    """
    # Empty boxes share no element, wherever they are.
    boxes = sorted((e for e in entries if math.prod(e.extent)), key=lambda e: e.offset)
    reaching: list[HeaderEntry] = []
    for box in boxes:
        if not box.offset:
            # Scalars have no dimension to sweep: two of them are the same element.
            return len(boxes) > 1
        # Boxes that end before this one starts can overlap none of the later ones.
        reaching = [
            other for other in reaching if other.offset[0] + other.extent[0] > box.offset[0]
        ]
        if any(_intersect(box, other) for other in reaching):
            return True
        reaching.append(box)
    return False


def _intersect(one: HeaderEntry, other: HeaderEntry) -> bool:
    sides = zip(one.offset, one.extent, other.offset, other.extent, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in sides)


def _damaged(path: Path, why: str) -> DamagedError:
    return DamagedError(f"checkpoint {path.parent} is damaged", why=f"{path.name}: {why}")
