"""Opens pages in Chromium, and checks that they have no error and make no request."""

import shutil
import time
from contextlib import contextmanager

import pytest

from jaxformer.interpret import explanation
from tests.interpret.pages import NO_MATRIX

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
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
def opened_pages(folder):
    """Starts Chromium. The pages have no dependency matrix and no atlas, which compile long."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with pytest.MonkeyPatch.context() as patch, sync_api.sync_playwright() as playwright:
        patch.setattr(explanation, "dependency_data", lambda *_: NO_MATRIX)
        patch.setattr(explanation, "repeated_atlas", lambda *_: None)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        pages = Pages(browser, folder)
        yield pages
        browser.close()
        assert pages.faults == [], pages.faults


def wait(tab, ready=READY):
    """Waits until an expression is true. The policy of the page forbids Playwright's own way."""
    for _ in range(400):
        if tab.evaluate(ready):
            return
        time.sleep(0.05)
    pytest.fail(f"{ready} did not become true")
