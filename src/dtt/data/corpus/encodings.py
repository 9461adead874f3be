"""Detection of text files in another encoding than UTF-8, from the beginning of each file.

Only a beginning is read: `dtt tokenize` checks every document. But a file in another encoding loses
most of its documents, which the user should know before a tokenizer is trained on the others.
"""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from dtt.base.errors import InputError
from dtt.data.corpus.bad_documents import raise_if_refused
from dtt.data.corpus.streams import UNREADABLE, is_compressed, open_stream

SAMPLE_BYTES = 2**16
FEW = 10
"""Maximum number of invalid bytes that count as damage, whatever else the sample contains. Damage
costs the documents in which it is; texts from the web often have some."""
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark is the beginning of this one
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
INVALID, NOT_ASCII = re.compile("[\udc80-\udcff]"), re.compile("[^\x00-\x7f]")


def check_encodings(paths: Sequence[Path]) -> None:
    """Raise InputError for a text file in another encoding than UTF-8."""
    for path in paths:
        sample = _sample(path)
        encoding = _marked(sample)
        text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(sample)
        found = INVALID.findall(text)
        valid = len(NOT_ASCII.findall(text)) - len(found)
        if encoding or len(found) > max(FEW, valid):
            byte = f", such as 0x{ord(found[0]) - 0xDC00:02x}" if found else ""
            why = f"invalid in UTF-8 among its first {len(sample):,} bytes: {len(found):,}{byte}"
            raise InputError(
                "a file is not UTF-8",
                where=path,
                why=f"it is {encoding}" if encoding else why,
                next=_conversion(path, encoding),
            )


def is_binary(path: Path) -> bool:
    """Return True if NUL bytes show that a file is not text, as they do for git and grep.

    UTF-16 has them, too, and is text.
    """
    sample = _sample(path)
    return b"\0" in sample and not _marked(sample)


def _sample(path: Path) -> bytes:
    try:
        with open_stream(path) as stream:
            return stream.read(SAMPLE_BYTES)
    except UNREADABLE as damage:  # the reader of documents reports it, and keeps what it can
        raise_if_refused(damage)
        return b""


def _marked(sample: bytes) -> str | None:
    """Return the name of the encoding that a byte order mark, or the place of zeros, shows.

    UTF-16 without a mark has a zero in every other byte where the text is ASCII; a run of zeros, as
    a crash leaves it in a file, has them in all bytes.
    """
    for mark, name in BYTE_ORDER_MARKS.items():
        if sample.startswith(mark):
            return name
    first, second = sample[::2].count(0), sample[1::2].count(0)
    if max(first, second) > max(len(sample) // 8, FEW) and 10 * min(first, second) < max(
        first, second
    ):
        return "UTF-16BE" if first > second else "UTF-16LE"
    return None


def _conversion(path: Path, encoding: str | None) -> str:
    """Return the command that converts a file to UTF-8."""
    name, new = shlex.quote(path.name), "NEW" + "".join(path.suffixes[-1 - is_compressed(path) :])
    convert = f"iconv -f {encoding or 'ENCODING'} -t UTF-8"
    if is_compressed(path):
        tool = "gzip" if path.suffix.lower() == ".gz" else "zstd"
        command = f"{tool} -dc {name} | {convert} | {tool} > {new}"
    else:
        command = f"{convert} {name} > {new}"
    return command if encoding else f"{command}; ENCODING is often LATIN1; file -i guesses it"
