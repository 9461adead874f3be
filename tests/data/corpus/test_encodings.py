"""Files in another encoding are refused when they are downloaded; half of a pair is replaced."""

from __future__ import annotations

import codecs
import gzip
import json
import subprocess
from pathlib import Path

import pytest
import zstandard

from dtt.base.errors import DamagedError, InputError
from dtt.config.data import DownloadConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import read_rows, read_unit
from dtt.data.corpus.download import download
from dtt.data.corpus.encodings import SAMPLE_BYTES, check_encodings
from dtt.data.corpus.units import Corpus

FRENCH = "caf\u00e9, na\u00efve\n" * 50
ENGLISH = "plain text of one line\n" * 50


@pytest.mark.parametrize(
    ("content", "why", "encoding"),
    [
        (FRENCH.encode("utf-16"), "it is UTF-16", "UTF-16"),
        (codecs.BOM_UTF16_BE + FRENCH.encode("utf-16-be"), "it is UTF-16", "UTF-16"),
        (FRENCH.encode("utf-32"), "it is UTF-32", "UTF-32"),
        (ENGLISH.encode("utf-16-le"), "it is UTF-16LE", "UTF-16LE"),
        (ENGLISH.encode("utf-16-be"), "it is UTF-16BE", "UTF-16BE"),
        (FRENCH.encode("latin-1"), "first 600 bytes: 100, such as 0xe9", "LATIN1"),
        ((ENGLISH + FRENCH).encode("cp1252"), "such as 0xe9", "CP1252"),
        (("\u65e5\u672c\u8a9e\n" * 50).encode("shift_jis"), "such as 0x93", "SHIFT_JIS"),
        (("\u4e2d\u6587\n" * 50).encode("gb18030"), "such as 0xd6", "GB18030"),
        (("\u0442\u0435\u043a\u0441\u0442\n" * 50).encode("koi8-r"), "such as 0x", "KOI8-R"),
    ],
)
@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.zst"])
def test_another_encoding_is_refused_with_a_command_that_works(
    tmp_path: Path, content: bytes, why: str, encoding: str, suffix: str
) -> None:
    path = tmp_path / f"my text{suffix}"
    packed = {".txt": bytes, ".txt.gz": gzip.compress, ".txt.zst": zstandard.compress}
    path.write_bytes(packed[suffix](content))
    with pytest.raises(InputError) as refusal:
        download(DownloadConfig(dataset=str(path)), tmp_path / "corpus")
    message = str(refusal.value)
    assert f"where: {path}" in message
    assert why in message
    if suffix == ".txt.zst":  # the program may be missing
        return
    command = message.split("next:  ")[1].split(";")[0].replace("ENCODING", encoding)
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    check_encodings([tmp_path / f"NEW{suffix}"])


@pytest.mark.parametrize(
    "content",
    [
        FRENCH.encode(),
        FRENCH.encode("utf-8-sig"),
        b"x" * (SAMPLE_BYTES - 1) + "\u00e9\n".encode(),  # the sample ends within a character
        b"\0" * 5000,  # as a crash leaves a file
        ENGLISH.encode() + b"\0" * 5000,
        b"one\nt\0o\n",
        b"",
    ],
)
def test_utf_8_and_zeros_are_not_taken_for_another_encoding(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    check_encodings([tmp_path / "a.txt"])


def test_a_csv_header_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"caf\xe9\nx\n")
    with pytest.raises(DamagedError, match="can't decode byte 0xe9"):
        download(DownloadConfig(dataset=str(tmp_path / "a.csv")), tmp_path / "corpus")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("half \\ud83d of a pair", "half \ufffd of a pair"),
        ("\\uDC00 first", "\ufffd first"),
        ("\\ud83d\\ud83d\\ude00", "\ufffd\U0001f600"),
        ("whole \\ud83d\\ude00", "whole \U0001f600"),
    ],
)
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("array", [False, True])
def test_half_of_a_surrogate_pair_is_replaced_and_counted(
    tmp_path: Path, written: str, read: str, rows: bool, array: bool
) -> None:
    line = f'{{"text": "{written}"}}'
    (tmp_path / "a.json").write_text(f"[{line}]" if array else line + "\n")
    download(DownloadConfig(dataset=str(tmp_path / "a.json")), tmp_path / "corpus", rows=rows)
    corpus, bad = Corpus(tmp_path / "corpus"), BadDocuments(stop=True)
    (unit,) = corpus.units(10**6)
    if rows:
        ((row,),) = read_rows(corpus, unit, bad)
        assert json.loads(row.content) == row.value == {"text": read}
    else:
        assert list(read_unit(corpus, unit, bad)) == [read.encode()]
    assert bad.replaced == ("\ufffd" in read)
