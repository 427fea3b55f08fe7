"""The reader can type a source text into the page of an encoder–decoder."""

from types import SimpleNamespace

import numpy as np
import pytest

import jaxformer as jf
from jaxformer.interpret import explain
from jaxformer.interpret.encoded_text import encode_text
from tests.interpret.chromium import opened_pages, wait
from tests.interpret.page_tokenizers import hard_texts, t5
from tests.interpret.pages import SIZES, TEXT, jax_logits, rounded_params, tokenizer
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
TARGET = "return f"
LIMITS = {"max_source_length": 60}
KINDS = {
    "bytes": (tokenizer, jf.EncoderDecoderConfig, SIZES),
    "t5": (t5, jf.EncoderDecoderConfig, SIZES),
    "recurrent": (
        tokenizer,
        jf.RecurrentEncoderDecoderConfig,
        {name: SIZES[name] for name in ("max_length", "num_layers", "embed_dim")},
    ),
}
STATE = """(() => { const { store, logits } = jaxformerPage;
  return { tokens: [...store.tokens], source: [...store.source],
    strengths: [...store.values.strengths], logits: logits(store.tokens.length - 1) }; })()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    with opened_pages(tmp_path_factory.mktemp("pages")) as found:
        yield found


@pytest.fixture(scope="module")
def translator(pages):
    return translator_of("bytes")


def translator_of(kind):
    """Returns a model, its variables, its tokenizer and its page."""
    make, config, sizes = KINDS[kind]
    words = make()
    sizes = {**sizes, **LIMITS, "vocab_size": max(300, words.vocab_size)}
    model = jf.build(config(**sizes).resolved)
    variables = tiny.weights(model, 0)
    page = explain(model, variables, TEXT, words, target=TARGET)
    return SimpleNamespace(model=model, variables=variables, words=words, page=page)


def field(tab):
    """Returns the field for the source and its button."""
    return tab.get_by_label("Your source text"), tab.locator("text=Run this source")


def source_ids(translator, text):
    return encode_text(
        translator.model, translator.variables, text, translator.words, TARGET
    ).source


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "bytes", slow=KINDS))
def test_typed_source_gives_the_token_ids_of_python_and_the_logits_of_jax(kind, pages, translator):
    found = translator if kind == "bytes" else translator_of(kind)
    tab = pages.open(found.page)
    text, button = field(tab)
    assert text.input_value() == found.words.decode(source_ids(found, TEXT))
    before = tab.evaluate(STATE)
    number = 6 if kind == "bytes" else 60
    # A text field turns a carriage return into a line feed.
    usable = (x for x in hard_texts(200)[::-1] if "\r" not in x)
    texts = [x for x in usable if 0 < len(found.words.encode_source(x)) <= 60][:number]
    for typed in ["x = 1", *texts]:
        text.fill(typed)
        source = source_ids(found, typed)
        assert f"{len(source)} token" in tab.inner_text(".text-status >> nth=0")
        button.click()
        wait(tab)
        state = tab.evaluate(STATE)
        assert state["source"] == source and state["tokens"] == before["tokens"], typed
        if typed in ("x = 1", texts[0]):
            params = rounded_params(found.variables["params"])
            wanted = jax_logits(found.model, params, state["tokens"], source)[-1]
            np.testing.assert_allclose(state["logits"], wanted, atol=1e-4, rtol=0)
            assert np.abs(np.subtract(state["logits"], before["logits"])).max() > 1e-3


def test_error_for_too_long_source_text_on_the_page_states_the_limit(pages, translator):
    tab = pages.open(translator.page)
    before = tab.evaluate(STATE)
    text, button = field(tab)
    number = len(translator.words.encode_source("z" * 80))
    text.fill("z" * 80)
    said = f"{number} tokens; this model takes at most 60."
    assert tab.inner_text(".text-status >> nth=0") == button.get_attribute("title") == said
    text.press("Control+Enter")
    assert button.is_disabled() and tab.evaluate(STATE) == before
    # The target has its own field and its own limit.
    tab.get_by_label("Your target text").fill("z" * 80)
    assert "at most 48" in tab.inner_text(".text-status >> nth=1")


def test_source_text_field_shows_the_text_of_the_edited_source_tokens(pages, translator):
    tab = pages.open(translator.page)
    text, _ = field(tab)
    target = tab.get_by_label("Your target text")
    target.fill("a draft")
    tools = tab.get_by_role("group", name="Edit the source")
    tools.get_by_role("button", name="Delete").click()
    wait(tab)
    left = source_ids(translator, TEXT)[1:]
    assert tab.evaluate(STATE)["source"] == left
    assert text.input_value() == translator.words.decode(left)
    assert target.input_value() == "a draft"  # the target did not change
    tools.get_by_label("Other source token").fill("def f(q")
    said = tools.locator(".field-note").inner_text()
    assert said.startswith("No token of the vocabulary contains “def f(q”. ")
    assert said.endswith("type it under “Your source text”.")
    tools.get_by_role("button", name="Replace").click()
    assert tab.evaluate(STATE)["source"] == left


@pytest.mark.slow
def test_link_restores_a_typed_source_and_the_strengths_of_all_heads(pages, translator):
    tab = pages.open(translator.page)
    text, button = field(tab)
    text.fill("x = 1")
    button.click()
    wait(tab)
    for kind in range(3):
        tab.evaluate(f"jaxformerPage.store.select({{ kind: {kind} }})")
        tab.evaluate(f"jaxformerPage.store.setStrength(1, {kind}, 0.5)")
        wait(tab)
    # The page writes its address after a pause.
    wait(tab, "(location.hash.match(/0[.]5/g) || []).length === 3")
    other = pages.open(translator.page, address=tab.evaluate("location.hash"))
    assert other.locator(".link-message").is_hidden()
    state = tab.evaluate(STATE)
    assert other.evaluate(STATE) == state
    assert sum(x != 1 for x in state["strengths"]) == 3
    for wrong in ("source=8c", "s=6/0/0", "s=0/4/0", "source="):
        other.evaluate(f"location.hash = '#v1;{wrong}'")
        other.locator(".link-message", has_text=wrong).wait_for()
