"""The first conversations of a fine-tuning run, with the tokens that are targets marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dtt.artifacts.manifests import TokensManifest
from dtt.artifacts.token_folders import token_paths
from dtt.base.errors import DttError
from dtt.base.secrets import redacted
from dtt.config.run import RunConfig
from dtt.data.inspect.conversation_report import read_conversations
from dtt.data.samples.token_shards import open_files
from dtt.data.tokenize.work_plan import TOKENIZER

CONVERSATIONS = 6
MAX_TEXT = 6000
"""Characters of a conversation that a page contains."""


def conversations(cfg: RunConfig, home: Path) -> list[dict[str, Any]]:
    """Return the first conversations of the training data of a run.

    Relative paths in `cfg` start from `home`. Returns an empty list for a run on text, and if the
    token files are not on this machine.
    """
    if not cfg.data.has_conversations:
        return []
    try:
        paths = token_paths(cfg, home)
    except (DttError, OSError):
        return []
    for path in paths:
        try:
            if TokensManifest.is_in(path):
                return _read(path)
        except (DttError, OSError, ValueError):
            continue
    return []


def _read(folder: Path) -> list[dict[str, Any]]:
    from dtt.data.text.tokenizer import open_tokenizer  # slow to import

    files = open_files(folder, "train", raw_dtype="uint16", end_of_document=None)
    if not files.are_conversations:
        return []
    tokenizer = open_tokenizer(folder / TOKENIZER)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    found: list[dict[str, Any]] = []
    for shard in files.shards:
        for length, targets, parts in read_conversations(shard, CONVERSATIONS - len(found), decode):
            found.append({"tokens": length, "targets": targets, "parts": _shortened(parts)})
        if len(found) >= CONVERSATIONS:
            break
    return found


def _shortened(parts: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Return the parts of a conversation up to MAX_TEXT characters."""
    left = MAX_TEXT
    kept: list[tuple[str, bool]] = []
    for text, is_target in parts:
        if left <= 0:
            return [*kept, ("…", False)]
        kept.append((redacted(text)[:left], is_target))
        left -= len(text)
    return kept
