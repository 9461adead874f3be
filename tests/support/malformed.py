"""Files with one fault each, of every format: beside a whole file they make a corpus."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

GOOD = ["first", "second", "third"]
"""Documents of the whole file."""
LINES = [json.dumps({"text": f"line {i}"}).encode() + b"\n" for i in range(4)]
LONG = 70_000_000
"""More than a document may have."""


def parquet(*values: object, kind: pa.DataType | None = None, column: str = "text") -> bytes:
    """A file of one column, four rows to a group."""
    stream = io.BytesIO()
    table = pa.table({column: pa.array(list(values), kind)})
    pq.write_table(table, stream, row_group_size=4, compression="none", use_dictionary=False)
    return stream.getvalue()


ROWS = [f"row {i} of a few" for i in range(12)]


def two_columns() -> bytes:
    """Two columns have the name of the text."""
    stream = io.BytesIO()
    columns = [pa.array(["a"]), pa.array(["b"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["text", "text"]), stream)
    return stream.getvalue()


def corrupt_page() -> bytes:
    """The second row group's page header is overwritten."""
    content = bytearray(parquet(*ROWS))
    at = content.index(b"row 4") - 20
    content[at : at + 8] = b"\xff" * 8
    return bytes(content)


def corrupt_page_of_many() -> bytes:
    """The last of twenty pages of the only row group has a header that is overwritten."""
    stream = io.BytesIO()
    table = pa.table({"text": [f"row {i:05d}" for i in range(10_000)]})
    pq.write_table(
        table, stream, compression="none", use_dictionary=False, data_page_size=1,
        write_batch_size=500, write_statistics=False,
    )  # fmt: skip
    content = bytearray(stream.getvalue())
    at = content.index(b"row 09500") - 20
    content[at : at + 12] = b"\xff" * 12
    return bytes(content)


def comma(*rows: str, header: str = "id,text") -> bytes:
    return "\n".join([header, *rows, ""]).encode()


GOOD_FILES: dict[str, Callable[[], bytes]] = {
    "parquet": lambda: parquet(*GOOD),
    "jsonl": lambda: b"".join(json.dumps({"text": t}).encode() + b"\n" for t in GOOD),
    "csv": lambda: comma(*(f"{i},{t}" for i, t in enumerate(GOOD))),
    "txt": lambda: "\n".join(GOOD).encode() + b"\n",
}


@dataclass(frozen=True)
class Fault:
    """A faulty file, and what becomes of its documents."""

    what: str
    suffix: str
    content: Callable[[], bytes]
    kept: int | None = 0
    """How many of its documents become tokens; None: as the compressing library has it."""
    skipped: int | None = 0
    """How many times something is left out: a document, or the rest of a file."""
    says: str = ""
    """Where and why, of the first."""
    refused: str = ""
    """What `dtt download` says, when that already turns the file away."""


def after(*lines: bytes) -> Callable[[], bytes]:
    """Two good lines, others, two good lines."""
    return lambda: b"".join([*LINES[:2], *lines, *LINES[2:]])


def gz(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def zst(content: bytes) -> bytes:
    return zstandard.compress(content)


MANY = b"".join(json.dumps({"text": f"{i} {i * i}"}).encode() + b"\n" for i in range(50_000))

FAULTS = [
    Fault("cut off before its footer", "parquet", lambda: parquet(*ROWS)[:-20], 0, 1,
          "b.parquet: cannot be read: Parquet magic bytes not"),
    Fault("another file's magic bytes", "parquet",
          lambda: b"GIF8" + parquet(*ROWS)[4:-4] + b"GIF8", 0, 1,
          "b.parquet: cannot be read: Parquet magic bytes not"),
    Fault("a corrupt page", "parquet", corrupt_page, 8, 4,
          "b.parquet, row 4: the rest of row group 1, 4 rows, cannot be read"),
    Fault("a corrupt page among many", "parquet", corrupt_page_of_many, 9_500, 500,
          "b.parquet, row 9500: the rest of row group 0, 500 rows, cannot be read"),
    Fault("a binary column", "parquet", lambda: parquet(b"x", b"\xff", kind=pa.binary()),
          refused="column 'text' does not contain text, but binary"),
    Fault("a column of integers", "parquet", lambda: parquet(1, 2),
          refused="column 'text' does not contain text, but int64"),
    Fault("a column of lists", "parquet", lambda: parquet(["x"], ["y", "z"]),
          refused="column 'text' does not contain text, but list<"),
    Fault("a column of structs", "parquet", lambda: parquet({"body": "x"}, {"body": "y"}),
          refused="column 'text' does not contain text, but struct<"),
    Fault("nulls", "parquet", lambda: parquet("x", None, "y", None), 2, 2,
          "b.parquet, row 1: the text is null"),
    Fault("a column of nothing but nulls", "parquet", lambda: parquet(None, None), 0, 2,
          "b.parquet, row 0: the text is null"),
    Fault("the column is missing", "parquet", lambda: parquet("x", column="body"),
          refused="there is no column 'text'"),
    Fault("two columns of one name", "parquet", two_columns,
          refused="two columns are called 'text'"),
    Fault("no rows", "parquet", lambda: parquet(kind=pa.string()), 0, 0),
    Fault("no bytes", "parquet", lambda: b"", 0, 1,
          "b.parquet: cannot be read: Parquet file size is 0 bytes"),
    Fault("invalid UTF-8", "parquet",
          lambda: parquet(*ROWS).replace(b"row 1 of", b"row \xff of"), 11, 1,
          "b.parquet, row 1: not UTF-8: invalid start byte at byte 4"),
    Fault("a document of 70 MB", "parquet", lambda: parquet("x", "y" * LONG, "z"), 2, 1,
          "b.parquet, row 1: longer than 64 MiB"),
    Fault("a broken line", "jsonl", after(b'{"text": "br\n'), 4, 1,
          "b.jsonl:3: not JSON"),
    Fault("the key is missing", "jsonl", after(b'{"body": "x"}\n'), 4, 1,
          "b.jsonl:3: no key 'text'"),
    Fault("text of the wrong type", "jsonl", after(b'{"text": 3}\n'), 4, 1,
          "b.jsonl:3: the text is int"),
    Fault("nothing but objects for text", "jsonl", lambda: b'{"text": {"body": "x"}}\n' * 3,
          refused="column 'text' does not contain text, but an object"),
    Fault("null for text", "jsonl", after(b'{"text": null}\n'), 4, 1,
          "b.jsonl:3: the text is null"),
    Fault("not an object", "jsonl", after(b'"text"\n'), 4, 1,
          "b.jsonl:3: not a JSON object"),
    Fault("invalid UTF-8", "jsonl", after(b'{"text": "\xff"}\n'), 4, 1,
          "b.jsonl:3: not UTF-8: byte 10 is 0xff"),
    Fault("half a surrogate pair", "jsonl", after(b'{"text": "\\ud800"}\n'), 5, 0),
    Fault("nested 100,000 deep", "jsonl", after(b'{"text": ' + b"[" * 100_000 + b"\n"), 4, 1,
          "b.jsonl:3: invalid JSON: nested too deeply"),
    Fault("NUL bytes between lines", "jsonl", after(b"\0\0\0\n"), 4, 1,
          "b.jsonl:3: not JSON"),
    Fault("a NUL in the text", "jsonl", after(b'{"text": "a\\u0000b"}\n'), 5, 0),
    Fault("NaN and a number of 5,000 digits", "jsonl",
          after(b'{"text": "x", "n": NaN}\n', b'{"text": "x", "n": ' + b"9" * 5000 + b"}\n"), 5, 1,
          "b.jsonl:4: not JSON"),
    Fault("a byte order mark", "jsonl", lambda: b"\xef\xbb\xbf" + b"".join(LINES), 4, 0),
    Fault("CRLF line ends", "jsonl", lambda: b"".join(LINES).replace(b"\n", b"\r\n"), 4, 0),
    Fault("blank lines", "jsonl", after(b"\n", b"  \n"), 4, 0),
    Fault("no line end at the end", "jsonl", lambda: b"".join(LINES)[:-1], 4, 0),
    Fault("cut off in its last line", "jsonl", lambda: b"".join(LINES)[:-5], 3, 1,
          "b.jsonl:4: not JSON"),
    Fault("UTF-16", "jsonl", lambda: b"".join(LINES).decode().encode("utf-16"),
          refused="a file is not UTF-8"),
    Fault("Latin-1", "txt", lambda: ("caf\u00e9\n" * 20).encode("latin-1"),
          refused="a file is not UTF-8"),
    Fault("a line of 70 MB", "jsonl", after(b'{"text": "' + b"y" * LONG + b'"}\n'), 4, 1,
          "b.jsonl:3: longer than 64 MiB"),
    Fault("a key that appears twice", "jsonl", after(b'{"text": "a", "text": "b"}\n'), 5, 0),
    Fault("an array instead of lines", "json", lambda: b'[\n{"text": "x"}\n]\n', 1, 0),
    Fault("a mistake in an array", "json", lambda: b'[{"text": "x"},\n7,\n{"text": "y"}, {broken',
          2, 2, "b.json:2: not a JSON object"),
    Fault("no bytes", "jsonl", lambda: b"", 0, 1,
          "b.jsonl:1: the file is empty"),
    Fault("cut off", "jsonl.gz", lambda: gz(MANY)[:-2000], None, 1,
          ": the rest of the file cannot be read: Compressed file ended before"),
    Fault("garbage behind it", "jsonl.gz", lambda: gz(b"".join(LINES)) + b"garbage", 4, 1,
          "b.jsonl.gz:5: the rest of the file cannot be read"),
    Fault("zeros behind it", "jsonl.gz", lambda: gz(b"".join(LINES)) + bytes(511), 4, 0),
    Fault("zeros and garbage behind it", "jsonl.gz",
          lambda: gz(b"".join(LINES)) + b"\0\0x", 4, 1,
          "b.jsonl.gz:5: the rest of the file cannot be read"),
    Fault("zeros in place of its end", "jsonl.gz", lambda: gz(MANY)[:-50] + bytes(50), None, None,
          "b.jsonl.gz:"),
    Fault("not compressed", "jsonl.gz", lambda: b"".join(LINES), 0, 1,
          "b.jsonl.gz:1: the rest of the file cannot be read"),
    Fault("no bytes", "jsonl.gz", lambda: b"", 0, 1,
          "b.jsonl.gz:1: the file is empty"),
    Fault("two members", "jsonl.gz",
          lambda: gz(b"".join(LINES[:2])) + gz(b"".join(LINES[2:])), 4, 0),
    Fault("a flipped byte", "jsonl.gz",
          lambda: (c := gz(MANY))[:60_000] + b"\0\0\0" + c[60_003:], None, None,
          "b.jsonl.gz:"),
    Fault("cut off", "jsonl.zst", lambda: zst(MANY)[:-2000], None, 1,
          ": the rest of the file cannot be read: Truncated compressed stream"),
    Fault("garbage behind it", "jsonl.zst", lambda: zst(MANY) + b"garbage", None, 1,
          ": the rest of the file cannot be read"),
    Fault("not compressed", "jsonl.zst", lambda: b"".join(LINES), 0, 1,
          "b.jsonl.zst:1: the rest of the file cannot be read"),
    Fault("no bytes", "jsonl.zst", lambda: b"", 0, 1,
          "b.jsonl.zst:1: the file is empty"),
    Fault("two frames", "jsonl.zst",
          lambda: zst(b"".join(LINES[:2])) + zst(b"".join(LINES[2:])), 4, 0),
    Fault("a quote that is never closed", "csv", lambda: comma("1,a", '2,"b', "3,c", "4,d"), 1, 1,
          "b.csv:3: not CSV: unexpected end of data; the rest of the file is left out"),
    Fault("a quote within a text, and a comma later", "csv",
          lambda: comma("1,a", '2,"He said "no" and left.', "Then, more.", 'The end."', "3,c"),
          1, 1,
          "b.csv:3: not CSV: ',' expected after '\"'; the rest of the file is left out"),
    Fault("too few columns", "csv", lambda: comma("1,a", "2", "3,c"), 2, 1,
          "b.csv:3: cells: 1, but the header has 2"),
    Fault("too many columns", "csv", lambda: comma("1,a", "2,b,more,and more", "3,c"), 2, 1,
          "b.csv:3: cells: 4, but the header has 2"),
    Fault("a NUL", "csv", lambda: comma("1,a", "2,b\0b", "3,c"), 3, 0),
    Fault("invalid UTF-8", "csv", lambda: comma("1,a", "2,?", "3,c").replace(b"?", b"\xff"), 2, 1,
          "b.csv:3: not UTF-8: invalid byte at character 0"),
    Fault("a column's name that appears twice", "csv",
          lambda: comma("1,a,b", header="id,text,text"),
          refused="two columns are called 'text'"),
    Fault("a field of 70 MB", "csv", lambda: comma("1,a", "2," + "y" * LONG, "3,c"), 2, 1,
          "b.csv:3: not CSV: longer than 64 MiB"),
    Fault("no header", "csv", lambda: b"1,a\n2,b\n",
          refused="there is no column 'text'"),
    Fault("semicolons", "csv", lambda: comma("1;a", header="id;text"),
          refused="the columns of a CSV file are not separated by commas"),
    Fault("no bytes", "csv", lambda: b"", 0, 1,
          "b.csv:1: the file is empty"),
    Fault("a header and nothing else", "csv", comma, 0, 0),
    Fault("UTF-16", "csv", lambda: comma("1,a").decode().encode("utf-16"),
          refused="a file is not UTF-8"),
    Fault("a carriage return in a field", "csv", lambda: comma("1,a", "2,b\rb", "3,c"), 3, 1,
          "b.csv:4: cells: 1, but the header has 2"),
    Fault("invalid UTF-8", "txt", lambda: b"one\ntw\xff\nthree\n", 2, 1,
          "b.txt:2: not UTF-8: byte 2 is 0xff"),
    Fault("UTF-16", "txt", lambda: "one\ntwo\n".encode("utf-16"),
          refused="a file is not UTF-8"),
    Fault("a NUL", "txt", lambda: b"one\nt\0o\nthree\n", 3, 0),
    Fault("a line of 70 MB", "txt", lambda: b"one\n" + b"y" * LONG + b"\nthree\n", 2, 1,
          "b.txt:2: longer than 64 MiB"),
    Fault("no bytes", "txt", lambda: b"", 0, 1,
          "b.txt:1: the file is empty"),
    Fault("nothing but blank lines", "txt", lambda: b"\n\r\n\n", 0, 0),
]  # fmt: skip
