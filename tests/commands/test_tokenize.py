"""`dtt tokenize` reports once, in words or as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def dtt(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dtt.main", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_corpus_becomes_token_files_with_a_report(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {i} of some"}) for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert dtt(tmp_path, "download", "-d", "a.jsonl").returncode == 0
    command = ("tokenize", "-d", "a.jsonl", "tokenizer.vocab_size=260")
    command += ("tokenize.validation_fraction=0.1",)
    first = dtt(tmp_path, *command)
    assert first.returncode == 0, first.stderr
    assert "data/tokens/a-bpe260" in first.stdout
    assert "train" in first.stdout
    assert "validation" in first.stdout
    assert "MB/s" in first.stdout
    second = dtt(tmp_path, *command, "--json")
    facts = json.loads(second.stdout)
    assert facts["already_done"]
    assert "already done" in second.stderr
    assert sum(split["documents"] for split in facts["splits"].values()) == 200
    refused = dtt(tmp_path, *command, "tokenize.validation_fraction=0.2")
    assert refused.returncode == 2
    assert "--overwrite" in refused.stderr
    again = dtt(tmp_path, *command, "tokenize.validation_fraction=0.2", "--overwrite", "--json")
    assert not json.loads(again.stdout)["already_done"]


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


def test_what_cannot_be_compared_is_told_and_a_wrong_name_before_anything_is_made(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n')
    dtt(tmp_path, "download", "-d", "a.jsonl")
    command = ("tokenize", "-d", "a.jsonl", "tokenize.validation_fraction=0", "tokenize.out=out")
    wrong = dtt(tmp_path, *command, "tokenize.compare=none.json")
    assert wrong.returncode == 66
    assert "no tokenizer at none.json" in wrong.stderr
    assert not (tmp_path / "out").exists()
    dtt(tmp_path, *command)
    run = dtt(tmp_path, *command, "tokenize.compare=out", "--json")
    assert json.loads(run.stdout)["compared"] is None
    assert "not compared with out: this node sees no text that is held out" in run.stderr


def test_a_missing_corpus_is_told_with_the_command_that_makes_it(tmp_path: Path) -> None:
    run = dtt(tmp_path, "tokenize", "-d", "a.jsonl")
    assert run.returncode == 66
    assert "dtt download" in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""
