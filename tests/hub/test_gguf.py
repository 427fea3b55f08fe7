"""llama.cpp reads a GGUF file as the same model.

Its Python package takes a quarter of an hour to build (pip install llama-cpp-python).
"""

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.hub.gguf import export_gguf
from tests.hub import foreign
from tests.hub.test_presets import PROMPT, default_run
from tests.properties import tiny
from tests.slow import mostly_slow

gguf = pytest.importorskip("gguf", reason="GGUF files need the package gguf")
SIZES = {"embed_dim": 64, "num_heads": 4, "head_dim": 16, "mlp_dim": 96, "max_length": 96}
LLAMA = {name: value for name, value in foreign.LLAMA.items() if name not in ("window", *SIZES)}
GEMMA = LLAMA | {
    "norm": "rms_one_plus",
    "norm_position": "sandwich",
    "query_key_norm": "head",
    "activation": "geglu_tanh",
    "scale_embeddings": True,
    "tie_embeddings": True,
    "num_layers": 4,
    "window": (None, 5, 5, 5),
    "rotary_base": (100.0, 500.0, 500.0, 500.0),
}
MODELS = {
    "gpt2": {"num_kv_heads": 4},
    "llama": LLAMA | {"rotary_base": 500.0},
    "llama3": LLAMA | {"rotary_scaling": jf.RotaryScaling("llama3", 8.0, 32)},
    "llama linear": LLAMA | {"rotary_scaling": jf.RotaryScaling("linear", 4.0)},
    "llama tied": LLAMA | {"tie_embeddings": True, "attention_scale": 0.25},
    "llama with biases": LLAMA
    | {
        "head_dim": 8,
        "query_key_value_bias": True,
        "attention_output_bias": True,
        "feedforward_bias": True,
    },
    "qwen2": LLAMA | {"query_key_value_bias": True},
    "qwen2 linear": LLAMA
    | {"query_key_value_bias": True, "rotary_scaling": jf.RotaryScaling("linear", 4.0)},
    "qwen2 tied": LLAMA | {"query_key_value_bias": True, "tie_embeddings": True},
    "qwen3": LLAMA | {"query_key_norm": "head"},
    "qwen3 linear": LLAMA
    | {"query_key_norm": "head", "rotary_scaling": jf.RotaryScaling("linear", 4.0)},
    "qwen3 with narrow heads": LLAMA | {"query_key_norm": "head", "head_dim": 8},
    "gemma3": GEMMA,
    "gemma3 without windows": GEMMA | {"window": None, "rotary_base": 500.0},
    "gemma3 with windows only": GEMMA | {"window": 5, "rotary_base": 500.0},
    "gemma3 linear": GEMMA
    | {"rotary_scaling": (jf.RotaryScaling("linear", 4.0), None, None, None)},
    "gemma3 with a cap": GEMMA | {"logits_softcap": 30.0},
    "gemma3 with narrow heads": GEMMA | {"head_dim": 8},
}
# Models that llama.cpp's architecture cannot represent: (options, the field that is named).
QWEN2, QWEN3 = MODELS["qwen2"], MODELS["qwen3"]
LLAMA3, YARN = jf.RotaryScaling("llama3", 8.0, 32), jf.RotaryScaling("yarn", 4.0, 32)
REFUSED = {
    "qwen2 llama3": (QWEN2 | {"rotary_scaling": LLAMA3}, "rotary_scaling"),
    "qwen3 llama3": (QWEN3 | {"rotary_scaling": LLAMA3}, "rotary_scaling"),
    "llama yarn": (LLAMA | {"rotary_scaling": YARN}, "rotary_scaling"),
    "qwen3 with biases": (
        QWEN3 | {"query_key_value_bias": True, "attention_output_bias": True},
        "query_key_value_bias",
    ),
    "qwen2 with narrow heads": (QWEN2 | {"head_dim": 8}, "head_dim"),
    "a part of each head": (LLAMA | {"rotary_fraction": 0.5}, "rotary_fraction"),
    "scaling by layer": (LLAMA | {"rotary_scaling": (LLAMA3, None)}, "rotary_scaling"),
    "window": (LLAMA | {"window": 5}, "window"),
    "gemma3 yarn": (GEMMA | {"rotary_scaling": (YARN, None, None, None)}, "rotary_scaling"),
    "gemma3 with another activation": (GEMMA | {"activation": "swiglu"}, "activation is 'swiglu'"),
    "gemma3 with another scale": (GEMMA | {"attention_scale": 0.1}, "attention_scale is"),
    "gemma3 with biases": (
        GEMMA | {"query_key_value_bias": True, "attention_output_bias": True},
        "query_key_value_bias",
    ),
}


def written(name, path, dtype="f32"):
    options = {**SIZES, **MODELS[name], "vocab_size": foreign.tokenizer().vocab_size}
    model = tiny.build(**options)
    variables = tiny.weights(model, 0)
    export_gguf(path, model, variables, foreign.tokenizer(), dtype=dtype)
    return model, variables


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_generates_the_same_tokens_from_exported_model(name, tmp_path):
    """llama.cpp gives the same ids for a text and the same 40 greedy tokens after it."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model, variables = written(name, tmp_path / "model.gguf")
    text = "the tide came in twice"
    prompt = [foreign.tokenizer().end_of_text, *foreign.tokenizer().encode(text)]
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=96, verbose=False)
    assert theirs.tokenize(text.encode(), add_bos=True) == prompt
    greedy = jf.Sampler(temperature=0.0)
    out = jf.generate(model, variables, [prompt], max_new_tokens=40, sampler=greedy)
    stream = theirs.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0)
    found = [token for token, _ in zip(stream, range(40), strict=False)]
    np.testing.assert_array_equal(out.tokens[0], found)


@pytest.mark.slow
def test_model_trained_with_defaults_generates_the_same_text_in_llama_cpp(tmp_path):
    """The run is trained and exported as in the README."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    _, prompt, expected = default_run(tmp_path)
    theirs = llama_cpp.Llama(str(tmp_path / "out.gguf"), n_ctx=128, verbose=False)
    assert theirs.tokenize(PROMPT.encode(), add_bos=True) == prompt
    stream = theirs.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0)
    found = [token for token, _ in zip(stream, range(len(expected)), strict=False)]
    np.testing.assert_array_equal(found, expected)


def test_gguf_file_of_gemma_stores_norm_scales_plus_one_and_layer_windows(tmp_path):
    """Gemma stores γ − 1, and llama.cpp multiplies by the tensor of the file."""
    _, variables = written("gemma3", tmp_path / "x.gguf")
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["gemma3.attention.sliding_window"] == 5
    assert fields["gemma3.attention.sliding_window_pattern"] == [False, True, True, True]
    assert fields["gemma3.rope.freq_base"] == 100.0
    assert fields["gemma3.rope.freq_base_swa"] == 500.0
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    params = variables["params"]
    scale = np.asarray(params["blocks"]["attention_norm"]["scale"])
    for layer, row in enumerate(scale):
        np.testing.assert_allclose(tensors[f"blk.{layer}.attn_norm.weight"], row + 1, rtol=1e-6)
    final = np.asarray(params["final_norm"]["scale"])
    np.testing.assert_allclose(tensors["output_norm.weight"], final + 1, rtol=1e-6)


def test_gguf_q8_0_export_stores_only_matrices_as_integers(tmp_path):
    """34 bytes for 32 numbers, which share a scale. Norms and biases are unchanged."""
    sizes = {}
    for dtype in ("f32", "q8_0"):
        written("llama", tmp_path / dtype, dtype)
        sizes[dtype] = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / dtype).tensors}
    for name, tensor in sizes["f32"].items():
        kept = tensor.n_bytes == sizes["q8_0"][name].n_bytes
        assert kept == (len(tensor.shape) == 1), name
        if not kept:
            assert sizes["q8_0"][name].n_bytes * 32 == tensor.n_elements * 34


@pytest.mark.parametrize("name", mostly_slow(["llama linear", "qwen3 linear"], "qwen3 linear"))
def test_gguf_file_stores_linear_rope_scaling_as_two_keys(name, tmp_path):
    """There is no tensor of factors, which only the architecture LLAMA has."""
    written(name, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    scaling = {key.partition(".")[2]: x for key, x in reader.fields.items() if "scaling" in key}
    assert scaling["rope.scaling.type"].contents() == "linear"
    assert scaling["rope.scaling.factor"].contents() == 4.0
    assert "rope_freqs.weight" not in {tensor.name for tensor in reader.tensors}


@pytest.mark.parametrize("name", REFUSED)
def test_model_unsupported_by_llama_cpp_is_rejected(name, tmp_path):
    options, field = REFUSED[name]
    model = tiny.build(**SIZES | options)
    family = name.split()[0] if name.startswith("qwen") else None
    with pytest.raises(ValueError, match=field):
        export_gguf(tmp_path / "x", model, shapes(model), foreign.tokenizer(), model_type=family)
    assert not list(tmp_path.iterdir())


def shapes(model):
    """Returns variables of zeros."""
    return jax.tree.map(lambda x: np.zeros(x.shape, np.float32), tiny.shapes(model))


def test_gguf_export_rejects_a_missing_tokenizer_sliding_windows_and_existing_paths(tmp_path):
    """A missing tokenizer, a model with windows, or an existing path raises ValueError."""
    model = tiny.build(**{**MODELS["llama"], **SIZES})
    variables = tiny.weights(model, 0)
    with pytest.raises(ValueError, match="tokenizer is None"):
        export_gguf(tmp_path / "x", model, variables, None)
    windowed = tiny.build(**{**MODELS["llama"], **SIZES, "window": 5})
    with pytest.raises(ValueError, match="window is 5"):
        export_gguf(tmp_path / "x", windowed, variables, foreign.tokenizer())
    (tmp_path / "y").write_text("mine")
    with pytest.raises(ValueError, match="already exists"):
        export_gguf(tmp_path / "y", model, variables, foreign.tokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["y"]
