"""The link to a state of the page: it restores the state, and refuses what does not fit."""

import time

import numpy as np
import pytest

from jaxformer.interpret import explain
from tests.interpret.chromium import opened_pages, wait
from tests.interpret.pages import TEXT, VIEWS, model_of, tokenizer
from tests.slow import mostly_slow

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
STATE = """(() => { const { store, tabs } = jaxformerPage;
  return { ...store.selection, tab: tabs.chosen.id, tokens: [...store.tokens],
    strengths: [...store.values.strengths], theme: document.documentElement.dataset.theme ?? null,
    logits: jaxformerPage.logits(store.tokens.length - 1) }; })()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    with opened_pages(tmp_path_factory.mktemp("pages")) as found:
        yield found


@pytest.fixture(scope="module")
def page(pages):
    return explain(*model_of(), TEXT, tokenizer())


def hash_of(tab):
    time.sleep(0.3)  # the page writes its address after a pause
    return tab.evaluate("location.hash")


def change(tab, rng):
    """Brings the page into a random state."""
    if rng.random() < 0.7:
        tokens = rng.integers(0, 300, rng.integers(1, 49)).tolist()
        tab.evaluate(f"jaxformerPage.store.setTokens({tokens}, 0, {len(tokens) - 1})")
        wait(tab)
    for _ in range(rng.integers(0, 3)):
        layer, head, strength = rng.integers(2), rng.integers(4), rng.integers(41) / 20
        tab.evaluate(f"jaxformerPage.store.setStrength({layer}, {head}, {strength})")
        wait(tab)
    length = tab.evaluate("jaxformerPage.store.tokens.length")
    head = rng.choice(["0", "1", "2", "3", "'mean'", "'max'"])
    position, layer = rng.integers(length), rng.integers(2)
    chosen = f"{{ position: {position}, layer: {layer}, head: {head} }}"
    tab.evaluate(f"jaxformerPage.store.select({chosen})")
    tab.click(f"#tab-{rng.choice(VIEWS)}")
    if rng.random() < 0.5:
        tab.click(".theme")


@pytest.mark.parametrize("seed", mostly_slow(range(4), 0))
def test_link_restores_a_random_state_of_the_page(seed, pages, page):
    tab = pages.open(page)
    other = pages.open(page)
    file = other.url.partition("#")[0]
    rng = np.random.default_rng(seed)
    for _ in range(1 if seed == 0 else 4):
        change(tab, rng)
        address = hash_of(tab)
        assert address.startswith("#v1;tab=")
        other.goto("about:blank")
        other.goto(f"{file}{address}")
        wait(other)
        assert other.evaluate(STATE) == tab.evaluate(STATE)
        assert other.evaluate("jaxformerPage.difference") < 1e-4
        assert other.locator(".link-message").is_hidden()
        assert hash_of(other) == address


FOREIGN = {
    "#v1;tab=nothing": "tab=nothing",
    "#v1;pos=999": "pos=999",
    "#v1;pos=-1": "pos=-1",
    "#v1;pos=": "pos=",
    "#v1;layer=2": "layer=2",
    "#v1;head=4": "head=4",
    "#v1;head=least": "head=least",
    "#v1;kind=1": "kind=1",
    "#v1;tokens=8c": "tokens=8c",  # 300 in base 36
    "#v1;tokens=" + ".".join("1" * 49): "tokens=1.1",
    "#v1;tokens=1;pos=1": "pos=1",
    "#v1;tokens=": "tokens=",
    "#v1;s=0/4/0": "s=0/4/0",
    "#v1;s=0/1/3": "s=0/1/3",
    "#v1;s=NaN": "s=NaN",
    "#v1;theme=pink": "theme=pink",
    "#v1;pos=1;pos=2": "pos=2",
    "#v1;toString=1": "toString=1",
    "#v1;__proto__=1": "__proto__=1",
    "#v1;<img src=x>": "<img src=x>",
    "#v1;%ff%": "%ff%",
    "#v1;;": "",
    "#v2;tab=lens": "v2",
}


def test_page_ignores_a_link_to_an_invalid_state_and_shows_a_message(pages, page):
    first = pages.open(page, view=None)
    expected = first.evaluate(STATE)
    for address, wrong in FOREIGN.items():
        first.evaluate("(text) => { location.hash = text; }", address)
        first.wait_for_timeout(30)
        said = first.locator(".link-message").inner_text()
        assert wrong in said and "does not fit this model" in said, address
        assert first.evaluate(STATE) == expected, address
    for address in ("#v1;pos=999", "#v1;%ff%"):
        assert pages.open(page, address=address).evaluate(STATE) == expected


def test_page_does_not_change_an_address_fragment_that_is_not_a_state(pages, page):
    """Another part of the page uses `#tour`."""
    for word in ("#tour", "#version", "#v", "#vv1;pos=1"):
        tab = pages.open(page, address=word)
        tab.click("#tab-lens")
        assert hash_of(tab) == word
        assert tab.locator(".link-message").is_hidden()


def test_opening_a_page_keeps_its_address_and_using_it_adds_no_browser_history(pages, page):
    tab = pages.open(page, view=None)
    assert hash_of(tab) == ""
    before = tab.evaluate("history.length")
    tab.click("#tab-lens")
    assert hash_of(tab).startswith("#v1;tab=lens;")
    assert tab.evaluate("history.length") == before


def test_copied_link_contains_the_current_state_of_the_page(pages, page):
    tab = pages.open(page, permissions=["clipboard-read", "clipboard-write"])
    tab.evaluate("jaxformerPage.store.select({ position: 2 })")
    tab.click("text=Copy link")
    tab.wait_for_timeout(200)
    assert "clipboard" in tab.locator(".link-message").inner_text()
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("file://") and "#v1;tab=attention;pos=2;" in copied
    # Without permission, the page offers the link in a field.
    refuse = "navigator.clipboard.writeText = () => Promise.reject(new Error('no'));"
    tab.evaluate(f"(() => {{ {refuse} }})()")
    tab.click("text=Copy link")
    tab.wait_for_timeout(100)
    assert tab.locator(".link-field").input_value() == copied


@pytest.mark.slow
def test_link_to_a_page_of_captured_values_restores_the_selection_but_not_the_text(pages):
    captured = explain(*model_of(dtype="bfloat16"), list(range(5, 17)))
    tab = pages.open(captured, address="#v1;tab=lens;pos=3;layer=1;head=mean;theme=dark")
    found = tab.evaluate(
        "(() => { const { store, tabs } = jaxformerPage; const { position, layer, head } ="
        " store.selection; return [tabs.chosen.id, position, layer, head]; })()"
    )
    assert found == ["lens", 3, 1, "mean"]
    tab = pages.open(captured, address="#v1;tokens=1.2")
    assert "tokens=1.2" in tab.locator(".link-message").inner_text()
