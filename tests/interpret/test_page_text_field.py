"""A text that the reader types into the page: its tokens, its limits, and why it is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import decoders, normalizers, pre_tokenizers

from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.interpret import explain
from jaxformer.interpret.encoded_text import encode_text
from jaxformer.interpret.page_patterns import js_pattern
from jaxformer.interpret.page_tokenizer import tokenizer_data, tokenizer_reason
from tests.errors import error_of
from tests.interpret.chromium import Pages, launched, wait, without_slow_data
from tests.interpret.page_tokenizers import KINDS, corpus
from tests.interpret.pages import TEXT, jax_logits, model_of, rounded_params, tokenizer

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
OTHER = "return f(x)\n\ndef"


def written(*arguments, **options):
    with without_slow_data():
        return explain(*arguments, **options)


@pytest.fixture(scope="module")
def live():
    model, variables = model_of()
    words = tokenizer()
    page = written(model, variables, TEXT, words)
    return SimpleNamespace(model=model, variables=variables, words=words, page=page)


@pytest.fixture(scope="module")
def browser():
    with launched() as opened:
        yield opened


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page and checks at the end that it had no error and made no request."""
    pages = Pages(browser, tmp_path)
    yield pages.open
    for context in browser.contexts:
        context.close()
    assert pages.faults == []


def tokens_of(tab):
    wait(tab)
    return tab.evaluate("[...jaxformerPage.store.tokens]")


def ids_of(live, text):
    return encode_text(live.model, live.variables, text, live.words, None).tokens


def test_page_encodes_typed_text_like_the_python_tokenizer_and_computes_its_logits(live, opened):
    tab = opened(live.page)
    assert tab.input_value("textarea") == TEXT
    for text, act in (
        (OTHER, lambda: tab.click("text=Run this text")),
        ("é 🙂\t<|endoftext|>", lambda: tab.press("textarea", "Control+Enter")),
    ):
        tab.fill("textarea", text)
        expected = ids_of(live, text)
        assert tab.inner_text(".text-status") == (
            f"{len(expected)} tokens with <|endoftext|> before the text; this model takes at most "
            "48."
        )
        act()
        assert tokens_of(tab) == expected and tab.input_value("textarea") == text
        last = len(expected) - 1
        assert tab.evaluate("jaxformerPage.store.selection.position") == last
        rounded = rounded_params(live.variables["params"])
        found = tab.evaluate(f"jaxformerPage.logits({last})")
        wanted = jax_logits(live.model, rounded, expected)[-1]
        np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)


def test_page_states_why_it_cannot_run_a_typed_text(live, opened):
    tab = opened(live.page)
    before, button = tokens_of(tab), tab.locator("text=Run this text")
    most = live.model.config.max_length
    too_long = "z" * most
    for text, said in {
        "": "Type at least one character.",
        too_long: f"{most + 1} tokens; this model takes at most {most}.",
        "z" * 20_001: "20,001 characters; this page reads at most 20,000.",
    }.items():
        tab.fill("textarea", text)
        assert tab.inner_text(".text-status") == button.get_attribute("title") == said
        assert button.is_disabled()
        tab.press("textarea", "Control+Enter")
        assert tokens_of(tab) == before
    tab.fill("textarea", too_long[1:])
    assert button.is_enabled() and button.get_attribute("title") == "Ctrl+Enter"
    tab.evaluate(
        "(() => { const x = document.querySelector('textarea'); x.value = 'a\\ud800';"
        " x.dispatchEvent(new Event('input')); })()"
    )
    assert "half of a character" in tab.inner_text(".text-status") and button.is_disabled()


def test_text_field_of_the_page_shows_the_text_of_the_edited_tokens(live, opened):
    tab = opened(live.page)
    tab.click("text=Delete")
    ids = tokens_of(tab)
    assert ids == ids_of(live, TEXT)[:-1]
    assert tab.input_value("textarea") == live.words.decode(ids)
    tab.evaluate("jaxformerPage.store.setTokens([0, 70, 0, 71])")
    tokens_of(tab)
    text = live.words.decode([70, 71])
    assert tab.input_value("textarea") == text
    number = len(ids_of(live, text))
    said = f"The tokens shown have no exact text. Running this text gives {number} tokens."
    assert tab.inner_text(".text-status") == said
    tab.fill("textarea", "a draft")
    tab.evaluate("jaxformerPage.store.setStrength(0, 1, 0.5)")
    tokens_of(tab)
    assert tab.input_value("textarea") == "a draft"  # the tokens did not change


def test_token_field_explains_why_no_token_matches_the_entered_text(live, opened):
    tab = opened(live.page)
    before = tokens_of(tab)
    said = tab.locator(".field-note")
    tab.click("text=Replace")
    assert said.inner_text() == "Type the text of a token first."
    tab.fill("[role=combobox]", "def f(q")
    ids = live.words.encode("def f(q")
    assert said.inner_text().startswith("No token of the vocabulary contains “def f(q”. The ")
    assert f" reads it as {len(ids)} tokens: def | ·f | ( | q. " in said.inner_text()
    tab.press("[role=combobox]", "Enter")
    assert tokens_of(tab) == before and said.is_visible()
    tab.fill("[role=combobox]", "def")
    assert said.is_hidden()


def test_page_without_tokenizer_or_weights_states_why_it_has_no_text_field(
    live, opened, monkeypatch
):
    tab = opened(written(live.model, live.variables, [1, 2, 3]))
    assert tab.locator("textarea").count() == 0
    reason = "the page was written from token ids, without a tokenizer"
    assert f"cannot read a text that you type: {reason}." in tab.inner_text("main")
    tab.fill("[role=combobox]", "none")
    said = "No token of the vocabulary contains “none”."
    assert tab.inner_text(".field-note") == said
    model, variables = model_of(dtype="bfloat16")
    tab = opened(written(model, variables, TEXT, live.words))
    assert tab.locator("textarea").count() == 0
    assert 'another page: jaxformer explain RUN "your text"' in tab.inner_text("main")


def test_typed_text_with_a_token_that_the_model_lacks_is_refused(live, opened):
    words = ByteTokenizer.train(corpus(), 320)
    wide = next(
        text for text in map(words.decode, ([n] for n in range(300, 320))) if text.isascii()
    )
    tab = opened(written(live.model, live.variables, "q", words))
    tab.fill("textarea", wide)
    (token,) = words.encode(wide)
    said = f"The text contains token {token}, “{wide}”; this model's tokens are 0 to 299."
    assert tab.inner_text(".text-status") == said


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 768, 1440, 2560])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_field_of_page_fits_the_screen_and_has_contrast(width, theme, live, opened):
    options = {"color_scheme": theme, "has_touch": width == 390, "is_mobile": width == 390}
    tab = opened(live.page, width, **options)
    tab.fill("textarea", "long " * 90)
    tab.fill("[role=combobox]", "x" * 90)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if width == 390:
        assert tab.locator("text=Run this text").bounding_box()["height"] >= 44
    for name in (".text-status", ".field-note", "textarea", ".text-field label"):
        text, ground = tab.evaluate(
            "(name) => { const x = document.querySelector(name), ground = x.closest('.card');"
            " return [x, ground].map((y, i) => getComputedStyle(y)[i ? 'backgroundColor' : "
            "'color'].match(/\\d+/g).slice(0, 3).map(Number)); }",
            name,
        )
        assert contrast(text, ground) >= 4.5, name


def contrast(first, second):
    """The contrast of two colours by the formula of WCAG 2."""

    def luminance(colour):
        x = np.array(colour) / 255
        x = np.where(x <= 0.03928, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
        return float(x @ [0.2126, 0.7152, 0.0722])

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama3", "mistral", "unigram", "bert"])
def test_page_adds_the_special_tokens_that_an_imported_tokenizer_adds(kind, opened):
    words = KINDS[kind]()
    model, variables = model_of(vocab_size=words.vocab_size, max_length=60)
    tab = opened(written(model, variables, "the tide", words))
    for text in ("the tide came in <tool> 12", " don't\n\nx"):
        tab.fill("textarea", text)
        tab.click("text=Run this text")
        assert tokens_of(tab) == encode_text(model, variables, text, words, None).tokens
    assert tab.evaluate("jaxformerPage.store.name(jaxformerPage.store.tokens[0])") == "<s>"


def test_page_names_the_tokenizer_component_that_it_does_not_support():
    config = model_of()[0].config
    of_bytes = KINDS["gpt2"]

    def reason(**parts):
        words = of_bytes()
        backend = words._backend
        for name, part in parts.items():
            setattr(backend, name, part)
        return tokenizer_reason(words.with_backend(backend))

    assert reason() is None
    assert reason(normalizer=normalizers.Nmt()) == "the page has no normalizer Nmt"
    scripts = pre_tokenizers.Sequence([pre_tokenizers.UnicodeScripts(), pre_tokenizers.ByteLevel()])
    assert reason(pre_tokenizer=scripts) == "the page has no pre-tokenizer UnicodeScripts"
    assert reason(decoder=decoders.CTC()) == "the page has no decoder CTC"
    parts = {
        "normalizer": normalizers.Strip(),
        "pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first"),
    }
    assert "'first' after the normalizer Strip" in reason(**parts)
    words = of_bytes()
    words._backend.model.dropout = 0.1
    assert "merges at random" in tokenizer_reason(words.with_backend(words._backend))

    class Own(ByteTokenizer):
        pass

    assert (
        tokenizer_reason(Own(tokenizer()._backend))
        == "the page does not implement tokenizers of the class Own"
    )
    assert "from token ids" in tokenizer_data(None, config)["tokenizer_reason"]
    assert tokenizer_data(tokenizer(), config)["tokenizer"]["text"]["before"] == [0]


UNKNOWN = r"[a-z&&[^x]] [a[^b]] [[:alpha:]] \bx \W (a)\1 ^a a$ (?m:a) (?i:ss) \p{Alpha} a{2}+ a{2}?"
UNKNOWN += " a{,} (?<n>a) (?i:[a-z]) []a] (a a) *a a** [a [^"


@pytest.mark.parametrize("pattern", UNKNOWN.split())
def test_regex_that_cannot_be_translated_to_javascript_is_rejected(pattern):
    assert "does not translate" in error_of(lambda: js_pattern(pattern))
