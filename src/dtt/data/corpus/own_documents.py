"""Documents of a user's own: a class yields them, and they become files of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dtt.artifacts.manifest import fingerprint
from dtt.base.files import replacing
from dtt.base.log import log
from dtt.config.own import own_code, own_file_of
from dtt.config.sources import Documents

KEY = "download.documents"
PART = "part-"
"""Start of the names of the files."""


def read_into(documents: Documents, folder: Path) -> tuple[str, list[Path]]:
    """Write the documents into `folder`, a file for each part; return their version and the files.

    A part that an earlier command has written, of the same class, keys and version, is not read
    again. Raises OwnCodeError for an exception of the class, or a row that is none.
    """
    with own_code(documents, KEY):
        parts, said = documents.parts(), documents.version()
    file = own_file_of(documents)
    made_by = [documents.model_dump(mode="json"), file and file.sha256, said]
    version = fingerprint(made_by)[:16]
    paths = []
    for part in range(parts):
        # The version is in the name: a complete file needs no record of what it was made from.
        path = folder / f"{PART}{part:05d}-{version}.jsonl"
        if not path.exists():
            count = _write(documents, part, path)
            log.info("part %d of %d: %d documents", part + 1, parts, count)
        paths.append(path)
    return version, paths


def _write(documents: Documents, part: int, path: Path) -> int:
    count = 0
    with replacing(path) as file:
        # Only the class runs in `own_code`: a full disk is not an error of the user's code.
        with own_code(documents, KEY):
            rows = iter(documents.rows(part))
        while line := _next_line(documents, rows):
            file.write(line)
            count += 1
    return count


def _next_line(documents: Documents, rows: Iterator[Any]) -> bytes:
    """Return the next row as a line of JSON; empty after the last one."""
    with own_code(documents, KEY):
        for row in rows:
            if not isinstance(row, str | Mapping):
                name = type(row).__name__
                raise TypeError(f"`rows` yielded {name}, not a text or a mapping: {row!r:.80}")
            named_row = {"text": row} if isinstance(row, str) else dict(row)
            # Not JSON: a date, a Decimal, NaN, half of a surrogate pair.
            line = json.dumps(named_row, ensure_ascii=False, allow_nan=False) + "\n"
            return line.encode("utf-8")
    return b""
