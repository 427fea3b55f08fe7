"""The tab "Inside" of the page: its numbers equal JAX's, and the shown numbers add up."""

import numpy as np
import pytest

from jaxformer.decoding.autoregressive import inspect
from jaxformer.interpret import explain
from tests.interpret.chromium import opened_pages, opens_first_view, read_json
from tests.interpret.pages import OPTIONS, TEXT, model_of, rounded_params, tokenizer
from tests.slow import mostly_slow

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
TOKENS = np.random.default_rng(1).integers(0, 300, 14).tolist()
POSITIONS = (0, 1, 6, 13)


@pytest.fixture(scope="module")
def open_tab(tmp_path_factory):
    with opened_pages(tmp_path_factory.mktemp("pages")) as pages:
        yield opens_first_view(pages)


@pytest.fixture(scope="module")
def tab(open_tab):
    """The tab "Inside" of one page, for the tests that only read it."""
    tab = open_tab(explain(*model_of(), TEXT, tokenizer()))
    tab.click("#tab-inside")
    return tab


def numbers(tab, layer, head, position):
    return read_json(tab, f"jaxformerPage.inside({layer}, {head}, {position})")


def close(found, expected, name):
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0, err_msg=name)


@pytest.mark.parametrize("name", mostly_slow(OPTIONS, "gpt2", "gemma"))
def test_numbers_on_the_inside_tab_equal_the_values_captured_in_jax(name, open_tab):
    model, variables = model_of(**OPTIONS[name])
    params = rounded_params(variables["params"])
    tab = open_tab(explain(model, variables, TOKENS))
    passed = inspect(
        model, {"params": params}, np.array([TOKENS]), capture=list(model.layer_hook_points)
    )
    jax_values = {hook: np.asarray(x)[:, 0] for hook, x in passed.captured.items()}
    group = model.config.num_heads // model.config.num_kv_heads
    for layer in range(2):
        at = {hook: x[layer] for hook, x in jax_values.items()}
        for position in POSITIONS:
            added = 0
            for head in range(4):
                found = numbers(tab, layer, head, position)
                keys = found["attention"]["keys"]
                weights = [key["weight"] for key in keys]
                rows = np.array([key["key"] for key in keys])
                values = np.array([key["value"] for key in keys])
                close(found["attention"]["query"], at["attention.query"][head, position], "query")
                close(rows, at["attention.key"][head // group], "key")
                close(values, at["attention.value"][head // group], "value")
                close(weights, at["attention.weights"][head, position], "weights")
                close(found["attention"]["output"], at["attention.heads"][head, position], "head")
                # The contributions of the keys sum to the head's output, the weights to 1.
                close(np.array(weights) @ values, found["attention"]["output"], "contributions")
                assert sum(weights) == pytest.approx(1)
                hidden = [key["hidden"] is not None for key in keys]
                np.testing.assert_array_equal(hidden, at["attention.weights"][head, position] == 0)
                added = added + np.array(found["added"])
            bias = params["blocks"]["attention"]["output"].get("bias")
            added = added if bias is None else added + bias[layer]
            close(added, at["attention.output"][position], "sum of the heads")
            mlp = found["mlp"]
            close(mlp["hidden"], at["feedforward.hidden"][position], "hidden")
            close(mlp["output"], at["feedforward.output"][position], "output of the MLP")
            close(mlp["after"], at["block.output"][position], "state")
            if model.config.parallel_block == "none":
                close(mlp["before"], at["block.middle"][position], "middle")
            check_lengths(found["lengths"], jax_values, position)


def check_lengths(lengths, jax_values, position):
    def norms(hook):
        return np.linalg.norm(jax_values[hook][:, position], axis=-1)

    close(lengths["states"], [norms("block.input")[0], *norms("block.output")], "states")
    close(lengths["attention"], norms("attention.output"), "attention")
    close(lengths["feedforward"], norms("feedforward.output"), "feedforward")


@pytest.mark.parametrize("name", mostly_slow(["gpt2", "gemma", "post-norm", "olmo"], "gpt2"))
def test_tokens_promoted_by_a_feature_are_those_with_the_largest_logit_increase(name, open_tab):
    """Compares with the derivative of the logits along the feature's output, in float64."""
    model, variables = model_of(**OPTIONS[name])
    params = rounded_params(variables["params"])
    tab = open_tab(explain(model, variables, TOKENS))
    norm = {"sandwich": "feedforward_output_norm", "pre": None}
    own = norm.get(model.config.norm_position, "feedforward_norm")
    for layer in range(2):
        for feature, sign in ((0, 1), (11, -1), (23, 1)):
            kernel = params["blocks"]["feedforward"]["down"]["kernel"]
            x = sign * kernel[layer, feature].astype(float)
            scales = [params["blocks"][own]["scale"][layer]] if own else []
            scales += [params["final_norm"]["scale"]] if "final_norm" in params else []
            for scale in scales:
                x = x - x.mean() if model.config.norm == "layer" else x
                x = x * (scale + (model.config.norm == "rms_one_plus"))
            table = params["embedding"]["tokens"].T
            products = x @ (
                params["head"]["kernel"] if "kernel" in params.get("head", {}) else table
            )
            found = read_json(
                tab, f"jaxformerPage.inside({layer}, 0, 3).featureTokens({feature}, {sign}, 5)"
            )
            assert found == np.argsort(-products)[:5].tolist()


def cells(tab, name):
    """Returns the numbers of a column of the table of keys, and its sum in the last row."""
    texts = [
        tab.locator(f"#inside-attention {part}").all_inner_texts()
        for part in (f"tbody td:nth-child({name})", f"tfoot td:nth-child({name})")
    ]
    column, (total,) = (
        [float(text.replace("−", "-").rstrip("%")) for text in part] for part in texts
    )
    return column, total


@pytest.mark.parametrize(("layer", "head", "position"), [(0, 0, 0), (0, 3, 5), (1, 2, 7)])
def test_columns_of_the_attention_table_add_up_to_the_displayed_totals(layer, head, position, tab):
    tab.evaluate(
        f"jaxformerPage.store.select({{layer: {layer}, head: {head}, position: {position}}})"
    )
    names = tab.locator("#inside-attention thead th").all_inner_texts()
    assert names[1:5] == ["q·k/√d", "after mask", "exp(s − max)", "weight"]
    found = numbers(tab, layer, head, position)["attention"]
    feature = int(tab.get_attribute("#inside-attention table", "data-feature"))
    for number, decimals in ((4, 3), (5, 1), (6, 3)):
        column, total = cells(tab, number)
        assert sum(column) == pytest.approx(total, abs=0.51 * 10**-decimals * (len(column) + 1))
    assert cells(tab, 5)[1] == 100
    assert cells(tab, 6)[1] == pytest.approx(found["output"][feature], abs=5e-4)


def test_selecting_an_output_feature_shows_the_contribution_of_each_key(tab):
    tab.evaluate("jaxformerPage.store.select({layer: 0, head: 1, position: 6})")
    output = numbers(tab, 0, 1, 6)["attention"]["output"]
    row = tab.locator("#inside-attention .step").nth(4).locator(".grid-rows").last
    for feature in (2, 0):
        row.locator(".cell").nth(feature).click()
        assert tab.get_attribute("#inside-attention table", "data-feature") == str(feature)
        assert cells(tab, 6)[1] == pytest.approx(output[feature], abs=5e-4)
    # The keyboard selects a number as well.
    row.focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight", "Enter"):
        tab.keyboard.press(key)
    assert cells(tab, 6)[1] == pytest.approx(output[3], abs=5e-4)


# Returns whether the region scrolls in each direction, and the cells whose text does not fit.
CUT = """(() => {
  const region = document.querySelector("#inside-attention .key-table");
  const isCut = (x) => x.scrollWidth > x.clientWidth
    || x.getBoundingClientRect().right > region.getBoundingClientRect().right + 1;
  const cells = [...region.querySelectorAll("th, td")].filter((x) => x.offsetParent);
  return [region.scrollWidth > region.clientWidth, region.scrollHeight > region.clientHeight,
    cells.filter(isCut).map((x) => x.outerHTML)];
})()"""
ALL_COLUMNS = {"positions": "alibi", "attention_softcap": 2.0}


@pytest.mark.parametrize("options", mostly_slow([{}, OPTIONS["gemma"], ALL_COLUMNS], {}))
def test_table_of_keys_fits_a_narrow_screen_without_scrolling_inside_it(options, open_tab):
    tab = open_tab(explain(*model_of(**options), TEXT, tokenizer()), 390)
    tab.click("#tab-inside")
    last = tab.evaluate("jaxformerPage.store.tokens.length") - 1
    for position in (1, last):
        tab.evaluate(f"jaxformerPage.store.select({{ position: {position} }})")
        assert tab.evaluate(CUT) == [False, False, []]
    # Each number has the name of its column.
    row = tab.locator("#inside-attention tbody tr:first-child td")
    heads = tab.locator("#inside-attention thead th").all_text_contents()[1:]
    named = row.evaluate_all("(all) => all.map((x) => getComputedStyle(x, '::before').content)")
    shown = [name.strip('"') for name in named]
    assert [*shown[:-1]] == heads[:-1] and heads[-1].startswith(shown[-1])


def test_masked_keys_are_shown_with_the_reason(open_tab):
    tab = open_tab(explain(*model_of(**OPTIONS["gemma"]), TOKENS))
    tab.click("#tab-inside")
    tab.evaluate("jaxformerPage.store.select({layer: 0, head: 0, position: 5})")
    mask = tab.locator("#inside-attention .step").nth(2)
    text = mask.inner_text()
    assert "can see 3 of 14 tokens" in text
    assert "8 come later" in text and "3 are outside the window of 3 tokens" in text
    titles = mask.locator(".mask-strip span").evaluate_all("(all) => all.map((x) => x.title)")
    reasons = [title.split(": ")[1] for title in titles]
    expected = ["outside the window of 3 tokens"] * 3 + ["visible"] * 3 + ["comes later"] * 8
    assert reasons == expected
    rows = tab.locator("#inside-attention tr.masked th").all_inner_texts()
    assert rows == ["0 to 2 (outside the window of 3 tokens)", "6 to 13 (comes later)"]
    # The second layer has no window.
    tab.evaluate("jaxformerPage.store.select({layer: 1, position: 13})")
    assert "No key is masked" in mask.inner_text()


@pytest.mark.slow
def test_steps_are_shown_one_by_one_on_a_narrow_screen_and_together_on_a_wide_one(open_tab):
    page = explain(*model_of(), TEXT, tokenizer())
    for width, visible in ((390, 1), (1440, 6)):
        tab = open_tab(page, width)
        tab.click("#tab-inside")
        steps = tab.locator("#inside-attention .step")
        previous, following = (
            tab.get_by_role("button", name=f"{name} step") for name in ("Previous", "Next")
        )
        assert previous.is_disabled() and previous.get_attribute("title")
        for number in range(6):
            assert sum(step.is_visible() for step in steps.all()) == visible
            assert steps.nth(number).is_visible()
            chosen = tab.locator(".step-number[aria-current=step]")
            assert chosen.inner_text() == str(number + 1)
            if number < 5:
                following.click()
        assert following.is_disabled() and following.get_attribute("title")
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


KINDS = {
    "gpt2": "a learned vector is added",
    "post-norm": "sines and cosines are added",
    "llama": "queries and keys are rotated",
    "parallel with two norms": "scores shrink with the distance",
    "relative": "scores depend on the distance",
    "without norm": None,
}


@pytest.mark.parametrize("name", mostly_slow(KINDS, "llama"))
def test_inside_tab_shows_how_the_model_encodes_positions(name, open_tab):
    model, variables = model_of(**OPTIONS[name])
    params = rounded_params(variables["params"])
    tab = open_tab(explain(model, variables, TOKENS))
    tab.click("#tab-inside")
    tab.evaluate("jaxformerPage.store.select({position: 6})")
    card = tab.locator("#inside-positions")
    steps = numbers(tab, 0, 2, 6)["positions"]
    if KINDS[name] is None:
        assert card.count() == 0 and steps is None
        return
    assert KINDS[name] in card.inner_text()
    if name == "gpt2":
        close(steps["values"], params["embedding"]["positions"][6], "learned")
    if name == "post-norm":
        angles = 6 / 10000 ** (2 * np.arange(8) / 16)
        close(steps["values"], np.stack([np.sin(angles), np.cos(angles)], 1).ravel(), "sines")
    if name == "llama":
        close([pair["angle"] for pair in steps["pairs"]], [6.0, 6 / 100], "angles of 2 pairs")
    if name == "parallel with two norms":
        assert steps["slope"] == pytest.approx(2**-6)  # the third of four heads: 2^(−8 · 3 / 4)
    if name == "relative":
        table = params["relative_bias"]["table"]
        assert steps["biases"][0]["bias"] == pytest.approx(float(table[0, 2]), abs=1e-6)
        assert len(steps["biases"]) == 6
