"""Bounded reads of small files, and retries of transient file system errors.

A file that was damaged, or that another user created, may be a FIFO, a directory, a sparse file of
20 GB, or JSON with different fields. All of these raise ValueError here; an OSError comes from the
file system itself.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dtt.base.errors import DamagedError

T = TypeVar("T")
Kind = type | tuple[type, ...]
"""Type of a JSON field: `int`, `float` (any finite number), `str`, `dict`, `list`, `type(None)`, or
a tuple of these."""

TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.EINTR}
"""Error numbers of a busy or just restarted file server, which often succeed on a retry."""
FULL = {errno.ENOSPC, errno.EDQUOT}
"""Error numbers of a full disk."""
PATIENCE = (0.5, 2.0, 8.0)
"""Seconds to wait before each retry."""
OUTAGE = 16.0
"""Seconds from the first failure on for which a training process retries anything at all.

If each file of a save, and of the end of a run, had the patience above, a folder that fails for
good would keep a run for minutes after SIGTERM, of which Slurm allows 30 s.
"""
APART = 60.0
"""Seconds without a failure after which the next one is the first of another outage."""
SMALL = 2**24
"""Maximum size in bytes of the small files of a job, and of a line in its record files."""
LARGE = 2**28
"""Maximum size in bytes of other files that are read whole, such as a tokenizer.json."""
LARGEST_INT = 2**63
NOT_REGULAR = "it is not a regular file"
REPLACE = "fetch or create it again, or remove it if nothing needs it"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a name appears twice in an object")
    return record


PLAIN = json.JSONDecoder()
STRICT = json.JSONDecoder(object_pairs_hook=_unique)
"""Decoder that rejects objects with duplicate names, because parsers differ in which one they
keep."""
log = logging.getLogger("dtt")
_reported: set[Path] = set()


@dataclass
class _Outage:
    """The time of the first and the last failure of a file system, on the monotonic clock."""

    began: float = -math.inf
    last: float = -math.inf

    def lasts(self, seconds: float) -> bool:
        """Record a failure; return True if a retry after `seconds` comes too late."""
        now = time.monotonic()
        if now - self.last > APART:
            self.began = now
        self.last = now
        return now + seconds - self.began > OUTAGE


_outages: list[_Outage] = []
"""The outage of this process, if its retries share one limit."""


@contextmanager
def outages_limited() -> Iterator[None]:
    """Let all retries of this process, in all threads, end after one `OUTAGE`."""
    _outages.append(_Outage())
    try:
        yield
    finally:
        _outages.pop()


def retrying(action: Callable[[], T]) -> T:
    """Return `action()`; retry it after transient file system errors.

    `action` must start over on each call: after a failed fsync, none of its earlier writes can be
    relied on.
    """
    patience, retried = iter(PATIENCE), False
    while True:
        try:
            result = action()
        except OSError as error:
            if error.errno not in TRANSIENT:
                if retried:  # the file system answers again, as with ENOENT after ESTALE
                    _end_outage()
                raise
            seconds = next(patience, None)
            if seconds is None:
                raise
            if _outages and _outages[-1].lasts(seconds):
                raise
            retried = True
            log.warning("%s; trying again in %g s", error, seconds)
            time.sleep(seconds)
        else:
            if retried:
                _end_outage()
            return result


def _end_outage() -> None:
    if _outages:
        _outages[-1] = _Outage()


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises ValueError for anything else, without blocking on a FIFO.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise ValueError("it is a directory" if stat.S_ISDIR(mode) else NOT_REGULAR)
    return fd


def read_small(path: Path, most: int = SMALL) -> bytes:
    """Return the content of a regular file of at most `most` bytes; raise ValueError otherwise."""
    with open(open_regular(path), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def read_whole(path: Path, most: int = LARGE) -> bytes:
    """Return the content of a regular file of at most `most` bytes; DamagedError names another."""
    try:
        return read_small(path, most)
    except ValueError as error:
        raise DamagedError(f"{path} cannot be read", why=str(error), next=REPLACE) from None


def check_regular(path: Path, most: int) -> None:
    """Raise DamagedError unless `path` is a regular file of at most `most` bytes.

    For files that are read by a library, which would wait for a FIFO and never finish a device.
    """
    facts = path.stat()
    if stat.S_ISREG(facts.st_mode) and facts.st_size <= most:
        return
    why = f"it has more than {most:,} bytes" if stat.S_ISREG(facts.st_mode) else NOT_REGULAR
    raise DamagedError(f"{path} cannot be read", why=why, next=REPLACE)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of at most `LARGE` bytes; DamagedError names another."""
    try:
        return read_json(path, LARGE)
    except ValueError as error:
        raise DamagedError(f"{path} is not JSON", why=str(error), next=REPLACE) from None


def parse(content: bytes, decoder: json.JSONDecoder | None = None) -> Any:
    """Return a JSON value; raise ValueError for anything else, and for text that is not UTF-8."""
    try:
        value = (decoder or PLAIN).decode(content.decode())
        if b"\\u" in content:  # a lone surrogate is valid JSON, but cannot be printed
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def read_json(path: Path, most: int = SMALL) -> dict[str, Any]:
    """Return the JSON object in a file; raise ValueError if the file contains anything else."""
    value = parse(read_small(path, most))
    if not isinstance(value, dict):
        raise ValueError("it does not contain a JSON object")
    return value


def fits(record: Any, fields: Mapping[str, Kind]) -> bool:
    """Return True if `record` is an object that has all `fields`, each of its type."""
    return isinstance(record, dict) and all(
        name in record and is_kind(record[name], kind) for name, kind in fields.items()
    )


def is_kind(value: Any, kind: Kind) -> bool:
    """Return True if a JSON value has a type of `kind`.

    Booleans do not count as numbers. Integers must be below `LARGEST_INT` in magnitude, floats
    finite, and strings free of NUL.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, int) and not isinstance(value, bool):
        return (int in kinds or float in kinds) and abs(value) < LARGEST_INT
    if isinstance(value, float):
        return float in kinds and math.isfinite(value)
    if isinstance(value, str) and "\0" in value:  # cannot be part of a path or an argument
        return False
    return type(value) in kinds


def tolerant(path: Path, read: Callable[[Path], T]) -> T | None:
    """Return `read(path)`, or None if the file does not exist or cannot be used.

    An unusable file is reported with one warning per process.
    """
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        if path not in _reported:
            _reported.add(path)
            why = error.strerror if isinstance(error, OSError) else error
            log.warning("%s cannot be read and is ignored: %s", path, why)
        return None


def read_record(path: Path, fields: Mapping[str, Kind]) -> dict[str, Any] | None:
    """Return the JSON object in a small file, or None if there is no object with `fields`."""

    def read(path: Path) -> dict[str, Any]:
        record = read_json(path)
        if not fits(record, fields):
            wrong = [n for n, kind in fields.items() if not fits(record, {n: kind})]
            raise ValueError(f"{', '.join(wrong)} missing or of the wrong type")
        return record

    return tolerant(path, read)


def read_text(path: Path) -> str | None:
    """Return the text of a small file, or None if it does not exist or is not UTF-8."""
    return tolerant(path, lambda path: read_small(path).decode())


def read_lines(path: Path, last: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the complete lines of a file with their numbers: all, or those in its `last` bytes.

    Yields nothing for a file that does not exist or cannot be used. Of a line longer than `SMALL`
    bytes, only the last part is yielded.
    """
    fd = tolerant(path, lambda path: retrying(lambda: open_regular(path)))
    if fd is None:
        return
    with open(fd, "rb") as file:  # noqa: PTH123  a descriptor
        if last is not None and os.fstat(fd).st_size > last:
            file.seek(-last, os.SEEK_END)
            file.readline(SMALL)  # skip the rest of a line that starts before
        for number, line in enumerate(iter(lambda: file.readline(SMALL), b""), 1):
            if line.endswith(b"\n"):  # else a crash cut the line off, or it is too long
                yield number, line


def read_records(
    path: Path, fields: Mapping[str, Kind], last: int | None = None, mark: bytes = b""
) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of a file that have `fields`.

    Lines that do not contain `mark` are skipped before they are parsed. The first other line that
    contains no such object is reported with a warning.
    """
    for number, line in read_lines(path, last):
        if mark not in line:
            continue
        try:
            record = parse(line)
        except ValueError:
            record = None
        if fits(record, fields):
            yield record
        elif path not in _reported:
            _reported.add(path)
            where = f"{path}:{number}" if last is None else f"a line of {path}"
            log.warning("%s is not a record; it is skipped, as are others like it", where)
