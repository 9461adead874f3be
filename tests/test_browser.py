"""The harness itself: what a page does beyond showing itself is on record."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from support.browser import OpenPage

PAGE = """<!doctype html>
<html lang="en" data-ready="1"><head><meta charset="utf-8"><title>t</title>{head}</head>
<body><main><h1>t</h1>{body}</main></body></html>"""
pytestmark = pytest.mark.slow
POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "script-src 'nonce-1'\">"
)


def write(folder: Path, body: str = "", head: str = "") -> Path:
    path = folder / "page.html"
    path.write_text(PAGE.format(head=head, body=body), "utf-8")
    return path


def test_a_plain_page_has_no_problems(chromium: Browser, tmp_path: Path) -> None:
    with OpenPage(chromium, write(tmp_path)) as open_page:
        assert (open_page.requests, open_page.problems) == ([], [])
        assert open_page.axe() == []
        assert open_page.pwned is None


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<img alt="" src="https://example.com/a.png">', "request: https://example.com/a.png"),
        ('<img alt="" src="other.png">', "request: file://"),
        ('<link rel="stylesheet" href="https://example.com/a.css">', "request: https://example"),
        ("<script>fetch('http://127.0.0.1:1/x').catch(() => 0)</script>", "request: http://127"),
        ("<script>new WebSocket('ws://127.0.0.1:1/x')</script>", "request: ws://127.0.0.1:1/x"),
        (
            "<script>navigator.sendBeacon('http://example.com/b')</script>",
            "request: http://example",
        ),
        ('<iframe title="f" src="https://example.com/f"></iframe>', "request: https://example"),
        ("<script>console.warn('hm')</script>", "console warning: hm"),
        ("<script>console.error('no')</script>", "console error: no"),
        ("<script>throw new Error('broken')</script>", "exception: broken"),
        ("<script>alert('hello')</script>", "dialog: hello"),
        ("<script>location = 'about:blank'</script>", "left for about:blank"),
    ],
)
def test_requests_errors_warnings_and_interruptions_are_problems(
    body: str, problem: str, chromium: Browser, tmp_path: Path
) -> None:
    with OpenPage(chromium, write(tmp_path, body), ready=False) as open_page:
        open_page.wait_for_problem(problem)
        assert len(open_page.requests) == problem.startswith("request: ")


def test_violations_of_the_content_security_policy_are_problems(
    chromium: Browser, tmp_path: Path
) -> None:
    body = "<p onclick='1' style='color: red'>x</p><script>window.pwned = 1</script>"
    with OpenPage(chromium, write(tmp_path, body, POLICY)) as open_page:
        open_page.page.click("p")  # some versions refuse a handler only when it is used
        for directive in ("script-src-attr", "script-src-elem", "style-src-attr"):
            open_page.wait_for_problem(f"securitypolicyviolation: {directive}")
        assert open_page.pwned is None


def test_text_that_is_executed_is_noticed(chromium: Browser, tmp_path: Path) -> None:
    body = '<img alt="" src="x" onerror="window.pwned = 1">'
    with OpenPage(chromium, write(tmp_path, body)) as open_page:
        open_page.page.wait_for_function("window.pwned")
        assert open_page.pwned == 1


def test_axe_finds_violations_of_all_kinds_under_a_strict_policy(
    chromium: Browser, tmp_path: Path
) -> None:
    """A missing name (WCAG A), too little contrast (AA), a skipped heading level (practice)."""
    body = "<style nonce='1'>p { color: #aaa; background: #fff }</style>"
    body += "<button></button><p>pale</p><h4>deep</h4>"
    policy = POLICY.replace("script-src", "style-src 'nonce-1'; script-src")
    with OpenPage(chromium, write(tmp_path, body, policy)) as open_page:
        found = {line.split()[0] for line in open_page.axe()}
    assert found == {"button-name", "color-contrast", "heading-order"}


def test_size_colour_scheme_and_medium_are_those_asked_for(
    chromium: Browser, tmp_path: Path
) -> None:
    path = write(tmp_path)
    queries = "['(prefers-color-scheme: dark)', 'print'].map(query => matchMedia(query).matches)"
    media = f"[innerWidth, ...{queries}]"
    with OpenPage(chromium, path, width=375, color_scheme="dark") as open_page:
        assert open_page.page.evaluate(media) == [375, True, False]
    with OpenPage(chromium, path, media="print") as open_page:
        assert open_page.page.evaluate(media) == [1280, False, True]


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[str]:
    """The origin of a server of the folder of this test."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_page_from_a_server_reaches_only_that_server(
    chromium: Browser, tmp_path: Path, origin: str
) -> None:
    (tmp_path / "a.js").write_text("document.title = 'reached'")
    elsewhere = "http://localhost:1/x"
    body = f'<script src="a.js"></script><img alt="" src="{elsewhere}">'
    write(tmp_path, body)
    with OpenPage(chromium, f"{origin}/page.html") as open_page:
        assert open_page.requests == [f"{origin}/a.js", elsewhere]
        assert f"request: {elsewhere}" in open_page.problems
        assert open_page.page.title() == "reached"
