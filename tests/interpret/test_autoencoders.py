"""Sparse autoencoders are read from SAELens' format and spliced into a forward pass."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import jaxformer as jf
from jaxformer.functional.hooks import Patch
from jaxformer.interpret import load_autoencoder, splice
from tests.errors import error_of
from tests.properties import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")
DIM, FEATURES = 8, 20


def written(folder, seed, **options):
    """Writes a random autoencoder; returns its tensors."""
    rng = np.random.default_rng(seed)
    sizes = {"W_enc": (DIM, FEATURES), "b_enc": FEATURES, "W_dec": (FEATURES, DIM), "b_dec": DIM}
    tensors = {name: np.float32(rng.normal(size=size)) for name, size in sizes.items()}
    if options.get("architecture") == "jumprelu":
        tensors["threshold"] = np.float32(rng.uniform(0, 2, FEATURES))
    folder.mkdir()
    config = {"d_in": DIM, "d_sae": FEATURES, "hook_name": "blocks.1.hook_resid_post", **options}
    (folder / "cfg.json").write_text(json.dumps(config))
    save_file(tensors, folder / "sae_weights.safetensors")
    return tensors


def features_of(x, tensors, centers):
    wide = {name: value.astype(np.float64) for name, value in tensors.items()}
    z = (x - (wide["b_dec"] if centers else 0)) @ wide["W_enc"] + wide["b_enc"]
    return np.where(z > wide.get("threshold", 0.0), np.maximum(z, 0), 0)


@settings(max_examples=10)
@given(
    seed=tiny.seeds,
    architecture=st.sampled_from(["standard", "jumprelu"]),
    centers=st.booleans(),
)
def test_features_and_reconstructions_equal_the_formula(
    tmp_path_factory, seed, architecture, centers
):
    folder = tmp_path_factory.mktemp("sae") / "sae"
    options = {"architecture": architecture, "apply_b_dec_to_input": centers}
    tensors = written(folder, seed, **options, activation_fn_str="relu")
    found = load_autoencoder(folder)
    x = np.random.default_rng(seed).normal(size=(3, DIM))
    features = features_of(x, tensors, centers)
    tiny.close(found.encode(jnp.asarray(x, jnp.float32)), features)
    tiny.close(found(jnp.asarray(x, jnp.float32)), features @ tensors["W_dec"] + tensors["b_dec"])


@settings(max_examples=5)
@given(seed=tiny.seeds, scan=st.sampled_from(["scan", "unrolled"]))
def test_splicing_autoencoders_into_several_layers_equals_patching_layer_by_layer(
    tmp_path_factory, seed, scan
):
    """Layers 1 and 2 of four, in one pass."""
    folder = tmp_path_factory.mktemp("sae")
    tensors = {layer: written(folder / f"{layer}", seed + layer) for layer in (2, 1)}
    autoencoders = {layer: load_autoencoder(folder / f"{layer}") for layer in tensors}
    model = tiny.build(num_layers=4, layers=scan)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 2, 6)
    once = jf.inspect(model, variables, tokens, patch=splice(autoencoders), capture=POINT)
    where, new = np.zeros((4, 1, 1, 1), bool), np.zeros((4, 2, 6, DIM))
    for layer in (1, 2):
        seen = jf.inspect(
            model, variables, tokens, patch={POINT[0]: Patch(where, new)}, capture=POINT
        )
        x = np.asarray(seen.captured[POINT[0]][layer], np.float64)
        own = tensors[layer]
        new[layer] = features_of(x, own, True) @ own["W_dec"] + own["b_dec"]
        where[layer] = True
    expected = jf.inspect(model, variables, tokens, patch={POINT[0]: Patch(where, new)})
    tiny.close(once.logits, expected.logits, 1e-4)


POINT = ("block.output",)


def first_off(features):
    return features.at[..., 0].set(0)


def unchanged(features):
    return features


@settings(max_examples=5)
@given(seed=tiny.seeds)
def test_changing_autoencoder_features_preserves_the_reconstruction_error(tmp_path_factory, seed):
    folder = tmp_path_factory.mktemp("sae") / "sae"
    tensors = written(folder, seed)
    sae = {1: load_autoencoder(folder)}
    model = tiny.build()
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 1, 6)
    plain = jf.inspect(model, variables, tokens, capture=POINT)
    kept = jf.inspect(model, variables, tokens, patch=splice(sae, change=unchanged))
    tiny.close(kept.logits, plain.logits)
    found = jf.inspect(
        model, variables, tokens, patch=splice(sae, change=first_off), capture=POINT
    ).captured[POINT[0]][1]
    x = np.asarray(plain.captured[POINT[0]][1], np.float64)
    first = features_of(x, tensors, True)[..., :1]
    tiny.close(found, x - first * tensors["W_dec"][0])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"architecture": "gated"}, "architecture is 'gated'; it must be 'standard' or 'jumprelu'"),
        ({"activation_fn": "topk"}, "activation_fn is 'topk'; it must be 'relu'"),
        ({"normalize_activations": "layer_norm"}, "normalize_activations is 'layer_norm'"),
    ],
)
def test_autoencoders_with_unsupported_options_are_refused(tmp_path, options, message):
    written(tmp_path / "sae", 0, **options)
    assert message in error_of(load_autoencoder, tmp_path / "sae")


def test_damaged_autoencoders_are_refused(tmp_path):
    assert "cfg.json does not exist" in error_of(load_autoencoder, tmp_path)
    tensors = written(tmp_path / "sae", 0)
    weights = tmp_path / "sae" / "sae_weights.safetensors"
    save_file({**tensors, "b_enc": np.zeros(3, np.float32)}, weights)
    assert "tensor b_enc has shape (3,); it must be (20,)" in error_of(
        load_autoencoder, tmp_path / "sae"
    )
    del tensors["W_dec"]
    save_file(tensors, weights)
    assert "tensor W_dec is missing" in error_of(load_autoencoder, tmp_path / "sae")
    weights.write_bytes(b"{}")
    assert "cannot be read" in error_of(load_autoencoder, tmp_path / "sae")
    weights.unlink()
    assert "does not exist" in error_of(load_autoencoder, tmp_path / "sae")
    assert "autoencoders is empty" in error_of(splice, {})
