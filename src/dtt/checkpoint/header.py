"""Validation of safetensors headers, before anything is allocated or read according to them.

A manifest with a matching hash proves that a file is unchanged, not that dtt wrote it.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors

from dtt.base.errors import DamagedError
from dtt.base.reading import STRICT, fits, is_kind, open_regular, parse

DTYPES = frozenset(("F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL"))
"""Dtypes that a checkpoint may contain, by their safetensors names."""


class HeaderEntry(NamedTuple):
    """A box of a tensor as described by a header.

    A tuple, because a thousand ranks exchange millions of them.
    """

    name: str
    dtype: str
    extent: tuple[int, ...]
    offset: tuple[int, ...]
    """Start of the box in the full tensor, in each dimension."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""


def opened(path: Path, framework: Literal["np", "pt"]) -> Any:
    """Open a safetensors file lazily; raise DamagedError if it is invalid.

    The library refuses headers that are no description of tensors whose data fill the rest of the
    file without gap or overlap, and allocates nothing before. A parser of our own could read
    another header than the library, which reads the tensors.
    """
    try:
        # Refuses a FIFO, which the library would wait for without an end.
        os.close(open_regular(path))
        return safetensors.safe_open(path, framework)
    except (ValueError, safetensors.SafetensorError) as error:
        raise _damaged(path, str(error)) from None


def entries(path: Path, file: Any) -> list[HeaderEntry]:
    """Return the entries of the header of an open `file`; raise DamagedError if one is invalid."""
    try:
        return _entries(file)
    except ValueError as error:
        raise _damaged(path, str(error)) from None


def check(files: Mapping[Path, Iterable[HeaderEntry]]) -> None:
    """Raise DamagedError unless the boxes in `files` cover every tensor exactly once."""
    by_name: dict[str, list[tuple[Path, HeaderEntry]]] = defaultdict(list)
    for path, found in files.items():
        for entry in found:
            by_name[entry.name].append((path, entry))
    for name, boxes in by_name.items():
        path, first = boxes[0]
        # Ranks that disagree would otherwise be joined into one tensor.
        if any((entry.dtype, entry.shape) != (first.dtype, first.shape) for _, entry in boxes):
            raise _damaged(path, f"{name} has a different dtype or shape in another file")
        # Elements are counted first: overlaps are only looked for if the number fits.
        elements = sum(math.prod(entry.extent) for _, entry in boxes)
        missing = math.prod(first.shape) - elements
        if missing > 0:
            raise _damaged(path, f"{missing} elements of {name} are in none of the files")
        if missing < 0 or _overlap([entry for _, entry in boxes]):
            raise _damaged(path, f"elements of {name} are stored more than once")


def _entries(file: Any) -> list[HeaderEntry]:
    pieces = parse((file.metadata() or {}).get("pieces", "{}").encode(), STRICT)
    # A description of a tensor that is not in the file could hide another one.
    if not isinstance(pieces, dict) or not pieces.keys() <= set(file.keys()):
        raise ValueError("its `pieces` do not describe the tensors in it")
    found = []
    for name in file.keys():  # noqa: SIM118  not a dict
        tensor = file.get_slice(name)  # reads nothing yet
        extent, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        if dtype not in DTYPES:
            raise ValueError(f"{name!r} has the unknown dtype {dtype!r}")
        offset, shape = _position(name, pieces.get(name), extent)
        found.append(HeaderEntry(name, dtype, extent, offset, shape))
    return found


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


def _sizes(values: Any, count: int) -> bool:
    """Return True if `values` are `count` non-negative integers."""
    return len(values) == count and all(is_kind(n, int) and n >= 0 for n in values)


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
