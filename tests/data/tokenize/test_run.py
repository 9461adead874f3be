"""`dtt tokenize` reports once, in words or as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
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
    again = dtt(tmp_path, *command, "tokenize.validation_fraction=0.2", "--overwrite", "--json")
    assert not json.loads(again.stdout)["already_done"]


@pytest.mark.slow
def test_the_tokenizer_is_compared_with_another_on_held_out_text(tmp_path: Path) -> None:
    """A byte a token by the tokenizer of bytes alone, but for the ends of documents."""
    lines = [json.dumps({"text": f"Dokument {i} über ähnliches\n"}) for i in range(500)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    command = ("tokenize", "-d", "a.jsonl", "tokenize.validation_fraction=0.2")
    dtt(tmp_path, "download", "-d", "a.jsonl")
    dtt(tmp_path, *command, "tokenizer.vocab_size=257", "tokenize.out=bytes")
    other = "tokenize.compare=bytes"
    run = dtt(tmp_path, *command, "tokenizer.vocab_size=300", "tokenize.out=merged", other)
    assert "compared " in run.stdout, run.stderr
    again = dtt(
        tmp_path, *command, "tokenizer.vocab_size=300", "tokenize.out=merged", other, "--json"
    )
    facts = json.loads(again.stdout)
    held_out = facts["splits"]["validation"]
    compared = facts["compared"]
    assert compared["text_bytes"] == held_out["text_bytes"]
    assert compared["bytes_per_token"] == held_out["bytes_per_token"]
    ends = held_out["text_bytes"] + held_out["documents"]
    assert compared["other_bytes_per_token"] == round(held_out["text_bytes"] / ends, 3)


@pytest.mark.slow
def test_a_skipped_comparison_and_an_unknown_tokenizer_are_reported(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n')
    dtt(tmp_path, "download", "-d", "a.jsonl")
    command = ("tokenize", "-d", "a.jsonl", "tokenize.validation_fraction=0", "tokenize.out=out")
    wrong = dtt(tmp_path, *command, "tokenize.compare=none.json", code=66)
    assert "no tokenizer at none.json" in wrong.stderr
    assert not (tmp_path / "out").exists()
    dtt(tmp_path, *command)
    run = dtt(tmp_path, *command, "tokenize.compare=out", "--json")
    assert json.loads(run.stdout)["compared"] is None
    assert "not compared with out: this node has no held-out text" in run.stderr


def test_a_missing_corpus_is_reported_with_the_command_that_creates_it(tmp_path: Path) -> None:
    run = dtt(tmp_path, "tokenize", "-d", "a.jsonl", code=66)
    assert "dtt download" in run.stderr
    assert run.stdout == ""
