"""`dtt tokenize` reports once, in words or as JSON."""

from __future__ import annotations

import json

from support.running import Dtt


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
