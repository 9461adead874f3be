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


def damaged(folder: Path, why: str) -> DamagedError:
    """Return the error for a checkpoint that is not as it was written."""
    return DamagedError(f"checkpoint {folder} is damaged", why=why)


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
        raise damaged(path.parent, f"{path.name}: {error}") from None


def read(path: Path, file: Any = None) -> list[HeaderEntry]:
    """Return the entries of the header of a file, which may be open; DamagedError as `opened`."""
    try:
        return _entries(file or opened(path, "np"))
    except ValueError as error:
        raise damaged(path.parent, f"{path.name}: {error}") from None


def check(files: Mapping[Path, Iterable[HeaderEntry]]) -> None:
    """Raise DamagedError unless the boxes in `files` cover every tensor exactly once."""
    by_name: dict[str, list[tuple[Path, HeaderEntry]]] = defaultdict(list)
    for path, found in files.items():
        for entry in found:
            by_name[entry.name].append((path, entry))
    for name, boxes in by_name.items():
        path, first = boxes[0]
        elements = sum(math.prod(entry.extent) for _, entry in boxes)
        missing = math.prod(first.shape) - elements
        # Ranks that disagree would otherwise be joined into one tensor.
        if any((entry.dtype, entry.shape) != (first.dtype, first.shape) for _, entry in boxes):
            why = f"{name} has a different dtype or shape in another file"
        elif missing > 0:
            why = f"{missing} elements of {name} are in none of the files"
        # Elements are counted first: overlaps are only looked for if the number fits.
        elif missing < 0 or _overlap([entry for _, entry in boxes]):
            why = f"elements of {name} are stored more than once"
        else:
            continue
        raise damaged(path.parent, f"{path.name}: {why}")


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
        or {len(piece["offset"]), len(piece["shape"])} != {len(extent)}
        or not all(is_kind(n, int) and n >= 0 for n in (*piece["offset"], *piece["shape"]))
        or any(o + n > s for o, n, s in zip(piece["offset"], extent, piece["shape"], strict=True))
    ):
        raise ValueError(f"`pieces` places {name!r} outside of its tensor")
    return tuple(piece["offset"]), tuple(piece["shape"])


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
        for other in reaching:
            sides = zip(box.offset, box.extent, other.offset, other.extent, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in sides):
                return True
        reaching.append(box)
    return False
