"""Token files of small conversations, as `dtt tokenize` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.running import Dtt
from support.tiny_job import make_tokenizer

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
CHAT_TOKENS = ["<|im_start|>", "<|im_end|>"]


def conversations(count: int) -> list[dict[str, Any]]:
    """Return rows of one to three turns, some with a system message or an untrained answer."""
    rows = []
    for i in range(count):
        messages: list[dict[str, Any]] = []
        if i % 4 == 0:
            messages.append({"role": "system", "content": f"Count to {i % 7}."})
        for turn in range(1 + i % 3):
            said = " ".join(WORDS[(i * 7 + j * j + turn) % 10] for j in range(1 + (3 * i) % 5))
            messages.append({"role": "user", "content": f"{i}, {said}?"})
            answer: dict[str, Any] = {"role": "assistant", "content": f"{said} {i + turn}."}
            if i % 6 == 5 and turn == 0:
                answer["train"] = False
            messages.append(answer)
        rows.append({"messages": messages})
    rows[5]["messages"].append({"role": "assistant", "content": "Done."})
    return rows


def write_conversations(folder: Path, count: int = 240) -> Path:
    """Write rows and a tokenizer of bytes into `folder`; return their token files."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(CHAT_TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    lines = (json.dumps(row) + "\n" for row in conversations(count))
    (folder / "rows.jsonl").write_text("".join(lines))
    dtt, tokens = Dtt(folder), folder / "tokens"
    arguments = [
        "data.type=chat", "download.dataset=rows.jsonl", "download.out=corpus",
        "tokenizer.type=file", "tokenizer.path=tokenizer.json", f"tokenize.out={tokens}",
        "tokenize.validation_fraction=0.2",
    ]  # fmt: skip
    dtt("download", *arguments)
    dtt("tokenize", *arguments)
    return tokens
