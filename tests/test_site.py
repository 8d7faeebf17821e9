"""The site: every public name has its place, and the pages work in a browser."""

import contextlib
import functools
import http.server
import importlib
import json
import re
import threading
from pathlib import Path

import pytest
from browser import OVERFLOW, browser, resize
from test_package import FRONTS, PACKAGE, PRIVATE_ROOMS, re_exported

_ = browser  # A fixture.

ROOT = Path(__file__).parent.parent
API = ROOT / "docs" / "pages" / "api"


def find(name):
    """The object that a dotted name refers to."""
    package, _, last = name.rpartition(".")
    return getattr(importlib.import_module(package), last)


def public_names():
    for front in FRONTS:
        rooms = front.parent.relative_to(PACKAGE).parts
        if not {*rooms} & {*PRIVATE_ROOMS}:
            names = [name for name, _ in re_exported(front)]
            yield from (".".join(["eqxshard", *rooms, name]) for name in names)


def test_every_public_name_is_on_a_page_of_the_api():
    """And in the table of all of them."""
    pages = {page.name: page.read_text() for page in API.glob("*.md")}
    index = re.findall(r"\.md#(eqxshard[\w.]+)\)", pages["index.md"])
    shown = re.findall(r"^::: (\S+)", "\n".join(pages.values()), flags=re.MULTILINE)
    assert {*shown} == {*index}
    objects = [find(name) for name in shown]
    missing = [name for name in public_names() if find(name) not in objects]
    # Rooms have pages of their own.
    assert [name for name in missing if not hasattr(find(name), "__path__")] == []


def test_each_page_of_the_api_says_what_its_names_are():
    """In plain Markdown, since a forge shows neither signatures nor docstrings."""
    for page in API.glob("*.md"):
        text = page.read_text()
        shown = re.findall(r"^::: (\S+)", text, flags=re.MULTILINE)
        said = re.findall(r"^- `(eqxshard[\w.]+)`: \w", text, flags=re.MULTILINE)
        assert said == shown, page.name


def test_the_files_that_the_page_of_internals_names_exist():
    page = (API.parent / "internals.md").read_text()
    lines = re.findall(r"^- `(.*/)(\w+\.py)`((?:, `\w+\.py`)*):", page, re.MULTILINE)
    for folder, first, others in lines:
        for name in [first, *re.findall(r"\w+\.py", others)]:
            assert (ROOT / folder / name).exists(), folder + name
    assert len(lines) == page.count("- `eqxshard/") > 10


@contextlib.contextmanager
def serve(folder):
    """Serve a folder; the address of its root."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the built site, as a version of it."""
    built = ROOT / "build" / "docs"
    if not (built / "index.html").exists():
        pytest.skip("the site is not built: run nox -s docs")
    root = tmp_path_factory.mktemp("site")
    (root / "0.1").symlink_to(built)
    (root / "versions.json").write_text(
        '[{"version": "0.1", "title": "0.1", "aliases": []}]'
    )
    with serve(root) as address:
        yield f"{address}0.1/"


#: One page of each kind.
KINDS = ["", "guide/ten-minutes/", "guide/from-others/", "api/sharding/", "performance/"]
KINDS += ["notebooks/sharding_by_pictures/"]
MOST_BYTES = 2_000_000


def requested(browser):
    """The addresses that were requested since the last call."""
    entries = (json.loads(entry["message"]) for entry in browser.get_log("performance"))
    messages = (entry["message"] for entry in entries)
    sent = (x["params"] for x in messages if x["method"] == "Network.requestWillBeSent")
    return {each["request"]["url"] for each in sent}


def wait_until(browser, script):
    """The value of an expression, once it is true."""
    wait = pytest.importorskip("selenium.webdriver.support.wait")
    script = f"return {script}"
    return wait.WebDriverWait(browser, 60).until(lambda x: x.execute_script(script))


@pytest.mark.slow
def test_pages_in_a_browser(browser, site):
    """Wide and narrow, light and dark: no overflow, no error, nothing from elsewhere."""
    browser.get("about:blank")
    requested(browser)
    for page in KINDS:
        for scheme, name in (("light", "default"), ("dark", "slate")):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            media = {"features": [feature]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            browser.get(site + page)
            used = "document.body.getAttribute('data-md-color-scheme')"
            wait_until(browser, f"{used} == '{name}'")
            for width in (1280, 400):
                resize(browser, width)
                # For a moment, the theme moves its search field.
                wait_until(browser, f"{OVERFLOW} <= 0")
        sizes = (
            "[...performance.getEntriesByType('resource'), ...performance."
            "getEntriesByType('navigation')].reduce((n, x) => n + x.decodedBodySize, 0)"
        )
        assert browser.execute_script(f"return {sizes}") < MOST_BYTES, page
        assert browser.get_log("browser") == []
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    elsewhere = [x for x in requested(browser) if not x.startswith((site[:-4], "data:"))]
    assert elsewhere == []
