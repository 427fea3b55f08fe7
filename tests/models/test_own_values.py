"""Masks and activations of the user's own are trained, decoded, saved and certified like others."""

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import jaxformer as jf
from jaxformer.functional import Causal, FeedForward, Residual
from jaxformer.models.flops import forward_flops
from jaxformer.models.parameters import shape_tree
from jaxformer.models.sharding.parameters import make_abstract_mesh, shardings
from jaxformer.verify.certificate import check_property
from jaxformer.verify.certified_model import certified_model
from tests.errors import error_of
from tests.models import own_stacks
from tests.models.own_layer import Bend, Strided, snake, with_own_values
from tests.properties import tiny
from tests.properties.chunks import cuts
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
CONFIG = tiny.build(num_layers=2, positions="rotary", max_length=24).config
OWN = [Strided, Bend, snake]


@cache
def model():
    return with_own_values(CONFIG)


@pytest.mark.slow
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(2), chunks=cuts())
def test_cached_chunks_with_user_defined_functions_equal_one_forward_pass(
    seed, segment_ids, chunks
):
    own_stacks.chunks_equal_one_pass(model(), seed, segment_ids, chunks)


def test_dependencies_of_model_match_its_user_defined_masks():
    own_stacks.dependencies_are_the_rules(model())


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(["causal", "cached = full"], "cached = full"))
def test_model_with_user_defined_functions_passes_verification(name):
    """Taint analysis reads the user's functions as it reads those of the library."""
    assert check_property(certified_model(model(), tiny.weights(model(), 0), length=12), name).holds


def test_model_uses_the_user_defined_activation():
    """What the feed-forward layer of the last layer computes from its input."""
    variables, tokens = tiny.weights(model(), 1), tiny.tokens(1, 1, tiny.LENGTH)
    points = ("block.middle", "feedforward.hidden")
    seen = jf.inspect(model(), variables, tokens, capture=points).captured
    weights = jax.tree.map(lambda x: np.asarray(x[-1]), variables["params"]["blocks"])
    x = np.asarray(seen["block.middle"][-1], np.float64)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    x = x * weights["feedforward_norm"]["scale"] + weights["feedforward_norm"]["bias"]
    z = x @ weights["feedforward"]["up"]["kernel"] + weights["feedforward"]["up"]["bias"]
    tiny.close(seen["feedforward.hidden"][-1], z + np.sin(z) ** 2, 1e-4)


def test_flops_do_not_depend_on_the_activation_function():
    """Matrix products count, activations do not."""
    layers = tuple(
        (attention, Residual(FeedForward(12, "relu"), feed_forward.norm))
        for attention, feed_forward in model().layers
    )
    assert forward_flops(model(), 16) == forward_flops(jf.Decoder(CONFIG, layers=layers), 16)


def test_user_defined_functions_are_saved_by_name(tmp_path):
    own_stacks.a_saved_model_is_equal(tmp_path / "own", model(), OWN)
    for missing in OWN:
        given = [x for x in OWN if x is not missing]
        said = error_of(lambda given=given: jf.load(tmp_path / "own", layers=given))
        assert said.startswith(f"{tmp_path}/own/config.json: layers[")
        assert f", as in jf.load(folder, layers=[{missing.__qualname__}])" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    mostly_slow(
        [jf.DecoderConfig, jf.EncoderConfig, jf.EncoderDecoderConfig],
        *(jf.DecoderConfig, jf.EncoderConfig),
    ),
)
def test_saved_model_is_loaded_with_its_user_defined_mask(kind, tmp_path):
    """The loaded model has the same mask and gives the same logits."""
    own = tiny.build(kind, mask=Causal() & Strided(3))
    variables, tokens = tiny.weights(own, 0), tiny.tokens(0, 2, 9)
    read = tiny.read(own, tiny.sources(own, 0, 2))
    jf.save(tmp_path / "own", own, variables)
    loaded = jf.load(tmp_path / "own", layers=[Strided])
    assert loaded.model.mask == own.mask
    found = loaded.model.apply(loaded.variables, tokens, **read)
    tiny.close(found, own.apply(variables, tokens, **read), 0.0)
    assert "mask.parts[1] is the class tests.models.own_layer:Strided" in error_of(
        jf.load, tmp_path / "own"
    )


def test_load_rejects_stored_mask_whose_class_is_not_a_mask(tmp_path):
    content = json.dumps({"class": "LayerNorm", "epsilon": 1e-5, "use_bias": True})
    jf.save(tmp_path / "own", own := tiny.build(mask=Causal()), tiny.weights(own, 0))
    path = tmp_path / "own" / "config.json"
    path.write_text(path.read_text().replace(json.dumps({"class": "Causal"}), content))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mask": json.loads(content)}))
    assert "it must be a jaxformer.functional.Mask" in error_of(jf.load, tmp_path / "own")


def test_unsavable_model_is_rejected_before_writing_files(tmp_path):
    variables = tiny.weights(model(), 0)

    def refused(write, own, variables=variables):
        said = error_of(write, tmp_path / "out", own, variables)
        assert not list(tmp_path.iterdir())
        return said

    assert "layers is (" in (said := refused(jf.export, model())) and "jf.save" in said
    masked = tiny.build(mask=Strided(2))
    assert "mask is Strided(stride=2); only" in refused(jf.export, masked, tiny.weights(masked, 0))
    layers = tuple(
        (x[0], Residual(FeedForward(12, lambda x: x), x[1].norm)) for x in model().layers
    )
    said = refused(jf.save, jf.Decoder(CONFIG, layers=layers))
    assert said.startswith("layers[0][1].sublayer.activation is test_unsavable_model_is_rejected")
    both = jf.Decoder(CONFIG, layers=model().layers, mask=Causal())
    assert "mask is Causal(), but layers were given too" in refused(jf.save, both)
    with pytest.raises(
        ValueError, match=r"activation is .*; a config takes .*jf\.Decoder\(config, activation=…\)"
    ):
        jf.DecoderConfig(activation=snake)


def test_model_with_user_defined_functions_is_sharded_like_library_models():
    """Masks and activations have no weights. `training/test_fit.py` trains them on a mesh."""
    plain = jf.Decoder(CONFIG, layers=jf.Decoder(CONFIG).architecture.stack.layers)
    mesh = make_abstract_mesh({"fsdp": 2, "tensor": 2})
    found, wanted = (
        jax.tree.map(lambda x: x.spec, shardings(shape_tree(x), x, mesh)["blocks"])
        for x in (model(), plain)
    )
    assert found == wanted


@pytest.mark.slow
def test_encoder_uses_user_defined_layers():
    """`encode` has the layers of a call; only BERT's transform is left out."""
    config = tiny.build(jf.EncoderConfig, transform=False).config
    layers = jf.Encoder(config).architecture.stack.layers
    own = tuple((x[0], Residual(FeedForward(12, snake), x[1].norm)) for x in layers)
    encoder = jf.Encoder(config, layers=own)
    variables, tokens = tiny.weights(encoder, 0), tiny.tokens(0, 1, 7)
    encoded = encoder.apply(variables, tokens, method="encode")
    tiny.close(encoded, encoder.apply(variables, tokens, method="hidden_states"), 0.0)
    assert jnp.isfinite(encoded).all()
