"""What a reader's browser sees on every page of the built site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

SITE = Path(__file__).parents[2] / "_build" / "html"
OURS = sorted(str(path.relative_to(SITE)) for path in (SITE / "book").glob("*.html"))
PAGES = [*OURS, "genindex.html", "search.html"]
CHAPTERS = [name for name in OURS if re.search(r"/\d\d_", name)]
every_page = pytest.mark.parametrize("name", PAGES)


def test_there_are_pages() -> None:
    assert CHAPTERS, "the site is not built: run `make book` first"


@every_page
def test_a_page_opens_in_silence_and_from_one_host(page: Page, address: str, name: str) -> None:
    complaints: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
    page.on(
        "response", lambda r: complaints.append(f"{r.status}: {r.url}") if r.status >= 400 else None
    )
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((address, "data:", "blob:"))
            else complaints.append(f"foreign host: {request.url}")
        ),
    )
    page.goto(f"{address}/{name}")
    page.wait_for_load_state("networkidle")
    assert not complaints


@every_page
def test_a_phone_does_not_scroll_sideways(page: Page, address: str, name: str) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(f"{address}/{name}")
    wide, room = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= room


def test_the_first_page_is_the_start_page(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_url("**/book/intro.html")


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_violation(page: Page, address: str, name: str, theme: str) -> None:
    page.goto(f"{address}/{name}")
    set_theme(page, theme)
    options = {"resultTypes": ["violations"], "runOnly": ["wcag2a", "wcag2aa"]}
    # The article is ours. The theme's own frame around it is not, nor are the roles that the
    # bibliography gives to its list.
    context = {"include": [["article.bd-article"]], "exclude": [[".citation-list"]]}
    found = Axe().run(page, context=context, options=options).response["violations"]
    serious = [
        (rule["id"], rule["help"], [node["html"][:160] for node in rule["nodes"][:3]])
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]
    assert not serious


def set_theme(page: Page, theme: str) -> None:
    page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)


CONTRASTS = """() => {
  const linear = v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.map(linear); return .2126 * r + .7152 * g + .0722 * b };
  const rgb = s => s.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const page = light(rgb(getComputedStyle(document.body).backgroundColor));
  return [...document.querySelectorAll('.picture svg text')].map(t => {
    const ink = light(rgb(getComputedStyle(t).fill));
    return (Math.max(ink, page) + .05) / (Math.min(ink, page) + .05) });
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["book/intro.html", *CHAPTERS])
def test_the_words_in_pictures_are_legible(page: Page, address: str, name: str, theme: str) -> None:
    page.goto(f"{address}/{name}")
    set_theme(page, theme)
    contrasts = page.evaluate(CONTRASTS)
    assert contrasts, "a chapter has pictures"
    assert min(contrasts) >= 4.5


def test_the_reader_can_switch_to_dark(page: Page, address: str) -> None:
    page.goto(f"{address}/{CHAPTERS[0]}")
    seen = set()
    for _ in range(3):
        page.locator("button.theme-switch-button").first.click()
        seen.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2


def test_search_finds_a_word(page: Page, address: str) -> None:
    page.goto(f"{address}/search.html?q=touch")
    page.wait_for_selector("#search-results li a")
    assert "Reference counts" in page.locator("#search-results").inner_text()


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_can_be_copied_launched_and_left(page: Page, address: str, name: str) -> None:
    page.goto(f"{address}/{name}")
    page.wait_for_selector("div.cell_input button.copybtn", state="attached")
    cells = page.locator("div.cell_input").count()
    assert page.locator("div.cell_input button.copybtn").count() == cells
    launch = page.locator(".dropdown-launch-buttons a").evaluate_all(
        "links => links.map(a => a.href)"
    )
    assert any("colab" in link for link in launch)
    assert any("binder" in link for link in launch)
    assert page.locator(".prev-next-footer a").count() == 2
    assert page.locator("div.admonition.solution.dropdown").count() >= 3


@every_page
def test_every_page_names_both_licenses(name: str) -> None:
    _, _, footer = (SITE / name).read_text(encoding="utf-8").partition("<footer")
    assert "MIT license" in footer
    assert "CC BY 4.0" in footer


def test_formulas_are_set(page: Page, address: str) -> None:
    page.goto(f"{address}/book/00_fanout.html")
    page.wait_for_selector("mjx-container svg, mjx-container mjx-math", state="attached")


class Links(HTMLParser):
    """The links of a page and the anchors that others may link to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        key = "href" if tag in ("a", "link") else "src"
        if link := values.get(key):
            self.links.append(link)


@cache
def parsed(path: Path) -> Links:
    links = Links()
    links.feed(path.read_text(encoding="utf-8"))
    return links


def internal(name: str) -> Iterator[tuple[str, Path, str]]:
    for link in parsed(SITE / name).links:
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc:
            target = (SITE / name).parent / unquote(parts.path) if parts.path else SITE / name
            yield link, target.resolve(), unquote(parts.fragment)


@every_page
def test_no_link_is_broken(name: str) -> None:
    for link, target, anchor in internal(name):
        target = target / "index.html" if target.is_dir() else target
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".html":
            assert anchor in parsed(target).anchors, f"{link}: no such anchor"
