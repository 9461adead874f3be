"""The answer of a model that reasons first: what follows its reasoning."""

from __future__ import annotations

MARKS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))
"""Texts around the reasoning: of Qwen3, DeepSeek-R1 and SmolLM3; of some tunings; of Magistral."""


def opens_reasoning(prompt: str) -> bool:
    """Return True if a prompt ends with the beginning of the reasoning, as some templates do."""
    return prompt.rstrip().endswith(tuple(begin for begin, _ in MARKS))


def without_reasoning(text: str, *, opened: bool) -> str | None:
    """Return what follows the reasoning at the start of a text; None if that does not end.

    With `opened`, the prompt contains the beginning of the reasoning.
    """
    start = text.lstrip()
    for begin, end in MARKS:
        if end in text and (opened or start.startswith(begin)):
            return text.partition(end)[2]
    return None if opened or start.startswith(tuple(begin for begin, _ in MARKS)) else text
