"""Texts that a tokenizer cannot encode, and panics of the Rust code of `tokenizers`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any

from dtt.base.errors import InputError


class Unencodable(InputError):
    """A text that a tokenizer cannot encode."""

    def __init__(self, where: object, why: str) -> None:
        """Name the tokenizer by `where` it is."""
        super().__init__(
            "the tokenizer cannot encode a text",
            where=where,
            why=why,
            next="use a tokenizer that was made for such text, or remove the text",
        )
        self.why = why


_lock = Lock()
_inside: list[Any] = []
"""What the calls inside of `encoding` share: their number, and the descriptors of stderr."""


@contextmanager
def encoding(where: object, *, patterns: bool = True) -> Iterator[None]:
    """Raise Unencodable for errors of `tokenizers`, whose tokenizer.json is at `where`.

    They are of no specific class: an Exception for a missing unknown token, and for a pattern that
    takes too many steps a panic, which is a BaseException. Without `patterns`, there is none.
    """
    try:
        with _without_panics() if patterns else nullcontext():
            yield
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        if not panic and type(error) is not Exception:
            raise
        why = " ".join(str(error).split())[:200]
        raise Unencodable(where, f"its pattern failed: {why}" if panic else why) from None


@contextmanager
def _without_panics() -> Iterator[None]:
    """Discard what Rust prints about a panic, which `encoding` reports; keep all other lines.

    Rust writes to the descriptor of stderr itself, so that is replaced meanwhile: 10 µs a call.
    """
    with _lock:
        if not _inside:
            aside = tempfile.TemporaryFile()  # noqa: SIM115  closed by the last one
            _inside[:] = [0, os.dup(2), aside]
            os.dup2(aside.fileno(), 2)
        _inside[0] += 1
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            if not _inside[0]:
                _, stderr, aside = _inside
                _inside.clear()
                os.dup2(stderr, 2)
                os.close(stderr)
                with aside:
                    aside.seek(0)
                    panic = False
                    for line in aside:
                        panic = b"panicked at" in line or (panic and not line[:1].isdigit())
                        if not panic:
                            os.write(2, line)
