"""The guided tour of the page: its targets, its numbers, and the keyboard."""

import re

import jax
import numpy as np
import pytest

from jaxformer.decoding.autoregressive import inspect
from jaxformer.interpret import explain
from tests.interpret.chromium import opened_pages, opens_first_view
from tests.interpret.pages import OPTIONS, TEXT, jax_logits, model_of, rounded_params, tokenizer
from tests.interpret.shared_pages import ARCHITECTURES, page_of
from tests.slow import mostly_slow

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def open_tab(tmp_path_factory):
    with opened_pages(tmp_path_factory.mktemp("pages")) as pages:
        yield opens_first_view(pages)


def count_of(tab):
    """Returns the number of the step and the number of steps."""
    return [int(x) for x in re.findall(r"\d+", tab.locator(".tour-count").inner_text())]


# The rectangles of the marked part and of the panel, and the width of the screen.
SEEN = """(() => {
  const box = (name) => {
    const { top, left, right, bottom } = document.querySelector(name).getBoundingClientRect();
    return { top, left, right, bottom };
  };
  return { part: box(".toured"), panel: box(".tour"), wide: innerWidth, high: innerHeight };
})()"""


def overlap(first, second):
    """Returns the number of pixels that two rectangles share."""
    sides = (("left", "right"), ("top", "bottom"))
    shared = [min(first[b], second[b]) - max(first[a], second[a]) for a, b in sides]
    return max(0, shared[0]) * max(0, shared[1])


@pytest.mark.parametrize("width", [390, 768, 1440])
@pytest.mark.parametrize("kind", mostly_slow(["gpt2", "without norm", *ARCHITECTURES], "gpt2"))
def test_each_step_of_the_tour_marks_a_part_that_the_panel_does_not_cover(kind, width, open_tab):
    tab = open_tab(page_of(kind)[2], width)
    assert tab.locator(".tour").is_hidden()  # it does not open by itself
    tab.click(".tour-button")
    number, total = count_of(tab)
    assert number == 1 and 3 <= total <= 10
    assert (total == 10) == (kind in OPTIONS)
    for step in range(1, total + 1):
        assert count_of(tab) == [step, total]
        marked = tab.locator(".toured")
        assert marked.count() == 1 and marked.is_visible()
        seen = tab.evaluate(SEEN)
        part, panel = seen["part"], seen["panel"]
        assert overlap(part, panel) == 0, (step, seen)
        assert part["top"] >= 0 and part["bottom"] <= seen["high"], (step, seen)
        assert part["left"] >= -4 and part["right"] <= seen["wide"] + 4
        assert panel["left"] >= 0 and panel["right"] <= seen["wide"]
        text = tab.locator(".tour").inner_text()
        assert "undefined" not in text and "NaN" not in text and "null" not in text
        name = "Finish" if step == total else "Next"
        tab.locator(".tour").get_by_role("button", name=name).click()
    assert tab.locator(".tour").is_hidden() and tab.locator(".toured").count() == 0


@pytest.mark.slow
def test_panel_of_the_tour_does_not_cover_a_large_attention_map(open_tab):
    page = explain(*model_of(), list(range(5, 50)))
    for width, place in ((1440, "left"), (768, "wide"), (390, "right")):
        tab = open_tab(page, width, address="#tour")
        while "tokens read tokens" not in tab.locator(".tour h2").inner_text():
            tab.locator(".tour button").nth(1).click()
        seen = tab.evaluate(SEEN)
        assert overlap(seen["part"], seen["panel"]) == 0, (width, seen)
        assert tab.get_attribute(".tour", "data-place") == place
        tab.context.close()


def test_tour_of_the_page_states_numbers_computed_from_the_model(open_tab):
    model, variables = model_of()
    params = rounded_params(variables["params"])
    words = tokenizer()
    tab = open_tab(explain(model, variables, TEXT, words), address="#tour")
    tokens = tab.evaluate("jaxformerPage.store.tokens")
    last = len(tokens) - 1
    texts = []
    for _ in range(count_of(tab)[1]):
        texts.append(tab.locator(".tour p").last.inner_text())
        tab.locator(".tour button").nth(1).click()
    assert f"{len(tokens)} tokens" in texts[0] and f"number {tokens[-1]} of the voc" in texts[0]
    assert "a vector of 16 numbers" in texts[1] and "300 rows" in texts[1]
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    blocks = sum(leaf.size for leaf in jax.tree.leaves(params["blocks"]))
    assert f"hold {blocks:,} of the model's {size:,} parameters" in texts[2]
    captured = inspect(
        model,
        {"params": params},
        np.array([tokens]),
        capture=["attention.weights", "block.input", "block.output", "feedforward.hidden"],
    ).captured
    weights = np.asarray(captured["attention.weights"])[:, 0, :, last, :last]
    layer, head, key = np.unravel_index(weights.argmax(), weights.shape)
    share = f"{100 * weights.max():.0f}%"
    assert f"head {head} of layer {layer} puts {share} of its weight on token {key}" in texts[3]
    assert share in texts[4]
    hidden = np.asarray(captured["feedforward.hidden"])[layer, 0, last]
    feature = np.abs(hidden).argmax()
    value = f"{hidden[feature]:.2f}".replace("-", "−")
    said = f"in layer {layer}, number {feature} is the most active here: {value}."
    assert said in texts[5]
    lengths = [
        np.linalg.norm(np.asarray(captured[name])[at, 0, last])
        for name, at in (("block.input", 0), ("block.output", -1))
    ]
    assert all(f"{length:.2f}" in texts[6] for length in lengths)
    logits = jax_logits(model, params, tokens)[last].astype(float)
    shares = np.exp(logits - logits.max())
    best = f"{100 * shares.max() / shares.sum():.0f}%"
    assert best in texts[7] and best in texts[8]
    assert f"switch off head {head} of layer {layer}" in texts[9]


def test_tour_of_the_page_is_updated_if_another_token_is_selected(open_tab):
    tab = open_tab(page_of("gpt2")[2], address="#tour")
    first = tab.locator(".tour p").last.inner_text()
    tab.evaluate("jaxformerPage.store.select({ position: 2 })")
    second = tab.locator(".tour p").last.inner_text()
    assert first != second and "Token 2," in second
    # The drawing is drawn again for each selection, and its part stays marked.
    tab.locator(".tour button").nth(1).click()
    tab.evaluate("jaxformerPage.store.select({ position: 1 })")
    assert tab.locator(".toured").count() == 1


def test_tour_works_with_the_keyboard_and_gives_the_focus_back(open_tab):
    tab = open_tab(page_of("gpt2")[2])
    press, read = tab.keyboard.press, tab.evaluate
    tab.focus(".tour-button")
    press("Enter")
    assert read("document.querySelector('.tour').contains(document.activeElement)")
    assert tab.locator(".tour button").first.is_disabled()
    press("Tab")  # Back is disabled, so Next has the focus
    for step in (2, 3):
        press("Enter")
        assert count_of(tab)[0] == step
        assert read("document.activeElement.textContent") == "Next"
    press("Shift+Tab")
    press("Enter")
    assert count_of(tab)[0] == 2
    press("Escape")
    assert tab.locator(".tour").is_hidden()
    assert read("document.activeElement.className") == "tour-button"
    # The page behind the panel can be used while the tour is open.
    tab.click(".tour-button")
    tab.click("#tab-lens")
    assert tab.locator("#view-lens").is_visible() and tab.locator(".tour").is_visible()
