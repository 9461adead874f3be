"""Detection and redaction of secrets, which must not be written to any file or log.

Secrets are passwords in URLs, access tokens, and the values of variables that hold them.
"""

from __future__ import annotations

import os
import re

WORDS = ("AUTH", "KEY", "PASS", "SECRET", "TOKEN", "JWT", "CREDENTIAL")
"""Substrings in the names of environment variables that hold secrets."""
ENDINGS = ("_PAT", "_PWD", "_DSN", "COOKIE")
"""Suffixes of the names of environment variables that hold secrets."""
SHORTEST = 12
"""Minimum length in characters of a secret value. Shorter values of such variables are words like
`false`, which also occur in ordinary text."""

_PATTERN = re.compile(
    # URL with a password. One character of the scheme is enough: with all of them, a word of ten
    # million letters would take hours, as each letter may begin a scheme.
    r"(?P<scheme>[A-Za-z0-9+.-]://)[^\s/:@'\"]*:[^\s/@'\"]+@"
    r"|\bhf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}"  # GitHub
    r"|\bAKIA[A-Z0-9]{16}\b"  # AWS
    r"|\bsk-[A-Za-z0-9_-]{20,}"  # OpenAI, Anthropic
    r"|\bwandb_v1_[A-Za-z0-9_]{20,}|\bglpat-[A-Za-z0-9_-]{20,}"  # W&B, GitLab
    r"|(?i:[?&](?:access_|x-(?:amz|goog)-(?:security-)?)?"  # signed URL
    r"(?:token|key|password|secret|credential|sig(?:nature)?)=)[^&\s]+"
    r"|(?i:\bbearer )[A-Za-z0-9._~+/-]{12,}"
)


def named_secret(variable: str) -> bool:
    """Return True if an environment variable of this name holds a secret."""
    name = variable.upper()
    return any(word in name for word in WORDS) or name.endswith(ENDINGS)


def holds_secret(text: str) -> bool:
    """Return True if a text contains a secret.

    Secrets are URLs with a password, access tokens of a well-known form, and the values of
    environment variables that `named_secret` recognises.
    """
    return _PATTERN.search(text) is not None or any(value in text for value in _values())


def redacted(text: str) -> str:
    """Return `text` with every secret replaced by `[secret]`."""
    for value in _values():
        text = text.replace(value, "[secret]")
    return _PATTERN.sub(lambda match: f"{match['scheme'] or ''}[secret]", text)


def _values() -> list[str]:
    """Return the secret values in this process's environment.

    Values that start with a slash are left out: they are paths of key files, not secrets.
    """
    return [
        value
        for name, value in os.environ.items()
        if named_secret(name) and len(value) >= SHORTEST and not value.startswith("/")
    ]
