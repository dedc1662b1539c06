"""The rendered pages in a real browser: run ``gramlin build`` first; without pages or a browser these are skipped."""

import functools
import http.server
import shutil
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).parent.parent
HTML = ROOT / "_build" / "html"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1300, "height": 900}

pytestmark = [
    pytest.mark.skipif(not (HTML / "index.html").exists(), reason="the book is not rendered: run `gramlin build`"),
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine"),
]


def pages() -> list[str]:
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text())
    files = [contents["root"]]
    for part in contents["parts"]:
        files += [chapter["file"] for chapter in part["chapters"]]
    return [f"{file}.html" for file in files]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    handler = functools.partial(_Quiet, directory=HTML)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page that has been opened and typeset, and what happened meanwhile."""

    def __init__(self, browser, url: str, size: dict, **context):
        self.context = browser.new_context(viewport=size, **context)
        self.page = self.context.new_page()
        self.console, self.failed, self.requested = [], [], []
        self.page.on("console", lambda message: message.type == "error" and self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("requestfailed", lambda request: self.failed.append(request.url))
        self.page.on("response", lambda answer: answer.status >= 400 and self.failed.append(answer.url))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.goto(url, wait_until="load")
        self.page.evaluate("window.MathJax && MathJax.startup ? MathJax.startup.promise : null")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()


@pytest.mark.parametrize("name", pages())
def test_a_page_loads_from_this_host_alone_and_typesets_all_mathematics(browser, address, name):
    with Visit(browser, f"{address}/{name}", DESKTOP) as visit:
        assert visit.console == []
        assert visit.failed == []
        assert {urlsplit(url).netloc for url in visit.requested if not url.startswith("data:")} == {
            urlsplit(address).netloc
        }
        formulas = visit.page.locator(".math").count()
        assert visit.page.locator("mjx-container").count() >= formulas
        errors = visit.page.locator("mjx-merror, [data-mjx-error]").all_inner_texts()
        assert errors == []
        assert formulas > 0 or not name.startswith("book/0")  # every chapter has some


@pytest.mark.parametrize("name", pages())
def test_a_page_fits_windows_between_a_phone_and_a_desktop(browser, address, name):
    with Visit(browser, f"{address}/{name}", PHONE) as visit:
        for width in (768, 1000, 1199, 1200, 1600):  # on both sides of the widths at which the theme changes
            visit.page.set_viewport_size({"width": width, "height": 900})
            # The theme moves its columns over some frames after a change of size; a page that never fits times out.
            visit.page.wait_for_function(
                "width => document.documentElement.scrollWidth <= width", arg=width, timeout=9000
            )


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", pages())
def test_a_page_fits_a_phone(browser, address, name, theme):
    with Visit(browser, f"{address}/{name}", PHONE, color_scheme=theme) as visit:
        width = visit.page.evaluate("document.documentElement.scrollWidth")
        wide = visit.page.evaluate(
            """() => [...document.querySelectorAll("article *")]
            .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
            .filter(e => {
                for (let p = e.parentElement; p; p = p.parentElement)
                    if (["auto", "scroll", "hidden"].includes(getComputedStyle(p).overflowX)) return false;
                return true;
            })
            .slice(0, 5).map(e => e.tagName + "." + e.className + ": " + e.textContent.slice(0, 60))"""
        )
        assert wide == []
        assert width <= PHONE["width"]


@pytest.mark.parametrize("name", pages())
def test_links_within_the_book_lead_somewhere(browser, address, name):
    with Visit(browser, f"{address}/{name}", DESKTOP) as visit:
        links = visit.page.eval_on_selector_all("a[href]", "links => links.map(link => link.href)")
        anchors = {}
        for link in sorted({link for link in links if link.startswith(address)}):
            target = urlsplit(link)
            path = HTML / unquote(target.path).lstrip("/")
            path = path / "index.html" if path.is_dir() else path
            assert path.exists(), link
            if target.fragment and path.suffix == ".html":
                if path not in anchors:
                    anchors[path] = path.read_text(encoding="utf-8")
                assert f'id="{unquote(target.fragment)}"' in anchors[path], link


@pytest.mark.parametrize("name", pages())
def test_every_figure_says_what_it_shows(browser, address, name):
    with Visit(browser, f"{address}/{name}", DESKTOP) as visit:
        texts = visit.page.eval_on_selector_all("article img", "images => images.map(image => image.alt)")
        assert all(len(text) > 20 for text in texts), texts


def test_search_finds_a_term(browser, address):
    with Visit(browser, f"{address}/search.html?q=Procrustes", DESKTOP) as visit:
        visit.page.wait_for_selector("#search-results li a")
        found = visit.page.locator("#search-results li a").all_inner_texts()
        assert any("rotation" in title for title in found)
