"""What readers see on the page: colours, masked cells, labels, widths, buttons, tabs, pictures."""

import io
import re
import time

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.interpret import explain
from jaxformer.models.parameters import init
from jaxformer.training.presets import training_preset
from jaxformer.verify.rules import layer_rules
from tests.interpret.chromium import opened_pages, wait
from tests.interpret.pages import SIZES, TEXT, VIEWS, model_of, tokenizer
from tests.interpret.shared_pages import page_of
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
WIDTHS = (390, 768, 1440, 2560)
THEMES = ("light", "dark")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    with opened_pages(tmp_path_factory.mktemp("pages")) as found:
        yield found


@pytest.fixture(scope="module")
def page(pages):
    """A page of a model with a window in its first layer."""
    return explain(*model_of(window=(4, None)), TEXT, tokenizer())


def luminance(colour):
    """Returns the relative luminance of WCAG 2."""
    parts = np.asarray(colour, float) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def variable(tab, name):
    """Returns the colour of a CSS variable."""
    style = "getComputedStyle(document.documentElement)"
    text = tab.evaluate(f"{style}.getPropertyValue('--{name}').trim()")
    return [int(text[i : i + 2], 16) for i in (1, 3, 5)]


@pytest.mark.parametrize("theme", THEMES)
def test_colour_of_attention_weight_0_1_differs_visibly_from_that_of_weight_0(theme, pages, page):
    tab = pages.open(page, color_scheme=theme)
    shares = [0, 0.001, 0.01, 0.03, 0.1, 0.2, 0.5, 0.8, 1]
    for sign in (1, -1):
        colours = [tab.evaluate(f"jaxformerPage.colour({sign * share})") for share in shares]
        found = [contrast(colour, colours[0]) for colour in colours]
        assert found[shares.index(0.1)] >= 3
        assert all(np.diff(found) > 0), "a larger weight has more contrast"
    assert contrast(variable(tab, "hatch"), variable(tab, "surface")) >= 3


CELLS = """(() => {
  const canvas = document.querySelector("#view-attention canvas.heat");
  const { width, height } = canvas;
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(canvas, 0, 0);
  const { data } = context.getImageData(0, 0, width, height);
  const { rows, columns } = jaxformerPage.attention(0, LAYER, HEAD);
  const size = Math.min((width - 78) / columns, (height - 78) / rows);
  const colours = (row, column) => {
    const found = new Set();
    const [left, top] = [78 + column * size, 78 + row * size].map((x) => Math.round(x));
    for (let y = top + 3; y < top + size - 3; y++) {
      for (let x = left + 3; x < left + size - 3; x++) {
        found.add(data.slice(4 * (y * width + x), 4 * (y * width + x) + 3).join(","));
      }
    }
    return [...found];
  };
  return Array.from({ length: rows }, (_, row) =>
    Array.from({ length: columns }, (_, column) => colours(row, column)));
})()"""


@pytest.mark.parametrize("theme", THEMES)
def test_masked_cells_are_hatched_and_visible_cells_have_the_colour_of_their_weight(
    theme, pages, page
):
    tab = pages.open(page, 1440, color_scheme=theme)
    rules = layer_rules(model_of(window=(4, None))[0].config, page.num_tokens)
    for layer in (0, 1):
        tab.evaluate(f"jaxformerPage.store.select({{ layer: {layer}, head: 1 }})")
        cells = tab.evaluate(CELLS.replace("LAYER", str(layer)).replace("HEAD", "1"))
        weights = "Array.from(jaxformerPage.attention(0, LAYER, 1).values)"
        weights = np.reshape(tab.evaluate(weights.replace("LAYER", str(layer))), rules[0].shape)
        for (row, column), is_visible in np.ndenumerate(rules[layer]):
            if not is_visible:
                assert len(cells[row][column]) > 1
            elif weights[row, column] >= 0.02 * weights.max():
                (colour,) = cells[row][column]
                share = weights[row, column] / weights.max()
                expected = tab.evaluate(f"jaxformerPage.colour({share})")
                np.testing.assert_allclose(list(map(int, colour.split(","))), expected, atol=4)
    legend = tab.locator("#view-attention .heat-legend").get_attribute("aria-label")
    assert re.search(r"Colours from 0% to \d+%\. Hatched: cannot be seen", legend)
    tab.locator("#view-attention canvas.heat").focus()
    tab.keyboard.press("End")
    assert "cannot see" in tab.locator("#view-attention .readout").inner_text()


@pytest.mark.slow
def test_heat_map_without_masked_keys_has_no_hatching(pages):
    model = jf.build(training_preset("tiny", "encoder").model)
    tab = pages.open(explain(model, init(model, jax.random.key(0)), [3, 4, 5, 6]))
    legend = tab.locator("#view-attention .heat-legend").get_attribute("aria-label")
    assert "Hatched" not in legend and legend.startswith("Colours from 0% to")
    assert tab.evaluate("jaxformerPage.store.values.hidden(0, 0)") is None


LONG = {
    "12 heads": {"num_heads": 12, "embed_dim": 24, "num_layers": 4, "dtype": "bfloat16"},
    "16 heads": {"num_heads": 16, "embed_dim": 32, "num_layers": 2},
    "90 tokens": {},
}
CUT = """[...document.querySelectorAll(
  "main button, main input, main select, canvas.heat, canvas.heat-legend, .strip, .heads")]
  .filter((x) => x.getClientRects().length && !x.closest(".scroll"))
  .filter((x) => {
    const { left, right } = x.getBoundingClientRect();
    const scrolls = x.matches(".heads, .strip") && x.scrollWidth > x.clientWidth + 1;
    return left < 0 || right > innerWidth || scrolls;
  })
  .map((x) => x.outerHTML.slice(0, 90))"""


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_page_fits_the_width_of_every_screen(name, pages):
    model, variables = model_of(**{"max_length": 96, **LONG[name]})
    tokens = np.random.default_rng(0).integers(0, 300, 90 if name == "90 tokens" else 30).tolist()
    page = explain(model, variables, tokens)
    sizes = []
    tab = None
    for width in WIDTHS:
        if tab is None or width == 768:  # The first screen is a touch screen.
            tab = pages.open(page, width, has_touch=width < 500)
        tab.set_viewport_size({"width": width, "height": 900})
        for view in VIEWS:
            if not tab.locator(f"#tab-{view}").count():
                continue
            tab.click(f"#tab-{view}")
            tab.wait_for_timeout(60)
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, view)
            assert tab.evaluate(CUT) == [], (width, view)
        tab.click("#tab-attention")
        assert tab.locator(".head").count() == model.config.num_layers * (
            model.config.num_heads + 2
        )
        sizes.append(tab.locator("canvas.heat").first.bounding_box()["width"])
    if name == "90 tokens":
        assert sizes == sorted(sizes) and sizes[3] > 1.2 * sizes[2]


OVERLAPS = """(() => {
  const boxes = (name) =>
    [...document.querySelectorAll(name)].map((x) => x.getBoundingClientRect());
  const tokens = boxes(".strip .token"), bars = boxes(".weight-bar");
  const meet = (a, b) => a.left < b.right - .5 && b.left < a.right - .5
    && a.top < b.bottom - .5 && b.top < a.bottom - .5;
  return [bars.length, bars.filter((bar) => tokens.some((token) => meet(bar, token))).length];
})()"""


DRAWN = """(() => {
  const { prototype } = CanvasRenderingContext2D, { fillText } = prototype, drawn = [];
  prototype.fillText = function (text, ...at) {
    drawn.push(text);
    return fillText.call(this, text, ...at);
  };
  document.dispatchEvent(new CustomEvent("themechange"));
  prototype.fillText = fillText;
  return drawn; })()"""


@pytest.fixture(scope="module")
def translation_page(pages):
    """Returns a page of an encoder–decoder."""
    config = jf.EncoderDecoderConfig(**SIZES, norm="rms", positions="rotary").resolved
    model = jf.build(config)
    return explain(model, tiny.weights(model, 0), TEXT, tokenizer(), target="def")


@pytest.mark.parametrize("width", mostly_slow([390, 1440], 390))
def test_names_of_layers_heads_and_parts_are_not_truncated(width, pages, translation_page):
    tab = pages.open(translation_page, width)
    tab.click("#tab-lens")
    assert {"embedding", "layer 0", "layer 1"} <= {*tab.evaluate(DRAWN)}
    tab.click("#tab-heads")
    assert {"layer 0", "layer 1", "head 0", "head 3"} <= {*tab.evaluate(DRAWN)}
    cut = "(all) => all.filter((x) => x.scrollWidth > x.clientWidth).map((x) => x.textContent)"
    names = tab.locator("#view-heads .bar-name")
    assert names.count() >= 8 and names.evaluate_all(cut) == []
    assert any("cross-attention head" in name for name in names.all_inner_texts())


def test_source_is_beside_the_target_on_a_wide_screen_and_above_it_on_a_phone(
    pages, translation_page
):
    for width, is_beside in ((1440, True), (390, False)):
        tab = pages.open(translation_page, width)
        source, target = (x.bounding_box() for x in tab.locator(".text-column").all())
        assert (source["y"] == target["y"]) == is_beside
        assert is_beside or target["y"] >= source["y"] + source["height"]
        edges = tab.locator(".tools button").evaluate_all(
            "(all) => all.map((x) => x.closest('.card').getBoundingClientRect().right"
            " - x.getBoundingClientRect().right)"
        )
        assert min(edges) > 0
        tab.context.close()


@pytest.mark.parametrize("width", mostly_slow([390, 768, 1440], 390))
def test_attention_weight_bars_on_the_page_do_not_overlap_tokens(width, pages):
    page = explain(*model_of(max_length=96), list(range(90)))
    tab = pages.open(page, width)
    for position in (89, 20, 3):
        tab.evaluate(f"jaxformerPage.store.select({{ position: {position}, head: 'mean' }})")
        tab.wait_for_timeout(50)
        num, crossing = tab.evaluate(OVERLAPS)
        assert num > 1 and crossing == 0, position


def test_phone_shows_the_map_below_the_heads_and_its_cells_can_be_tapped(pages, page):
    tab = pages.open(page, 390, 844, has_touch=True, is_mobile=True)
    heads, canvas = tab.locator(".heads"), tab.locator("#view-attention canvas.heat")
    below = canvas.bounding_box()["y"] - heads.bounding_box()["y"] - heads.bounding_box()["height"]
    assert 0 < below < 160
    box = canvas.bounding_box()
    canvas.scroll_into_view_if_needed()
    canvas.tap(position={"x": box["width"] - 8, "y": box["height"] - 8})
    readout = tab.locator("#view-attention .readout")
    last = page.num_tokens - 1
    assert readout.inner_text().startswith(f"{last} ")
    tab.locator("#view-attention .heat-steps button").nth(1).tap()
    assert readout.inner_text().startswith(f"{last - 1} ")
    small = tab.evaluate(
        "[...document.querySelectorAll('main button, main select, main input, .strip .token')]"
        ".filter((x) => x.getClientRects().length && x.getBoundingClientRect().height < 44)"
        ".map((x) => x.outerHTML.slice(0, 90))"
    )
    assert small == []


def test_layer_zero_is_at_the_top_in_every_view(pages, page):
    tab = pages.open(page)
    assert tab.locator(".head-layer").all_inner_texts() == ["L0", "L1"]
    tab.click("#tab-lens")
    for table in tab.locator("#view-lens table").all():
        rows = table.locator("tbody th").all_inner_texts()
        assert rows == ["embedding", "layer 0", "layer 1"]
    tab.click("#tab-decoding")
    assert tab.locator("svg.cache text").all_text_contents() == ["L0", "L1"]


@pytest.mark.slow
def test_buttons_say_their_state_and_why_they_are_disabled(pages, page):
    tab = pages.open(page)
    switch = tab.locator(".strength button").first
    assert switch.inner_text() == "Switch off"
    switch.click()
    wait(tab)
    assert switch.inner_text() == "Switch on"
    switch.click()
    wait(tab)
    assert switch.inner_text() == "Switch off"
    tab.evaluate("jaxformerPage.store.select({ head: 'mean' })")
    assert "Switch off: select one head" in tab.locator(".strength .reasons").inner_text()
    tab.evaluate("jaxformerPage.store.setTokens([1])")
    wait(tab)
    assert "Delete: the text needs a token." in tab.locator("main .reasons").first.inner_text()
    check_reasons(tab)
    tab.evaluate(f"jaxformerPage.store.setTokens({[1] * 48})")
    wait(tab)
    assert "at most 48" in tab.locator("main .reasons").first.inner_text()
    check_reasons(tab)


def check_reasons(tab):
    """Every disabled control in every view has a title that says why."""
    for view in VIEWS:
        tab.click(f"#tab-{view}")
        silent = "[...document.querySelectorAll(':disabled')].filter((x) => !x.title).length"
        assert tab.evaluate(silent) == 0, view


# The tabs of each kind of model, and a sentence about a tab that the page lacks.
TABS = {
    "recurrent": (
        "model states dependency decoding",
        "No Attention tab and no Heads tab: an LSTM has no attention heads.",
    ),
    "convolutional": (
        "model field lens norm dependency decoding",
        "No Attention tab and no Heads tab: a convolutional network has no attention heads.",
    ),
    "encoder": (
        "model mask attention lens norm dependency",
        "No Decoding tab: an encoder reads the whole text in one pass and generates nothing.",
    ),
    "encoder-decoder": ("model attention lens norm dependency decoding heads", None),
    "recurrent-encoder-decoder": (
        "model states attention dependency decoding",
        "No Layers tab: a recurrent encoder-decoder has no residual stream",
    ),
}


@pytest.mark.parametrize("kind", mostly_slow(TABS, slow=list(TABS)))
def test_page_omits_tabs_that_do_not_apply_to_the_model_and_explains_why(kind, pages):
    tab = pages.open(page_of(kind)[2])
    expected, sentence = TABS[kind]
    tabs = tab.eval_on_selector_all(".tabs button", "xs => xs.map((x) => x.id.slice(4))")
    assert tabs == expected.split()
    header = tab.locator("header").inner_text()
    assert "Live: " in header and (sentence or "Live") in header
    named = {"attention", "lens", "norm", "decoding", "heads"}
    assert header.count(" tab") == len(named - set(tabs))
    for view in tabs:
        tab.click(f"#tab-{view}")
        assert tab.locator(f"#view-{view} .card").count() > 0


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["none", "dynamic_tanh"])
def test_page_of_a_model_without_layer_norm_has_no_norm_tab(norm, pages):
    tab = pages.open(explain(*model_of(norm=norm), [1, 2, 3]))
    assert tab.locator("#tab-norm").count() == 0
    assert "No LayerNorm tab: this model" in tab.locator("header").inner_text()


def saved(tab):
    with tab.expect_download() as download:
        tab.click("text=Save picture")
    path = download.value.path()
    return download.value.suggested_filename, path.read_bytes()


def test_heat_maps_are_saved_as_png_of_twice_the_size(pages, page):
    Image = pytest.importorskip("PIL.Image")
    tab = pages.open(page)
    box = tab.locator("#view-attention canvas.heat").bounding_box()
    name, data = saved(tab)
    assert name == "Decoder-attention.png"
    image = Image.open(io.BytesIO(data)).convert("RGB")
    assert image.width >= 2 * box["width"] and image.height >= 2 * box["height"]
    assert image.width < 2.4 * box["width"] and image.height < 2.5 * box["height"]
    colours = {colour for _, colour in image.getcolors(1 << 24)}
    assert tuple(variable(tab, "surface")) in colours  # the background
    assert len(colours) > 50


def test_drawings_are_saved_as_svg_with_their_styles(pages, page):
    tab = pages.open(page)
    tab.click("#tab-norm")
    name, data = saved(tab)
    text = data.decode()
    assert name == "Decoder-norm.svg" and "class=" not in text and "var(" not in text
    drawings = tab.locator("#view-norm svg").count()
    assert drawings >= 3 and text.count("<svg") == drawings + 1
    accent = "rgb({}, {}, {})".format(*variable(tab, "accent"))
    assert f'fill="{accent}"' in text
    other = tab.context.new_page()
    other.goto("about:blank")
    natural = other.evaluate(
        "(text) => new Promise((found) => { const image = new Image();"
        " image.onload = () => found(image.naturalWidth); image.onerror = () => found(0);"
        " image.src = URL.createObjectURL(new Blob([text], { type: 'image/svg+xml' })); })",
        text,
    )
    assert natural > 300


def test_page_in_a_notebook_explains_why_it_has_no_link(pages, page):
    context = pages.browser.new_context()
    tab = context.new_page()
    faults = []
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.set_content(f"<!doctype html><title>notebook</title>{page._repr_html_()}")
    frame = tab.frames[1]
    wait(frame)
    frame.click("#tab-lens")
    time.sleep(0.4)
    link = frame.locator(".page-actions button").nth(1)
    assert link.is_disabled() and "notebook" in link.get_attribute("title")
    name, data = saved(frame_with_downloads(frame, tab))
    assert name.endswith("-lens.png") and data[:4] == b"\x89PNG"
    assert faults == []
    context.close()


class frame_with_downloads:
    """A frame that clicks, in a tab that receives the download."""

    def __init__(self, frame, tab):
        """Stores the frame's click and the tab's download."""
        self.click, self.expect_download = frame.click, tab.expect_download
