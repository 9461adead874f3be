"""Rows with conversations and a small tokenizer for them, as tests use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dtt.config.data import GivenTokenizerConfig, TrainedTokenizerConfig
from dtt.data.text.tokenizer import train_tokenizer

WORDS = ["seven", "eggs", "minus", "three", "is", "four", "ünïcode", "字", "<|im_end|>", "\n"]


def write_tokenizer(folder: Path) -> GivenTokenizerConfig:
    """Write the tokenizer.json of a small vocabulary with the special tokens of conversations."""
    folder.mkdir(exist_ok=True)
    cfg = TrainedTokenizerConfig(vocab_size=300, chat_tokens=True)
    (folder / "tokenizer.json").write_text(train_tokenizer(cfg, [5 * [" seven"] + 4 * [" eggs"]]))
    return GivenTokenizerConfig(path=str(folder))


def conversation(number: int) -> dict[str, Any]:
    """Return a row of one to three questions and answers; every third has a system message."""
    rng = np.random.default_rng(number)

    def words() -> str:
        return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), rng.integers(1, 30)))

    messages = [] if number % 3 else [{"role": "system", "content": words()}]
    for _ in range(number % 3 + 1):
        messages += [
            {"role": "user", "content": f"{number} {words()}"},
            {"role": "assistant", "content": f"so {words()}"},
        ]
    return {"messages": messages}


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    """Return rows as JSON lines."""
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
