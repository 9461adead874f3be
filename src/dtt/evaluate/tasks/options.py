"""Options that a model scores: continuations of a context."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """A continuation to score, and its context, as token ids; neither is empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class OptionScore:
    """The score of an option."""

    log_likelihood: float
    """Sum of the log-probabilities of the continuation's tokens, in nats."""
    greedy: bool
    """True if each token of the continuation is the most likely one."""
