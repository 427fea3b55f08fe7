"""Models that read a source depend on all of it, ignore its padding, and encode it once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.verify import rules
from tests.properties import tiny
from tests.properties.chunks import chunked
from tests.properties.models import MODELS
from tests.properties.witness import by_jacobian, exactly, one_number
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH, LENGTH = 2, 8
SOURCED = [name for name in MODELS if "source" in str(MODELS[name]) or "encoder" in name]
each_sourced = pytest.mark.parametrize("name", mostly_slow(SOURCED, "encoder-decoder"))
paddings = st.lists(
    st.lists(st.sampled_from((0, 1, 1, 2)), min_size=LENGTH, max_size=LENGTH).filter(any),
    min_size=BATCH,
    max_size=BATCH,
).map(np.array)


def setup(name, seed):
    model = tiny.build(**MODELS[name])
    return model, tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)


@each_sourced
@tiny.many
@given(seed=tiny.seeds, padding=paddings)
def test_every_output_depends_on_all_of_its_source(name, seed, padding):
    """∂ output i / ∂ source j ≠ 0 exactly for the tokens of the batch element's own source."""
    model, variables, tokens = setup(name, seed)
    source = tiny.embeddings(seed, BATCH, LENGTH, model.config.embed_dim)
    found = by_source(model)(variables, tokens, source, jnp.asarray(padding))
    exactly(found, rules.of_source(np.ones_like(tokens), padding))


@tiny.cache
def by_source(model):
    def run(variables, tokens, source, segments):
        def logits(source):
            read = {"source": source, "source_segments": segments}
            return one_number(model.apply(variables, tokens, **read))

        return by_jacobian(logits, source)

    return jax.jit(run)


@pytest.mark.slow
@each_sourced
@given(seed=tiny.seeds, padding=paddings)
def test_where_the_padding_of_a_source_stands_does_not_matter(name, seed, padding):
    """Padding before, inside or after the source, with any ids, does not change the logits."""
    model, variables, tokens = setup(name, seed)
    size = model.config.source_vocab_size
    source = tiny.tokens(seed, BATCH, LENGTH, vocab_size=size)
    read = {"source": source, "source_segments": padding}
    found = tiny.apply(model)(variables, tokens, **read)
    first, segments = np.zeros((2, BATCH, 12), np.int32)  # tokens first, then padding to length 12
    for row in range(BATCH):
        own = source[row][padding[row] != 0]
        first[row, : len(own)], segments[row, : len(own)] = own, 1
    read = {"source": first, "source_segments": segments}
    tiny.close(found, tiny.apply(model)(variables, tokens, **read))


@each_sourced
@given(seed=tiny.seeds, padding=paddings)
def test_nan_in_the_padding_of_a_source_reaches_nothing(name, seed, padding):
    """Loss and gradients are bitwise equal to those without NaN, and finite."""
    model, variables, _ = setup(name, seed)
    segments = jnp.ones((BATCH, tiny.LENGTH), int)
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, model.config.embed_dim)
    clean = tiny.embeddings(seed + 1, BATCH, LENGTH, model.config.embed_dim)
    source = jnp.where((padding != 0)[..., None], clean, jnp.nan)
    found, wanted = (
        tiny.loss_and_gradients(model)(
            variables, x, segments, source=some, source_segments=jnp.asarray(padding)
        )
        for some in (source, clean)
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert jax.tree.all(jax.tree.map(lambda leaf: np.isfinite(leaf).all(), found))


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCED)
@given(seed=tiny.seeds)
def test_a_source_is_read_once(name, seed):
    """After `start`, decoding does not need the encoder: NaN in its weights has no effect."""
    model, variables, tokens = setup(name, seed)
    source = tiny.sources(model, seed, BATCH)
    whole = tiny.apply(model)(variables, tokens, **tiny.read(model, source))
    cache = jf.start(model, variables, BATCH, tiny.LENGTH, source)
    forgotten = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), variables["params"]["encoder"])
    variables = {"params": {**variables["params"], "encoder": forgotten}}
    tiny.close(chunked(model, variables, tokens, [5, 5, 1, 1], cache=cache)[0], whole)


@pytest.mark.slow
@each_sourced
@given(seed=tiny.seeds)
def test_a_source_serves_several_rows(name, seed):
    """Batch elements that share a source give the same logits as with a copy of it each."""
    model, variables, _ = setup(name, seed)
    source, tokens = tiny.sources(model, seed, 2), tiny.tokens(seed, 6, 5)
    shared = jf.start(model, variables, 6, 5, source)
    each = jf.start(model, variables, 6, 5, [source[i // 3] for i in range(6)])
    found, wanted = (jf.advance(model, variables, tokens, cache)[0] for cache in (shared, each))
    tiny.close(found, wanted)


@each_sourced
def test_invalid_sources_are_rejected_by_name(name):
    model, variables, tokens = setup(name, 0)
    size = model.config.source_vocab_size
    whole = np.ones((BATCH, 3), np.int32)

    def apply(source, segments=None, tokens=tokens):
        return model.apply(variables, tokens, source=source, source_segments=segments)

    def generate(source):
        return jf.generate(
            model, variables, [[1]] * 2, max_new_tokens=1, key=jax.random.key(0), source=source
        )

    wrong = {
        "source is None": lambda: apply(None),
        "source is 17 long; max_source_length is 16": lambda: apply(np.ones((BATCH, 17), int)),
        f"source hold id {size}; source_vocab_size is {size}": lambda: apply(whole * size),
        "source has no tokens": lambda: apply(whole[:, :0]),
        "source has no rows": lambda: jf.start(model, variables, 2, 4, whole[:0]),
        "source 1 is nothing but padding": lambda: apply(whole, np.array([[0, 1, 0], [0, 0, 0]])),
        "source_segments are": lambda: apply(whole, np.ones((BATCH, 4), int)),
        "source has 2 rows; tokens have 1": lambda: apply(whole, tokens=tokens[:1]),
        r"source are float32 \(2, 3\)": lambda: apply(np.ones((2, 3), np.float32)),
        f"source is None; a {type(model).__name__} reads one": lambda: generate(None),
        "source has 1 rows; there are 2 prompts": lambda: generate([[1]]),
        "source 1 is empty": lambda: generate([[1], []]),
        "source 0 has 17 tokens; max_source_length is 16": lambda: generate([[1] * 17, [1]]),
        f"source 1 holds id {size}; source_vocab_size": lambda: generate([[1], [size]]),
        "source 0 is float64": lambda: generate([[0.5], [1]]),
        "source has 2 rows; batch_size, 3, must be": lambda: jf.start(
            model, variables, 3, 4, [[1], [2]]
        ),
        "source has 1 rows; tokens have 2": lambda: jf.score(
            model, variables, tokens, source=[[1]]
        ),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()
    plain = tiny.build()
    with pytest.raises(ValueError, match="source was given, but a Decoder reads none"):
        jf.start(plain, tiny.weights(plain, 0), 1, 4, source=[[1]])
