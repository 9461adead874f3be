"""Local files and the standard library become corpora; nothing is read twice; mistakes are told."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.corpora import parquet, read_texts, write_files
from support.running import Dtt

from dtt.artifacts.corpus import CorpusManifest
from dtt.base.errors import ConfigError, InputError
from dtt.config.data import DownloadConfig
from dtt.data.corpus import download as module
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import read_unit
from dtt.data.corpus.local_files import local_files
from dtt.data.corpus.units import Corpus

Log = pytest.LogCaptureFixture
LINE = b'{"id": "1", "text": "some text", "n": 3}\n'


def test_local_files_stay_where_they_are_and_are_described(corpora: Any, tmp_path: Path) -> None:
    manifest = corpora.make({"a.jsonl": LINE, "sub/b.jsonl": LINE + LINE}).manifest
    assert [file.path for file in manifest.files] == [
        str(tmp_path / "source/a.jsonl"),
        str(tmp_path / "source/sub/b.jsonl"),
    ]
    assert [file.bytes for file in manifest.files] == [len(LINE), 2 * len(LINE)]
    assert manifest.file_format == "jsonl"
    assert manifest.text_column == "text"
    assert {p.name for p in (tmp_path / "corpus").iterdir()} <= {"manifest.json", ".lock"}


def test_only_changed_files_are_hashed_again(
    corpora: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    first = corpora.make({"a.txt": b"aaa", "b.txt": b"bbb"}).manifest
    hashed: list[str] = []
    real = module.sha256_file
    monkeypatch.setattr(module, "sha256_file", lambda p: hashed.append(p.name) or real(p))
    assert corpora.download(dataset=str(source)) == first
    assert hashed == []
    (source / "b.txt").write_bytes(b"ccc")
    os.utime(source / "b.txt", ns=(1, 1))
    second = corpora.download(dataset=str(source))
    assert hashed == ["b.txt"]
    assert second.files[0] == first.files[0]
    assert second.files[1].sha256 != first.files[1].sha256
    assert second.content_key() != first.content_key()


def test_a_split_is_a_word_of_the_path(tmp_path: Path) -> None:
    names = ["train-00000-of-2.txt", "val-0.txt", "dev/x.txt", "Test.txt", "constrained.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def chosen(split: str) -> set[str]:
        return {str(path.relative_to(tmp_path)) for path in local_files(tmp_path, split)}

    assert chosen("train") == {"train-00000-of-2.txt"}
    assert chosen("validation") == chosen("valid") == {"val-0.txt", "dev/x.txt"}
    assert chosen("test") == {"Test.txt"}
    with pytest.raises(InputError, match=r"no file of .* belongs to split 'other'"):
        local_files(tmp_path, "other")
    single = tmp_path / "val-0.txt"
    assert local_files(single, "validation") == [single.resolve()]
    with pytest.raises(InputError, match="belongs to split 'train'"):
        local_files(single, "train")


def write_tree(folder: Path, *names: str) -> None:
    write_files(folder, {name: os.fsencode(name) for name in names})


def test_hidden_and_foreign_files_are_left_out_counted_and_named(
    tmp_path: Path, caplog: Log
) -> None:
    write_tree(
        tmp_path,
        "a.txt",
        ".hidden.txt",
        ".git/b.txt",
        ".git/c.txt",
        "README.md",
        "_x.txt",
        "_/y.txt",
    )
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "broken.txt").symlink_to("nowhere")
    (tmp_path / "circle.txt").symlink_to("circle.txt")
    with caplog.at_level("INFO", "dtt"):
        assert [path.name for path in local_files(tmp_path, None)] == ["a.txt"]
    messages = caplog.messages
    assert len(messages) == 3
    assert (
        "left out 4: hidden, or named _…; name one with -d to read it: .git/, .hidden.txt"
        in messages[0]
    )
    assert "left out 3: not regular files (broken links" in messages[1]
    assert "broken.txt, circle.txt, pipe.txt" in messages[1]
    assert messages[2] == "left out 1: files of other formats: README.md"
    hidden = tmp_path / ".hidden.txt"
    assert local_files(hidden, None) == [hidden]


def test_links_are_followed_and_each_file_is_taken_once(tmp_path: Path, caplog: Log) -> None:
    """A loop of links ends, and a link to a sibling adds nothing."""
    write_tree(tmp_path, "data/b.txt", "data/sub/c.txt", "store/train/d.txt", "store/e.txt")
    data = tmp_path / "data"
    (data / "a.txt").symlink_to("b.txt")
    (data / "linked").symlink_to(tmp_path / "store")
    (data / "sub/again").symlink_to(tmp_path / "store/train")
    (data / "sub/up").symlink_to("..")
    (tmp_path / "store/back").symlink_to(data)
    with caplog.at_level("INFO", "dtt"):
        found = local_files(data, None)
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "data/b.txt", "data/sub/c.txt", "store/e.txt", "store/train/d.txt",
    ]  # fmt: skip
    log = "\n".join(caplog.messages)
    assert "left out 1: links to files that are already read: a.txt" in log
    assert re.search("left out 3: links to folders that are already read: .*sub/up/", log)
    assert [path.name for path in local_files(data, "train")] == ["d.txt"]


def test_a_link_keeps_the_name_that_shows_its_format(corpora: Any, tmp_path: Path) -> None:
    """The Hub's cache links names with a suffix to files without any."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/1f3a").write_bytes(gzip.compress(LINE))
    (tmp_path / "source").mkdir()
    link = tmp_path / "source/a.jsonl.gz"
    link.symlink_to("../blobs/1f3a")
    for dataset in (tmp_path / "source", link):
        out = tmp_path / f"of {dataset.name}"
        manifest = module.download(DownloadConfig(dataset=str(dataset)), out)
        assert [file.path for file in manifest.files] == [str(link)]
        corpus = Corpus(out)
        (unit,) = corpus.units(10**6)
        assert list(read_unit(corpus, unit, BadDocuments(stop=True))) == [b"some text"]


def test_a_name_that_no_manifest_can_hold_is_refused(dtt: Dtt) -> None:
    write_tree(dtt.folder, "source/a.txt", "source/b\udcff.txt")
    refused = dtt("download", "-d", "source", expect=66)
    assert "not UTF-8" in refused.stderr
    assert r"b\udcff.txt" in refused.stderr


@pytest.mark.parametrize(
    ("files", "kind", "message"),
    [
        ({"a.txt": b"x", "b.jsonl": LINE}, ConfigError, "mixes formats"),
        ({"a.docx": b"x"}, InputError, "no file of .* has a format"),
        ({"a.parquet.gz": b"x"}, InputError, "no file of .* has a format"),
        ({"a.txt": b""}, InputError, "is empty"),
        ({"a.jsonl": b"no json\n"}, InputError, "no JSON object"),
        ({"a.jsonl": b'{"a": "x", "b": "y"}\n'}, ConfigError, "which column contains the text"),
        ({"a.csv": b"x,y\n1,2\n"}, ConfigError, "columns: x, y"),
        ({"a.parquet": b"no parquet at all"}, Exception, "cannot read a file"),
    ],
)
def test_invalid_corpora_are_refused(
    corpora: Any, files: dict[str, bytes], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        corpora.make(files)
    assert not CorpusManifest.exists(corpora.folder / "corpus")


def test_an_unknown_column_is_reported_with_the_existing_ones(corpora: Any) -> None:
    content = parquet(story=["a"], title=["b"], n=[1])
    with pytest.raises(ConfigError, match=r"no column 'txt'[^$]*story, title, n"):
        corpora.make({"a.parquet": content}, text_column="txt")
    with pytest.raises(ConfigError, match="column 'n' does not contain text"):
        corpora.make({"a.parquet": content}, text_column="n")
    assert corpora.make({"a.parquet": content}, text_column="story").manifest.text_column == "story"


@pytest.mark.parametrize(
    ("name", "first", "second", "columns"),
    [
        ("jsonl", LINE, b'\n{"content": "x", "id": 1}\n', "content, id"),
        ("csv", b"text,id\na,1\n", b"content,id\na,1\n", "content, id"),
        ("parquet", parquet(text=["a"]), parquet(content=["a"], id=[1]), "content, id"),
    ],
)
def test_a_later_file_without_the_column_is_named(
    corpora: Any, name: str, first: bytes, second: bytes, columns: str
) -> None:
    files = {f"a.{name}": first, f"b.{name}": first, f"c.{name}": second}
    with pytest.raises(ConfigError, match=rf"no column 'text'\n.*c\.{name}\n.*: {columns}; "):
        corpora.make(files)


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"text": ["a"], "content": ["b"]}, "text"),
        ({"title": ["a"], "content": ["b"]}, "content"),
        ({"story": ["a"], "n": [1]}, "story"),
    ],
)
def test_the_text_column_is_found(corpora: Any, columns: dict[str, list[Any]], found: str) -> None:
    assert corpora.make({"a.parquet": parquet(**columns)}).manifest.text_column == found


def test_an_unknown_dataset_name_is_refused(corpora: Any) -> None:
    for dataset in ("tinystoriez", "./nowhere/at.jsonl", "/no/such/folder", "folder/file.txt"):
        with pytest.raises(InputError, match="no dataset"):
            corpora.download(dataset=dataset)


def test_a_folder_of_another_corpus_is_not_overwritten(corpora: Any) -> None:
    corpora.make({"a.txt": b"x"})
    with pytest.raises(ConfigError, match="another corpus"):
        corpora.download(dataset="python-stdlib")


def test_the_standard_library_is_the_same_bytes_every_time(tmp_path: Path, corpora: Any) -> None:
    first = corpora.download(dataset="python-stdlib")
    path = corpora.folder / "corpus" / first.files[0].path
    written = path.stat().st_mtime_ns
    assert corpora.download(dataset="python-stdlib") == first
    assert path.stat().st_mtime_ns == written
    second = module.download(DownloadConfig(dataset="python-stdlib"), tmp_path / "again")
    assert second.files[0].sha256 == first.files[0].sha256
    table = pq.read_table(path)
    ids = table["id"].to_pylist()
    assert ids == sorted(ids)
    assert "json.decoder" in ids
    assert "argparse" in ids
    assert not any(name.startswith(("test.", "idlelib", "site-packages")) for name in ids)
    texts, bad = read_texts(Corpus(corpora.folder / "corpus"), 10**6)
    assert bad.count == 0
    assert len(texts) == len(ids)
    assert sum(map(len, texts)) > 5_000_000


@pytest.mark.slow
def test_the_conversations_about_the_standard_library_are_the_same_bytes_every_time(
    tmp_path: Path, corpora: Any
) -> None:
    first = corpora.download(dataset="python-stdlib-chat")
    assert (first.file_format, first.text_column) == ("jsonl", None)
    again = module.download(DownloadConfig(dataset="python-stdlib-chat"), tmp_path / "again")
    assert again.files[0].sha256 == first.files[0].sha256
    lines = (corpora.folder / "corpus" / first.files[0].path).read_text().splitlines()
    rows = [json.loads(line)["messages"] for line in lines]
    assert len(rows) > 1000
    assert {rows[0][0]["role"], rows[1][0]["role"]} == {"user", "system"}
    roles = [[message["role"] for message in row if message["role"] != "system"] for row in rows]
    assert all(row == ["user", "assistant"] * (len(row) // 2) for row in roles)
    [argparse] = [row for row in rows if "module argparse for" in row[-2]["content"]]
    assert argparse[-1]["content"] == "Command-line parsing library"


def test_what_a_killed_download_left_is_removed_by_the_next(corpora: Any, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    torn = [".manifest.json.0a1b2c3d.tmp", ".python-stdlib.parquet.tmp"]
    for name in [*torn, ".selection-12345678.0a1b2c3d.tmp", ".mine.tmp"]:
        (tmp_path / "corpus" / name).write_bytes(b"{")
    for _ in range(2):
        corpora.make({"a.txt": b"text"})
    assert {path.name for path in (tmp_path / "corpus").glob(".*.tmp")} == {
        ".selection-12345678.0a1b2c3d.tmp",
        ".mine.tmp",
    }


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["data/train-0.jsonl", "data/test-0.jsonl", "data/val-0.jsonl"], "2 of 3 files"),
        (["a/x.jsonl", "dev/x.jsonl"], "1 of 2 files"),
        (["test/x.jsonl", "test/y.jsonl"], None),
        (["x.jsonl", "contest.jsonl"], None),
    ],
)
def test_held_out_splits_in_a_local_folder_are_named_with_the_remedy(
    corpora: Any, caplog: Log, names: list[str], said: str | None
) -> None:
    files = dict.fromkeys(names, LINE)
    assert len(corpora.make(files).manifest.files) == len(names)
    warnings = [text for text in caplog.messages if "held-out" in text]
    assert len(warnings) == (said is not None)
    if said is not None:
        assert said in warnings[0]
        remedy = warnings[0].partition("next: ")[2]
        if remedy.startswith("download.split="):
            corpora.download(dataset=str(corpora.folder / "source"), split="train")


def test_results_go_to_stdout_and_a_rerun_reports_completion(dtt: Dtt) -> None:
    (dtt.folder / "book.txt").write_text("Once upon a time.\n" * 10)
    first, second = (dtt("download", "-d", "book.txt") for _ in range(2))
    assert "data/corpus/book" in first.stdout
    assert "1 txt" in first.stdout
    assert second.stdout == first.stdout
    assert ["already done" in done.stderr for done in (first, second)] == [False, True]
