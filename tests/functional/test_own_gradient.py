"""Functions with a gradient of their own, in any composition of JAX's transformations."""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from jaxformer.functional.own_gradient import own_gradient
from tests.properties import tiny

WORDS = np.array([2, 0, 1])


def product(x, words, rest):
    """A function with an integer argument and an argument without a gradient."""
    return jnp.sin(x[words]) * x * rest["scale"] + 0.0 * rest["unused"], jnp.cos(x).sum()


def forward(x, words, rest):
    return product(x, words, rest), (x, words, rest["scale"], jnp.cos(x[words]))


def backward(residuals, cotangents, factor=1.0):
    x, words, scale, cosine = residuals
    first, second = cotangents
    scaled = first * scale
    moved = jnp.zeros_like(x).at[words].add(scaled * x * cosine)
    of_x = scaled * jnp.sin(x[words]) + moved - second * jnp.sin(x)
    of_scale = (first * jnp.sin(x[words]) * x).sum()
    return factor * of_x, None, {"scale": factor * of_scale, "unused": None}


def of_one_array(function):
    """Returns R³ → R³."""

    def run(x):
        first, second = function(x, WORDS, {"scale": x[0], "unused": jnp.float32(1)})
        return first + second

    return run


def with_shared_scale(function):
    """Returns R³ → R³, with a batch of x that has one scale."""

    def run(x):
        def each(factor):
            first, second = function(factor * x, WORDS, {"scale": x[0], "unused": x[1]})
            return first + second

        return jax.vmap(each)(jnp.array([0.5, 1.0, 2.0], jnp.float32)).sum(axis=0)

    return run


OWN = own_gradient(product, forward, backward)


def looped(f):
    def step(x, scale):
        return f(x * scale), None

    return lambda x: jax.lax.scan(step, x, jnp.array([0.9, 1.1], jnp.float32))[0]


def mapped(f):
    scales = jnp.array([0.5, 1.0, 2.0], jnp.float32)
    return lambda x: jax.vmap(lambda scale: f(x * scale))(scales).sum(axis=0)


# Each transformation returns another function R³ → R³.
DIRECTION = jnp.array([0.3, -1.0, 0.7], jnp.float32)
TRANSFORMATIONS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": looped,
    "vmap": mapped,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (DIRECTION,))[1],
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](DIRECTION)[0],
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](DIRECTION),
    "jacfwd": lambda f: lambda x: jax.jacfwd(f)(x) @ DIRECTION,
    "jacrev": lambda f: lambda x: jax.jacrev(f)(x) @ DIRECTION,
    "vmap of directions": lambda f: (
        lambda x: jax.vmap(lambda t: jax.jvp(f, (x,), (t,))[1])(jnp.eye(3)).sum(axis=0)
    ),
    "vmap of cotangents": lambda f: lambda x: jax.vmap(jax.vjp(f, x)[1])(jnp.eye(3))[0].sum(axis=0),
}


@pytest.mark.slow
@given(
    seed=tiny.seeds,
    names=st.lists(st.sampled_from(list(TRANSFORMATIONS)), min_size=1, max_size=3),
    use=st.sampled_from([of_one_array, with_shared_scale]),
)
@settings(max_examples=10)  # each example compiles
def test_custom_gradient_function_equals_plain_function_under_transforms(seed, names, use):
    x = jnp.asarray(np.random.default_rng(seed).normal(size=3), jnp.float32)
    found, wanted = (
        reduce(lambda f, name: TRANSFORMATIONS[name](f), names, use(function))(x)
        for function in (OWN, product)
    )
    scale = 1.0 + float(abs(wanted).max())
    np.testing.assert_allclose(found / scale, wanted / scale, atol=2e-5)


@pytest.mark.parametrize("compile", [pytest.param(lambda f: f, marks=pytest.mark.slow), jax.jit])
def test_custom_gradient_is_used_only_in_reverse_mode(compile):
    """The backward pass returns twice the gradient here, so that the two are distinct."""
    doubled = of_one_array(own_gradient(product, forward, lambda *x: backward(*x, factor=2.0)))
    x = jnp.array([0.2, 0.5, -1.0], jnp.float32)
    for transformation, factor in (("jvp", 1), ("jacfwd", 1), ("vjp", 2), ("jacrev", 2)):
        found, wanted = (
            compile(TRANSFORMATIONS[transformation](f))(x) for f in (doubled, of_one_array(product))
        )
        np.testing.assert_allclose(found, factor * wanted, rtol=1e-5, err_msg=transformation)


def test_custom_gradient_uses_a_separate_function_for_forward_mode_derivatives():
    """As for a kernel, whose derivative is that of an equal function."""
    kernel = own_gradient(
        lambda x: jax.lax.stop_gradient(x**2),
        lambda x: (x**2, x),
        lambda x, cotangent: (2 * x * cotangent,),
        derived=lambda x: x * x,
    )
    assert jax.jvp(kernel, (3.0,), (1.0,)) == (9.0, 6.0)
    assert jax.grad(kernel)(3.0) == jax.grad(lambda x: x**2)(3.0) == 6.0


def test_array_that_is_both_input_and_saved_value_is_stored_once():
    def loss(x):
        first, second = OWN(x, WORDS, {"scale": x[0], "unused": x[0]})
        return first.sum() + second

    x = jnp.ones(3)
    _, linear = jax.linearize(loss, x)
    stored = [y for y in jax.tree.leaves(linear) if getattr(y, "shape", None) == (3,)]
    floats = [y for y in stored if jnp.issubdtype(y.dtype, jnp.floating)]
    assert sum(bool((y == x).all()) for y in floats) <= 1


@pytest.mark.parametrize("derivative", ["gradient", "forward over reverse"])
def test_gradients_of_replicated_arguments_are_summed_over_devices(derivative):
    """Inside `shard_map` each device has its own x, and all have the same scale."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    by_device, shared = PartitionSpec("data"), PartitionSpec()
    arguments = jnp.array([0.2, 0.5, -1.0]), jnp.float32(0.7)

    def found(function):
        def of_device(x, scale):
            first, second = function(x, WORDS, {"scale": scale, "unused": scale})
            return jax.lax.psum((first**2).sum() + second, "data")

        total = jax.shard_map(of_device, mesh=mesh, in_specs=(by_device, shared), out_specs=shared)
        gradient = jax.grad(total, argnums=(0, 1))
        if derivative == "gradient":
            return jax.jit(gradient)(*arguments)
        return jax.jit(lambda *x: jax.jvp(gradient, x, x)[1])(*arguments)

    tiny.all_close(found(OWN), found(product))
