"""A sub-layer of the user's own is trained, decoded, inspected, saved and certified like others."""

from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

import jaxformer as jf
from jaxformer.functional import (
    Attention,
    Causal,
    FeedForward,
    LayerNorm,
    Packed,
    Residual,
    SubLayer,
    Window,
)
from jaxformer.verify import rules
from tests.models import own_stacks
from tests.models.own_layer import Memory, with_memory
from tests.properties import tiny
from tests.properties.chunks import cuts
from tests.properties.witness import exactly, jacobian

pytestmark = pytest.mark.usefixtures("quick_compilation")
CONFIG = tiny.build(num_layers=4, positions="rotary").config
LENGTH = tiny.LENGTH
LAYERS = jf.Decoder(CONFIG).architecture.stack.layers


@cache
def model():
    return with_memory(CONFIG)


def reference(weights, x, segment_ids, decay=0.9):
    """The formula of `Memory` in NumPy loops."""
    kernel, bias = (np.asarray(weights["input"][name], np.float64) for name in ("kernel", "bias"))
    hidden = np.zeros(x.shape)
    for index, ids in enumerate(segment_ids):
        state, last = np.zeros(x.shape[-1]), 0
        for t, segment in enumerate(ids):
            if segment:
                state = decay * state * (segment == last) + x[index, t] @ kernel + bias
                last, hidden[index, t] = segment, state
    return hidden


@pytest.mark.slow
def test_attention_without_a_packing_mask_stays_within_documents():
    """Steps see neither the empty slots of a cache nor another document, as whole sequences do."""
    for mask in (Causal(), Causal() & Window(3)):
        attention = Residual(Attention(4, 4, 2, mask=mask), LayerNorm())
        own = jf.Decoder(CONFIG, layers=((attention,),) * CONFIG.num_layers)
        variables, tokens = tiny.weights(own, 0), tiny.tokens(0, 1, 8)
        segment_ids = jnp.array([[1, 1, 1, 2, 2, 2, 0, 2]])
        whole = tiny.apply(own)(variables, tokens, segment_ids)
        cache, logits = jf.init_cache(own, variables, 1, 16), []
        for i in range(8):
            columns = slice(i, i + 1)
            each, cache = jf.extend(
                own, variables, tokens[:, columns], cache, segment_ids=segment_ids[:, columns]
            )
            logits.append(each)
        tiny.close(jnp.concatenate(logits, axis=1), whole, where=segment_ids != 0)


@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(2))
def test_user_defined_sublayer_output_equals_numpy_reference(seed, segment_ids):
    """What it reads and writes, captured in the first layer, with documents and padding."""
    variables, tokens = tiny.weights(model(), seed), tiny.tokens(seed, 2, LENGTH)
    points = ("block.input", "memory.hidden", "block.middle", "attention.heads")
    seen = jf.inspect(model(), variables, tokens, segment_ids=segment_ids, capture=points).captured
    assert [len(seen[name]) for name in points] == [4, 2, 4, 2]  # the layers that have the point
    weights = jax.tree.map(lambda x: x[0], variables["params"]["blocks"]["0"])
    x = np.asarray(seen["block.input"][0], np.float64)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    x = x * np.asarray(weights["memory_norm"]["scale"]) + np.asarray(weights["memory_norm"]["bias"])
    wanted = reference(weights["memory"], x, segment_ids)
    tiny.close(seen["memory.hidden"][0], wanted, 1e-4, where=segment_ids != 0)


@pytest.mark.slow
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(2), chunks=cuts())
def test_cached_chunks_through_user_defined_sublayer_equal_one_pass(seed, segment_ids, chunks):
    own_stacks.chunks_equal_one_pass(model(), seed, segment_ids, chunks)


@pytest.mark.slow
def test_scanned_and_unrolled_layers_give_equal_logits():
    """Layers of different kinds repeat with a period of two."""
    variables, tokens = tiny.weights(model(), 0), tiny.tokens(0, 2, LENGTH)
    wanted = tiny.apply(model())(variables, tokens)
    scanned = replace(model(), execution=jf.Execution(layers="scan"))
    tiny.close(scanned.apply(variables, tokens), wanted)
    _, cache = jf.extend(
        scanned, variables, tokens[:, :8], jf.init_cache(scanned, variables, 2, 12)
    )
    tiny.close(jf.extend(scanned, variables, tokens[:, 8:], cache)[0], wanted[:, 8:])


@pytest.mark.slow
def test_user_defined_sublayer_has_exactly_the_dependencies_of_its_mask():
    own_stacks.dependencies_are_the_rules(model())


@pytest.mark.slow
def test_generate_equals_greedy_choice_from_uncached_forward_passes():
    variables, prompt = tiny.weights(model(), 2), tiny.tokens(2, 2, 5)
    greedy = jf.Sampler(temperature=0.0)
    out = jf.generate(model(), variables, prompt, max_new_tokens=6, sampler=greedy)
    text = np.concatenate([prompt, out.tokens], axis=1)
    logits = model().apply(variables, text)
    np.testing.assert_array_equal(logits[:, 4:-1].argmax(axis=-1), out.tokens)
    with pytest.raises(ValueError, match="the last state of the sub-layer 'memory'"):
        jf.extend(model(), variables, prompt, jf.init_cache(model(), variables, 2, 8))[1].rewind(1)


@pytest.mark.slow
def test_user_defined_sublayer_is_saved_by_name_and_loaded_with_its_class(tmp_path):
    """Without the class, and with one that has other fields, loading says what is missing."""
    own_stacks.a_saved_model_is_equal(tmp_path / "own", model(), [Memory])
    with pytest.raises(ValueError, match=r"\[0\].sublayer is the class .*:Memory, .*\[Memory\]\)"):
        jf.load(tmp_path / "own")
    other = dataclass(frozen=True)(type("Memory", (SubLayer,), {"name": "memory"}))
    with pytest.raises(ValueError, match=r"has the fields decay, .* Memory has no fields"):
        jf.load(tmp_path / "own", layers=[other])


@pytest.mark.slow
def test_user_defined_sublayer_is_trained():
    """The step of the package trains it: the loss of one text falls."""
    from jaxformer.training.batch import Batch
    from jaxformer.training.step import init_state, make_step

    tokens = tiny.tokens(4, 1, LENGTH)[None]
    state = init_state(model(), optax.adam(1e-2), 0)
    step, losses = make_step(model(), optax.adam(1e-2)), []
    for _ in range(20):
        state, measured = step(state, Batch(tokens[..., :-1], tokens[..., 1:]))
        losses.append(float(measured.loss))
    assert losses[-1] < 0.7 * losses[0]


@dataclass(frozen=True)
class Ahead(Memory):
    """Reads later tokens, although it says that it does not."""

    def __call__(self, weights, x, at):
        return super().__call__(weights, x[:, ::-1], at)


@dataclass(frozen=True)
class Forgetful(Memory):
    """Keeps no state."""

    def init_state(self, weights, start):
        return None


def own(sublayer):
    def changed(part):
        is_memory = isinstance(part.sublayer, Memory)
        return replace(part, sublayer=sublayer) if is_memory else part

    layers = tuple(tuple(changed(part) for part in layer) for layer in model().layers)
    return replace(model(), layers=layers)


def test_jacobian_reveals_a_sublayer_that_declares_the_wrong_mask():
    bad = own(Ahead())
    x, segment_ids = tiny.embeddings(0, 2, LENGTH, CONFIG.embed_dim), np.ones((2, LENGTH), int)
    found = jacobian(bad)(tiny.weights(bad, 0), x, jnp.asarray(segment_ids), None)
    with pytest.raises(AssertionError):
        exactly(found, rules.model_rule(bad.config, segment_ids, layers=bad.layers))


def test_error_for_invalid_layers_names_layer_and_sublayer(tmp_path):
    variables, layers = tiny.weights(model(), 0), model().layers
    forgetful = own(Forgetful())
    with pytest.raises(ValueError, match="layer 0: the sub-layer 'memory' reads other tokens, but"):
        jf.init_cache(forgetful, variables, 1, 8)
    twice = (Residual(FeedForward(8)), Residual(FeedForward(8)))
    for wrong, message in (
        (layers[:2], "layers has 2 entries, but the config has num_layers 4"),
        ((*layers[:3], Memory()), r"layers\[3\] is a Memory; it must be a tuple of at least"),
        ((*layers[:3], (Memory(),)), r"layers\[3\] has a Memory; its entries must be Residual"),
        ((twice, *layers[1:]), r"layers\[0\] has 2 sub-layers named 'feedforward'"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(model(), layers=wrong).apply(variables, tiny.tokens(0, 1, 3))
    with pytest.raises(ValueError, match="parameter blocks/"):
        model().apply(tiny.weights(jf.Decoder(CONFIG), 0), tiny.tokens(0, 1, 3))
    with pytest.raises(ValueError, match=r"layers is .*; only jaxformer's own format can store it"):
        jf.export(tmp_path / "out", model(), variables)
    ahead = tuple((Residual(replace(x[0].sublayer, mask=Packed())), x[1]) for x in LAYERS)
    with pytest.raises(ValueError, match="position 0 attends to the later position 1"):
        jf.init_cache(replace(jf.Decoder(CONFIG), layers=ahead), variables, 1, 8)
