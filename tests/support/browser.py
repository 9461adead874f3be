"""Pages in a real browser, Chromium, that cannot reach a network."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urldefrag, urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Dialog,
    Download,
    Frame,
    Page,
    Request,
    Route,
    WebSocket,
    expect,
    sync_playwright,
)

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
"""Tags of the rules of axe-core that a page is checked against."""
READY = "html[data-ready='1']"
"""What a report is when it is drawn and reacts."""
REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", event => console.error(
    "securitypolicyviolation:", event.effectiveDirective, event.blockedURI, event.sample,
    event.sourceFile + ":" + event.lineNumber));
"""
TIMEOUT = 60_000
"""Milliseconds that a wait may take before it fails."""
expect.set_options(timeout=TIMEOUT)


@contextmanager
def launched() -> Iterator[Browser]:
    """Start the Chromium of this machine; skip the test if there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium")
    # No name but these two has an address, whatever a page or the browser itself asks for.
    unreachable = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=[unreachable])
        try:
            yield browser
        finally:
            browser.close()


class OpenPage:
    """An open page: a file without any network, or a URL that reaches only its own server."""

    def __init__(
        self,
        browser: Browser,
        target: Path | str,
        *,
        width: int = 1280,
        height: int = 900,
        color_scheme: Literal["light", "dark"] = "light",
        media: Literal["screen", "print"] = "screen",
        ready: bool = True,
    ) -> None:
        """Open a file or URL; wait until it is `ready`, that is, drawn and interactive."""
        self.url = target.absolute().as_uri() if isinstance(target, Path) else target
        self._origin = None if isinstance(target, Path) else urlsplit(target)[:2]
        self.requests: list[str] = []
        """URLs of all requests other than for the page itself, including those refused."""
        self.problems: list[str] = []
        """Errors and warnings of the console, exceptions, violations of the content security
        policy, refused requests, and whatever opens, leaves, downloads or interrupts the page."""
        self.context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=color_scheme,
            offline=self._origin is None,
            service_workers="block",
        )
        self.context.set_default_timeout(TIMEOUT)
        self.context.route("**/*", self._on_route)
        self.context.add_init_script(REPORT_VIOLATIONS)
        self.page: Page = self.context.new_page()
        self.page.emulate_media(media=media)
        self._watch()
        self.page.goto(self.url)
        if ready:
            self.page.wait_for_selector(READY, state="attached")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the page."""
        self.context.close()

    def wait_for_problem(self, text: str) -> None:
        """Wait until a problem contains `text`: the browser reports what a page does after it."""
        deadline = time.monotonic() + TIMEOUT / 1000
        while not any(text in problem for problem in self.problems):
            assert time.monotonic() < deadline, f"no {text!r} in {self.problems}"
            self.page.wait_for_timeout(20)  # events arrive meanwhile

    @property
    def pwned(self) -> object:
        """`window.pwned`, which hostile text sets if it is executed; None if it is not set."""
        return self.page.evaluate("window.pwned ?? null")

    def axe(self) -> list[str]:
        """Return what axe-core finds: one line per element that violates a rule."""
        if not self.page.evaluate("typeof axe === 'object'"):
            self.page.evaluate(_axe_script())
        options = {"runOnly": {"type": "tag", "values": RULES}, "resultTypes": ["violations"]}
        found = self.page.evaluate("options => axe.run(document, options)", options)
        return [
            f"{violation['id']} ({violation['impact']}): {violation['help']}: "
            f"{' '.join(map(str, node['target']))}: {' '.join(node['failureSummary'].split())}"
            for violation in found["violations"]
            for node in violation["nodes"]
        ]

    def _watch(self) -> None:
        page = self.page
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        page.on("framenavigated", self._on_navigation)
        page.on("popup", lambda popup: self.problems.append(f"opened {popup.url}"))
        page.on("download", self._on_download)
        page.on("dialog", self._on_dialog)
        page.on("websocket", self._on_websocket)

    def _on_route(self, route: Route, request: Request) -> None:
        navigation = request.is_navigation_request() and request.frame == self.page.main_frame
        if navigation and urldefrag(request.url).url == urldefrag(self.url).url:
            route.continue_()
            return
        self.requests.append(request.url)
        if self._origin is not None and urlsplit(request.url)[:2] == self._origin:
            route.continue_()
            return
        self.problems.append(f"request: {request.url}")
        route.abort()

    def _on_websocket(self, socket: WebSocket) -> None:
        self.requests.append(socket.url)
        self.problems.append(f"request: {socket.url}")

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.problems.append(f"console {message.type}: {message.text}")

    def _on_navigation(self, frame: Frame) -> None:
        if frame != self.page.main_frame:
            self.problems.append(f"frame: {frame.url}")
        elif urldefrag(frame.url).url != urldefrag(self.url).url:
            self.problems.append(f"left for {frame.url}")

    def _on_download(self, download: Download) -> None:
        self.problems.append(f"download: {download.url}")

    def _on_dialog(self, dialog: Dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()


@cache
def _axe_script() -> str:
    return files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
