"""Opens pages in Chromium and checks at the end that they had no error and made no request."""

import json
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from jaxformer.interpret import explanation
from tests.interpret.pages import NO_MATRIX

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
READY = "globalThis.jaxformerPage?.store.values && !jaxformerPage.store.busy"
# Typed arrays become lists.
AS_JSON = "(x) => JSON.stringify(x, (_, y) => (ArrayBuffer.isView(y) ? Array.from(y) : y))"


@contextmanager
def open_tabs():
    """Yields a function (page, width, address, **options of the context) → tab."""
    faults = []
    with (
        sync_api.sync_playwright() as playwright,
        TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(explanation, "dependency_data", lambda *_: NO_MATRIX)
        patch.setattr(explanation, "repeated_atlas", lambda *_: None)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def open_tab(page, width=1440, address="", **options):
            path = page.write(Path(folder) / f"{len(page.html)}.html")
            viewport = {"width": width, "height": 844 if width < 500 else 900}
            context = browser.new_context(viewport=viewport, reduced_motion="reduce", **options)
            tab = context.new_page()
            tab.on("console", lambda message: faults.append(message.text))
            tab.on("pageerror", lambda error: faults.append(str(error)))
            own = f"file://{path}"
            tab.on("request", lambda request: request.url == own or faults.append(request.url))
            tab.goto(own + address)
            wait(tab)
            return tab

        yield open_tab
        browser.close()
    assert faults == []


def wait(tab, ready=READY):
    """Waits until an expression is true."""
    for _ in range(400):
        if tab.evaluate(ready):
            return
        time.sleep(0.05)
    pytest.fail(f"{ready} did not become true")


def read_json(tab, expression):
    """Returns the value of an expression, in which typed arrays have become lists."""
    return json.loads(tab.evaluate(f"({AS_JSON})({expression})"))
