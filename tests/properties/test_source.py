"""Models that read a source depend on all of it, ignore its padding, and encode it once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import jaxformer as jf
from jaxformer.decoding.translate import check_translates
from jaxformer.models.flops import forward_flops
from jaxformer.models.parameters import shape_tree
from jaxformer.models.sharding.parameters import make_abstract_mesh, shardings
from jaxformer.verify import rules
from tests.properties import tiny
from tests.properties.chunks import chunked
from tests.properties.models import MODELS
from tests.properties.witness import by_jacobian, exactly, one_number
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH, LENGTH = 2, 8
SOURCED = [name for name in MODELS if "source" in str(MODELS[name]) or "encoder" in name]
WITH_IDS = [name for name in SOURCED if "source_features" not in MODELS[name]]
each_sourced = pytest.mark.parametrize("name", mostly_slow(SOURCED, "encoder-decoder"))
paddings = st.lists(
    st.lists(st.sampled_from((0, 1, 1, 2)), min_size=LENGTH, max_size=LENGTH).filter(any),
    min_size=BATCH,
    max_size=BATCH,
).map(np.array)


def setup(name, seed):
    model = tiny.build(**MODELS[name])
    return model, tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)


@pytest.mark.slow
@each_sourced
@tiny.many
@given(seed=tiny.seeds, padding=paddings)
def test_logits_depend_on_exactly_the_source_tokens_of_their_sequence(name, seed, padding):
    """∂ output i / ∂ source j ≠ 0 exactly for the tokens of the batch element's own source."""
    model, variables, tokens = setup(name, seed)
    source = tiny.source_vectors(model, seed, BATCH, LENGTH)
    found = by_source(model)(variables, tokens, source, jnp.asarray(padding))
    exactly(found, rules.source_rule(np.ones_like(tokens), padding))


@tiny.cache
def by_source(model):
    def run(variables, tokens, source, segment_ids):
        def logits(source):
            read = {"source": source, "source_segment_ids": segment_ids}
            return one_number(model.apply(variables, tokens, **read))

        return by_jacobian(logits, source)

    return jax.jit(run)


@pytest.mark.slow
@each_sourced
@given(seed=tiny.seeds, padding=paddings)
def test_moving_source_padding_does_not_change_the_logits(name, seed, padding):
    """Padding before, inside or after the source, with any ids, does not change the logits."""
    model, variables, tokens = setup(name, seed)
    source = tiny.source(model, seed, BATCH, LENGTH)
    read = {"source": source, "source_segment_ids": padding}
    found = tiny.apply(model)(variables, tokens, **read)
    # tokens first, then padding to length 12
    first, segment_ids = np.zeros((BATCH, 12, *source.shape[2:])), np.zeros((BATCH, 12), np.int32)
    first = first.astype(source.dtype)
    for index in range(BATCH):
        own = source[index][padding[index] != 0]
        first[index, : len(own)], segment_ids[index, : len(own)] = own, 1
    read = {"source": first, "source_segment_ids": segment_ids}
    tiny.close(found, tiny.apply(model)(variables, tokens, **read))


@pytest.mark.slow
@each_sourced
@given(seed=tiny.seeds, padding=paddings)
def test_nan_in_source_padding_does_not_change_loss_and_gradients(name, seed, padding):
    """Loss and gradients are bitwise equal to those without NaN, and finite."""
    model, variables, _ = setup(name, seed)
    segment_ids = jnp.ones((BATCH, tiny.LENGTH), int)
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, model.config.embed_dim)
    clean = tiny.source_vectors(model, seed + 1, BATCH, LENGTH)
    source = jnp.where((padding != 0)[..., None], clean, jnp.nan)
    found, wanted = (
        tiny.loss_and_gradients(model)(
            variables, x, segment_ids, source=some, source_segment_ids=jnp.asarray(padding)
        )
        for some in (source, clean)
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert jax.tree.all(jax.tree.map(lambda leaf: np.isfinite(leaf).all(), found))


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCED)
@given(seed=tiny.seeds)
def test_decoding_with_an_initialized_cache_does_not_read_encoder_weights(name, seed):
    """After `init_cache`, decoding does not need the encoder: NaN in its weights has no effect."""
    model, variables, tokens = setup(name, seed)
    source = tiny.sources(model, seed, BATCH)
    whole = tiny.apply(model)(variables, tokens, **tiny.read(model, source))
    cache = jf.init_cache(model, variables, BATCH, tiny.LENGTH, source)
    forgotten = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), variables["params"]["encoder"])
    variables = {"params": {**variables["params"], "encoder": forgotten}}
    tiny.close(chunked(model, variables, tokens, [5, 5, 1, 1], cache=cache)[0], whole)


@pytest.mark.slow
@each_sourced
@given(seed=tiny.seeds)
def test_batch_elements_that_share_a_source_have_the_logits_of_separate_copies(name, seed):
    """Batch elements that share a source give the same logits as with a copy of it each."""
    model, variables, _ = setup(name, seed)
    source, tokens = tiny.sources(model, seed, 2), tiny.tokens(seed, 6, 5)
    shared = jf.init_cache(model, variables, 6, 5, source)
    each = jf.init_cache(model, variables, 6, 5, [source[i // 3] for i in range(6)])
    found, wanted = (jf.extend(model, variables, tokens, cache)[0] for cache in (shared, each))
    tiny.close(found, wanted)


@pytest.mark.parametrize("name", mostly_slow(WITH_IDS, "encoder-decoder"))
def test_invalid_sources_raise_errors_that_name_the_argument(name):
    model, variables, tokens = setup(name, 0)
    size = model.config.source_vocab_size
    whole = np.ones((BATCH, 3), np.int32)

    def apply(source, segment_ids=None, tokens=tokens):
        return model.apply(variables, tokens, source=source, source_segment_ids=segment_ids)

    def generate(source):
        return jf.generate(
            model, variables, [[1]] * 2, max_new_tokens=1, key=jax.random.key(0), source=source
        )

    wrong = {
        "source is missing": lambda: apply(None),
        "source has length 17, more than max_source_length": lambda: apply(
            np.ones((BATCH, 17), int)
        ),
        f"source contain id {size}, but source_vocab_size is {size}": lambda: apply(whole * size),
        "source does not contain any tokens": lambda: apply(whole[:, :0]),
        "source has batch size 0; it must be": lambda: jf.init_cache(
            model, variables, 2, 4, whole[:0]
        ),
        r"source\[1\] contains only padding": lambda: apply(
            whole, np.array([[0, 1, 0], [0, 0, 0]])
        ),
        "source_segment_ids have shape": lambda: apply(whole, np.ones((BATCH, 4), int)),
        "source has batch size 2, but tokens have batch size 1": lambda: apply(
            whole, tokens=tokens[:1]
        ),
        r"source are float32 \(2, 3\)": lambda: apply(np.ones((2, 3), np.float32)),
        f"source is missing; {type(model).__name__} needs a source": lambda: generate(None),
        "there are 1 sources and 2 prompts": lambda: generate([[1]]),
        "source 1 is empty": lambda: generate([[1], []]),
        "source 0 has 17 tokens, more than max_source_length": lambda: generate([[1] * 17, [1]]),
        f"source 1 contains id {size}, but source_vocab_size": lambda: generate([[1], [size]]),
        "source 0 is float64": lambda: generate([[0.5], [1]]),
        "batch_size is 3, but it must be a multiple": lambda: jf.init_cache(
            model, variables, 3, 4, [[1], [2]]
        ),
        "source has batch size 1, but tokens has batch size 2": lambda: jf.score(
            model, variables, tokens, source=[[1]]
        ),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()
    plain = tiny.build()
    with pytest.raises(
        ValueError, match="source is not accepted, because Decoder does not have an encoder"
    ):
        jf.init_cache(plain, tiny.weights(plain, 0), 1, 4, source=[[1]])


# ---- a source of floats


def one_hot_pair(name, seed):
    """Returns (model of tokens, model of features, their variables) that compute the same.

    The kernel of the features is the table of the source's tokens.
    """
    size = tiny.SIZES["vocab_size"]
    own = ("source_features", "source_vocab_size", "share_embeddings")
    options = {x: y for x, y in MODELS[name].items() if x not in own}
    tokens = tiny.build(**options, share_embeddings=False)
    features = tiny.build(**options, source_features=size)
    variables = tiny.weights(tokens, seed)
    encoder = variables["params"]["encoder"]
    table = encoder["embedding"]["tokens"]
    embedding = {"kernel": table, "bias": jnp.zeros(table.shape[1])}
    params = variables["params"] | {"encoder": encoder | {"embedding": embedding}}
    return tokens, features, variables, {"params": params}


def as_arrays(sequences, form):
    """Returns sequences as NumPy arrays, JAX arrays, nested lists, or in half precision."""
    forms = {
        "numpy": lambda x: x.astype(np.float64),
        "jax": jnp.asarray,
        "lists": np.ndarray.tolist,
        "bfloat16": lambda x: jnp.asarray(x, jnp.bfloat16),
    }
    return [forms[form](sequence) for sequence in sequences]


FORMS = st.sampled_from(("numpy", "jax", "lists", "bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["frames", "attention lstm"])
@given(seed=tiny.seeds, form=FORMS)
def test_one_hot_source_features_decode_like_source_tokens(name, seed, form):
    """Both models decode, search and score alike, whatever the lengths of the sources."""
    tokens, features, variables, same = one_hot_pair(name, seed)
    ids = tiny.sources(tokens, seed, 3)
    size = tiny.SIZES["vocab_size"]
    floats = as_arrays([np.eye(size, dtype=np.float32)[sequence] for sequence in ids], form)
    prompts = [[1], [2, 3], [4]]
    options = {"max_new_tokens": 4, "sampler": jf.Sampler(temperature=0.0)}
    wanted = jf.generate(tokens, variables, prompts, source=ids, **options)
    found = jf.generate(features, same, prompts, source=floats, **options)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    tiny.close(found.log_probs, wanted.log_probs)
    text = tiny.tokens(seed, 3, 4)
    found = jf.score(features, same, text, source=floats)
    tiny.close(found, jf.score(tokens, variables, text, source=ids))
    found = jf.beam_search(features, same, prompts, source=floats, max_new_tokens=3)
    wanted = jf.beam_search(tokens, variables, prompts, source=ids, max_new_tokens=3)
    tiny.close(found.scores, wanted.scores)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(WITH_IDS, "encoder-decoder"))
@given(seed=tiny.seeds, form=st.sampled_from(("numpy", "jax", "lists")), batch=st.integers(1, 3))
def test_generation_from_source_embeddings_equals_source_token_ids(name, seed, form, batch):
    model, variables, _ = setup(name, seed)
    params = variables["params"]
    table = {**params["embedding"], **params["encoder"].get("embedding", {})}["tokens"]
    ids = tiny.sources(model, seed, 3)
    floats = as_arrays([np.asarray(table)[sequence] for sequence in ids], form)
    options = {"max_new_tokens": 4, "sampler": jf.Sampler(temperature=0.0), "batch_size": batch}
    found, wanted = (
        jf.generate(model, variables, [[1], [2], [3]], source=source, **options)
        for source in (floats, ids)
    )
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    tiny.close(found.log_probs, wanted.log_probs)


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_source_features_as_array_or_list_give_equal_logits(seed):
    model, variables, tokens = setup("frames", seed)
    source = tiny.source(model, seed, BATCH, LENGTH)
    wanted = tiny.apply(model)(variables, tokens, source=source)
    for form in (source, jnp.asarray(source), list(source)):
        found = jf.inspect(model, variables, tokens, source=form).logits
        tiny.close(found, wanted)


@pytest.mark.slow
def test_invalid_source_features_are_rejected():
    model, variables, tokens = setup("frames", 0)
    good, nan = np.ones((2, 3), np.float32), np.full((2, 3), np.nan)
    accepted = r"float \[batch, length, 3\] \(features\)"

    def apply(source, segment_ids=None):
        return model.apply(variables, tokens, source=source, source_segment_ids=segment_ids)

    def generate(source):
        greedy = jf.Sampler(temperature=0.0)
        return jf.generate(
            model, variables, [[1]] * 2, max_new_tokens=1, sampler=greedy, source=source
        )

    wrong = {
        f"source is missing; this model needs a source, {accepted}": lambda: apply(None),
        f"source are int64 .2, 3.; they must be {accepted}": lambda: apply(np.ones((2, 3), int)),
        f"source are float64 .2, 3, 4.; they must be {accepted}": lambda: apply(np.ones((2, 3, 4))),
        "source 1 is not finite at position 0": lambda: apply(np.stack([good, nan])),
        f"source is missing; .* needs a source: {accepted}": lambda: generate(None),
        r"source 1 is int64 .2,.; it must be float \[length, 3\]": lambda: generate([good, [1, 2]]),
        r"source 0 is float64 .2, 4.; it must be": lambda: generate([np.ones((2, 4)), good]),
        "source 1 is not finite at position 0; it": lambda: generate([good, nan]),
        "source 1 has positions with different": lambda: generate([good, [[1.0, 2.0], [1.0]]]),
        "source 1 is empty": lambda: generate([good, good[:0]]),
        "source 0 is empty": lambda: generate([[], good]),
        "source 0 has 17 tokens, more than max_source_length": lambda: generate(
            [np.ones((17, 3)), good]
        ),
        "source holds floats, but encoder_repetition_penalty": lambda: jf.generate(
            model,
            variables,
            [[1]],
            max_new_tokens=1,
            sampler=jf.Sampler(temperature=0.0),
            source=[good],
            constraints=jf.Constraints(encoder_repetition_penalty=2.0),
        ),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()
    padded = np.stack([good, np.concatenate([good[:1], nan[:1]])])
    assert np.isfinite(apply(padded, np.array([[1, 1], [1, 0]]))).all()  # NaN in padding
    pair, variables, _ = setup("encoder-decoder", 0)
    mixed = [[1], np.ones((1, pair.config.embed_dim))]
    with pytest.raises(ValueError, match="source has both ids and embeddings"):
        jf.init_cache(pair, variables, 2, 4, mixed)


def test_translate_rejects_models_with_source_features():
    model = tiny.build(**MODELS["frames"])
    with pytest.raises(ValueError, match="source_features is 3; it must be None to read text"):
        check_translates(model)


@pytest.mark.parametrize("kind", [jf.EncoderDecoderConfig, jf.RecurrentEncoderDecoderConfig])
def test_source_features_cannot_be_combined_with_source_vocab_size(kind):
    config = kind(vocab_size=9, source_features=3).resolved
    assert config.source_vocab_size is None
    assert not config.shares_table
    assert config.resolved == config
    with pytest.raises(ValueError, match="source_vocab_size is 7, but source_features is 3; a sou"):
        kind(source_features=3, source_vocab_size=7)
    with pytest.raises(ValueError, match=r"source_features is 0; it must be .* at least 1"):
        kind(source_features=0)


@pytest.mark.slow
def test_model_with_source_features_is_saved_and_loaded(tmp_path):
    model, variables, tokens = setup("frames", 0)
    jf.save(tmp_path / "model", model, variables)
    checkpoint = jf.load(tmp_path / "model")
    assert checkpoint.model == model.clone(execution=checkpoint.model.execution)
    source = tiny.source(model, 0, BATCH, LENGTH)
    found = checkpoint.model.apply(checkpoint.variables, tokens, source=source)
    np.testing.assert_array_equal(found, model.apply(variables, tokens, source=source))


def test_source_feature_layer_is_included_in_flops_and_sharded():
    small, large = (tiny.build(**MODELS["frames"] | {"source_features": n}) for n in (3, 5))
    added = forward_flops(large, 4, 7) - forward_flops(small, 4, 7)
    assert added == 2 * 7 * 2 * small.config.embed_dim  # 7 positions, 2 features more
    mesh = make_abstract_mesh({"fsdp": 2, "tensor": 2})
    placed = shardings(shape_tree(small), small, mesh)["encoder"]["embedding"]
    assert placed["kernel"].spec == PartitionSpec(None, "fsdp")
    assert not any(placed["bias"].spec)
