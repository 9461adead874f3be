"""`dtt tokenize` reports once, in words or as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from support.running import Done, Dtt


def dtt(folder: Path, *arguments: str, code: int = 0) -> Done:
    return Dtt(folder)(*arguments, expect=code)


def test_a_corpus_becomes_token_files_with_a_report(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {i} of some"}) for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    dtt(tmp_path, "download", "-d", "a.jsonl")
    command = ("tokenize", "-d", "a.jsonl", "tokenizer.vocab_size=260")
    command += ("tokenize.validation_fraction=0.1",)
    first = dtt(tmp_path, *command)
    assert "data/tokens/a-bpe260" in first.stdout
    assert "train" in first.stdout
    assert "validation" in first.stdout
    assert "MB/s" in first.stdout
    second = dtt(tmp_path, *command, "--json")
    facts = json.loads(second.stdout)
    assert facts["already_done"]
    assert "already done" in second.stderr
    assert sum(split["documents"] for split in facts["splits"].values()) == 200
    refused = dtt(tmp_path, *command, "tokenize.validation_fraction=0.2", code=2)
    assert "--overwrite" in refused.stderr
    planned = dtt(tmp_path, *command, "--dry-run").stdout
    assert "next        nothing to do" in planned
    again = dtt(tmp_path, *command, "tokenize.validation_fraction=0.2", "--overwrite", "--json")
    assert not json.loads(again.stdout)["already_done"]


def test_a_missing_corpus_is_reported_with_the_command_that_creates_it(tmp_path: Path) -> None:
    run = dtt(tmp_path, "tokenize", "-d", "a.jsonl", code=66)
    assert "dtt download" in run.stderr
    assert run.stdout == ""
