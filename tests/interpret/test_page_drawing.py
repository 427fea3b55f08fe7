"""The drawing of the page: its parameter counts, and that each part opens what it names."""

import jax
import pytest

from jaxformer.interpret import explain
from jaxformer.interpret.page_drawing import drawing_data
from tests.interpret.chromium import opened_pages, opens_first_view, wait
from tests.interpret.pages import OPTIONS, TEXT, model_of, tokenizer
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


def size_of(variables):
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


def sum_of_side(side):
    layers = sum(sum(layer.values()) for layer in side["layers"])
    return layers + sum(side["outside"].values())


@pytest.mark.parametrize("kind", mostly_slow([*ARCHITECTURES, *OPTIONS, "experts"], "gpt2"))
def test_drawn_parameter_counts_sum_to_the_parameters_of_the_model(kind, open_tab):
    model, variables, page = page_of(kind)
    data = drawing_data(model, variables)
    sides = [data[side] for side in ("decoder", "encoder") if data[side]]
    assert data["total"] == sum(map(sum_of_side, sides)) == size_of(variables)
    assert len(data["decoder"]["layers"]) == model.config.num_layers
    tab = open_tab(page)
    tab.click("#tab-model")
    for layer in range(model.config.num_layers):
        numbers = tab.locator(".drawing .part").evaluate_all(
            "(parts) => parts.map((part) => Number(part.dataset.parameters))"
        )
        assert sum(numbers) == size_of(variables), f"layer {layer} is open"
        others = tab.locator(".drawing .part[data-part=layers]")
        if others.count():
            others.last.click()
            wait(tab)


@pytest.mark.parametrize("kind", mostly_slow(["gpt2", *ARCHITECTURES, "experts"], "gpt2"))
def test_keyboard_reaches_every_part_of_the_drawing_and_opens_the_view_named_in_its_label(
    kind, open_tab
):
    tab = open_tab(page_of(kind)[2])
    tab.click("#tab-model")
    drawn = tab.locator(".drawing .part[role=button]")
    expected = drawn.evaluate_all("(parts) => parts.map((part) => part.dataset.id)")
    assert len(expected) >= 3
    assert drawn.evaluate_all("(parts) => parts.every((part) => part.tabIndex === 0)")
    assert drawn.count() == tab.locator(".drawing .part").count()
    tab.focus("#tab-model")
    reached = []
    for _ in range(len(expected) + 3):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.dataset.id ?? null"))
    assert [name for name in reached if name] == expected
    titles = {
        name: tab.get_attribute(f".drawing .part[data-id='{name}']", "aria-label")
        for name in expected
    }
    for name, title in titles.items():
        tab.click("#tab-model")
        tab.focus(f".drawing .part[data-id='{name}']")
        # The card beside the drawing explains the part that has the focus.
        shown = tab.locator(".part-about").inner_text()
        assert shown.startswith(title.split(". ")[0][:20])
        tab.keyboard.press("Enter")
        target = title.rstrip(".").split("Opens ")[1]
        if target == "the explanation of this part":
            assert tab.evaluate("document.activeElement.id") == "part-about"
        elif target.startswith("the tab "):
            chosen = tab.locator("[role=tab][aria-selected=true]").inner_text()
            assert chosen == target.removeprefix("the tab ")
            inside_view = "document.activeElement.closest('[role=tabpanel]:not([hidden])') !== null"
            assert tab.evaluate(inside_view)
        elif target == "the text":
            assert tab.evaluate("document.activeElement.getAttribute('role')") == "listbox"
        else:
            assert target.startswith("layer ") and target.endswith(" in this drawing")
            number = target.split()[1]
            assert f"Layer {number}," in tab.locator(".layer-name").last.text_content()
            if number != "0":
                tab.locator(".drawing .part[data-part=layers]").last.press("Enter")


def test_parts_of_the_drawing_without_a_view_open_an_explanation(open_tab):
    tab = open_tab(page_of("gpt2")[2])
    tab.click("#tab-model")
    norm = tab.locator(".drawing .part[data-part=attention_norm]")
    assert norm.get_attribute("aria-label").endswith("Opens the tab LayerNorm.")
    tab.evaluate(
        "(() => { const { tabs, store } = jaxformerPage;"
        " tabs.views.splice(tabs.views.findIndex(({ id }) => id === 'norm'), 1);"
        " store.notify('view'); })()"
    )
    assert norm.get_attribute("aria-label").endswith("Opens the explanation of this part.")
    norm.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "part-about"
    assert "γ" in tab.locator("#part-about").inner_text()


def test_drawing_of_the_model_shows_the_values_of_the_selected_token(open_tab):
    model, variables = model_of()
    tab = open_tab(explain(model, variables, TEXT, tokenizer()))
    tab.click("#tab-model")
    for position in (0, 4):
        tab.evaluate(f"jaxformerPage.store.select({{ position: {position} }})")
        name = tab.evaluate(f"jaxformerPage.store.name(jaxformerPage.store.tokens[{position}])")
        text = tab.locator(".drawing [data-id=text] .part-title").text_content()
        assert text == f"Token {position}: ‘{name}’"[: len(text) - 1] + text[-1]
        states = tab.evaluate(f"jaxformerPage.inside(0, 0, {position}).lengths.states")
        shown = tab.locator(".drawing .state-text").all_text_contents()
        found = [float(text.split()[-1]) for text in shown]
        assert found == pytest.approx([states[0], states[1], states[2]], abs=0.006)
        best = tab.locator(".prediction .bar-name").first.inner_text()
        predicted = tab.locator(".drawing [data-id=prediction] .part-title")
        assert f"‘{best}’" in predicted.text_content()


def test_parts_of_the_drawing_are_large_enough_to_touch(open_tab):
    tab = open_tab(page_of("parallel with two norms")[2], 390, has_touch=True)
    tab.click("#tab-model")
    boxes = [box.bounding_box() for box in tab.locator(".drawing .part-box").all()]
    assert min(box["height"] for box in boxes) >= 44
    assert min(box["width"] for box in boxes) >= 44
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
