"""A mask defined by the caller applies in full passes, in cached decoding and in certificates."""

from dataclasses import dataclass
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import jaxformer as jf
from jaxformer.functional import Causal, Mask, dot_product_attention
from jaxformer.models.autoregressive import forward_edge, require_autoregressive
from jaxformer.models.builders.own import OwnParts
from jaxformer.models.builders.transformers import build_decoder
from jaxformer.verify import rules
from jaxformer.verify.certificate import check_property
from jaxformer.verify.certified_model import certified_model
from tests.properties import tiny
from tests.properties.chunks import chunked, cuts
from tests.properties.witness import exactly, jacobian
from tests.slow import mostly_rare, mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")
BATCH = 2


def _distance(query, key):
    """Returns the distance from each query back to each key."""
    return query.position_ids()[..., :, None] - key.position_ids()[..., None, :]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Strided(Mask):
    """Lets a query see every `stride`-th key, counting back and forward from itself."""

    stride: int

    def __call__(self, query, key):
        return _distance(query, key) % self.stride == 0


@dataclass(frozen=True)
class Near(Mask):
    """Lets a query see the keys within `distance` on both sides. Not registered with JAX."""

    distance: int

    def __call__(self, query, key):
        return abs(_distance(query, key)) <= self.distance


CAUSAL = Causal() & Strided(3)
MODELS = {
    "decoder": {"mask": CAUSAL, "positions": "rotary"},
    "encoder-decoder": {"kind": jf.EncoderDecoderConfig, "mask": CAUSAL, "num_layers": 1},
    "encoder": {"kind": jf.EncoderConfig, "mask": Near(2)},
}


def sees(name, query: int, key: int) -> bool:
    if name == "encoder":
        return abs(query - key) <= 2
    return key <= query and (query - key) % 3 == 0


def rule(name, model, segment_ids):
    """Composes the expected rule over the layers. Returns bool [batch, length, batch, length]."""
    table = np.zeros((BATCH, tiny.LENGTH) * 2, bool)
    for index, ids in enumerate(segment_ids):
        documents, positions = rules.read(ids)
        one = np.array(
            [
                [
                    d and d == e and sees(name, i, j)
                    for e, j in zip(documents, positions, strict=True)
                ]
                for d, i in zip(documents, positions, strict=True)
            ],
            bool,
        )
        table[index, :, index] = rules.composed([one] * model.config.num_layers, ids)
    return table


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, attention",
    mostly_slow(
        product(MODELS, ("explicit", "blockwise")),
        ("decoder", "blockwise"),
        ("encoder", "explicit"),
    ),
)
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_nonzero_jacobian_entries_match_the_user_defined_mask(name, attention, seed, segment_ids):
    """Distances are counted within the document, with or without padding."""
    model = tiny.build(attention=attention, **MODELS[name])
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, model.config.embed_dim)
    read = tiny.read(model, tiny.sources(model, seed, BATCH))
    found = jacobian(model)(tiny.weights(model, seed), x, jnp.asarray(segment_ids), None, **read)
    exactly(found, rule(name, model, segment_ids))
    np.testing.assert_array_equal(
        rules.model_rule(model.config, segment_ids, mask=model.mask), rule(name, model, segment_ids)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH), chunks=cuts())
def test_cached_chunks_with_user_defined_mask_equal_one_pass(name, seed, segment_ids, chunks):
    model = tiny.build(**MODELS[name])
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)
    sources = tiny.sources(model, seed, BATCH)
    whole = tiny.apply(model)(
        variables, tokens, jnp.asarray(segment_ids), **tiny.read(model, sources)
    )
    found, _ = chunked(model, variables, tokens, chunks, segment_ids, source=sources)
    tiny.close(found, whole, where=segment_ids != 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(["decoder", "encoder-decoder"], "decoder"))
def test_generation_uses_the_user_defined_mask(name):
    model = tiny.build(**MODELS[name], max_length=24)
    variables, prompts = tiny.weights(model, 0), tiny.tokens(0, BATCH, 5)
    source = tiny.sources(model, 0, BATCH)
    greedy = {"max_new_tokens": 6, "sampler": jf.Sampler(temperature=0.0)}
    out = jf.generate(model, variables, prompts, source=source, **greedy)
    text = np.concatenate([prompts, out.tokens], axis=1)
    logits = tiny.apply(model)(variables, text, **tiny.read(model, source))
    np.testing.assert_array_equal(out.tokens, logits[:, 4:-1].argmax(axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_rare(["decoder", "encoder-decoder"], "decoder"))
def test_model_verification_uses_the_user_defined_mask(name):
    model = tiny.build(**MODELS[name], max_length=24)
    subject = certified_model(model, tiny.weights(model, 0), length=12)
    for name in ("causal", "cached = full"):
        assert check_property(subject, name).holds


@pytest.mark.slow
def test_model_verification_fails_if_the_model_ignores_its_mask(monkeypatch):
    """The model runs a mask other than the one it declares."""
    model, other = tiny.build(mask=CAUSAL), Causal() & Strided(2)
    ignoring = staticmethod(lambda config, own: build_decoder(config, OwnParts(other)))
    monkeypatch.setattr(jf.Decoder, "builder", ignoring)
    assert not check_property(
        certified_model(model, tiny.weights(model, 0), length=12), "causal"
    ).holds


def test_models_and_decoding_reject_invalid_user_defined_mask():
    variables, tokens = tiny.weights(tiny.build(), 0), tiny.tokens(0, 1, 6)

    def generate(**options):
        model = tiny.build(**options)
        return jf.generate(model, variables, tokens, max_new_tokens=2, key=jax.random.key(0))

    with pytest.raises(ValueError, match="position 0 attends to the later position 1"):
        generate(mask=Near(2))
    with pytest.raises(ValueError, match="window is 3; with a mask it must not be set"):
        generate(mask=CAUSAL, window=3)
    model = jf.Decoder(tiny.build().config, mask=np.tri(6, dtype=bool))
    with pytest.raises(ValueError, match=r"mask has shape \(6, 6\), but max_length is 16"):
        model.apply(variables, tokens)
    with pytest.raises(ValueError, match="mask is a str; it must be a jaxformer"):
        jf.Decoder(tiny.build().config, mask="causal")


@dataclass(frozen=True)
class AheadFrom(Mask):
    """A causal mask, but the queries from `start` on see `ahead` later keys."""

    start: int
    ahead: int

    def __call__(self, query, key):
        ahead = (query.position_ids() >= self.start) * self.ahead
        return key.position_ids()[..., None, :] <= (query.position_ids() + ahead)[..., :, None]


@pytest.mark.parametrize("length", [5, 1024, pytest.param(2500, marks=pytest.mark.slow)])
def test_noncausal_mask_is_detected_at_any_position(length):
    for start in {0, length // 2, 600, 1023, 1024, length - 2}:
        if start < length - 1:
            edge = (start, start + 1)
            assert forward_edge(AheadFrom(start, 1), length) == edge
            assert forward_edge(AheadFrom(start, 1) & AheadFrom(0, length), length) == edge
    assert forward_edge(AheadFrom(length - 1, 1), length) is None  # there is no such key
    assert forward_edge(AheadFrom(0, 0), length) is None


@pytest.mark.parametrize("ahead", [1, 300, 1500])
def test_noncausal_mask_is_detected_at_any_distance(ahead):
    @dataclass(frozen=True)
    class Only(Mask):
        def __call__(self, query, key):
            return -_distance(query, key) == ahead

    query, key = forward_edge(Only(), 2500)
    assert key - query == ahead
    assert forward_edge(Only(), ahead) is None


def test_mask_is_checked_for_causality_at_all_positions():
    model = tiny.build(mask=AheadFrom(600, 1), positions="rotary", max_length=1024)
    with pytest.raises(ValueError, match="position 600 attends to the later position 601"):
        require_autoregressive(model)
    jax.jit(lambda: require_autoregressive(model.copy(mask=Causal() & model.mask)))()


@dataclass
class Thawed(Mask):
    """A mask that is not frozen and therefore has no hash."""

    distance: int


@pytest.mark.parametrize("attention", ["blockwise", "explicit"])
def test_every_use_of_an_unhashable_user_defined_mask_is_rejected(attention):
    """The error is raised with and without jit, in a pass, in generation and in verification."""
    with pytest.raises(ValueError, match=r"Thawed is not hashable.*@dataclass\(frozen=True\)"):
        Thawed(2)
    base = tiny.build(attention=attention)
    model = base.copy(mask=Causal() & Near([2]))
    variables, tokens = tiny.weights(base, 0), tiny.tokens(0, 1, 6)
    uses = {
        "apply": lambda: model.apply(variables, tokens),
        "jit": lambda: jax.jit(model.apply)(variables, tokens),
        "inspect": lambda: model.apply(variables, tokens, method="inspect"),
        "generate": lambda: jf.generate(model, variables, tokens, max_new_tokens=2),
        "verify": lambda: certified_model(model, variables),
    }
    for use in uses.values():
        with pytest.raises(ValueError, match=r"mask is .* not hashable .*a tuple in place of"):
            use()


def test_user_defined_mask_class_works_without_registration():
    """Compiled blockwise attention accepts a class that is defined after the import."""

    @dataclass(frozen=True)
    class Everything(Mask):
        def __call__(self, query, key):
            return _distance(query, key) > -99

    x = tiny.embeddings(0, 1, 2, 6, 4)
    attend = jax.jit(dot_product_attention, static_argnames=("mask", "implementation"))
    found = attend(x, x, x, mask=Causal() & Everything(), implementation="blockwise")
    expected = dot_product_attention(x, x, x, mask=Causal(), implementation="explicit")
    np.testing.assert_allclose(found, expected, atol=1e-6)
