"""GGUF: what llama.cpp makes of the file. Its Python package takes a quarter of an hour to build
(pip install llama-cpp-python)."""

import numpy as np
import pytest

import jaxformer as jf
from jaxformer.hub.gguf import export_gguf
from tests.hub import foreign
from tests.properties import tiny

gguf = pytest.importorskip("gguf", reason="GGUF files need the package gguf")
SIZES = {"embed_dim": 64, "num_heads": 4, "head_dim": 16, "mlp_dim": 96, "max_length": 96}
LLAMA = {name: value for name, value in foreign.LLAMA.items() if name != "window"}
MODELS = {
    "gpt2": {"num_kv_heads": 4},
    "llama": LLAMA | {"rotary_base": 500.0},
    "llama3": LLAMA | {"rotary_scaling": jf.RotaryScaling("llama3", 8.0, 32)},
    "qwen2": LLAMA | {"query_key_value_bias": True},
    "qwen3": LLAMA | {"query_key_norm": "head"},
}


def written(name, path, dtype="f32"):
    options = {**MODELS[name], **SIZES, "vocab_size": foreign.tokenizer().vocab_size}
    model = tiny.build(**options)
    variables = tiny.weights(model, 0)
    export_gguf(path, model, variables, foreign.tokenizer(), dtype=dtype)
    return model, variables


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_says_the_same(name, tmp_path):
    """The same ids for a text, and the same 40 greedy tokens after it."""
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


def test_q8_0_is_a_quarter(tmp_path):
    """Matrices are integers with a scale for each 32, norms and biases stay as they are."""
    sizes = {}
    for dtype in ("f32", "q8_0"):
        written("llama", tmp_path / dtype, dtype)
        sizes[dtype] = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / dtype).tensors}
    for name, tensor in sizes["f32"].items():
        kept = tensor.n_bytes == sizes["q8_0"][name].n_bytes
        assert kept == (len(tensor.shape) == 1), name
        if not kept:
            assert sizes["q8_0"][name].n_bytes * 32 == tensor.n_elements * 34


def test_what_has_no_file_is_refused(tmp_path):
    """A window, a tokenizer of another kind, none at all, a path that holds something."""
    model = tiny.build(**{**MODELS["llama"], **SIZES})
    variables = tiny.weights(model, 0)
    with pytest.raises(ValueError, match="tokenizer is None"):
        export_gguf(tmp_path / "x", model, variables, None)
    windowed = tiny.build(**{**MODELS["llama"], **SIZES, "window": 5})
    with pytest.raises(ValueError, match="window is 5"):
        export_gguf(tmp_path / "x", windowed, variables, foreign.tokenizer())
    (tmp_path / "y").write_text("mine")
    with pytest.raises(ValueError, match="holds something already"):
        export_gguf(tmp_path / "y", model, variables, foreign.tokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["y"]
