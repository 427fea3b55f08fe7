"""Certificates: a sound model passes, and a broken one fails a property at a named layer.

The tests put bugs into the package with monkeypatch. Each bug must fail the property that it
breaks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.verify import PROPERTIES, certificate, certify, dependency
from jaxformer.verify.certificate import check_property
from jaxformer.verify.certified_model import CertifiedModel, certified_model
from tests.properties import tiny
from tests.properties.models import centred
from tests.slow import mostly_rare, mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODELS = {
    "decoder": {},
    "main job": {"positions": "rotary", "norm": "rms", "use_bias": False, "window": 5},
    "lstm": {"kind": jf.RecurrentConfig},
    "encoder-decoder": {"kind": jf.EncoderDecoderConfig, "max_source_length": 9},
    "attention lstm": {"kind": jf.RecurrentEncoderDecoderConfig},
    "frames": {"kind": jf.EncoderDecoderConfig, "source_features": 3},
    "layers that differ": {
        "num_layers": 3,
        "window": (3, None),
        "positions": "rotary",
        "rotary_base": (9.0, None),
    },
    "encoder": {"kind": jf.EncoderConfig, "window": (2, None), "norm_position": "post"},
    "cnn": {"kind": jf.ConvolutionalConfig, "kernel_size": 3, "activation": "gelu"},
}


@pytest.fixture(autouse=True)
def compiled_anew():
    """Clears the caches: `jit` would reuse a model compiled before the bug was put in."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_rare(MODELS, "main job"))
def test_correct_model_passes_all_verification_properties(name):
    model = tiny.build(**MODELS[name])
    found = list(certify(model, tiny.weights(model, 0)))
    left_out = {"bidirectional"}
    if name == "encoder":
        left_out = set(certificate.OF_GENERATION)
    elif not hasattr(model.config, "max_source_length"):
        left_out |= {"reads its source"}
    assert [entry.name for entry in found] == [x for x in PROPERTIES if x not in left_out]
    assert all(entry.holds and entry.layer is None for entry in found), found


def _window(monkeypatch):
    from jaxformer.functional.attention.masks import Window

    def sees_one_more(self, query, key):
        return key.position_ids()[..., None, :] >= query.position_ids()[..., :, None] - self.size

    monkeypatch.setattr(Window, "__call__", sees_one_more)


def _mask(monkeypatch):
    from jaxformer.functional.attention.masks import Causal

    def sees_the_next(self, query, key):
        return key.position_ids()[..., None, :] <= query.position_ids()[..., :, None] + 1

    monkeypatch.setattr(Causal, "__call__", sees_the_next)


def _positions(monkeypatch):
    """Counts positions along the sequence instead of within each document."""
    from jaxformer.functional.attention import contexts

    read = contexts.document_positions

    def along_the_sequence(segment_ids, cursor):
        documents, _, after = read(segment_ids, cursor)
        return (
            documents,
            jnp.broadcast_to(jnp.arange(segment_ids.shape[1]), segment_ids.shape),
            after,
        )

    monkeypatch.setattr(contexts, "document_positions", along_the_sequence)


def _cache(monkeypatch):
    """Shifts the positions of all chunks after the first by one."""
    from jaxformer.functional.cache import key_values

    read = key_values.document_positions

    def one_too_far(segment_ids, cursor):
        documents, positions, after = read(segment_ids, cursor)
        late = jnp.where(cursor.position > 0, 1, 0)
        return documents, positions + late[:, None], after

    monkeypatch.setattr(key_values, "document_positions", one_too_far)


def _norm(monkeypatch):
    """Computes the statistics over the batch too."""
    from jaxformer.functional.layers import norms

    def of_the_batch(x, scale, epsilon=1e-5):
        square = jnp.square(x).mean(axis=(0, -1) if x.ndim == 3 else -1, keepdims=True)
        return (x * (square + epsilon) ** -0.5 * scale).astype(x.dtype)

    monkeypatch.setattr(norms, "rms_norm", of_the_batch)


BROKEN = {
    "mask off by one": (_mask, "causal", "layer 0"),
    "window of W + 1": (_window, "causal", "layer 0"),
    "positions not restarted": (_positions, "packed = separate", "layer 0, attention.query"),
    "cache offset by one": (_cache, "cached = full", "layer 0, attention.keys"),
    "batch statistics": (_norm, "batch-independent", "layer 0, attention.input"),
}


@pytest.mark.parametrize("bug", mostly_slow(BROKEN, slow=("cache offset by one",)))
def test_model_verification_names_the_property_and_layer_of_a_bug(bug, monkeypatch):
    put_in, name, layer = BROKEN[bug]
    put_in(monkeypatch)
    model = tiny.build(**MODELS["main job"])
    found = check_property(certified_model(model, tiny.weights(model, 0)), name)
    assert not found.holds and found.layer == layer, found


@pytest.mark.slow
def test_model_verification_detects_attention_windows_in_the_wrong_layers(monkeypatch):
    """The windows are in the wrong layers; the rule has the right ones."""
    from jaxformer.models.config import transformer

    shifted = transformer._layers.__wrapped__
    pattern = {"window": (3, None, None)}

    def one_too_late(config):
        layers = shifted(config)
        return (layers[-1], *layers[:-1])

    model = tiny.build(num_layers=3, **pattern)
    monkeypatch.setattr(transformer, "_layers", one_too_late)
    found = check_property(certified_model(model, tiny.weights(model, 0)), "causal")
    assert not found.holds and found.layer == "layer 0", found


@pytest.mark.parametrize("blind", mostly_slow(["taint", "derivative", "change"]))
def test_model_verification_reports_an_analysis_that_misses_dependencies(blind, monkeypatch):
    """The other witnesses see its pairs. If taint is blind, the certificate fails."""
    honest = getattr(dependency, f"by_{blind}")

    def sees_nothing(*arguments):
        found = honest(*arguments)
        return (0 * found[0], *found[1:]) if blind == "taint" else 0 * found

    model = tiny.build(num_layers=1)
    subject = certified_model(model, tiny.weights(model, 0))
    monkeypatch.setattr(dependency, f"by_{blind}", sees_nothing)
    found = subject.dependency
    assert len(found.disagreements) == subject.rule.sum()
    monkeypatch.setattr(dependency, f"by_{blind}", honest)
    assert check_property(subject, "causal").holds == (blind != "taint")


@pytest.mark.slow
def test_model_verification_passes_if_attention_weights_round_to_zero():
    """Weights that round to 0 hide the effect of a change; the path exists and is reported."""
    model = tiny.build(num_layers=1)
    params = jax.tree.map(jnp.array, tiny.weights(model, 0)["params"])
    params["blocks"]["attention"]["query"]["kernel"] *= 100
    found = check_property(certified_model(model, {"params": params}), "causal")
    assert found.holds and "no measurable effect" in found.detail


@pytest.mark.slow
def test_model_verification_rejects_wrong_cross_attention_masks(monkeypatch):
    """Two bugs: the model sees the source's padding; it does not see one token of the source."""
    from jaxformer.functional.attention.masks import Padding

    model = tiny.build(**MODELS["encoder-decoder"])
    subject = certified_model(model, tiny.weights(model, 0))
    monkeypatch.setattr(Padding, "__call__", lambda self, query, key: np.True_)
    assert check_property(subject, "padded = alone").layer == "layer 0, cross_attention.heads"
    jax.clear_caches()
    hides_one = np.arange(64) != 4
    monkeypatch.setattr(Padding, "__call__", lambda self, query, key: hides_one[None, : key.length])
    assert (
        "0 unexpected dependencies; 8 missing" in check_property(subject, "reads its source").detail
    )


@pytest.mark.slow
def test_model_verification_detects_cache_error_common_to_all_chunk_sizes(monkeypatch):
    """The bug changes the logits by the same factor for all chunk sizes."""
    advance = certificate.extend

    def sharper(*arguments):
        logits, cache = advance(*arguments)
        return 1.01 * logits, cache

    monkeypatch.setattr(certificate, "extend", sharper)
    model = tiny.build()
    assert not check_property(certified_model(model, tiny.weights(model, 0)), "cached = full").holds


def test_model_verification_rejects_a_model_that_sees_its_targets():
    """The model sees its targets; without that, no model beats chance on random tokens."""

    class Told:
        config, minimum_prefill = tiny.build().config, 1

        def apply(self, variables, tokens):
            return 9.0 * jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), self.config.vocab_size)

    found = check_property(CertifiedModel(Told(), {"params": {}}, 16), "loss floor")
    assert not found.holds and "0.0" in found.detail


def test_certify_refuses_unsupported_models_and_arguments():
    model = centred()
    with pytest.raises(ValueError, match="not autoregressive"):
        next(certify(model, tiny.weights(model, 0)))
    model = tiny.build()
    for length in (11, 17):
        with pytest.raises(ValueError, match=f"length is {length}; it must be between 12 and 16"):
            next(certify(model, tiny.weights(model, 0), length=length))
    with pytest.raises(ValueError, match="seed is -1; it must be a whole number"):
        next(certify(model, tiny.weights(model, 0), seed=-1))
    with pytest.raises(ValueError, match="they must contain 'params'"):
        next(certify(model, tiny.weights(model, 0)["params"]))
