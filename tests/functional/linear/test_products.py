"""Products of bfloat16 numbers are added up in float32, in the gradients too."""

import itertools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.functional import machine
from jaxformer.functional.linear import products
from jaxformer.functional.linear.products import contract
from jaxformer.models.config import KINDS
from jaxformer.verify.taint import taint
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

GROUPED = "...kgqs,...kgqd->...ksd"
# Each formula with the sizes of its indices.
FORMULAS = {
    "bi,io->bo": {"b": 5, "i": 300, "o": 7},
    "bi,i->b": {"b": 5, "i": 30},
    "poi,pbi->pob": {"p": 2, "o": 4, "i": 200, "b": 3},
    "...kgqd,...ksd->...kgqs": {"...": 2, "k": 2, "g": 3, "q": 4, "d": 70, "s": 5},
    GROUPED: {"...": 2, "k": 2, "g": 3, "q": 40, "d": 7, "s": 5},
}


def with_rule(formula, x, y, dtype):
    return products.product(formula, jnp.dtype(dtype), x, y)


def without_rule(formula, x, y, dtype):
    with mock.patch.object(products, "multiplies_bfloat16", lambda: False):
        return contract(formula, x, y, dtype)


FUNCTIONS = {"JAX's rule": without_rule, "own rule": with_rule}
# If the CPU has AVX-512 BF16, XLA:CPU of jaxlib 0.12 rounds partial sums in one gradient of this
# product. The package computes this product with a float32 result only.
ROUNDED = ("JAX's rule", GROUPED, "bfloat16")
WAYS = [x for x in itertools.product(FUNCTIONS, FORMULAS, ["bfloat16", "float32"]) if x != ROUNDED]
QUICK_WAYS = ("JAX's rule", GROUPED, "float32"), ("own rule", "bi,io->bo", "bfloat16")
SEEDS = st.integers(0, 2**32 - 1)


def parts(formula):
    """The formulas of the product and of its two gradients, each with its operands' numbers."""
    x, y, result = re.split(",|->", formula)
    return [(formula, (0, 1)), (f"{result},{y}->{x}", (2, 1)), (f"{result},{x}->{y}", (2, 0))]


def draw(formula, seed, batch=((), (), ())):
    """The operands and a cotangent, with additional axes."""
    sizes, rng = FORMULAS[formula], np.random.default_rng(seed)
    names = re.split(",|->", formula)
    shapes = [[sizes[i] for i in re.findall(r"\.\.\.|\w", name)] for name in names]
    arrays = (rng.normal(size=[*b, *shape]) for b, shape in zip(batch, shapes, strict=True))
    return [jnp.asarray(array, jnp.bfloat16) for array in arrays]


def product_and_gradients(way, formula, dtype):
    def function(x, y, cotangent):
        result, pull_back = jax.vjp(lambda x, y: FUNCTIONS[way](formula, x, y, dtype), x, y)
        return result, *pull_back(cotangent.astype(dtype))

    return function


def check_errors(found, formula, operands):
    """The only errors are those of float32 sums and of one rounding of each result."""
    operands = [np.asarray(x, np.float64) for x in operands]
    exact, size = (np.einsum(formula, *f) for f in (operands, map(abs, operands)))
    roundings = 2.0**-8 if found.dtype == "bfloat16" else 0.0
    limit = roundings * np.abs(exact) + 2.0**-20 * size
    assert (np.abs(np.asarray(found, np.float64) - exact) <= limit).all()


@pytest.mark.parametrize(("way", "formula", "dtype"), mostly_slow(WAYS, *QUICK_WAYS))
@given(seed=SEEDS)
def test_matrix_products_and_their_gradients_are_rounded_once(way, formula, dtype, seed):
    arrays = draw(formula, seed)
    results = jax.jit(product_and_gradients(way, formula, dtype))(*arrays)
    assert [x.dtype for x in results] == [dtype, "bfloat16", "bfloat16"]
    for found, (part, (i, j)) in zip(results, parts(formula), strict=True):
        check_errors(found, part, (arrays[i], arrays[j]))


# Whether x, y and the cotangent have a batch axis. `jax.jacrev` batches only the cotangent.
BATCHED = [x for x in itertools.product((True, False), repeat=3) if any(x)]
VMAPPED = itertools.product(FORMULAS, BATCHED)
JACREV = (False, False, True)


@pytest.mark.parametrize(
    ("formula", "batched"),
    mostly_slow(VMAPPED, slow=[(GROUPED, JACREV), ("bi,io->bo", (True, False, False))]),
)
@given(seed=SEEDS)
def test_custom_vmap_rule_of_products_equals_einsum(formula, batched, seed):
    """XLA:CPU cannot compute each product of JAX's rule for vmap."""
    arrays = draw(formula, seed, [(3,) if b else () for b in batched])
    axes = [0 if b else None for b in batched]
    function = product_and_gradients("own rule", formula, "float32")
    results = jax.jit(jax.vmap(function, axes))(*arrays)
    for found, (part, (i, j)) in zip(results, parts(formula), strict=True):
        x, y, result = re.split(",|->", part)
        x, y = ("Z" * b + name for b, name in ((batched[i], x), (batched[j], y)))
        if batched[i] or batched[j]:
            result = f"Z{result}"
        else:  # copies of one array
            found = found[0]
        check_errors(found, f"{x},{y}->{result}", (arrays[i], arrays[j]))


@pytest.mark.parametrize("formula", [x for x in FORMULAS if x != "bi,i->b"])  # y has no other axis
def test_vmapped_product_merges_batch_axis_into_matrix_rows(formula):
    """So a vmapped model multiplies matrices of more rows, not more matrices."""
    axes = [[0, None, None], [None, 0, None], [None, None, 0]]
    function = product_and_gradients("own rule", formula, "float32")
    ranks = []
    for each in axes:
        arrays = draw(formula, 0, [() if axis is None else (3,) for axis in each])
        program = jax.jit(jax.vmap(function, each)).lower(*arrays).as_text()
        results = re.findall(r"dot_general .*-> tensor<(.*)x\w+>", program)
        ranks.append([len(x.split("x")) for x in results])
    own = [len(draw(formula, 0)[k].shape) for k in (2, 0, 1)]
    assert ranks == [own] * 3


@pytest.mark.parametrize(
    "formula, x_shape, y_shape",
    [
        ("...i,io->...o", (3, 4, 2, 5), (5, 6)),
        pytest.param("...i, io -> ...o", (3, 4, 2, 5), (5, 6), marks=pytest.mark.slow),
        pytest.param("...qd,...sd->...qs", (3, 4, 3, 5), (3, 4, 2, 2, 5), marks=pytest.mark.slow),
        ("bi,bi->", (3, 4, 2, 5), (3, 4, 2, 5)),
    ],
)
def test_nested_vmap_of_products_equals_einsum(formula, x_shape, y_shape):
    """With axes that the formula does not name, and with different numbers of them."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in (x_shape, y_shape))
    axes = (0, 0 if y.ndim > 2 else None)

    def value(x, y):
        return products.product(formula, jnp.dtype("float32"), x, y)

    def twice(function):
        return jax.vmap(jax.vmap(function, axes), axes)

    def plain(x, y):
        return jnp.einsum(formula, x, y, precision="float32")

    exact = [a.astype("float32") for a in (x, y)]
    np.testing.assert_allclose(twice(value)(x, y), twice(plain)(*exact), atol=1e-5)
    gradient, expected = (
        twice(jax.grad(lambda x, y, f=f: f(x, y).sum(), argnums=1))(*arrays)
        for f, arrays in ((value, (x, y)), (plain, exact))
    )
    np.testing.assert_allclose(gradient.astype("float32"), expected, atol=1e-5, rtol=2.0**-8)


def test_einsum_formula_without_arrow_is_rejected(monkeypatch):
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: True)
    x, y, _ = draw("bi,io->bo", 0)
    with pytest.raises(ValueError, match='must contain "->"'):
        contract("bi,io", x, y)


@pytest.mark.parametrize(
    "words, expected",
    [
        ("vendor_id : GenuineIntel flags : avx512_bf16 amx_bf16 amx_tile", True),
        ("vendor_id : AuthenticAMD flags : avx512f avx512_bf16", True),
        ("vendor_id : GenuineIntel flags : avx512f avx512_bf16", False),
        ("vendor_id : AuthenticAMD flags : avx512f", False),
    ],
)
def test_bfloat16_instructions_of_the_cpu_are_detected(monkeypatch, words, expected):
    monkeypatch.setattr(machine.Path, "exists", lambda path: True)
    monkeypatch.setattr(machine.Path, "read_text", lambda path: words)
    monkeypatch.setattr(machine, "platform", lambda: "cpu")
    machine._cpu_multiplies_bfloat16.cache_clear()
    found = machine.multiplies_bfloat16()
    monkeypatch.setattr(machine, "platform", lambda: "gpu")
    on_gpu = machine.multiplies_bfloat16()
    machine._cpu_multiplies_bfloat16.cache_clear()
    assert (found, on_gpu) == (expected, False)


def test_taint_analysis_follows_rows_through_matrix_products():
    """Row 1 of the product depends on row 1 of x, and no other row does."""
    y = jnp.ones((4, 2), jnp.bfloat16)

    def function(x):
        return products.product("bi,io->bo", jnp.dtype("float32"), x, y)

    bits, remarks = taint(function, jnp.ones((3, 4), jnp.bfloat16), 1)
    assert not remarks and (bits == np.eye(3, dtype=bool)[:, None]).all()


def test_matrix_products_and_gradients_call_a_user_replacement_of_jnp_einsum(monkeypatch):
    """As qwix does, to quantize a model."""
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(jnp, "einsum", lambda formula, x, y, **_: 2 * x @ y)
    x, y, _ = draw("bi,io->bo", 0)
    gradient = jax.grad(lambda x: contract("bi,io->bo", x, y).astype("float32").sum())(x)
    check_errors(gradient, "bo,io->bi", (jnp.full((5, 7), 2, jnp.bfloat16), y))


def test_gradients_of_replicated_operands_are_summed_over_devices(monkeypatch):
    """Inside `shard_map` each device has its own rows x, and all have the same y."""
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: True)
    x, y, _ = draw("bi,io->bo", 0)

    def total(x, y):
        return jax.lax.psum(contract("bi,io->bo", x, y, "float32").sum(), "data")

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    of_rows = jax.sharding.PartitionSpec("data")
    shared = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(total, mesh=mesh, in_specs=(of_rows, shared), out_specs=shared)
    gradients = jax.jit(jax.grad(mapped, argnums=(0, 1)))(x, y)
    ones = jnp.ones((5, 7), jnp.bfloat16)
    check_errors(gradients[0], "bo,io->bi", (ones, y))
    check_errors(gradients[1], "bi,bo->io", (x, ones))


@pytest.mark.parametrize("precision", [None, "float32"])
def test_matrix_products_have_a_forward_mode_derivative(monkeypatch, precision):
    """A product is linear in each operand, so its tangent is a product, too."""
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: True)
    x, y, _ = draw("bi,io->bo", 0)
    with jax.default_matmul_precision(precision):
        tangent = jax.jvp(lambda x: contract("bi,io->bo", x, y, "float32"), (x,), (x,))[1]
    check_errors(tangent, "bi,io->bo", (x, y))


def test_products_use_einsum_if_matmul_precision_is_set(monkeypatch):
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(products, "product", lambda *_: pytest.fail("it is the own product"))
    x, y, _ = draw("bi,io->bo", 0)
    with jax.default_matmul_precision("float32"):
        check_errors(contract("bi,io->bo", x, y, "float32"), "bi,io->bo", (x, y))


def along(f, direction):
    """Returns the function y → derivative of f at y in the direction."""
    return lambda y: jax.jvp(f, (y,), (direction,))[1]


SECOND = {
    "forward over reverse": lambda f, t: along(jax.grad(f), t),
    "reverse over forward": lambda f, t: jax.grad(along(f, t)),
    "reverse over reverse": lambda f, t: jax.grad(lambda y: (jax.grad(f)(y) * t).sum()),
    "vmap of forward over reverse": lambda f, t: (
        lambda y: jax.vmap(lambda s: along(jax.grad(f), s * t)(y))(jnp.array([0.0, 1.0], t.dtype))[
            1
        ]
    ),
    "vmap of forward mode": lambda f, t: (
        lambda y: jax.vmap(lambda s: along(f, s * t)(y))(jnp.array([0.0, 1.0], t.dtype))[1]
    ),
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_of_bfloat16_products_equal_those_in_float32(monkeypatch, name):
    """Those of a quadratic function of bfloat16 products, compared with float32."""
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: True)
    x, y, _ = draw("bi,io->bo", 0)

    def total(y):
        return (contract("bi,io->bo", x, y, "float32") ** 2).sum()

    def plain(y):
        return ((x.astype(jnp.float32) @ y) ** 2).sum()

    found = jax.jit(SECOND[name](total, y))(y)
    exact = SECOND[name](plain, y.astype(jnp.float32))(y.astype(jnp.float32))
    tiny.close(found, exact, 0.02)


@pytest.mark.parametrize("generation", [0, 7, 8, 9])
def test_gradients_of_float32_results_are_rounded_to_bfloat16_on_gpus(monkeypatch, generation):
    """Every product of the backward pass of logits has the algorithm, from Ampere on."""
    monkeypatch.setattr(products, "gpu_generation", lambda: generation)
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: False)
    x, y = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 3), jnp.bfloat16)

    def loss(x, y):
        return jnp.square(contract("bi,io->bo", x, y, "float32")).sum()

    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, y).as_text()
    rounded = [" = <lhs_precision_type = bf16" in x for x in re.findall("dot_general .*", program)]
    assert rounded == [generation >= 8] * 3


CASES = itertools.product(KINDS, ["explicit", "blockwise"])
QUICK = (("decoder", "blockwise"),)


@pytest.mark.parametrize(("kind", "attention"), mostly_slow(CASES, *QUICK))
def test_every_product_of_forward_and_backward_pass_sums_in_float32(monkeypatch, kind, attention):
    """Forward and backward: bfloat16 operands and a float32 result, as CPUs multiply fast."""
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: True)
    model = tiny.build(KINDS[kind], dtype="bfloat16", attention=attention)
    tokens = jnp.zeros((2, tiny.LENGTH), jnp.int32)
    read = {"source": tokens} if kind.endswith("encoder-decoder") else {}

    def loss(variables):
        return jnp.square(model.apply(variables, tokens, **read)).sum()

    program = jax.jit(jax.grad(loss)).lower(tiny.shapes(model)).as_text()
    dots = re.findall(r"contracting_dims = \[(.*?)\] x .* : \((.*), (.*)\) -> (.*)", program)
    ends = {tuple(re.search(r"(\w+)>", x)[1].split("x")[-1] for x in each[1:]) for each in dots}
    assert ends == {("bf16", "bf16", "f32")}
    # CPUs multiply fast if the left matrix need not be transposed: its last axis is contracted.
    assert {each[0] for each in dots if re.fullmatch(r"tensor<\d+x\d+xbf16>", each[1])} == {"1"}


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["scan", "unrolled"])
def test_rematerialization_stores_matrix_products_in_the_dtype_of_activations(layers):
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
