"""Opens pages in Chromium, and checks that they have no error and make no request."""

import json
import shutil
import time
from contextlib import contextmanager

import pytest

from jaxformer.interpret import explanation
from tests.interpret.pages import NO_MATRIX

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Typed arrays become lists.
AS_JSON = "(x) => JSON.stringify(x, (_, y) => (ArrayBuffer.isView(y) ? Array.from(y) : y))"
READY = "globalThis.jaxformerPage?.store.values && !jaxformerPage.store.busy"


class Pages:
    """Opens pages in new tabs.

    Attributes:
        folder: the folder of the HTML files.
        faults: errors, messages of the console and requests of all tabs.
    """

    def __init__(self, browser, folder):
        """Stores the browser and the folder."""
        self.browser, self.folder, self.faults, self._files = browser, folder, [], {}

    def open(self, page, width=1280, height=900, address="", view="attention", **options):
        """Opens a page at a size and returns its tab, on this view if the page has it.

        `address` follows the name of the file. With an address, the page chooses the view itself.
        """
        number = self._files.setdefault(id(page), len(self._files))
        path = page.write(self.folder / f"{number}.html")
        size = {"width": width, "height": height}
        context = self.browser.new_context(viewport=size, **options)
        tab = context.new_page()
        tab.on("console", lambda message: self.faults.append(message.text))
        tab.on("pageerror", lambda error: self.faults.append(str(error)))
        own = (f"file://{path}", "blob:")
        tab.on("request", lambda x: x.url.startswith(own) or self.faults.append(x.url))
        tab.goto(f"file://{path}{address}")
        wait(tab)
        if view and not address and tab.locator(f"#tab-{view}").count():
            tab.click(f"#tab-{view}")
        return tab


@contextmanager
def launched():
    """Starts Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def without_slow_data():
    """Pages get no dependency matrix and no atlas, which compile long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explanation, "dependency_data", lambda *_: NO_MATRIX)
        patch.setattr(explanation, "repeated_atlas", lambda *_: None)
        yield


@contextmanager
def opened_pages(folder):
    """Starts Chromium; the pages are made without slow data."""
    with without_slow_data(), launched() as browser:
        pages = Pages(browser, folder)
        yield pages
    assert pages.faults == [], pages.faults


def wait(tab, ready=READY):
    """Waits until an expression is true. The policy of the page forbids Playwright's own way."""
    for _ in range(400):
        if tab.evaluate(ready):
            return
        time.sleep(0.05)
    pytest.fail(f"{ready} did not become true")


def read_json(tab, expression):
    """Returns the value of an expression, in which typed arrays have become lists."""
    return json.loads(tab.evaluate(f"({AS_JSON})({expression})"))


def opens_first_view(pages):
    """Returns a function (page, width, address, **options of the context) → tab.

    The tab shows the view that the page chooses, without animations.
    """

    def open_tab(page, width=1440, address="", **options):
        height = 844 if width < 500 else 900
        options |= {"view": None, "reduced_motion": "reduce"}
        return pages.open(page, width, height, address, **options)

    return open_tab
