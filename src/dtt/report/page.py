"""The HTML page of a report: one file without references to others.

The page contains its data as JSON, and draws itself from it (assets/*.js). Text of a run, such as
a sample or the name of a source, therefore never becomes markup: it passes JSON, and then
`textContent`. The content security policy is a second barrier: the browser runs only the script
with the hash below, and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from dtt.base.secrets import redacted

SCRIPTS = (
    "uPlot.iife.min.js", "elements.js", "runs.js", "chart.js", "curves.js", "summary.js",
    "time.js", "tables.js", "tasks.js", "live.js", "report.js",
)  # fmt: skip
"""Parts of the script, in the order in which they are joined."""
STYLES = ("uPlot.min.css", "theme.css", "report.css", "sections.css")
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>This page draws itself with JavaScript, which is off in this browser.</noscript>
<main id="page"></main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def render(data: Mapping[str, Any]) -> str:
    """Return the page for `data`, with all secrets redacted."""
    # Before texts are joined or shortened: half of a secret would not be recognised.
    clean = without_secrets(data)
    return document(
        str(clean["title"]),
        clean,
        joined("dtt.report", SCRIPTS),
        joined("dtt.report", STYLES),
        connects=bool(clean.get("live")),
    )


def document(title: str, data: Any, script: str, style: str, *, connects: bool) -> str:
    """Return a page that draws itself in `main#page`, from `data`, which has no secrets.

    Its content security policy allows this script and style only, and requests to its own server
    if it `connects`.
    """
    script = f"(() => {{\n'use strict';\n{script}}})();"  # no name becomes a global
    connect = "'self'" if connects else "'none'"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    return PAGE.format(
        policy=policy,
        title=html.escape(title),
        style=style,
        script=script,
        data=embedded(data),
    )


def embedded(data: Any) -> str:
    """Return JSON that contains no markup, not even `</script>` or `<!--` within a string."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII: escapes U+2028, too
    # The browser ends a script element at `</script` even inside a JSON string.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def without_secrets(value: Any) -> Any:
    """Return a JSON value with the secrets in its strings redacted, those in names included.

    Non-finite numbers, which JSON cannot represent, become null.
    """
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {redacted(str(name)): without_secrets(inner) for name, inner in value.items()}
    # A fast path for the curves, which are nearly all of the page.
    if isinstance(value, list | tuple):
        if all(type(inner) is int or type(inner) is float for inner in value):
            return [inner if math.isfinite(inner) else None for inner in value]  # a long curve
        return [without_secrets(inner) for inner in value]
    return value


@cache
def joined(package: str, names: tuple[str, ...]) -> str:
    """Return the content of asset files of a package, one after the other."""
    folder = resources.files(package) / "assets"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    """Return the hash of an inline script or style, as a content security policy names it."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
