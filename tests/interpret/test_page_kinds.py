"""Every kind of model in the page: in Chromium, its logits equal JAX's, also after edits.

Skipped without Playwright and Chromium, as `test_page_browser.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.decoding.fill import fill
from jaxformer.interpret import explain, page_data, page_weights
from tests.interpret import test_page_browser as pages
from tests.interpret.pages import SIZES, TEXT, drawn_weights, jax_logits, rounded_params
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pages.pytestmark
browser, opened = pages.browser, pages.opened

_SHORT = {name: SIZES[name] for name in ("vocab_size", "max_length", "num_layers", "embed_dim")}
_SEPARATE = {"share_embeddings": False, "source_vocab_size": 350, "max_source_length": 60}
# Configs that together cover every option of each kind's forward pass in the page.
MODELS = {
    "bert": jf.EncoderConfig(
        **SIZES, norm_position="post", embedding_norm=True, num_token_types=2, position_offset=2
    ),
    "modernbert": jf.EncoderConfig(
        **SIZES,
        positions="rotary",
        activation="geglu",
        embedding_norm=True,
        first_attention_norm=False,
        window=(3, None),
        pooler=False,
        tie_embeddings=False,
    ),
    "relative encoder": jf.EncoderConfig(
        **SIZES, positions="relative", relative_buckets=6, relative_distance=9, transform=False
    ),
    "vaswani": jf.EncoderDecoderConfig(
        **SIZES,
        norm_position="post",
        positions="sinusoidal",
        scale_embeddings=True,
        activation="relu",
    ),
    "t5": jf.EncoderDecoderConfig(
        **SIZES,
        norm="rms",
        positions="relative",
        relative_buckets=8,
        relative_distance=9,
        attention_scale=1.0,
        use_bias=False,
        activation="geglu_tanh",
        output_scale=0.25,
        num_encoder_layers=3,
        num_encoder_heads=2,
    ),
    "two vocabularies": jf.EncoderDecoderConfig(
        **SIZES,
        **_SEPARATE,
        positions="alibi",
        parallel_block="separate_norms",
        num_kv_heads=2,
        tie_embeddings=False,
        head_bias=True,
    ),
    "bart": jf.EncoderDecoderConfig(
        **SIZES, positions="learned", position_offset=2, attention_softcap=2.0, norm_position="post"
    ),
    "lstm": jf.RecurrentConfig(**_SHORT),
    "wide lstm": jf.RecurrentConfig(
        **{**_SHORT, "num_layers": 3}, hidden_dim=24, tie_embeddings=False, head_bias=False
    ),
    "rnn": jf.RecurrentConfig(**{**_SHORT, "num_layers": 1}, cell="rnn"),
    "dilated": jf.ConvolutionalConfig(
        **{**_SHORT, "num_layers": 3}, kernel_size=3, dilation_growth=2
    ),
    "plain convolutions": jf.ConvolutionalConfig(
        **_SHORT,
        kernel_size=4,
        residual=False,
        norm="none",
        activation="gelu",
        tie_embeddings=False,
        head_bias=False,
    ),
    "rms convolutions": jf.ConvolutionalConfig(**_SHORT, kernel_size=1, norm="rms"),
    "attention seq2seq": jf.RecurrentEncoderDecoderConfig(**_SHORT),
    "wide seq2seq": jf.RecurrentEncoderDecoderConfig(
        **_SHORT, **_SEPARATE, hidden_dim=20, tie_embeddings=False
    ),
    "rnn seq2seq": jf.RecurrentEncoderDecoderConfig(**_SHORT, cell="rnn", attends=False),
}
QUICK = ("lstm", "dilated")
LENGTH = 14


def model_and_texts(name, length=LENGTH):
    """Returns a model, drawn variables, the tokens, and the source or None."""
    model = jf.build(MODELS[name].resolved)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 300, length).tolist()
    reads = model.config.reads_source
    source = rng.integers(0, model.config.num_source_ids, 9).tolist() if reads else None
    return model, drawn_weights(model), tokens, source


def write(model, variables, tokens, source, **options):
    if source is None:
        return explain(model, variables, tokens, **options)
    return explain(model, variables, source, target=tokens, **options)


def check(tab, model, variables, tokens, source):
    pages.wait(tab)
    expected = jax_logits(model, rounded_params(variables["params"]), tokens, source)
    found = pages.logits_of(tab, len(tokens))
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
    return found


@pytest.mark.parametrize("name", mostly_slow(MODELS, *QUICK))
def test_page_computes_the_logits_of_jax_for_every_kind_of_model(name, opened):
    model, variables, tokens, source = model_and_texts(name)
    page = write(model, variables, tokens, source)
    assert page.mode == "live"
    tab = opened(page)
    first = check(tab, model, variables, tokens, source)
    assert tab.evaluate("jaxformerPage.difference") < 1e-4
    # With equal lengths, JAX compiles once.
    edited = [*tokens[:7], 9, *tokens[8:], *([] if name in QUICK else [5])]
    tab.evaluate(f"jaxformerPage.store.setTokens({edited}, 7)")
    after = check(tab, model, variables, edited, source)
    assert np.abs(after[7] - first[7]).max() > 1e-2
    if source is not None:
        changed = [*source[:3], 7, 8, *source[4:]]
        tab.evaluate(f"jaxformerPage.store.edit((tokens) => ({{ tokens, source: {changed} }}))")
        check(tab, model, variables, edited, changed)
    for button in tab.locator(".tabs button").all():
        button.click()
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_source_of_an_encoder_decoder_is_edited_with_the_keyboard(opened):
    model, variables, tokens, source = model_and_texts("t5")
    tab = opened(write(model, variables, tokens, source))
    tab.focus("[role=listbox][aria-label='Source tokens']")
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowRight")
    tools = tab.locator("[role=group][aria-label='Edit the source']")
    tools.locator("input").fill("#33")
    tools.locator("input").press("Enter")
    replaced = [source[0], 33, *source[2:]]
    check(tab, model, variables, tokens, replaced)
    assert tab.evaluate("jaxformerPage.store.source") == replaced
    delete = tools.get_by_role("button", name="Delete")
    for left in range(len(source) - 1, 0, -1):
        delete.click()
        pages.wait(tab)
        assert tab.evaluate("jaxformerPage.store.source.length") == left
    assert delete.is_disabled() and "at least one token" in delete.get_attribute("title")
    tools.get_by_role("button", name="Reset source").click()
    check(tab, model, variables, tokens, source)


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(3))
def test_switched_off_head_of_an_encoder_decoder_equals_ablation_in_jax(kind, opened):
    model, variables, tokens, source = model_and_texts("vaswani")
    tab = opened(write(model, variables, tokens, source))
    tab.evaluate(
        f"(() => {{ const {{ store }} = jaxformerPage; store.select({{ kind: {kind} }});"
        " store.setStrength(1, 2, 0); })()"
    )
    params = jax.tree.map(np.array, variables["params"])
    stack = params["encoder"] if kind == 2 else params
    part = "cross_attention" if kind == 1 else "attention"
    dim = model.config.head_dim
    stack["blocks"][part]["output"]["kernel"][1, 2 * dim : 3 * dim] = 0
    ablated = check(tab, model, {"params": params}, tokens, source)
    whole = jax_logits(model, variables["params"], tokens, source)
    assert np.abs(ablated - whole).max() > 1e-2


@pytest.mark.slow
def test_contributions_of_an_encoder_decoder_add_up_to_the_logit(opened):
    """The Python tests compare the parts with JAX; here cross-attention is one of them."""
    model, variables, tokens, source = model_and_texts("t5")
    tab = opened(write(model, variables, tokens, source))
    tab.click("#tab-heads")
    logits = tab.evaluate(f"jaxformerPage.logits({LENGTH - 1})")
    said = tab.locator("#view-heads .note").first.inner_text()
    assert f"All parts together: {max(logits):.3f}" in said
    assert "cross-attention head" in tab.locator("#view-heads .bars").inner_text()


def test_page_says_why_it_cannot_run_a_model(monkeypatch):
    """The reasons are exact: they name the value that the page does not support."""

    class OwnRecurrent(jf.Recurrent):
        """A subclass may compute something else."""

    def reason(model):
        return page_weights.live_reason(model, {"params": {"x": np.zeros(7)}})

    assert all(reason(jf.build(config.resolved)) is None for config in MODELS.values())
    lstm = MODELS["lstm"].resolved
    assert "not OwnRecurrent" in reason(OwnRecurrent(lstm))
    narrow = jf.build(dataclasses.replace(lstm, dtype="bfloat16"))
    assert reason(narrow) == "the model computes in bfloat16, which JavaScript does not have"
    experts = jf.build(dataclasses.replace(MODELS["bert"], num_experts=2).resolved)
    assert reason(experts) == "the page does not implement experts"
    convolutions = jf.Convolutional(MODELS["dilated"].resolved, activation=jnp.sin)
    assert "user-defined activation" in reason(convolutions)
    monkeypatch.setattr(page_weights, "MOST_PARAMETERS", 6)
    assert reason(jf.build(lstm)) == ("the model has 7 parameters, and a page can hold at most 6")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "attention seq2seq"])
def test_attention_weights_of_encoder_decoder_on_page_equal_those_of_jax(name, opened):
    model, variables, tokens, source = model_and_texts(name)
    variables = {"params": jax.tree.map(jnp.asarray, rounded_params(variables["params"]))}
    points = [x for x in page_data._ATTENTION if x in model.hook_points]
    tab = opened(write(model, variables, tokens, source))
    inputs = jnp.array([tokens]), jnp.array([source])
    seen = page_data.inspect(model, variables, inputs[0], source=inputs[1], capture=points)
    for kind, point in enumerate(points):
        expected = np.asarray(seen.captured[point])[:, 0]
        for layer, head in np.ndindex(*expected.shape[:2]):
            found = tab.evaluate(
                f"Array.from(jaxformerPage.attention({kind}, {layer}, {head}).values)"
            )
            np.testing.assert_allclose(found, expected[layer, head].ravel(), atol=1e-5)


def test_page_predicts_the_same_masked_tokens_as_fill(opened):
    """The predictions at two masked positions, each made by the button."""
    words = ByteTokenizer.train([TEXT * 3], 270, mask=True)
    assert words.mask_token is not None
    model, variables, *_ = model_and_texts("modernbert")
    variables = {"params": jax.tree.map(jnp.asarray, rounded_params(variables["params"]))}
    tab = opened(explain(model, variables, TEXT, words))
    tokens = tab.evaluate("jaxformerPage.store.tokens")
    tab.click("#tab-mask")
    for position in (2, 5):
        tab.evaluate(f"jaxformerPage.store.select({{ position: {position} }})")
        tab.get_by_role("button", name="Mask this token").click()
        pages.wait(tab)
        tokens[position] = words.mask_token
    assert tab.get_by_role("button", name="Mask this token").is_disabled()
    (filled,) = fill(model, variables, [tokens], words.mask_token, 8)
    assert filled.positions.tolist() == [2, 5]
    names = tab.evaluate("jaxformerPage.store.data.names")
    for number, position in enumerate((2, 5)):
        place = tab.locator(f"#view-mask [data-position='{position}']")
        shown = place.locator(".bar-name").all_text_contents()
        assert shown == [names[token] for token in filled.tokens[number]]
        assert "original token" in place.inner_text()
    tab.get_by_role("button", name="Fill in the best token").click()
    pages.wait(tab)
    best = next(x for x in filled.tokens[1] if x != words.mask_token)
    assert tab.evaluate("jaxformerPage.store.tokens[5]") == best


def gradient_norms(model, params, tokens, position):
    """Returns {part: [layers][tokens]}, the norms of ∂loss/∂state by automatic differentiation."""
    layers = model.architecture.stack.layer_trees(params["blocks"])
    is_lstm = model.config.cell == "lstm"
    size = layers[0]["recurrent"]["state"]["kernel"].shape[0]

    def loss(added):
        below = params["embedding"]["tokens"][jnp.array(tokens)]
        for layer, tree in enumerate(layers):
            hidden = cell = jnp.zeros(size)
            above = []
            for t, x in enumerate(below):
                gates = x @ tree["recurrent"]["input"]["kernel"]
                gates += hidden @ tree["recurrent"]["state"]["kernel"]
                gates += tree["recurrent"]["input"]["bias"]
                if is_lstm:
                    i, f, g, o = jnp.split(gates, 4)
                    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
                    cell += added["cell"][layer, t]
                    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
                else:
                    hidden = jnp.tanh(gates)
                hidden += added["hidden"][layer, t]
                above.append(hidden)
            below = jnp.stack(above)
        kernel = params.get("head", {}).get("kernel", params["embedding"]["tokens"].T)
        logits = below[position] @ kernel + params.get("head", {}).get("bias", 0)
        return -jax.nn.log_softmax(logits)[tokens[position + 1]]

    zeros = jnp.zeros((len(layers), len(tokens), size))
    parts = ("hidden", "cell") if is_lstm else ("hidden",)
    gradients = jax.grad(loss)({name: zeros for name in parts})
    return {name: np.linalg.norm(x, axis=-1) for name, x in gradients.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm", "wide lstm", "rnn"])
def test_gradient_norms_through_time_on_the_page_equal_those_of_jax(name, opened):
    model, variables, tokens, _ = model_and_texts(name, 9)
    params = jax.tree.map(jnp.asarray, rounded_params(variables["params"]))
    tab = opened(write(model, variables, tokens, None))
    tab.click("#tab-states")
    tab.evaluate("jaxformerPage.store.select({ position: 6 })")
    expected = gradient_norms(model, params, tokens, 6)
    for layer in range(model.config.num_layers):
        tab.locator("#view-states select").first.select_option(str(layer))
        pages.wait(tab, "document.querySelector('#view-states figure')")
        shown = tab.evaluate("JSON.parse(document.querySelector('[data-norms]').dataset.norms)")
        assert shown.keys() == expected.keys()
        for part, norms in shown.items():
            np.testing.assert_allclose(norms, expected[part][layer, :7], rtol=1e-3, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm", "wide lstm"])
def test_displayed_lstm_gates_and_states_satisfy_the_lstm_formulas(name, opened):
    model, variables, tokens, _ = model_and_texts(name)
    tab = opened(write(model, variables, tokens, None))
    tab.click("#tab-states")
    tab.locator("#view-states input[type=number]").fill("5")
    tab.locator("#view-states input[type=number]").press("Enter")
    read = "[...document.querySelectorAll('#view-states .steps tbody tr')].slice(-2)"
    read += ".map((row) => [...row.querySelectorAll('td')].map((x) => x.textContent))"
    before, now = (
        [float(x.replace("−", "-")) for x in row] for row in tab.evaluate(read)
    )  # i, f, g, o, c, h
    i, f, g, o, c, h = now
    assert abs(f * before[4] + i * g - c) < 2e-3 and abs(o * np.tanh(c) - h) < 2e-3
    for line in tab.locator("#view-states .steps .formula").all_inner_texts():
        product, result = line.replace("−", "-").replace("·", "*").split(" = ")[2:]
        assert abs(eval(product) - float(result)) < 2e-3, line
    seen = page_data.inspect(
        model,
        {"params": jax.tree.map(jnp.asarray, rounded_params(variables["params"]))},
        jnp.array([tokens]),
        capture=["recurrent.cell", "recurrent.hidden"],
    )
    for point, shown in (("recurrent.cell", c), ("recurrent.hidden", h)):
        assert abs(np.asarray(seen.captured[point])[0, 0, -1, 5] - shown) < 1e-3


@pytest.mark.parametrize("name", mostly_slow(["dilated", "plain convolutions"], "dilated"))
def test_receptive_field_on_page_contains_exactly_the_tokens_that_change_the_logits(name, opened):
    model, variables, tokens, _ = model_and_texts(name, 24)
    tab = opened(write(model, variables, tokens, None))
    tab.click("#tab-field")
    position = 20
    tab.evaluate(f"jaxformerPage.store.select({{ position: {position} }})")
    params = rounded_params(variables["params"])
    batch = np.array([[*tokens[:i], (tokens[i] + 1) % 300, *tokens[i + 1 :]] for i in range(24)])
    run = jax.jit(model.apply)
    logits = run({"params": params}, np.concatenate([[tokens], batch]))[:, position]
    read = [i for i in range(24) if np.abs(logits[i + 1] - logits[0]).max() > 0]
    names = tab.evaluate("[...document.querySelectorAll('.read-name')].map((x) => x.textContent)")
    assert names == [f"#{tokens[i]}" for i in read]
    said = tab.locator("#view-field .note").first.inner_text()
    assert f"reads {len(read)} of the {position + 1} tokens" in said


@pytest.mark.parametrize("name", mostly_slow([*MODELS, "decoder"], "decoder"))
def test_logits_of_page_with_8_bit_weights_equal_jax_logits_with_rounded_weights(
    name, opened, monkeypatch
):
    """The logits equal JAX's with rounded weights, and the stated bound holds without rounding."""
    monkeypatch.setattr(page_weights, "MOST_EXACT", 0)
    if name == "decoder":
        model = jf.Decoder(jf.DecoderConfig(**SIZES, tie_embeddings=True))
        variables, source = tiny.weights(model, 0), None
        tokens = list(range(20, 20 + LENGTH))
    else:
        model, variables, tokens, source = model_and_texts(name)
    tab = opened(write(model, variables, tokens, source))
    found = check(tab, model, variables, tokens, source)
    exact = jax_logits(model, variables["params"], tokens, source)
    stated = tab.evaluate("jaxformerPage.store.data.rounding")
    difference = np.abs(found - exact).max()
    assert 0 < difference < stated["difference"] + 1e-4
    assert stated["difference"] == pytest.approx(difference, abs=1e-3)
    assert stated["same"] == (found.argmax(-1) == exact.argmax(-1)).sum()
    said = tab.locator("#rounding").inner_text()
    assert f"at {stated['same']} of {LENGTH} positions" in said and "first pass took" in said
    expanded = tab.evaluate(
        "(() => { const { model } = jaxformerPage.store.values;"
        " return [model.embedding.tokens_codes.codes.constructor.name,"
        " model.embedding.tokens.length]; })()"
    )
    assert expanded == ["Int8Array", model.config.vocab_size * model.config.embed_dim]
