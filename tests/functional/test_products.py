"""Products of bfloat16 numbers are added up in float32, in the gradients too."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.functional import machine, products
from jaxformer.functional.products import contract
from jaxformer.models.config import KINDS
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

GROUPED = "...kgqs,...kgqd->...ksd"
# Each formula with the sizes of its indices.
FORMULAS = {
    "bi,io->bo": {"b": 5, "i": 300, "o": 7},
    "poi,pbi->pob": {"p": 2, "o": 4, "i": 200, "b": 3},
    "...kgqd,...ksd->...kgqs": {"...": 2, "k": 2, "g": 3, "q": 4, "d": 70, "s": 5},
    GROUPED: {"...": 2, "k": 2, "g": 3, "q": 40, "d": 7, "s": 5},
}


def with_rule(formula, x, y, dtype):
    return products._with_float32_sums(formula, jnp.dtype(dtype), x, y)


FUNCTIONS = {"contract": contract, "own rule": with_rule}
WAYS = itertools.product(["contract", "own rule"], FORMULAS, ["bfloat16", "float32"])
QUICK_WAYS = ("contract", GROUPED, "float32"), ("own rule", "bi,io->bo", "bfloat16")


@pytest.mark.parametrize(("way", "formula", "dtype"), mostly_slow(WAYS, *QUICK_WAYS))
@given(seed=st.integers(0, 2**32 - 1))
def test_products_and_their_gradients_are_rounded_once(way, formula, dtype, seed):
    """The only errors are those of float32 sums and of one rounding of each result."""
    sizes, rng = FORMULAS[formula], np.random.default_rng(seed)
    names = re.split(",|->", formula)
    drawn = (rng.normal(size=[sizes[i] for i in re.findall(r"\.\.\.|\w", x)]) for x in names)
    x, y, cotangent = (jnp.asarray(array, jnp.bfloat16) for array in drawn)

    def both(x, y, cotangent):
        result, pull_back = jax.vjp(lambda x, y: FUNCTIONS[way](formula, x, y, dtype), x, y)
        return result, *pull_back(cotangent.astype(dtype))

    of_x, of_y, of_result = names
    operands = [
        (formula, x, y),
        (f"{of_result},{of_y}->{of_x}", cotangent, y),
        (f"{of_result},{of_x}->{of_y}", cotangent, x),
    ]
    results = jax.jit(both)(x, y, cotangent)
    for found, (product, *pair) in zip(results, operands, strict=True):
        exact, size = (np.einsum(product, *f) for f in (_float64(pair), map(abs, _float64(pair))))
        assert found.dtype == (dtype if found is results[0] else "bfloat16")
        roundings = 2.0**-8 if found.dtype == "bfloat16" else 0.0
        limit = roundings * np.abs(exact) + 2.0**-20 * size
        assert (np.abs(np.asarray(found, np.float64) - exact) <= limit).all()


def _float64(arrays):
    return [np.asarray(x, np.float64) for x in arrays]


@pytest.mark.parametrize("generation", [0, 7, 8, 9])
def test_gradients_of_float32_results_are_rounded_on_gpus_that_can(monkeypatch, generation):
    """Every product of the backward pass of logits has the algorithm, from Ampere on."""
    monkeypatch.setattr(products, "gpu_generation", lambda: generation)
    monkeypatch.setattr(products, "has_matrix_units", lambda: False)
    x, y = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 3), jnp.bfloat16)

    def loss(x, y):
        return jnp.square(contract("bi,io->bo", x, y, "float32")).sum()

    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, y).as_text()
    rounded = [" = <lhs_precision_type = bf16" in x for x in re.findall("dot_general .*", program)]
    assert rounded == [generation >= 8] * 3


CASES = itertools.product(KINDS, ["explicit", "blockwise"])
QUICK = ("decoder", "blockwise"), ("encoder-decoder", "explicit")


@pytest.mark.parametrize(("kind", "attention"), mostly_slow(CASES, *QUICK))
def test_every_product_of_a_step_has_float32_sums(monkeypatch, kind, attention):
    """Forward and backward: bfloat16 operands and a float32 result, as CPUs multiply fast."""
    monkeypatch.setattr(machine, "_cpu_has_matrix_units", lambda: True)
    model = tiny.build(KINDS[kind], dtype="bfloat16", attention=attention)
    tokens = jnp.zeros((2, tiny.LENGTH), jnp.int32)
    read = {"source": tokens} if kind.endswith("encoder-decoder") else {}

    def loss(variables):
        return jnp.square(model.apply(variables, tokens, **read)).sum()

    program = jax.jit(jax.grad(loss)).lower(tiny.shapes(model)).as_text()
    types = re.findall(r"dot_general .* : \((.*), (.*)\) -> (.*)", program)
    ends = {tuple(re.search(r"(\w+)>", x)[1].split("x")[-1] for x in each) for each in types}
    assert ends == {("bf16", "bf16", "f32")}


@pytest.mark.parametrize("layers", mostly_slow(["scan", "unrolled"], "scan"))
def test_remat_dots_stores_products_in_the_dtype_of_activations(layers):
    """It stores results of products, not float32 sums, and computes none of them twice."""
    tokens = jnp.zeros((3, tiny.LENGTH), jnp.int32)
    stored, times = {}, {}
    for remat in ("dots", "full"):
        model = tiny.build(dtype="bfloat16", layers=layers, remat=remat, mlp_dim=40)

        def apply(variables, model=model):
            return model.apply(variables, tokens)

        def pull_back(variables, apply=apply):
            return jax.vjp(apply, variables)[1]

        variables = tiny.shapes(model)
        residuals = jax.tree.leaves(jax.eval_shape(pull_back, variables))
        stored[remat] = {x.dtype for x in residuals if x.shape[-2:] in ((36, 40), (12, 40))}
        step = jax.jit(lambda v, apply=apply: jax.grad(lambda v: apply(v).sum())(v))
        # The first product of a feed-forward block: 36 tokens × 40 features.
        times[remat] = len(
            re.findall(r"dot_general .*-> tensor<36x40x", step.lower(variables).as_text())
        )
    assert stored == {"dots": {jnp.dtype("bfloat16")}, "full": set()}
    assert times["full"] > times["dots"]
