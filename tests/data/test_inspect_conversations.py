"""Inspection of conversations shows what is trained, and warns of what users get wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.conversation_files import conversation, jsonl, write_tokenizer
from support.running import Dtt

ROWS = [conversation(i) for i in range(1, 60)]


@pytest.fixture
def dtt(tmp_path: Path) -> Dtt:
    write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_bytes(jsonl(ROWS))
    dtt = Dtt(tmp_path)
    dtt("download", "-d", "rows.jsonl", "data.type=chat", "download.out=corpus")
    return dtt


def tokenize(dtt: Dtt, *arguments: str) -> None:
    dtt(
        "tokenize", "data.type=chat", "download.out=corpus", "tokenizer.type=file",
        "tokenizer.path=tokenizer", "tokenize.out=tokens", "tokenize.validation_fraction=0",
        *arguments,
    )  # fmt: skip


def test_the_answer_of_a_conversation_is_between_the_marks(dtt: Dtt) -> None:
    tokenize(dtt)
    shown = dtt("data", "inspect", "tokens", "--samples", 1).stdout
    answer = ROWS[0]["messages"][1]["content"]
    text = "\n".join(line.removeprefix("    | ") for line in shown.splitlines())
    assert f"<|im_start|>assistant\n⟦{answer}<|im_end|>⟧" in text
    assert "trained tokens are between ⟦ and ⟧" in shown
    assert "stop_tokens        <|im_end|> (2)" in shown
    assert "anomalies" not in shown


def test_refused_rows_and_damaged_masks_are_reported(dtt: Dtt) -> None:
    (dtt.folder / "rows.jsonl").write_bytes(jsonl(ROWS) + b'{"messages": []}\n')
    dtt("download", "-d", "rows.jsonl", "data.type=chat", "download.out=corpus")
    tokenize(dtt)
    assert "refused rows: 1: messages is empty" in dtt("data", "inspect", "tokens").stdout
    mask = dtt.folder / "tokens/train-00000.mask"
    content = mask.read_bytes()
    mask.write_bytes(content[:-1] + bytes([1 - content[-1]]))
    done = dtt("data", "inspect", "tokens", "--verify", expect=65)
    assert "train-00000.mask: its sha256 is" in done.stdout
    mask.write_bytes(content[:-1])
    assert "train-00000.mask" in dtt("data", "inspect", "tokens", expect=65).stdout


def test_the_mixture_of_a_run_names_what_it_leaves_out(dtt: Dtt) -> None:
    tokenize(dtt)
    (dtt.folder / "run.yaml").write_text(
        "data: {type: chat, tokens: tokens}\ntrain: {seq_len: 512, global_batch_tokens: 512}\n"
    )
    shown = dtt("data", "mix", "-c", "run.yaml").stdout
    assert "of 59 conversations are longer than train.seq_len = 512: left out" in shown


def test_rows_are_inspected_before_they_are_tokenized(dtt: Dtt) -> None:
    for path in ("corpus", "rows.jsonl"):
        shown = dtt("data", "inspect", path).stdout
        assert "documents          59" in shown
        assert '{"messages": ' in shown
