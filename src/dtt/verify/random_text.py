"""The inputs of a comparison: random text, token files made from it, and a job to start from.

The user's own data may not exist yet, and its content does not matter here; the lengths of its
documents do. Most are longer than half a sequence, so that sequences of complete documents end in
padding and have different numbers of targets; a few are a word, or three sequences, long.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dtt.config.load import resolve
from dtt.config.run import RunConfig
from dtt.data.corpus import download
from dtt.data.tokenize import run as tokenize

DOCUMENTS = 400
"""Number of documents: more than the steps read, of which a tenth is held out."""
LONGEST = 120
"""Most words of a document. A word is one to two tokens, and a sequence has 64."""
MEDIUM = 0.8
"""Share of documents of about 0.6 to 0.9 sequences; the others are log-uniform."""
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def write_inputs(configs: Sequence[str]) -> None:
    """Write the token files of the configuration files into the working directory.

    That of the first also trains the tokenizer, which that of conversations, if any, uses. Code of
    a user's own, which plays no part in them, does not run.
    """
    texts, *others = (resolve(path, env={}, run_code=False).config for path in configs)
    source = random.Random(0)
    vocabulary = ["".join(source.choices(ALPHABET, k=source.randint(1, 3))) for _ in range(60)]

    def text(longest: int) -> str:
        length = round(longest ** source.random())
        return " ".join(source.choices(vocabulary, k=length))

    def document() -> str:
        medium = source.choices(vocabulary, k=source.randint(22, 32))
        return " ".join(medium) if source.random() < MEDIUM else text(LONGEST)

    _write(texts, [{"text": document()} for _ in range(DOCUMENTS)])
    for rows in others:
        preference = rows.data.has_pairs
        _write(rows, list(_conversations(text, preference)))


def _write(cfg: RunConfig, documents: list[dict[str, Any]]) -> None:
    assert cfg.download.dataset is not None
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    Path(cfg.download.dataset).write_text(lines)
    download.run(cfg)
    tokenize.run(cfg)


def _conversations(text: Any, preference: bool) -> Iterator[dict[str, Any]]:
    """Yield rows whose turns have a few words, so that most fit into a sequence."""
    for number in range(DOCUMENTS):
        turns = []
        for _ in range(1 if preference else number % 2 + 1):
            turns.append({"role": "user", "content": text(5)})
            turns.append({"role": "assistant", "content": text(7)})
        if not preference:
            yield {"messages": turns}
            continue
        other = {"role": "assistant", "content": f"{turns[1]['content']} {text(4)}"}
        yield {"chosen": turns, "rejected": [turns[0], other]}
