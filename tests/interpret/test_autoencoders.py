"""Sparse autoencoders are read from SAELens' format and spliced into a forward pass."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import jaxformer as jf
from jaxformer.functional.hooks import Patch
from jaxformer.interpret import SparseAutoencoder, load_autoencoder, splice
from tests.errors import error_of
from tests.properties import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")
DIM, FEATURES = 8, 20


OWN = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "b_mag", "r_mag"),
}


def written(folder, seed, **options):
    """Writes a random autoencoder; returns its tensors."""
    rng = np.random.default_rng(seed)
    sizes = {"W_enc": (DIM, FEATURES), "W_dec": (FEATURES, DIM), "b_dec": DIM}
    sizes |= dict.fromkeys(OWN.get(options.get("architecture"), ("b_enc",)), FEATURES)
    tensors = {name: np.float32(rng.normal(size=size)) for name, size in sizes.items()}
    folder.mkdir()
    config = {"d_in": DIM, "d_sae": FEATURES, "hook_name": "blocks.1.hook_resid_post", **options}
    (folder / "cfg.json").write_text(json.dumps(config))
    save_file(tensors, folder / "sae_weights.safetensors")
    return tensors


def features_of(x, tensors, centers, k=FEATURES):
    """Computes the features of every architecture, by its tensors, in float64."""
    wide = {name: value.astype(np.float64) for name, value in tensors.items()}
    h = (x - (wide["b_dec"] if centers else 0)) @ wide["W_enc"]
    if "b_gate" in wide:
        magnitude = np.maximum(h * np.exp(wide["r_mag"]) + wide["b_mag"], 0)
        return np.where(h + wide["b_gate"] > 0, magnitude, 0)
    z = h + wide["b_enc"]
    features = np.where(z > wide.get("threshold", 0.0), np.maximum(z, 0), 0)
    for row in features.reshape(-1, FEATURES):
        row[np.argsort(row)[: FEATURES - k]] = 0
    return features


@settings(max_examples=20)
@given(
    seed=tiny.seeds,
    architecture=st.sampled_from(list(OWN)),
    centers=st.booleans(),
    k=st.integers(1, FEATURES),
)
def test_autoencoder_features_and_reconstructions_equal_their_formulas(
    tmp_path_factory, seed, architecture, centers, k
):
    folder = tmp_path_factory.mktemp("sae") / "sae"
    options = {"architecture": architecture, "apply_b_dec_to_input": centers}
    options |= {"k": k} if architecture == "topk" else {"activation_fn_str": "relu"}
    tensors = written(folder, seed, **options)
    found = load_autoencoder(folder)
    x = np.random.default_rng(seed).normal(size=(3, DIM))
    features = features_of(x, tensors, centers, k if architecture == "topk" else FEATURES)
    tiny.close(found.encode(jnp.asarray(x, jnp.float32)), features)
    tiny.close(found(jnp.asarray(x, jnp.float32)), features @ tensors["W_dec"] + tensors["b_dec"])


def test_topk_autoencoder_keeps_exactly_k_of_several_equal_features():
    ones = jnp.ones((1, 6), jnp.float32)
    zeros = jnp.zeros(6, jnp.float32)
    found = SparseAutoencoder(ones, zeros, ones.T, zeros[:1], zeros[:1], zeros, k=2)
    assert np.count_nonzero(found.encode(jnp.ones((3, 1), jnp.float32))) == 6


@pytest.mark.parametrize(
    "options",
    [
        {"architecture": "topk", "activation_fn_kwargs": {"k": 3}, "activation_fn_str": "topk"},
        {"architecture": "topk", "k": 3, "metadata": {"sae_lens_version": "6.0.0"}},
    ],
)
def test_k_of_a_topk_autoencoder_is_read_from_both_config_formats(tmp_path, options):
    written(tmp_path / "sae", 0, **options)
    assert load_autoencoder(tmp_path / "sae").k == 3


@pytest.mark.parametrize(
    "name, layer, point",
    [
        ("blocks.5.hook_resid_pre", 5, "block.input"),
        ("blocks.12.hook_resid_mid", 12, "block.middle"),
        ("blocks.0.hook_resid_post", 0, "block.output"),
        ("blocks.3.mlp.hook_post", 3, "feedforward.hidden"),
        ("blocks.3.hook_mlp_out", 3, None),
        ("hook_embed", None, None),
        (None, None, None),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_hook_names_of_autoencoders_are_translated_to_layers_and_points(
    tmp_path, name, layer, point, is_nested
):
    own = {"hook_name": name}
    written(tmp_path / "sae", 0, **own)
    path = tmp_path / "sae" / "cfg.json"
    config = {"d_in": DIM, "d_sae": FEATURES} | ({"metadata": own} if is_nested else own)
    path.write_text(json.dumps(config))
    found = load_autoencoder(tmp_path / "sae")
    assert (found.layer, found.point) == (layer, point)


def test_autoencoders_are_spliced_at_their_own_hook_point(tmp_path):
    for layer, hook in enumerate(("hook_resid_pre", "hook_resid_post", "hook_mlp_out")):
        written(tmp_path / hook, layer, hook_name=f"blocks.{layer}.{hook}")
    before, after, unknown = (
        load_autoencoder(tmp_path / x)
        for x in ("hook_resid_pre", "hook_resid_post", "hook_mlp_out")
    )
    ((point, edit),) = splice({before.layer: before}).items()
    assert (point, edit.layers) == ("block.input", (0,))
    assert set(splice({0: before, 1: after}, "block.middle")) == {"block.middle"}
    assert "pass point" in error_of(splice, {0: before, 1: after})
    assert "hook points of the autoencoders are None" in error_of(splice, {2: unknown})
    assert "different sizes (dim, features, k)" in error_of(
        splice, {0: before, 1: replace(after, k=2)}
    )


@pytest.mark.slow
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
        (
            {"architecture": "transcoder"},
            "architecture is 'transcoder'; it must be 'standard' or 'jumprelu' or 'topk' or",
        ),
        ({"architecture": "topk"}, "k is None; it must be a whole number from 1 to 20"),
        ({"architecture": "topk", "k": 21}, "k is 21; it must be a whole number from 1 to 20"),
        ({"architecture": "topk", "activation_fn_kwargs": [3]}, "k is None; it must be a whole"),
        ({"metadata": {"hook_head_index": 3}}, "hook_head_index is 3; it must be null"),
        ({"rescale_acts_by_decoder_norm": True}, "rescale_acts_by_decoder_norm is True"),
        ({"reshape_activations": "hook_z"}, "reshape_activations is 'hook_z'"),
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
    (tmp_path / "sae" / "cfg.json").write_text('{"architecture": "jumprelu"}')
    save_file(tensors, weights)
    assert "tensor threshold is missing" in error_of(load_autoencoder, tmp_path / "sae")
    del tensors["W_dec"]
    save_file(tensors, weights)
    assert "tensor W_dec is missing" in error_of(load_autoencoder, tmp_path / "sae")
    weights.write_bytes(b"{}")
    assert "cannot be read" in error_of(load_autoencoder, tmp_path / "sae")
    weights.unlink()
    assert "does not exist; the folder must contain cfg.json and" in error_of(
        load_autoencoder, tmp_path / "sae"
    )
    assert "autoencoders is empty" in error_of(splice, {})
