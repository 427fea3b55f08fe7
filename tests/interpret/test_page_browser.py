"""The page in Chromium: its logits, its controls, its speed, and that it loads nothing.

Skipped without Playwright (`pip install playwright`) and Chromium (`apt-get install chromium`).
"""

import html
import time

import numpy as np
import pytest

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.interpret import explain, page_data, page_weights
from jaxformer.interpret.atlas import HeadAtlas
from jaxformer.interpret.encoded_text import token_names
from jaxformer.models.parameters import init
from tests.interpret.chromium import Pages, launched, wait, without_slow_data
from tests.interpret.pages import (
    OPTIONS,
    TEXT,
    VIEWS,
    jax_logits,
    model_of,
    rounded_params,
    tokenizer,
)
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def browser():
    with launched() as opened:
        yield opened


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page and checks at the end that it had no error and made no request."""
    pages = Pages(browser, tmp_path)
    with without_slow_data():
        yield pages.open
    for context in browser.contexts:
        context.close()
    assert pages.faults == []


def logits_of(tab, length):
    return np.array([tab.evaluate(f"jaxformerPage.logits({i})") for i in range(length)])


def row_sums(tab, kind, layer, head):
    """Returns the sum of the attention weights of each query."""
    found = tab.evaluate(
        f"(() => {{ const m = jaxformerPage.attention({kind}, {layer}, {head}); "
        "return { ...m, values: Array.from(m.values) }; })()"
    )
    return np.reshape(found["values"], (found["rows"], found["columns"])).sum(axis=1)


def check_logits(tab, model, params, tokens):
    expected = jax_logits(model, rounded_params(params), tokens)
    np.testing.assert_allclose(logits_of(tab, len(tokens)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", mostly_slow([*OPTIONS, "8 bits"], "gpt2", "gemma"))
def test_explain_page_computes_the_same_logits_as_jax(name, opened, monkeypatch):
    if name == "8 bits":
        monkeypatch.setattr(page_weights, "MOST_EXACT", 0)
    model, variables = model_of(**OPTIONS.get(name, {"norm": "rms", "positions": "rotary"}))
    tokens = np.random.default_rng(1).integers(0, 300, 20).tolist()
    tab = opened(explain(model, variables, tokens))
    check_logits(tab, model, variables["params"], tokens)
    assert tab.evaluate("jaxformerPage.difference") < 1e-4
    for layer in range(2):
        for head in (0, 3):
            sums = row_sums(tab, 0, layer, head)
            np.testing.assert_allclose(sums, 1, atol=1e-5)
    # An edit recomputes only what depends on it, and gives the logits of the new text.
    edited = [*tokens[:7], 9, *tokens[8:], 5]
    tab.evaluate(f"jaxformerPage.store.setTokens({edited}, 7)")
    wait(tab)
    check_logits(tab, model, variables["params"], edited)


def test_disabling_a_head_on_explain_page_equals_ablation_in_jax(opened):
    model, variables = model_of(**OPTIONS["llama"])
    tokens = list(range(5, 17))
    tab = opened(explain(model, variables, tokens))
    before = logits_of(tab, len(tokens))
    tab.evaluate("jaxformerPage.store.setStrength(1, 2, 0)")
    wait(tab)
    kernel = np.array(variables["params"]["blocks"]["attention"]["output"]["kernel"])
    kernel[1, 2 * model.config.head_dim : 3 * model.config.head_dim] = 0
    params = {**variables["params"]}
    attention = {**params["blocks"]["attention"], "output": {"kernel": kernel}}
    params["blocks"] = {**params["blocks"], "attention": attention}
    check_logits(tab, model, params, tokens)
    assert np.abs(logits_of(tab, len(tokens)) - before).max() > 1e-2
    tab.evaluate("jaxformerPage.store.resetStrengths()")
    wait(tab)
    np.testing.assert_array_equal(logits_of(tab, len(tokens)), before)


@pytest.mark.parametrize(
    "name", mostly_slow(["gpt2", "llama", "relative", "parallel with two norms"], "gpt2")
)
def test_head_contributions_on_explain_page_add_up_to_the_logit(name, opened):
    model, variables = model_of(**OPTIONS[name])
    tab = opened(explain(model, variables, list(range(5, 17))))
    tab.click("#tab-heads")
    said = tab.locator("#view-heads .note").first.inner_text()
    logits = tab.evaluate("jaxformerPage.logits(11)")
    assert f"{max(logits):.3f}" in said, said


def test_page_shows_a_large_negative_effect_among_many_heads(opened):
    """The map has more cells than pixels, and one negative cell among small positive ones."""
    effect = np.full((700, 900), 0.01)
    effect[351, 451] = -2.0
    atlas = HeadAtlas({"first_token": abs(effect) / 2}, effect, effect / 4, 1.0, 5)
    tab = opened(explain(*model_of(), [1, 2, 3], atlas=atlas))
    tab.click("#tab-heads")
    tab.locator("#view-heads select").first.select_option("effect of removing the head")
    nearest_colour = """(() => {
      const canvas = document.querySelector("#view-heads canvas");
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      const wanted = getComputedStyle(document.documentElement).getPropertyValue("--heat-negative");
      const probe = document.createElement("canvas").getContext("2d");
      probe.fillStyle = wanted.trim();
      probe.fillRect(0, 0, 1, 1);
      const colour = probe.getImageData(0, 0, 1, 1).data;
      let nearest = 765;
      for (let i = 0; i < data.length; i += 4) {
        const apart = [0, 1, 2].map((c) => Math.abs(data[i + c] - colour[c]));
        nearest = Math.min(nearest, apart[0] + apart[1] + apart[2]);
      }
      return nearest;
    })()"""
    assert tab.evaluate(nearest_colour) <= 6


def test_explain_page_shows_scores_and_effects_of_heads(opened):
    effect = np.arange(8.0).reshape(2, 4)
    atlas = HeadAtlas({"first_token": effect / 8}, effect, effect / 4, 1.0, 5)
    tab = opened(explain(*model_of(), [1, 2, 3], atlas=atlas))
    tab.click("#tab-heads")
    score = tab.locator("#view-heads select").first
    assert score.locator("option").all_inner_texts() == [
        "first token",
        "effect of removing the head",
    ]
    grid, readout = (tab.locator(f"#view-heads {name}").first for name in ("canvas", ".readout"))
    grid.focus()
    effect_of_removing = "effect of removing the head"
    expected = {"first token": "0.625", effect_of_removing: "5.000 ± 1.250 nats per token"}
    for option, value in expected.items():
        score.select_option(option)
        grid.focus()
        for key in ("ArrowDown", "Home", "ArrowRight"):
            tab.keyboard.press(key)
        assert readout.inner_text().endswith(value)
    tab.keyboard.press("Enter")
    assert tab.evaluate("jaxformerPage.store.selection.head") == 1


def test_layer_norm_output_on_explain_page_has_beta_as_mean_and_gamma_as_stddev(opened):
    model, variables = model_of(embed_dim=64)
    tab = opened(explain(model, variables, TEXT, tokenizer()))
    tab.click("#tab-norm")
    scale, bias = tab.locator("#view-norm input[type=range]").all()
    for source in ("model", "lesson", "skewed"):
        tab.locator("#view-norm select").first.select_option(source)
        for gamma, beta in ((1, 0), (2.5, -1.2), (0.3, 3)):
            for slider, value in ((scale, gamma), (bias, beta)):
                slider.fill(str(value))
            for after in tab.locator("#view-norm figure[data-kind=after]").all():
                assert float(after.get_attribute("data-mean")) == pytest.approx(beta, abs=1e-3)
                assert float(after.get_attribute("data-spread")) == pytest.approx(gamma, abs=1e-3)


def test_every_control_of_explain_page_works_with_the_keyboard(opened):
    model, variables = model_of()
    tab = opened(explain(model, variables, TEXT, tokenizer()))
    press, read = tab.keyboard.press, tab.evaluate
    tab.focus("#tab-attention")
    press("Home")
    for view in VIEWS[1:]:
        press("ArrowRight")
        assert tab.locator(f"#view-{view}").is_visible()
        assert tab.locator(f"#tab-{view}").get_attribute("aria-selected") == "true"
        # Every button, field and heat map has a name.
        unnamed = read(
            "[...document.querySelectorAll('button, input, select, canvas[tabindex]')]"
            ".filter((x) => !(x.textContent || x.ariaLabel || x.labels?.length)).length"
        )
        assert unnamed == 0
    press("Home")
    press("ArrowRight")
    # A token: arrow keys move the selection.
    tab.focus("[role=listbox]")
    press("Home")
    assert read("jaxformerPage.store.selection.position") == 0
    press("ArrowRight")
    assert read("jaxformerPage.store.selection.position") == 1
    # A head: arrow keys move the focus, Enter selects.
    tab.focus(".head[tabindex='0']")
    press("ArrowRight")
    press("ArrowDown")
    press("Enter")
    assert read("[jaxformerPage.store.selection.layer, jaxformerPage.store.selection.head]") == [
        1,
        1,
    ]
    # The heat map: arrow keys select a cell, whose value is read aloud.
    tab.focus("#view-attention canvas.heat")
    press("ArrowDown")
    said = tab.locator("#view-attention .readout").inner_text()
    assert said.startswith("1 ") and "attends to 0 " in said
    press("Enter")
    assert read("jaxformerPage.store.selection.position") == 1
    # The strength of the head.
    tab.focus("#view-attention input[type=range]")
    press("Home")
    wait(tab)
    assert read("jaxformerPage.store.values.strengths[5]") == 0
    # Another token: the field opens a list, arrow keys choose, Enter replaces.
    tab.focus("[role=combobox]")
    tab.keyboard.type("z")
    press("ArrowDown")
    press("Enter")
    wait(tab)
    assert read("jaxformerPage.store.name(jaxformerPage.store.tokens[1])") == "z"
    # Decoding.
    tab.focus("#tab-attention")
    for _ in range(VIEWS.index("decoding") - VIEWS.index("attention")):
        press("ArrowRight")
    before = read("jaxformerPage.store.tokens.length")
    press("Tab")
    press("Enter")
    wait(tab)
    assert read("jaxformerPage.store.tokens.length") == before + 1
    tab.focus(".theme")
    press("Enter")
    assert read("document.documentElement.dataset.theme") == "dark"


# This clock advances by 6 ms whenever the page reads it, so the page computes in many slices.
SLOW_CLOCK = "(() => { let t = 0; performance.now = () => (t += 6); })()"
BUTTONS = {
    "Append the best token": "#view-decoding",
    "Remove the last token": "#view-decoding",
    "Replace": ".tools",
    "Insert after": ".tools",
    "Delete": ".tools",
    "Reset text": ".tools",
    "Switch off/Switch on": "#view-attention",
    "Reset all heads": "#view-attention",
}


def press(tab, names):
    """Presses buttons without giving the page time to compute; returns whether it computes."""
    return tab.evaluate(
        "(names) => { for (const [name, part] of names) {"
        " [...document.querySelectorAll(`${part} button`)]"
        ".find((x) => name.split('/').includes(x.textContent)).click(); }"
        " return jaxformerPage.store.busy; }",
        [[name, BUTTONS[name]] for name in names],
    )


def state_of(tab):
    state = tab.evaluate(
        "(() => { const { tokens, selection, values } = jaxformerPage.store;"
        " return { tokens, position: selection.position, strengths: [...values.strengths] }; })()"
    )
    return state, logits_of(tab, len(state["tokens"]))


@pytest.mark.parametrize("seed", mostly_slow(range(6), 0))
def test_explain_page_processes_clicks_during_computation_in_order(seed, opened):
    """The result is that of a page that has computed before each press."""
    model, variables = model_of()
    page = explain(model, variables, TEXT, tokenizer())
    rng = np.random.default_rng(seed)
    # The heads are switched first, because a strength takes effect at once, before pending edits.
    names = [*rng.choice(list(BUTTONS)[-2:], 2), *rng.choice(list(BUTTONS)[:-2], 7)]
    names = ["Append the best token"] * 5 if seed == 0 else names
    found = []
    for waits in (True, False):
        tab = opened(page)
        tab.evaluate(SLOW_CLOCK)
        tab.fill("[role=combobox]", "z")
        for group in [[name] for name in names] if waits else [names]:
            assert press(tab, group) or waits
            wait(tab)
        found.append(state_of(tab))
    (expected, expected_logits), (state, logits) = found
    assert state == expected
    np.testing.assert_array_equal(logits, expected_logits)
    if seed == 0:
        assert len(state["tokens"]) == page.num_tokens + 5


def test_token_selected_while_the_html_page_computes_stays_selected(opened):
    model, variables = model_of()
    tab = opened(explain(model, variables, list(range(5, 17))))
    tab.evaluate(SLOW_CLOCK)
    tab.evaluate(
        "(() => { const { store } = jaxformerPage; store.select({ position: 3 });"
        " store.edit((tokens) => ({ tokens: tokens.toSpliced(4, 0, 200), first: 3, select: 4 }));"
        " store.select({ position: 7 });"  # the token 12, which the insertion moves
        " store.edit((tokens, at) => ({ tokens: tokens.with(at, 100), first: at })); })()"
    )
    wait(tab)
    expected = [5, 6, 7, 8, 200, 9, 10, 11, 100, 13, 14, 15, 16]
    assert tab.evaluate("jaxformerPage.store.tokens") == expected
    check_logits(tab, model, variables["params"], expected)


def test_hidden_tabs_of_explain_page_stop_computing_if_the_text_changes(opened):
    model, variables = model_of()
    tab = opened(explain(model, variables, list(range(40))))
    tab.evaluate(SLOW_CLOCK)
    tab.evaluate(
        "(() => { const { store, tabs } = jaxformerPage, { lens } = store.values;"
        " globalThis.beyond = 0; store.values.lens = (state, position) => {"
        " beyond += position >= store.tokens.length; return lens(state, position); };"
        " for (const id of ['lens', 'dependency'])"
        " tabs.choose(tabs.views.find((x) => x.id === id));"
        " store.setTokens([1, 2]); })()"
    )
    wait(tab)
    time.sleep(0.5)
    assert tab.evaluate("beyond") == 0


def test_every_suggested_token_of_the_page_can_be_selected(opened):
    """Spaces, line feeds and tabs have signs, which are tokens themselves."""
    words = ByteTokenizer.train(["·\n→\n⏎\n\t\n ·x x→"] * 9, 300)
    model, variables = model_of()
    tab = opened(explain(model, variables, "a → b · c", words))
    names = token_names(words, range(300))
    seen = set()
    for typed in ("·", "→", "⏎"):
        tab.fill("[role=combobox]", typed)
        options = tab.locator("[role=combobox] ~ .matches li").all_inner_texts()
        for number, name in enumerate(options):
            for keyboard in (True, False):
                tab.fill("[role=combobox]", "")
                tab.fill("[role=combobox]", typed)
                if keyboard:
                    for _ in range(number + 1):
                        tab.press("[role=combobox]", "ArrowDown")
                    tab.press("[role=combobox]", "Enter")
                else:
                    tab.locator("[role=combobox] ~ .matches li").nth(number).click()
                    press(tab, ["Replace"])
                wait(tab)
                position = tab.evaluate("jaxformerPage.store.selection.position")
                token = tab.evaluate(f"jaxformerPage.store.tokens[{position}]")
                assert names[token] == name
                seen.add(token)
    assert {words.encode(x)[0] for x in (" ", "\n", "\t", "·", "→", "⏎")} <= seen


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.5, 0, 0.4), (1.5, 20, 0.6), (0.7, 3, 1.0), (2.0, 0, 1.0)]
)
def test_explain_page_samples_from_the_distribution_of_the_sampler(
    opened, temperature, top_k, top_p
):
    model, variables = model_of()
    tab = opened(explain(model, variables, TEXT, tokenizer()))
    tab.click("#tab-decoding")
    last = tab.evaluate("jaxformerPage.store.tokens.length - 1")
    logits = np.array(tab.evaluate(f"jaxformerPage.logits({last})"))
    sliders = tab.locator("#view-decoding input[type=range]").all()
    for slider, value in zip(sliders, (temperature, top_k, top_p), strict=True):
        slider.fill(str(value))
    shares = np.sort(np.exp((logits - logits.max()) / temperature))[::-1]
    shares = shares[: top_k or None] / shares[: top_k or None].sum()
    kept = int((np.cumsum(shares) - shares < top_p).sum())
    said = tab.locator("#view-decoding [aria-live=polite]").inner_text()
    assert said.startswith(f"{kept} of 300 tokens")
    best = tab.locator("#view-decoding .bar-value").first.inner_text()
    assert float(best.rstrip("%")) == pytest.approx(100 * shares[0] / shares[:kept].sum(), abs=0.6)


def test_explain_page_escapes_html_in_texts_and_tokens(opened):
    hostile = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>'
    model, variables = model_of(vocab_size=330, max_length=100)
    words = tokenizer(hostile * 40)
    tab = opened(explain(model, variables, hostile, words, title=hostile))
    for view in VIEWS:
        tab.click(f"#tab-{view}")
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert tab.evaluate("document.querySelectorAll('script').length") == 2
    assert tab.locator("h1").inner_text() == hostile


def test_two_explain_pages_in_one_notebook_are_independent(opened, browser):
    frames = []
    for seed, name in enumerate(("first", "second")):
        model = model_of()[0]
        frames.append(explain(model, tiny.weights(model, seed), [1, 2, 3 + seed], title=name))
    texts = "".join(page._repr_html_() for page in frames)
    context = browser.new_context()
    tab = context.new_page()
    faults = []
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.set_content(f"<!doctype html><title>notebook</title>{texts}")
    first, second = tab.frames[1:]
    for frame in (first, second):
        wait(frame)
    assert [frame.locator("h1").inner_text() for frame in (first, second)] == ["first", "second"]
    first.click("#tab-norm")
    assert second.locator("#view-model").is_visible()
    assert second.locator("#view-norm").is_hidden() and first.locator("#view-norm").is_visible()
    assert first.evaluate("jaxformerPage.logits(2)") != second.evaluate("jaxformerPage.logits(2)")
    assert html.unescape("&lt;") == "<" and faults == []
    context.close()


@pytest.mark.parametrize(
    "kind", mostly_slow(["encoder-decoder", "recurrent", "encoder"], "encoder-decoder")
)
def test_explain_page_of_captured_values_displays_the_values(kind, opened, monkeypatch):
    import jax

    from jaxformer.training.presets import training_preset

    monkeypatch.setattr(page_weights, "MOST_PARAMETERS", 100)
    if kind == "encoder":  # as for a large model
        monkeypatch.setattr(page_data, "MOST_WEIGHTS", 10)
    model = jf.build(training_preset("tiny", kind).model)
    read = {"target": [1, 2, 3, 4]} if model.config.reads_source else {}
    tab = opened(explain(model, init(model, jax.random.key(0)), [3, 4, 5, 6, 7], **read), 375)
    kinds = tab.evaluate("jaxformerPage.store.values.kinds.length")
    assert kinds == {"encoder-decoder": 3, "recurrent": 0, "encoder": 1}[kind]
    for number in range(kinds):
        sums = row_sums(tab, number, 1, 1)
        np.testing.assert_allclose(sums, 1, atol=1e-5)
    if kind == "encoder-decoder":
        tab.locator("#view-attention select").first.select_option("1")
        assert tab.locator(".strip").count() == 2
    if kind == "encoder":
        assert "mean of all heads" in tab.locator("#view-attention .heat-title").inner_text()
    if kind == "recurrent":
        assert "no attention heads" in tab.locator("header").inner_text()
    has_parts = kind == "encoder-decoder"
    for view in VIEWS:
        if (chosen := tab.locator(f"#tab-{view}")).count():
            chosen.click()
    if has_parts:
        assert "All parts together" in tab.locator("#view-heads").inner_text()
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


# Milliseconds from an action until the page is laid out again. The target is 100. A shared machine
# may be several times slower, so the test allows more and prints the measured times.
TARGET, ALLOWED = 100, 400
INTERACTIONS = {
    "select a token": "store.select({ position: 300 })",
    "select a head": "store.select({ layer: 1, head: 3 })",
    "mean of the heads": "store.select({ layer: 1, head: 'mean' })",
    "strength of a head": "store.setStrength(1, 3, 0.5)",
    "replace a token": "store.setTokens(store.tokens.with(400, 7), 400)",
    "open layers": "tabs.choose(tabs.views.find((x) => x.id === 'lens'))",
    "open decoding": "tabs.choose(tabs.views.find((x) => x.id === 'decoding'))",
}


@pytest.mark.slow
def test_explain_page_stays_responsive_with_512_tokens(opened):
    model, variables = model_of(max_length=512, embed_dim=64, mlp_dim=256)
    tokens = np.random.default_rng(0).integers(0, 300, 512).tolist()
    tab = opened(explain(model, variables, tokens))
    times = {}
    for name, action in INTERACTIONS.items():
        times[name] = tab.evaluate(
            f"(() => {{ const {{ store, tabs }} = jaxformerPage; const begin = performance.now(); "
            f"{action}; document.body.offsetHeight; return performance.now() - begin; }})()"
        )
        wait(tab)
        time.sleep(0.3)
    print({name: round(x) for name, x in times.items()}, f"target: {TARGET} ms")
    assert max(times.values()) < ALLOWED, times
