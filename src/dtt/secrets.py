"""What must not be written anywhere: passwords in URLs, access tokens, variables that hold them."""

from __future__ import annotations

import os
import re

WORDS = ("AUTH", "KEY", "PASS", "SECRET", "TOKEN", "JWT", "CREDENTIAL")
"""A variable with one of these in its name holds a secret,"""
ENDINGS = ("_PAT", "_PWD", "_DSN", "COOKIE")
"""or with one of these at its end."""
SHORTEST = 12
"""Values of such variables that are shorter are words like `false`, which occur by chance."""

_PATTERN = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^\s/:@'\"]*:[^\s/@'\"]+@"  # URL with a password
    r"|\bhf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}"  # GitHub
    r"|\bAKIA[A-Z0-9]{16}\b"  # AWS
    r"|\bsk-[A-Za-z0-9_-]{20,}"  # OpenAI, Anthropic
    r"|\bwandb_v1_[A-Za-z0-9_]{20,}|\bglpat-[A-Za-z0-9_-]{20,}"  # W&B, GitLab
    r"|(?i:[?&](?:access_)?(?:token|key|password|secret|sig(?:nature)?)=)[^&\s]+"  # signed URL
    r"|(?i:\bbearer )[A-Za-z0-9._~+/-]{12,}"
)


def named_secret(variable: str) -> bool:
    """Whether a variable of this name holds a secret."""
    name = variable.upper()
    return any(word in name for word in WORDS) or name.endswith(ENDINGS)


def holds_secret(text: str) -> bool:
    """Whether a text has a URL with a password, an access token of a well-known form, or the value
    of an environment variable that holds a secret in it."""
    return _PATTERN.search(text) is not None or any(value in text for value in _values())


def redacted(text: str) -> str:
    """`text` with such places blackened."""
    for value in _values():
        text = text.replace(value, "[secret]")
    return _PATTERN.sub(lambda match: f"{match['scheme'] or ''}[secret]", text)


def _values() -> list[str]:
    """Values of this process's variables that hold secrets; paths (of keys) are none."""
    return [
        value
        for name, value in os.environ.items()
        if named_secret(name) and len(value) >= SHORTEST and not value.startswith("/")
    ]
