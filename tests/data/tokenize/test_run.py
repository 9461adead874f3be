"""`dtt tokenize` reports once, in words or as JSON."""

from __future__ import annotations

import inspect
import json
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
from support.running import Dtt

import dtt as dtt_package
from dtt.config.load import resolve
from dtt.data.corpus import download
from dtt.data.tokenize import run as tokenize


def test_a_corpus_becomes_token_files_with_a_report(dtt: Dtt) -> None:
    lines = [json.dumps({"text": f"document {i} of some"}) for i in range(200)]
    (dtt.folder / "a.jsonl").write_text("\n".join(lines))
    dtt("download", "-d", "a.jsonl")
    command = ("tokenize", "-d", "a.jsonl", "tokenizer.vocab_size=260")
    command += ("tokenize.validation_fraction=0.1",)
    first = dtt(*command)
    assert "data/tokens/a-bpe260" in first.stdout
    assert "train" in first.stdout
    assert "validation" in first.stdout
    assert "MB/s" in first.stdout
    second = dtt(*command, "--json")
    facts = json.loads(second.stdout)
    assert facts["already_done"]
    assert "already done" in second.stderr
    assert sum(split["documents"] for split in facts["splits"].values()) == 200
    refused = dtt(*command, "tokenize.validation_fraction=0.2", expect=2)
    assert "--overwrite" in refused.stderr
    other = (*command, "tokenize.validation_fraction=0.2", "--overwrite")
    again = dtt(*other, "--json")
    assert not json.loads(again.stdout)["already_done"]


def test_a_missing_corpus_is_reported_with_the_command_that_creates_it(dtt: Dtt) -> None:
    run = dtt("tokenize", "-d", "a.jsonl", expect=66)
    assert "dtt download" in run.stderr
    assert run.stdout == ""


def test_a_run_goes_through_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wants to know how a document becomes tokens has these to read."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"document {i} of some"}) for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    options = ["download.dataset=a.jsonl", "tokenizer.vocab_size=260"]
    cfg = resolve(None, [*options, "tokenize.validation_fraction=0.1"], env={}).config
    download.run(cfg)
    package = Path(dtt_package.__file__).parent
    called: set[Path] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # Of a function, not of a module or class, whose body runs when it is imported.
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:
            called.add(Path(code.co_filename))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        tokenize.run(cfg)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    files = {path.relative_to(package) for path in called if path.is_relative_to(package)}
    assert Path("data/tokenize/shards.py") in files
    assert len(files) <= 40, "\n".join(sorted(map(str, files)))
