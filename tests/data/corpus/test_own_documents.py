"""Documents of a user's own: a class that yields them, and the corpus that they become."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.own_classes import WORDS
from support.running import ROOT, Dtt

from dtt.base.errors import ExitCode

EXAMPLES = ROOT / "examples"


@pytest.fixture
def words(dtt: Dtt) -> Dtt:
    (dtt.folder / "words.py").write_text(WORDS)
    (dtt.folder / "version").write_text("1")
    (dtt.folder / "run.yaml").write_text("download: {documents: {type: words.py:Words}}\n")
    return dtt


def texts(folder: Path) -> list[Any]:
    manifest = json.loads((folder / "manifest.json").read_text())
    found = [(folder / file["path"]).read_text().splitlines() for file in manifest["files"]]
    listed = {file["path"] for file in manifest["files"]}
    assert listed == {path.name for path in folder.glob("part-*")}
    return [json.loads(line) for part in found for line in part]


def calls(dtt: Dtt) -> str:
    path = dtt.folder / "calls"
    found = path.read_text().strip() if path.exists() else ""
    path.write_text("")
    return found


def test_they_are_read_again_only_when_they_changed(words: Dtt) -> None:
    corpus = words.folder / "data/corpus/Words"
    for change, expected in (
        ("", "0 1"),
        ("", ""),
        ("version", "0 1"),
        ("count", "0 1"),
        ("file", "0 1"),
        ("killed before the second part", "1"),
    ):
        match change:
            case "version":
                (words.folder / "version").write_text("2")
            case "file":
                (words.folder / "words.py").write_text(WORDS.replace("{part} {i}", "{i} {part}"))
            case "killed before the second part":
                (corpus / "manifest.json").unlink()
                [path] = corpus.glob("part-00001-*")
                path.unlink()
        count = 3 if change in ("", "version") else 2
        words("download", "-c", "run.yaml", f"download.documents.count={count}")
        assert calls(words) == expected, change
    assert texts(corpus) == [{"text": f"word {i} {part}"} for part in (0, 1) for i in (0, 1)]


def test_other_keys_than_those_of_the_token_files_are_refused(words: Dtt) -> None:
    keys = ("-c", "run.yaml", "tokenizer.vocab_size=300", "tokenize.validation_fraction=0")
    words("tokenize", *keys, expect=ExitCode.INPUT_MISSING)
    words("download", *keys)
    words("tokenize", *keys)
    (words.folder / "words.py").write_text(WORDS + "# another word in a comment\n")
    words("tokenize", *keys)
    done = words("tokenize", *keys, "download.documents.said=other", expect=ExitCode.USAGE)
    assert "'said': 'word'} there" in done.stderr
    assert "'said': 'other'} now" in done.stderr


def test_several_datasets_may_have_classes(words: Dtt) -> None:
    (words.folder / "run.yaml").write_text(
        "download:\n"
        "  datasets:\n"
        "  - documents: {type: words.py:Words, said: one}\n"
        "    out: data/one\n"
        "  - documents: {type: words.py:Words, said: two}\n"
        "    out: data/two\n"
    )
    words("download", "-c", "run.yaml")
    for name in ("one", "two"):
        assert texts(words.folder / "data" / name)[0] == {"text": f"{name} 0 0"}


def test_the_rows_of_a_database(dtt: Dtt) -> None:
    """A text between two that are null, and a part without a row."""
    with closing(sqlite3.connect(dtt.folder / "articles.db")) as connection, connection:
        connection.execute("CREATE TABLE documents (text)")
        rows = [("a",), (None,), ("c \u20ac\n",), ("d",), ("e",), ("f",), ("g",)]
        connection.executemany("INSERT INTO documents VALUES (?)", rows)
        connection.execute("DELETE FROM documents WHERE rowid IN (4, 5, 6)")
    config = (EXAMPLES / "sqlite.yaml").read_text().replace("sqlite.py", f"{EXAMPLES}/sqlite.py")
    (dtt.folder / "run.yaml").write_text(config)
    dtt("download", "-c", "run.yaml", "download.documents.rows_per_part=3")
    found = [row["text"] for row in texts(dtt.folder / "data/corpus/Sqlite")]
    assert found == ["a", "c \u20ac\n", "g"]


def test_the_rows_of_a_saved_dataset_are_conversations(dtt: Dtt) -> None:
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(5)]
    datasets.Dataset.from_list(rows).save_to_disk(str(dtt.folder / "saved"))
    kind = f"download.documents.type={EXAMPLES}/hf_dataset.py:Saved"
    keys = (kind, "download.documents.folder=saved", "download.documents.shards=2")
    dtt("download", *keys, "data.type=chat")
    found = [row["messages"] for row in texts(dtt.folder / "data/corpus/Saved")]
    assert [[turn["content"] for turn in one] for one in found] == [
        [f"{i}?", str(i)] for i in range(5)
    ]
