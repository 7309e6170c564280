"""The built site, served on loopback, and a browser to read it with."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Page, sync_playwright

SITE = Path(__file__).parents[2] / "_build" / "html"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The last four keep the browser from calling home, which would look like traffic of our pages.
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Keep the test output readable."""


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    assert (SITE / "index.html").exists(), "the site is not built: run `make book` first"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = os.environ.get("FANOUTKV_CHROMIUM") or next(
        filter(None, map(shutil.which, NAMES)), None
    )
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        except Error as missing:
            if os.environ.get("CI"):
                raise
            remedy = "install Debian's chromium, or run `python -m playwright install chromium`"
            pytest.skip(f"no browser: {remedy} ({missing.message.splitlines()[0]})")
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()
