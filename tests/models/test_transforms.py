"""JAX's transformations of models with default settings: derivatives, vmap, checkify, export."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import checkify

import jaxformer as jf
from tests.properties import tiny
from tests.properties.models import MODELS
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")

CASES = {**MODELS, "encoder": {"kind": jf.EncoderConfig, "num_layers": 1}}
LENGTH, SOURCE_LENGTH = 12, 7


def each_model(*quick):
    return pytest.mark.parametrize("name", mostly_slow(list(CASES), *quick))


def source_of(model, batch_size=2, length=SOURCE_LENGTH):
    """Returns the keyword argument `source` of the model; empty if it reads none."""
    if not model.config.reads_source:
        return {}
    return {"source": jnp.asarray(tiny.source(model, 9, batch_size, length))}


@cache
def losses(name):
    """Returns a model's loss of (variables, embeddings), by default and by explicit attention."""

    def loss(model, variables, x):
        logits = model.apply(variables, x, **source_of(model, len(x)))
        return jnp.sin(logits).mean()

    models = [tiny.build(**CASES[name], attention=way) for way in ("auto", "explicit")]
    return tiny.weights(models[0], 0), [partial(loss, model) for model in models]


def random_like(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)


def directional(loss, direction):
    return lambda v: jax.jvp(loss, (v,), (direction,))[1]


DERIVATIVES = {
    "jvp": lambda loss, v, t: directional(loss, t)(v),
    "grad": lambda loss, v, t: jax.grad(loss)(v),
    "forward over reverse": lambda loss, v, t: jax.jvp(jax.grad(loss), (v,), (t,))[1],
    "reverse over forward": lambda loss, v, t: jax.grad(directional(loss, t))(v),
    "hessian": lambda loss, v, t: jax.hessian(
        lambda s: loss(jax.tree.map(lambda x, d: x + s.sum() * d, v, t))
    )(jnp.zeros(2)),
    "vmap of gradients": lambda loss, v, t: jax.vmap(
        lambda s: jax.grad(loss)(jax.tree.map(lambda x, d: x + s * d, v, t))
    )(jnp.array([0.0, 0.1])),
    "jacfwd": lambda loss, v, t: jax.jacfwd(
        lambda s: loss(jax.tree.map(lambda x, d: x + s * d, v, t))
    )(0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("derivative", DERIVATIVES)
@each_model("decoder")
def test_automatic_choice_of_attention_implementation_preserves_derivatives(name, derivative):
    variables, both = losses(name)
    x, direction = tiny.embeddings(1, 2, LENGTH, 8), random_like(variables, 2)
    found, wanted = (
        jax.jit(lambda v, t, x, loss=loss: DERIVATIVES[derivative](lambda v: loss(v, x), v, t))(
            variables, direction, x
        )
        for loss in both
    )
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        scale = 1e-3 + float(abs(other).max())
        np.testing.assert_allclose(one / scale, other / scale, atol=2e-3)


@each_model()
def test_forward_mode_tangent_equals_finite_difference(name):
    """The change by differences, which share no rule of derivatives."""
    variables, (loss, _) = losses(name)
    x, direction = tiny.embeddings(1, 2, LENGTH, 8), random_like(variables, 2)

    def at(s):
        return loss(jax.tree.map(lambda v, d: v + s * d, variables, direction), x)

    # With a larger step a router would choose other experts, and unit vectors would turn far.
    step = 1e-3 if "experts" in name or name == "gated delta" else 1e-2
    change = (at(step) - at(-step)) / (2 * step)
    tangent = directional(lambda v: loss(v, x), direction)(variables)
    np.testing.assert_allclose(tangent, change, rtol=0.05, atol=2e-3)


@pytest.mark.slow
@each_model("decoder")
def test_checkify_finds_no_error_in_a_model_and_its_gradient(name):
    variables, (loss, _) = losses(name)
    x = tiny.embeddings(1, 2, LENGTH, 8)
    run = checkify.checkify(jax.value_and_grad(loss), errors=checkify.all_checks)
    error, (value, _) = jax.jit(run)(variables, x)
    assert error.get() is None
    np.testing.assert_allclose(value, loss(variables, x), rtol=1e-5, atol=1e-7)


def exported(model, variables, constraints=(), **given):
    """Exports a model for all batch sizes and lengths of the tokens and of the source."""
    reads = model.config.reads_source
    names = "b, l, k" if reads else "b, l"
    batch, length, *source = export.symbolic_shape(names, constraints=constraints)
    shapes = {"tokens": jax.ShapeDtypeStruct((batch, length), jnp.int32)}
    if reads:
        like = tiny.source(model, 0, 1, 1)
        shapes["source"] = jax.ShapeDtypeStruct((batch, *source, *like.shape[2:]), like.dtype)
    for name in given:
        shapes[name] = shapes["tokens"]

    def run(variables, inputs):
        return model.apply(variables, **inputs)

    return export.export(jax.jit(run))(variables, shapes)


def inputs_of(model, batch_size, length):
    """Returns the keyword arguments of a pass."""
    tokens = jnp.asarray(tiny.tokens(0, batch_size, length), jnp.int32)
    return {"tokens": tokens} | source_of(model, batch_size)


SIZES = ((1, 1), (2, 12), (3, 5), (1, 16))


@pytest.mark.slow
@pytest.mark.parametrize("length_at_most", mostly_slow([None, 16], None))
@each_model("decoder")
def test_model_exported_by_jax_accepts_all_batch_sizes_and_lengths(name, length_at_most):
    model = tiny.build(**CASES[name])
    variables = tiny.weights(model, 0)
    constraints = () if length_at_most is None else (f"l <= {length_at_most}",)
    program = exported(model, variables, constraints)
    for batch_size, length in SIZES:
        inputs = inputs_of(model, batch_size, length)
        wanted = model.apply(variables, **inputs)
        np.testing.assert_allclose(program.call(variables, inputs), wanted, atol=1e-5)


def test_model_with_a_mask_function_exported_by_jax_accepts_all_lengths():
    model = jf.build(tiny.build().config, mask=lambda query, key: key <= query)
    variables = tiny.weights(model, 0)
    program = exported(model, variables)
    for batch_size, length in ((1, 1), (3, 5)):
        inputs = inputs_of(model, batch_size, length)
        wanted = model.apply(variables, **inputs)
        np.testing.assert_allclose(program.call(variables, inputs), wanted, atol=1e-5)


@each_model("decoder")
def test_model_exported_by_jax_returns_nan_beyond_its_positions(name):
    model = tiny.build(**CASES[name])
    variables = tiny.weights(model, 0)
    program = exported(model, variables)
    inputs = inputs_of(model, 1, 17)
    assert jnp.isnan(program.call(variables, inputs)).all()


@pytest.mark.slow
def test_model_exported_by_jax_accepts_packed_documents():
    model = tiny.build()
    variables = tiny.weights(model, 0)
    tokens = jnp.asarray(tiny.tokens(0, 2, LENGTH), jnp.int32)
    segment_ids = jnp.asarray([[1] * 5 + [2] * 7, [1] * 8 + [0] * 4], jnp.int32)
    program = exported(model, variables, segment_ids=segment_ids)
    found = program.call(variables, {"tokens": tokens, "segment_ids": segment_ids})
    wanted = model.apply(variables, tokens, segment_ids)
    tiny.close(found, wanted, 1e-5, where=segment_ids != 0)


@pytest.mark.slow
@each_model()
def test_gradients_of_model_exported_by_jax_equal_those_of_the_original(name):
    model = tiny.build(**CASES[name])
    variables = tiny.weights(model, 0)
    program = exported(model, variables)
    inputs = inputs_of(model, 3, 5)

    def gradient(apply):
        return jax.grad(lambda v: jnp.sin(apply(v)).mean())(variables)

    assert program.has_vjp()
    found = gradient(lambda v: program.call(v, inputs))
    wanted = gradient(lambda v: model.apply(v, **inputs))
    tiny.all_close(found, wanted, 1e-4)
