"""Small token files in the published format of llm.c, for a Hub on the loopback interface."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from support.loopback_hub import LoopbackHub
from support.tiny_job import make_tokenizer

REPO, TOKENIZER = "kjj0/fineweb10B-gpt2", "openai-community/gpt2"
VOCAB_SIZE = 257


def token_file(ids: np.ndarray, *, version: int = 1, count: int | None = None) -> bytes:
    """The content of a file: a header of 256 int32, then the ids as uint16."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, version, len(ids) if count is None else count
    return header.tobytes() + ids.astype("<u2").tobytes()


def learnable(tokens: int) -> np.ndarray:
    """Ids that a small model learns in a few steps: each is followed by the next one of ten."""
    return np.arange(tokens) % 10


def random(tokens: int, seed: int) -> np.ndarray:
    """Ids that no model can predict: the loss of held-out ones stays near log(256) = 5.5."""
    return np.random.default_rng(seed).integers(0, 256, tokens)


def publish(hub: LoopbackHub, folder: Path, ids: list[np.ndarray]) -> None:
    """Put token files on the Hub: the first is held out, the others are for training."""
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{n:06d}.bin" for n in range(1, len(ids)))]
    files = {name: token_file(part) for name, part in zip(names, ids, strict=True)}
    hub.add("dataset", REPO, files)
    make_tokenizer().save(str(folder / "published-tokenizer.json"))
    content = (folder / "published-tokenizer.json").read_bytes()
    hub.add("model", TOKENIZER, {"tokenizer.json": content})
