"""`jax_enable_x64`, which sets JAX's default dtypes to 64 bits, does not change any result."""

import ast
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxformer as jf
from jaxformer.decoding.fill import fill
from jaxformer.functional import chunked_cross_entropy
from jaxformer.functional.dropout import dropout
from jaxformer.functional.losses.token_masking import mask_tokens
from jaxformer.interpret import (
    AlignmentSettings,
    InterchangePairs,
    InterchangeSite,
    attribute_neurons,
    composition_scores,
    copying_scores,
    train_alignment,
)
from jaxformer.interpret.attribution import attribute, input_gradients
from jaxformer.interpret.circuits import evaluate_circuits
from jaxformer.interpret.edge_attribution import attribute_edges
from jaxformer.interpret.edges import patch_edges
from jaxformer.interpret.lens import jacobian_lens, logit_lens
from jaxformer.interpret.patching import LogitDifference
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.parameters import init
from jaxformer.training.batch import Batch
from jaxformer.training.objectives import CrossEntropy
from jaxformer.training.step import init_state, make_step
from jaxformer.verify import certify
from tests.properties import tiny
from tests.properties.models import KINDS, MODELS
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
PACKAGE = Path(__file__).parents[1] / "jaxformer"
# Functions whose default dtype depends on the flag, with the index of the argument `dtype`.
OF_JNP = {"zeros": 1, "ones": 1, "empty": 1, "full": 2, "eye": 3, "arange": 3, "linspace": 5}
OF_RANDOM = {"normal": 2, "uniform": 2, "gumbel": 2, "exponential": 2, "laplace": 2, "randint": 4}
OF_RANDOM |= {"truncated_normal": 4}
ALL_MODELS = {**MODELS, "encoder": {"kind": jf.EncoderConfig}, "bfloat16": {"dtype": "bfloat16"}}
GREEDY = jf.Sampler(temperature=0.0)


def without_dtype(path):
    """Returns a module's calls that create an array without naming the dtype."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        module, _, name = called.rpartition(".")
        index = {"jnp": OF_JNP, "jax.random": OF_RANDOM}.get(module, {}).get(name)
        named = any(keyword.arg == "dtype" for keyword in node.keywords)
        if index is not None and not named and len(node.args) <= index:
            found.append(ast.unparse(node))
        # The dtype of the draw is the probability's dtype: float64 for a Python number.
        if called == "jax.random.bernoulli" and "jnp.float32(" not in ast.unparse(node):
            found.append(ast.unparse(node))
    return found


def test_every_array_is_created_with_an_explicit_dtype():
    found = {path: without_dtype(path) for path in PACKAGE.rglob("*.py")}
    assert not {str(path.relative_to(PACKAGE)): calls for path, calls in found.items() if calls}


def wide_dtypes(jaxpr):
    """Returns the float64 values in a program, except weakly typed scalars."""
    for equation in jaxpr.eqns:
        for value in equation.outvars:
            wide = getattr(value.aval, "dtype", None) in (np.float64, np.complex128)
            if wide and not value.aval.weak_type:
                yield f"{value.aval} = {equation.primitive}"
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from wide_dtypes(inner)


@cache
def random_batch(model):
    """Returns random inputs and targets, and sources for a model that reads sources."""
    tokens = tiny.tokens(0, 2, tiny.LENGTH)
    read = tiny.read(model, tiny.sources(model, 0, 2))
    read = {name: np.asarray(x) for name, x in read.items()}
    return Batch(tokens[:, :-1], tokens[:, 1:], np.ones((2, tiny.LENGTH - 1), np.float32), **read)


@pytest.mark.parametrize("name", mostly_slow(ALL_MODELS, "post-norm encoder-decoder", slow=KINDS))
def test_no_value_of_a_model_or_its_gradient_is_float64(name):
    model = tiny.build(**ALL_MODELS[name])
    batch = random_batch(model)
    with jax.enable_x64(True):
        params = jax.eval_shape(lambda: init(model, jax.random.key(0)))["params"]
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}

        def loss(*arguments):
            return CrossEntropy().loss(model, *arguments).loss

        gradient = jax.value_and_grad(loss)
        programs = (
            jax.make_jaxpr(lambda: init(model, jax.random.key(0)))(),
            jax.make_jaxpr(gradient)(params, batch, jax.random.key(0)),
        )
    assert not [line for program in programs for line in wide_dtypes(program.jaxpr)]


# ---- values: each program runs with and without the flag


@cache
def built(name):
    model = tiny.build(**ALL_MODELS[name])
    return model, tiny.weights(model, 1), tiny.sources(model, 1, 2)


def train(name, lora=LoraConfig(), label_smoothing=0.0, **options):  # noqa: B008 (frozen)
    """Returns the losses and the parameters of two updates."""
    model, variables, _ = built(name)
    optimizer = optax.adamw(1e-2)
    batch = jax.tree.map(lambda x: x[None], random_batch(model))
    averages = "ema_decay" in options
    base = jax.tree.map(jnp.copy, variables["params"]) if lora.lora_rank else None
    state = init_state(model, optimizer, 0, base, lora=lora, averages=averages)
    step, losses = make_step(model, optimizer, CrossEntropy(label_smoothing), **options), []
    for _ in range(2):
        state, measured = step(state, batch)
        losses.append(measured)
    return losses, state.parts()[0]


def decoded(function, name, **options):
    """Decodes prompts given as lists, whose integers are int64 under the flag."""
    model, variables, sources = built(name)
    read = {} if sources is None else {"source": sources}
    return function(model, variables, [[1, 2], [3]], max_new_tokens=3, **options, **read).tokens


def explained(function, name, *arguments):
    model, variables, sources = built(name)
    tokens = tiny.tokens(2, 2, 6)
    read = {} if sources is None else {"source": sources}
    return function(model, variables, tokens, *arguments, **read)


def measured_edges():
    """Returns effects of edges and metrics of circuits."""
    model, variables, _ = built("decoder")
    texts = tiny.tokens(2, 2, 6), tiny.tokens(3, 2, 6)
    arguments = (model, variables, *texts, LogitDifference(1, 2))
    found = attribute_edges(*arguments)
    circuits = evaluate_circuits(*arguments, [found.strongest(9)])
    return found.effects, patch_edges(*arguments, found.strongest(9)).effects, circuits


def saved(name, folder):
    model, variables, _ = built(name)
    jf.save(folder, model, variables)
    return jf.load(folder).variables


def aligned():
    model, variables, _ = built("decoder")
    pairs = InterchangePairs(*(tiny.tokens(seed, 8, 6) for seed in (0, 1)), np.arange(8))
    place = InterchangeSite(0, (2,))
    return train_alignment(model, variables, pairs, place, 2, AlignmentSettings(2, 4))


def in_chunks():
    hidden = jax.random.normal(jax.random.key(0), (2, 4, 8), jnp.float32)
    kernel, targets = jnp.ones((8, 17), jnp.float32), jnp.asarray(tiny.tokens(0, 2, 4))
    return jax.value_and_grad(chunked_cross_entropy, argnums=(0, 1))(hidden, kernel, targets)


def proved():
    model, variables, _ = built("decoder")
    found = certify(model, variables, length=12, allow_remarks=True)
    return {each.name: each.holds for each in found}


PROGRAMS = {
    "initial weights": lambda path: init(tiny.build(**MODELS["lstm"]), jax.random.key(0)),
    "dropout": lambda path: dropout(jax.random.key(0), jnp.ones(99, jnp.float32), 0.3),
    "masked tokens": lambda path: mask_tokens(
        jax.random.key(0), jnp.asarray(tiny.tokens(0, 2, 40)), 12, 13
    ),
    "chunked loss": lambda path: in_chunks(),
    "updates": lambda path: train("decoder", label_smoothing=0.1, ema_decay=0.9),
    "updates of an adapter": lambda path: train("llama", LoraConfig(lora_rank=2)),
    "updates of an encoder": lambda path: train("encoder", skip_non_finite=True),
    "updates of a translator": lambda path: train("encoder-decoder"),
    "updates of an LSTM": lambda path: train("lstm"),
    "greedy tokens": lambda path: decoded(jf.generate, "llama", sampler=GREEDY),
    "sampled tokens": lambda path: decoded(jf.generate, "decoder", key=jax.random.key(0)),
    "sampled tokens of an LSTM": lambda path: decoded(jf.generate, "lstm", key=jax.random.key(0)),
    "beams": lambda path: decoded(jf.beam_search, "decoder", beam_width=2),
    "beams of a translator": lambda path: decoded(jf.beam_search, "encoder-decoder", beam_width=2),
    "scores": lambda path: explained(jf.score, "decoder"),
    "filled tokens": lambda path: fill(*built("encoder")[:2], [[1, 12, 3]], 12),
    "attribution": lambda path: explained(attribute, "decoder", [1, 2]),
    "attribution of a translator": lambda path: explained(attribute, "encoder-decoder", [1, 2]),
    "attribution of neurons": lambda path: explained(attribute_neurons, "decoder", [1, 2]),
    "composition scores": lambda path: composition_scores(*built("llama")[:2], 1),
    "copying scores": lambda path: copying_scores(*built("llama")[:2]),
    "an alignment": lambda path: aligned(),
    "gradients of inputs": lambda path: explained(input_gradients, "decoder", [1, 2], -1),
    "logit lens": lambda path: explained(logit_lens, "decoder"),
    "Jacobian lens": lambda path: explained(jacobian_lens, "decoder"),
    "edges and circuits": lambda path: measured_edges(),
    "a certificate": lambda path: proved(),
    "a saved model": lambda path: saved("decoder", path / f"x64-{jax.config.jax_enable_x64}"),
}


QUICK = ("attribution",)


@pytest.mark.parametrize("name", mostly_slow(PROGRAMS, *QUICK, slow=PROGRAMS))
def test_library_results_do_not_change_under_enable_x64(name, tmp_path):
    plain = jax.device_get(PROGRAMS[name](tmp_path))
    with jax.enable_x64(True):
        wide = jax.device_get(PROGRAMS[name](tmp_path))
    assert jax.tree.structure(plain) == jax.tree.structure(wide)
    for one, other in zip(*map(jax.tree.leaves, (plain, wide)), strict=True):
        assert np.asarray(one).dtype.kind == np.asarray(other).dtype.kind
        assert np.asarray(other).dtype != np.float64 or isinstance(other, float | np.float64)
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)


WINDOWS = {"ring": {"window": 4}, "ring and all tokens": {"window": (4, None)}}
KEEPS = {name: ALL_MODELS[name] for name in ALL_MODELS if name != "encoder"} | WINDOWS


@pytest.mark.parametrize("name", mostly_slow(KEEPS, slow=("ring and all tokens", "recurrent")))
def test_extending_a_cache_under_x64_creates_no_64_bit_arrays(name):
    """A user's own loop can therefore carry a cache, starting with the first token."""
    model = tiny.build(**KEEPS[name])
    source = tiny.sources(model, 0, 2)
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 2, 3)
    segment_ids = np.array([[1, 1, 1], [0, 1, 2]])
    with jax.enable_x64(True):
        cache = jf.init_cache(model, variables, 2, 200, source)
        for keep_states in (False, True):
            _, after = jf.extend(
                model, variables, tokens, cache, segment_ids, keep_states=keep_states
            )
            assert {x.dtype.itemsize for x in jax.tree.leaves(after)} <= {2, 4}
            rewound = after.rewind([1, 0]) if keep_states else after
            assert {x.dtype.itemsize for x in jax.tree.leaves(rewound)} <= {2, 4}
