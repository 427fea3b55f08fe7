"""Two models on one page: the values against NumPy in float64, wrong inputs, and the view."""

import json
import re

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.saved import Checkpoint
from jaxformer.cli import main
from jaxformer.interpret import explain, explanation
from jaxformer.interpret.page_compare import Compared, jensen_shannon
from jaxformer.interpret.page_file import unpack
from jaxformer.models.parameters import init
from jaxformer.training.presets import training_preset
from tests.errors import error_of
from tests.interpret.chromium import opened_pages
from tests.interpret.pages import NO_MATRIX, TEXT, model_of, tokenizer
from tests.properties import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def models():
    """Returns two checkpoints with one tokenizer, of different sizes and windows."""
    words = tokenizer()
    second, variables = model_of(num_layers=3, num_heads=2, window=(4, None, None))
    return Checkpoint(*model_of(), words), Checkpoint(second, variables, words)


@pytest.fixture(scope="module")
def page(models):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explanation, "dependency_data", lambda *_: NO_MATRIX)
        patch.setattr(explanation, "repeated_atlas", lambda *_: None)
        first, second = models
        compared = Compared(second, "second")
        return explain(*first[:2], TEXT, first.tokenizer, title="first", compare=compared)


def data_of(page):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.html)
    return json.loads(text)


def shares_of(checkpoint, tokens):
    """Returns the probabilities of each position, by the formula of softmax in float64."""
    logits = jax.jit(checkpoint.model.apply)(checkpoint.variables, np.array([tokens]))[0]
    exponentials = np.exp(np.asarray(logits, np.float64))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def entropy(shares):
    return -np.sum(shares * np.log2(np.where(shares > 0, shares, 1)), axis=-1)


@pytest.mark.slow
def test_losses_predictions_and_divergence_of_compared_models_equal_numpy(page, models):
    data = data_of(page)
    tokens, compared = data["tokens"], data["compare"]
    shares = [shares_of(checkpoint, tokens) for checkpoint in models]
    places = np.arange(len(tokens) - 1)
    for expected, found in zip(shares, compared["models"], strict=True):
        losses = -np.log(expected[places, tokens[1:]])
        np.testing.assert_allclose(unpack(found["loss"]), losses, rtol=1e-4)
        best = np.sort(expected, axis=-1)[:, ::-1][:, :5]
        np.testing.assert_allclose(unpack(found["top"]["shares"]), best, rtol=1e-4)
        ids = unpack(found["top"]["ids"])
        np.testing.assert_allclose(np.take_along_axis(expected, ids, axis=-1), best, rtol=1e-4)
    # By entropies: H((p + q) / 2) − (H(p) + H(q)) / 2.
    divergence = entropy(sum(shares) / 2) - (entropy(shares[0]) + entropy(shares[1])) / 2
    np.testing.assert_allclose(unpack(compared["divergence"]), divergence, atol=1e-5)
    assert [one["title"] for one in compared["models"]] == ["first", "second"]
    layers = [unpack(one["attention"][0]["weights"]).shape[:2] for one in compared["models"]]
    assert layers == [(2, 4), (3, 2)]
    masks = [one["attention"][0]["masks"]["layers"] for one in compared["models"]]
    assert masks == [[0, 0], [0, 1, 1]]


@pytest.mark.parametrize("seed", range(4))
def test_jensen_shannon_divergence_is_symmetric_and_at_most_one_bit(seed):
    rng = np.random.default_rng(seed)
    p, q = (rng.dirichlet(np.full(6, 0.1), 5) for _ in range(2))
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(p), np.log(q)
        apart = np.log(np.eye(2))
    found = jensen_shannon(log_p, log_q)
    np.testing.assert_allclose(found, entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2)
    np.testing.assert_allclose(found, jensen_shannon(log_q, log_p))
    assert (found >= 0).all() and (found <= 1).all()
    np.testing.assert_allclose(jensen_shannon(log_p, log_p), 0, atol=1e-15)
    np.testing.assert_allclose(jensen_shannon(apart, apart[::-1]), 1)
    # A padded vocabulary has tokens with probability 0.
    wider = np.pad(log_q, ((0, 0), (0, 3)), constant_values=-np.inf)
    np.testing.assert_allclose(jensen_shannon(log_p, wider), found)


def test_explain_refuses_models_that_cannot_be_compared(models, monkeypatch):
    for name in ("captured_data", "dependency_data", "all_logits", "compare_data"):
        monkeypatch.setattr(explanation, name, lambda *_: pytest.fail("it was computed"))
    first, second = models

    def of(other, text=TEXT, words=first.tokenizer):
        return error_of(lambda: explain(*first[:2], text, words, compare=other))

    # The second tokenizer has the same size as the first, and then another size.
    said = of(
        second._replace(tokenizer=ByteTokenizer.train(["jk" * 9], first.tokenizer.vocab_size))
    )
    assert "must share the tokenizer, but " in said
    said = of(second._replace(tokenizer=ByteTokenizer.train([TEXT * 3], 261)))
    assert re.search(r"share the tokenizer, but they have \d+ and \d+ tokens", said)
    assert "the second model has none" in of(second._replace(tokenizer=None))
    assert "the first model has none" in of(second, [1, 2], None)
    short = Checkpoint(*model_of(max_length=8), first.tokenizer)
    assert "the second model cannot read the text: text has" in of(short)
    assert "at most 8" in of(short)
    encoder = jf.build(training_preset("tiny", "encoder").model)
    other = Checkpoint(encoder, {"params": {}}, first.tokenizer)
    assert "of the types decoder and encoder; both or neither must read both sides" in of(other)
    translator = jf.build(training_preset("tiny", "encoder-decoder").model)
    assert "read a source" in of(Checkpoint(translator, {"params": {}}, first.tokenizer))
    wide = Checkpoint(*model_of(vocab_size=301), None)
    assert "they have 300 and 301 token ids" in of(wide, [1, 2], None)


@pytest.mark.slow
def test_comparison_of_encoders_scores_each_token_at_its_own_position(monkeypatch):
    monkeypatch.setattr(explanation, "dependency_data", lambda *_: NO_MATRIX)
    model = jf.build(training_preset("tiny", "encoder").model)
    first, second = (Checkpoint(model, tiny.weights(model, i), None) for i in range(2))
    tokens = [3, 4, 5, 6]
    page = explain(*first[:2], tokens, title="same", compare=Compared(second, "same"))
    compared = data_of(page)["compare"]
    assert compared["offset"] == 0
    assert [one["title"] for one in compared["models"]] == ["same", "same (second)"]
    for checkpoint, found in zip((first, second), compared["models"], strict=True):
        losses = -np.log(shares_of(checkpoint, tokens)[np.arange(4), tokens])
        np.testing.assert_allclose(unpack(found["loss"]), losses, rtol=1e-3)


@pytest.mark.slow
def test_explain_command_compares_two_runs(tmp_path, monkeypatch, capsys, models):
    monkeypatch.setattr(explanation, "dependency_data", lambda *_: NO_MATRIX)
    monkeypatch.setattr(explanation, "repeated_atlas", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    first, second = models
    jf.save("first", *first)
    jf.save("second", *second)
    jf.save("foreign", *second[:2], tokenizer("x"))
    short = model_of(max_length=8)
    jf.save("short", *short, first.tokenizer)
    assert main(["explain", "first", TEXT, "--compare", "second"]) == 0
    html = (tmp_path / "page.html").read_text()
    assert '"compare":' in html and '"title":"second"' in html.replace('": "', '":"')
    capsys.readouterr()
    errors = {"foreign": "share the tokenizer", "short": "at most 8", "absent": "absent"}
    for run, words in errors.items():
        assert main(["explain", "first", TEXT, "--compare", run]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and words in said
    assert len([*tmp_path.glob("*.html")]) == 1


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    with opened_pages(tmp_path_factory.mktemp("pages")) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1440])
def test_compare_tab_shows_the_values_of_both_models(width, pages, page, models):
    data = data_of(page)
    tab = pages.open(page, width)
    tab.click("#tab-compare")
    tab.evaluate("jaxformerPage.store.select({ position: 2 })")
    shares = [shares_of(checkpoint, data["tokens"])[2] for checkpoint in models]
    view = tab.locator("#view-compare")
    for number, (title, p) in enumerate(zip(("first", "second"), shares, strict=True)):
        actual = view.locator(".compared-pair .note").nth(number).inner_text()
        assert f"loss {-np.log(p[data['tokens'][3]]):.3f} nats" in actual
        bars = view.get_by_label(f"Predictions of {title}").locator(".bar-value").all_inner_texts()
        assert float(bars[0].rstrip("%")) == pytest.approx(100 * p.max(), abs=0.51)
    # Each model has its own layers and heads.
    layers = [len(x.locator("option").all()) for x in view.locator("select").all()]
    assert layers == [2, 4 + 2, 3, 2 + 2]
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    # An edit of the text does not change the comparison.
    before = view.inner_text()
    tab.evaluate("jaxformerPage.store.setTokens([1, 2, 3])")
    tab.wait_for_timeout(300)
    assert view.inner_text() == before


@pytest.mark.slow
def test_page_without_a_second_model_has_no_compare_tab(models, pages):
    first, _ = models
    tab = pages.open(explain(*first[:2], TEXT, first.tokenizer))
    assert tab.locator("#tab-compare").count() == 0


@pytest.mark.slow
def test_lstm_on_a_compare_page_has_no_attention_maps(monkeypatch):
    monkeypatch.setattr(explanation, "dependency_data", lambda *_: NO_MATRIX)
    lstm = jf.build(training_preset("tiny", "recurrent").model)
    variables = init(lstm, jax.random.key(0))
    decoder = jf.build(training_preset("tiny", "decoder").model)
    weights = {"params": init(decoder, jax.random.key(0))["params"]}
    assert decoder.config.vocab_size == lstm.config.vocab_size
    other = Checkpoint(decoder, weights, None)
    compared = data_of(explain(lstm, variables, [3, 4, 5], compare=other))["compare"]
    assert [len(one["attention"]) for one in compared["models"]] == [0, 1]
