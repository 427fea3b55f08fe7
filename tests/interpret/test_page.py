"""The page as a file: its policy, its data, its size, and the errors before it is computed."""

import base64
import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import get_args, get_type_hints

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import jaxformer as jf
from jaxformer.interpret import explain, explanation, page_file, page_kinds, page_weights
from jaxformer.interpret.atlas import HeadAtlas, head_atlas
from jaxformer.interpret.texts import repeated_batch
from jaxformer.models.parameters import init
from jaxformer.training.presets import training_preset
from tests.errors import error_of
from tests.interpret.pages import (
    NO_MATRIX,
    TEXT,
    jax_logits,
    model_of,
    rounded_params,
    tokenizer,
)
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

HOSTILE = '</script><img src=x onerror="alert(1)">\x1b[31m<!-- & \u2028'


@pytest.fixture(scope="module")
def page():
    atlas = HeadAtlas({}, np.zeros((2, 4)), np.zeros((2, 4)), 1.0, 1)
    return explain(*model_of(), TEXT, tokenizer(), title="a <b>model</b>", atlas=atlas)


@pytest.fixture
def no_matrix(monkeypatch):
    """Leaves out the dependency matrix and the atlas, which compile for seconds."""
    monkeypatch.setattr(explanation, "dependency_data", lambda *_: NO_MATRIX)
    monkeypatch.setattr(explanation, "repeated_atlas", lambda *_: None)


def data_of(page):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.html)
    return json.loads(text)


def hash_of(text):
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_content_security_policy_of_page_allows_only_its_script_and_style(page):
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', page.html)
    (script,) = re.findall(r"<script>(.*?)</script>", page.html, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page.html, re.DOTALL)
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert f"script-src 'sha256-{hash_of(script)}'" in policy
    assert f"style-src 'sha256-{hash_of(style)}'" in policy
    assert not re.search(r"""(?:src|href)=["']?(?:https?:|//)""", page.html)


def test_javascript_module_of_explain_page_comes_after_its_imports():
    """The joined modules share one scope, so names must differ and no import may remain."""
    script = page_file.joined_script()
    assert not re.search(r"^\s*(?:import|export)\b", script, re.MULTILINE)
    modules = re.findall(r"^// ([\w-]+\.js)$", script, re.MULTILINE)
    assert modules[-1] == "main.js" and len(set(modules)) == len(modules)
    for name in modules:
        text = page_file.asset(name)
        assert text.count("\n") < 300 and "innerHTML" not in text and "eval(" not in text
        imported = re.findall(r"^import .*$", text, re.MULTILINE)
        assert all(page_file._IMPORT.fullmatch(f"{line}\n") for line in imported)
        for other in page_file._IMPORT.findall(text):
            assert modules.index(other) < modules.index(name)
    declared = re.findall(
        r"^(?:async )?(?:function\*?|const|let|class) (\w+)", script, re.MULTILINE
    )
    assert len(set(declared)) == len(declared)
    folder = page_file.files("jaxformer.interpret") / "page"
    assert {x.name for x in folder.iterdir() if x.name.endswith(".js")} == set(modules)


def test_data_of_explain_page_are_read_back_unchanged(page):
    data = data_of(page)
    _, variables = model_of()
    ids = [*tokenizer().opening, *tokenizer().encode(TEXT)]
    assert data["tokens"] == ids and page.num_tokens == len(ids)
    assert data["mode"] == page.mode == "live" and page.reason is None
    packed = data["weights"]["blocks/attention/query/kernel"]
    rounded = rounded_params(variables["params"])["blocks"]["attention"]["query"]["kernel"]
    np.testing.assert_array_equal(np.float32(page_file.unpack(packed)), rounded)
    assert page.html.count("a &lt;b&gt;model&lt;/b&gt;") == 1  # the title of the document


@pytest.mark.usefixtures("no_matrix")
def test_explain_page_escapes_html_in_its_data():
    page = explain(*model_of(), HOSTILE, tokenizer(HOSTILE), title=HOSTILE)
    embedded = page.html.partition('id="data">')[2].partition("</script>")[0]
    assert not set(embedded) & set("<>&\x1b") and "<img" not in page.html
    assert data_of(page)["title"] == HOSTILE
    framed = page._repr_html_()
    assert framed.count("<") == 2 and 'sandbox="allow-scripts allow-downloads"' in framed
    assert unescape(re.search(r'srcdoc="(.*)"', framed, re.DOTALL)[1]) == page.html


@pytest.mark.parametrize("title", ["caf\udce9", "\ud800 <b>"])
@pytest.mark.usefixtures("no_matrix")
def test_invalid_characters_of_a_page_title_are_replaced(title, tmp_path):
    """Python reads the name of a folder in Latin-1 as such a title."""
    page = explain(*model_of(), TEXT, tokenizer(), title=title)
    written = page.write(tmp_path / "page.html").read_text(encoding="utf-8")
    assert written == page.html and len(written.encode()) == page.num_bytes
    shown = (
        title.replace("\udce9", "\ufffd").replace("\ud800", "\ufffd").replace("<b>", "&lt;b&gt;")
    )
    assert f"<title>{shown}: " in written
    assert page._repr_html_().encode()


@pytest.mark.usefixtures("no_matrix")
def test_weights_in_page_data_differ_from_the_model_only_by_rounding():
    params = model_of()[1]["params"]
    flat, half = (flatten_dict(x, sep="/") for x in (params, rounded_params(params)))
    for name, exact in flat.items():
        np.testing.assert_allclose(half[name], exact, rtol=2**-11, atol=1e-7)
    for axis in (-2, -1):
        matrix = np.asarray(flat["blocks/feedforward/up/kernel"])
        codes, scales = page_file.quantize(matrix, axis)
        assert (np.abs(codes * scales - matrix) <= scales * 0.5001).all()
        unpacked = page_file.unpack(page_file.pack_int8(matrix, axis))
        np.testing.assert_array_equal(unpacked, codes * scales)


def test_quantized_attention_divided_by_its_row_sums_is_close_to_unquantized():
    rng = np.random.default_rng(0)
    rows = rng.dirichlet(np.full(512, 0.05), size=(2, 3, 8)).astype(np.float32)
    codes = page_file.quantize_rows(rows).astype(np.float64)
    shares = codes / codes.sum(axis=-1, keepdims=True)
    assert np.abs(shares - rows).max() < 1 / 255
    assert (page_file.quantize_rows(np.full((1, 512), 1 / 512)) == 255).all()
    assert (page_file.quantize_rows(np.zeros((1, 4))) == 0).all()


@pytest.mark.slow
@pytest.mark.usefixtures("no_matrix")
def test_explain_page_of_the_default_preset_is_below_6_mb():
    model = jf.build(training_preset("stdlib", "decoder").model)
    page = explain(model, init(model, jax.random.key(0)), list(range(100)))
    assert page.mode == "live" and page.num_bytes < 6_000_000


@pytest.mark.slow
@pytest.mark.usefixtures("no_matrix")
def test_explain_page_states_why_it_cannot_run_the_model(monkeypatch):
    ids = [1, 2, 3]
    model, variables = model_of(dtype="bfloat16")
    assert "bfloat16" in explain(model, variables, ids).reason
    assert "experts" in explain(*model_of(num_experts=2), ids).reason
    assert "sinks" in explain(*model_of(attention_sinks=True), ids).reason
    assert "gates" in explain(*model_of(attention_gate=True), ids).reason
    other = explain(*model_of(norm="dynamic_tanh"), ids)
    assert "norm 'dynamic_tanh'" in other.reason and "norms" not in data_of(other)
    model, variables = model_of()
    monkeypatch.setattr(page_weights, "MOST_PARAMETERS", 100)
    page = explain(model, variables, ids)
    assert page.mode == "captured" and "at most 100" in page.reason
    data = data_of(page)
    assert "weights" not in data and len(data["captured"]["attention"]) == 1
    logits = jax_logits(model, variables["params"], ids)
    stored = page_file.unpack(data["captured"]["logits"]["values"])
    np.testing.assert_allclose(stored[:, 0], logits.max(axis=-1), rtol=1e-5)
    lens = page_file.unpack(data["captured"]["lens"]["ids"])
    assert lens.shape == (3, 3, 5)
    np.testing.assert_array_equal(lens[-1, :, 0], logits.argmax(axis=-1))


LEFT_OUT = {
    "activation": ["clipped_swiglu"],
    "norm": ["dynamic_tanh"],
}  # values that `live_reason` refuses


def test_explain_page_supports_or_rejects_every_decoder_config_field():
    """A new field or value must be implemented in page/model.js, or refused by `live_reason`."""
    derived = """num_kv_heads mlp_dim relative_buckets relative_distance rotary_base rotary_scaling
        rotary_fraction rotary_interleaved use_bias query_key_value_bias attention_output_bias
        feedforward_bias norm_bias head_bias dropout dtype window first_attention_norm""".split()
    refused = """num_experts experts_per_token expert_dim normalize_router router_bias
        shared_expert_dim shared_expert_gate attention_sinks attention_gate layer_types
        convolution_kernel_size convolution_bias delta_key_heads delta_value_heads delta_key_dim
        delta_value_dim""".split()
    fields = {field.name for field in dataclasses.fields(jf.DecoderConfig)}
    only_encoder = {"bidirectional", "transform"}
    assert fields | only_encoder == {*page_kinds.FIELDS, *derived, *refused}
    hints = get_type_hints(jf.DecoderConfig)
    for name, known in page_weights._KNOWN.items():
        values = {
            value for hint in (hints[name], *get_args(hints[name])) for value in get_args(hint)
        }
        values |= {value for value in get_args(hints[name]) if isinstance(value, str)}
        words = {value for value in values if isinstance(value, str)}
        assert words == {*known.split(), *LEFT_OUT.get(name, ())}


@pytest.mark.slow
@pytest.mark.usefixtures("no_matrix")
def test_explain_rejects_unknown_page_options(monkeypatch):
    monkeypatch.setitem(page_weights._KNOWN, "norm", "rms")
    page = explain(*model_of(), [1, 2, 3])
    assert page.mode == "captured" and "does not implement norm 'layer'" in page.reason


@pytest.mark.slow
@pytest.mark.usefixtures("no_matrix")
@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        pytest.param("encoder", ["Self-attention"], marks=pytest.mark.slow),
        ("recurrent", []),
        pytest.param("convolutional", [], marks=pytest.mark.slow),
        pytest.param(
            "encoder-decoder",
            ["Self-attention", "Cross-attention", "Self-attention of the encoder"],
            marks=pytest.mark.slow,
        ),
        pytest.param("recurrent-encoder-decoder", ["Cross-attention"], marks=pytest.mark.slow),
    ],
)
def test_page_of_captured_values_can_be_written_for_every_architecture(kind, labels, monkeypatch):
    monkeypatch.setattr(page_weights, "MOST_PARAMETERS", 100)
    model = jf.build(training_preset("tiny", kind).model)
    read = {"target": [1, 2]} if model.config.reads_source else {}
    page = explain(model, init(model, jax.random.key(0)), [3, 4, 5], **read)
    data = data_of(page)
    assert page.mode == "captured" and "at most 100" in page.reason
    assert data["kind"] == kind
    found = [entry["label"] for entry in data["captured"]["attention"]]
    assert len(found) == len(labels)
    assert all(label.startswith(start) for label, start in zip(found, labels, strict=True))


@pytest.mark.parametrize(
    "other", mostly_slow(["short_convolution", "gated_delta"], "short_convolution")
)
@pytest.mark.usefixtures("no_matrix")
def test_attention_on_explain_page_has_the_layer_numbers_of_the_model(other):
    """Of a model with other layers between; views of one value for each layer are left out."""
    types = (other, "attention")
    model = tiny.build(num_layers=4, positions="rotary", layer_types=types)
    page = explain(model, tiny.weights(model, 0), [1, 2, 3])
    captured = data_of(page)["captured"]
    assert "does not implement layer_types" in page.reason and "norms" not in data_of(page)
    assert captured["attention"][0]["layers"] == [1, 3]
    assert "attention" not in captured["vectors"]
    with pytest.raises(ValueError, match="layer 0 of the model has no heads of 'attention'"):
        head_atlas(model, tiny.weights(model, 0), np.ones((2, 8), int))


def test_dependency_matrix_on_explain_page_equals_the_mask_rule(page):
    matrix = data_of(page)["dependency"]
    assert matrix["holds"] and matrix["rule"] == matrix["matrix"]
    assert np.array_equal(matrix["matrix"], np.tril(np.ones_like(matrix["matrix"])))


@pytest.mark.slow
def test_explain_page_that_runs_the_model_contains_head_effects(monkeypatch):
    monkeypatch.setattr(explanation, "dependency_data", lambda *_: NO_MATRIX)
    model, variables = model_of()
    data = data_of(explain(model, variables, [1, 2]))["atlas"]
    expected = head_atlas(model, variables, repeated_batch(300, 48, 16))
    np.testing.assert_allclose(data["effects"], expected.effect, atol=1e-5)
    np.testing.assert_allclose(data["errors"], expected.standard_error, atol=1e-5)
    np.testing.assert_allclose(data["scores"]["induction"], expected.scores["induction"], atol=1e-5)
    assert "16 sequences of repeated random tokens" in data["text"]
    # Without delimiters, their score is NaN, which JSON does not have.
    assert "delimiter" in expected.scores and "delimiter" not in data["scores"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_matrix")
def test_explain_page_accepts_precomputed_head_scores_and_effects():
    effect = np.arange(8.0).reshape(2, 4)
    atlas = HeadAtlas({"induction": 2 * effect}, effect, 3 * effect, 1.0, 5)
    assert data_of(explain(*model_of(dtype="bfloat16"), [1, 2], atlas=atlas))["atlas"] == {
        "scores": {"induction": (2 * effect).tolist()},
        "effects": effect.tolist(),
        "errors": (3 * effect).tolist(),
        "text": "Measured on 5 sequences of text.",
    }


@pytest.mark.slow
@pytest.mark.usefixtures("no_matrix")
def test_explain_page_of_encoder_decoder_attributes_the_last_logit_to_components(monkeypatch):
    model = jf.build(training_preset("tiny", "encoder-decoder").model)
    variables = tiny.weights(model, 0)
    monkeypatch.setattr(page_weights, "MOST_PARAMETERS", 100)
    data = data_of(explain(model, variables, [3, 4, 5], target=[1, 2]))
    found, logits = data["attribution"], data["captured"]["logits"]
    best = page_file.unpack(logits["ids"])[-1, 0]
    assert found["target"] == best
    names = ("heads", "cross", "feedforward", "embedding", "rest")
    total = sum(np.sum(found[name]) for name in names)
    np.testing.assert_allclose(total, found["logit"], atol=1e-4)
    np.testing.assert_allclose(found["logit"], page_file.unpack(logits["values"])[-1, 0], atol=1e-4)
    lstm = jf.build(training_preset("tiny", "recurrent").model)
    assert "attribution" not in data_of(explain(lstm, tiny.weights(lstm, 0), [3, 4, 5]))


def test_explain_checks_arguments_before_it_computes(monkeypatch):
    for name in ("captured_data", "dependency_data", "all_logits"):
        monkeypatch.setattr(explanation, name, lambda *_: pytest.fail("it was computed"))
    model, variables = model_of()
    words = tokenizer()

    def of(*arguments, **options):
        return error_of(lambda: explain(model, variables, *arguments, **options))

    assert of("", words) == "text is empty; give at least one character"
    assert "text is empty" in of([])
    assert "tokenizer is None" in of("text")
    assert "this model reads at most 48" in of("x " * 100, words)
    assert "text has the id 300; this model's ids are 0 … 299" in of([1, 300])
    assert "must be a text or a list of token ids" in of([0.5])
    assert "has no source" in of("text", words, target="text")
    assert "must contain 'params'" in error_of(lambda: explain(model, {"packed": 1}, [1]))
    long = jf.Decoder(jf.DecoderConfig(max_length=1024, vocab_size=9, embed_dim=12))
    assert "a page shows at most 512" in error_of(lambda: explain(long, variables, [1] * 600))


def test_explain_writes_a_page(tmp_path, monkeypatch, capsys):
    from jaxformer.cli import main

    model, variables = model_of()
    jf.save(tmp_path / "model", model, variables, tokenizer())
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "model", TEXT]) == 0
    assert main(["explain", "model", TEXT]) == 0
    printed = capsys.readouterr().out
    assert "page.html: " in printed and "page-2.html: " in printed and "live: " in printed
    before = (tmp_path / "page.html").read_bytes()
    assert before == (tmp_path / "page-2.html").read_bytes()
    for words in ([""], ["x", "-o", "page.txt"], ["x", "-o", "no/page.html"], ["x " * 99], []):
        assert main(["explain", "model", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["explain", "model", "x = 1", "-o", "page.html"]) == 0
    assert (tmp_path / "page.html").read_bytes() != before


@pytest.mark.slow
def test_wheel_contains_the_files_of_the_explain_page(tmp_path):
    """A wheel holds the modules, the style sheet and the template."""
    from zipfile import ZipFile

    project = Path(str(page_file.files("jaxformer"))).parent
    copy = tmp_path / "copy"  # building writes into the folder
    shutil.copytree(project / "jaxformer", copy / "jaxformer")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(project / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "-q", "-w", str(tmp_path)]
    built = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"no wheel can be built here: {built.stderr.splitlines()[-1]}")
    (wheel,) = tmp_path.glob("*.whl")
    names = ZipFile(wheel).namelist()
    for name in ("page.html", "page.css", "main.js"):
        assert f"jaxformer/interpret/page/{name}" in names
