"""Takes pictures of every view of the page that `jaxformer explain` writes.

    python experiments/gallery.py runs/stdlib
    python experiments/gallery.py runs/stdlib --all --folder /tmp/views

Headless Chromium opens each view on a wide screen in the light theme. docs/gallery.md shows the
pictures, which are in docs/static/explain. With `--all`, the browser also opens each view on a
phone and in the dark theme.

Needs `pip install playwright` and Debian's `chromium`.
"""

import io
import shutil
import tempfile
import time
from pathlib import Path

from record import Parser, require, run

FOLDER = Path(__file__).parent.parent / "docs" / "static" / "explain"
TEXT = 'def area(radius):\n    """Return the area of a circle."""\n    return pi * radius ** 2\n'
VIEWS = ("model", "attention", "inside", "lens", "norm", "dependency", "decoding", "heads")
SIZES = {"wide": (1280, 900), "phone": (390, 844)}
THEMES = ("light", "dark")
# Pictures of longer pages are cut at this height in pixels.
CLIP = 1500


def pictures(page: Path, folder: Path, chromium: str, every: bool) -> list[Path]:
    """Writes pictures of each view and returns their paths.

    Args:
        page: The HTML page.
        folder: The folder of the pictures.
        chromium: The path of the browser.
        every: Whether to take pictures of all widths and themes, or only of the first width and
            theme.
    """
    from playwright.sync_api import sync_playwright

    written = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for size, (width, height) in list(SIZES.items())[: None if every else 1]:
            for theme in THEMES[: None if every else 1]:
                context = browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme=theme
                )
                tab = context.new_page()
                tab.goto(page.as_uri())
                wait(tab)
                for view in VIEWS:
                    if not tab.locator(f"#tab-{view}").count():
                        continue
                    tab.click(f"#tab-{view}")
                    # The page draws a view some time after the click.
                    time.sleep(0.5)
                    path = folder / f"{view}-{size}-{theme}.webp"
                    save(tab.screenshot(full_page=True), path)
                    written.append(path)
                context.close()
        browser.close()
    return written


def wait(tab) -> None:
    """Waits until the page has computed its values; raises ValueError if this takes 30 seconds."""
    for _ in range(300):
        if tab.evaluate("globalThis.jaxformerPage?.store.values != null"):
            return
        time.sleep(0.1)
    raise ValueError("the page did not compute any values within 30 seconds")


def save(png: bytes, path: Path) -> None:
    """Writes a screenshot as WebP, cut at `CLIP` pixels of height."""
    from PIL import Image

    image = Image.open(io.BytesIO(png))
    image.crop((0, 0, image.width, min(image.height, CLIP))).save(path, quality=80, method=6)


def main():
    parser = Parser(__doc__)
    parser.add_argument("run", help="a folder made by `jaxformer train`")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument(
        "--all", action="store_true", help="also take pictures at phone width and in the dark theme"
    )
    arguments = parser.parse_args()
    require("playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise ValueError("chromium is not installed; run: apt-get install chromium")
    from jaxformer.hub.load import load
    from jaxformer.interpret import explain

    model, variables, tokenizer = load(arguments.run)
    title = Path(arguments.run).name
    page = explain(model, variables, arguments.text, tokenizer, title=title)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = page.write(Path(folder) / "page.html")
        written = pictures(path, arguments.folder, chromium, arguments.all)
    total = sum(path.stat().st_size for path in written)
    print(f"{len(written)} pictures, {total / 1e6:.1f} MB, in {arguments.folder}")


if __name__ == "__main__":
    run(main)
