"""Patterns choose files as .gitignore would; text of any ending is read; binary files are named."""

from __future__ import annotations

import ast
import gzip
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.corpora import parquet, read_texts, write_files

from dtt.artifacts.corpus import CorpusManifest
from dtt.base.errors import ConfigError, InputError
from dtt.config.data import DownloadConfig
from dtt.data.corpus.download import local_manifest
from dtt.data.corpus.file_choice import FilePatterns
from dtt.data.corpus.local_files import local_files

LINE = b'{"text": "some text"}\n'
TREE = {
    "README.md": b"# A project",
    "docs/one.md": b"one",
    "docs/deep/two.md": b"two",
    "docs/deep/three.rst": b"three",
    "src/__init__.py": b"x = 1",
    "src/_private/a.py": b"y = 2",
    ".github/hidden.md": b"hidden",
    "data/rows.jsonl": LINE,
}


def chosen(folder: Path, include: list[str], exclude: list[str] | None = None) -> set[str]:
    cfg = DownloadConfig(include=tuple(include), exclude=tuple(exclude or ()))
    files = local_files(folder, None, FilePatterns(cfg))
    return {str(path.relative_to(folder)) for path in files}


@pytest.mark.parametrize(
    ("include", "exclude", "names"),
    [
        (["**/*.md"], [], ["README.md", "docs/one.md", "docs/deep/two.md"]),
        (["*.md"], ["/README.md"], ["docs/one.md", "docs/deep/two.md"]),
        (["docs/*.md"], [], ["docs/one.md"]),
        (["docs/"], [], ["docs/one.md", "docs/deep/two.md", "docs/deep/three.rst"]),
        (["*.md"], ["deep"], ["README.md", "docs/one.md"]),
        (["**/*.py"], [], ["src/__init__.py", "src/_private/a.py"]),
        ([".github/*.md"], [], [".github/hidden.md"]),
        (["docs/**/*.m[a-d]"], [], ["docs/one.md", "docs/deep/two.md"]),
        ([], ["docs/"], ["data/rows.jsonl"]),
        (["docs/**/"], [], ["docs/deep/two.md", "docs/deep/three.rst"]),
        (["**/deep/**"], ["*.md"], ["docs/deep/three.rst"]),
    ],
)
def test_the_patterns_are_those_of_gitignore(
    tmp_path: Path, include: list[str], exclude: list[str], names: list[str]
) -> None:
    write_files(tmp_path, TREE)
    assert chosen(tmp_path, include, exclude) == set(names)


def test_text_of_any_ending_is_a_document_a_file(corpora: Any) -> None:
    corpus = corpora.make(TREE, include=("**/*.md", "*.rst"))
    assert corpus.manifest.file_format == "txt"
    assert corpus.manifest.txt_documents == "file"
    assert corpus.manifest.source.include == ("**/*.md", "*.rst")
    assert sorted(read_texts(corpus, 10**6)[0]) == ["# A project", "one", "three", "two"]
    rows = corpora.download(dataset=str(corpora.folder / "source"), include=("data/",))
    assert rows.file_format == "jsonl"


MIXED = {"a.jsonl": LINE, "b.json": LINE, "c.txt": b"x", "d.md": b"y"}


def argument(error: Exception) -> str:
    """Return the argument that a message suggests, as a shell reads it."""
    next_ = str(error).split("next:")[1]
    return next(one for one in shlex.split(next_) if one.startswith("download."))


@pytest.mark.parametrize(
    ("files", "options", "suggested"),
    [
        ({"a.md": b"x", "b.png": b"\x89PNG"}, {}, "download.include=['**/*.md']"),
        ({"a.jsonl": LINE, "c.txt": b"x"}, {}, "download.include=['**/*.jsonl']"),
        ({"a/b.tex": b"x", "c.bin": b"\0"}, {}, "download.include=['**/*.tex']"),
        (
            {"a.md": b"x", "b.png": b"\x89PNG\0"},
            {"include": ("*",)},
            "download.exclude=['**/*.png']",
        ),
    ],
)
def test_what_is_suggested_works(
    corpora: Any, files: dict[str, bytes], options: dict[str, Any], suggested: str
) -> None:
    with pytest.raises((ConfigError, InputError)) as refused:
        corpora.make(files, **options)
    assert argument(refused.value) == suggested
    key, value = suggested.removeprefix("download.").split("=")
    patterns = tuple(ast.literal_eval(value))
    assert corpora.make(files, **(options | {key: patterns})).manifest.files


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.docx", b"PK\3\4\0\0"), ("a.tar.gz", gzip.compress(b"name\0\0\0", mtime=0))],
)
def test_a_binary_file_is_refused_by_name(corpora: Any, name: str, content: bytes) -> None:
    with pytest.raises(InputError, match=rf"{name}\n.*contains NUL bytes"):
        corpora.make({name: content, "b.md": b"x"}, include=("*",))
    with pytest.raises(InputError, match="convert them to UTF-8 text"):
        corpora.download(dataset=str(corpora.folder / "source" / name), include=("a*",))
    assert not CorpusManifest.exists(corpora.folder / "corpus")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.markdown", r"matches '\*\.markdown'"),
        ("#notes.md", "matches '#notes.md'"),
        ("", "matches ''"),
        ("!*.md", "begins with an exclamation mark"),
        ("[z-a].md", "is not a pattern"),
        ("a\\", "is not a pattern"),
    ],
)
@pytest.mark.parametrize("key", ["include", "exclude"])
def test_a_pattern_without_effect_is_named(
    corpora: Any, pattern: str, message: str, key: str
) -> None:
    options: dict[str, Any] = {"include": ("*.md",)} | {key: (pattern,)}
    with pytest.raises(ConfigError, match=message) as refused:
        corpora.make(TREE, **options)
    assert f"download.{key}" in str(refused.value)


def test_an_excluded_folder_is_not_listed(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": b"x", "closed/b.txt": b"y"})
    (tmp_path / "closed").chmod(0)
    try:
        assert chosen(tmp_path, [], ["closed/"]) == {"a.txt"}
    finally:
        (tmp_path / "closed").chmod(0o755)


def test_a_column_of_text_is_suggested(corpora: Any) -> None:
    content = parquet(n=[1], story=["a b c"], title=["a"])
    with pytest.raises(ConfigError, match="which column contains") as refused:
        corpora.make({"a.parquet": content})
    assert argument(refused.value) == "download.text_column=story,"
    path = corpora.folder / "source/a.parquet"
    with pytest.raises(ConfigError, match=f"dtt download -d {path} download.text_column=story"):
        local_manifest(path)
