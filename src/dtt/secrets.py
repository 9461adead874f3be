"""What must not be written anywhere: passwords in URLs, access tokens, variables that hold them."""

from __future__ import annotations

import re

WORDS = ("AUTH", "KEY", "PASS", "SECRET", "TOKEN", "JWT", "CREDENTIAL")
"""A variable with one of these in its name holds a secret."""

_PATTERN = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^\s/:@'\"]*:[^\s/@'\"]+@"  # URL with a password
    r"|\bhf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}"  # GitHub
    r"|\bAKIA[A-Z0-9]{16}\b"  # AWS
    r"|\bsk-[A-Za-z0-9_-]{20,}"  # OpenAI, Anthropic
    r"|\bwandb_v1_[A-Za-z0-9_]{20,}"
)


def named_secret(variable: str) -> bool:
    """Whether a variable of this name holds a secret."""
    return any(word in variable.upper() for word in WORDS)


def holds_secret(text: str) -> bool:
    """Whether a text has a URL with a password, or an access token of a well-known form, in it."""
    return _PATTERN.search(text) is not None


def redacted(text: str) -> str:
    """`text` with such places blackened."""
    return _PATTERN.sub(lambda match: f"{match['scheme'] or ''}[secret]", text)
