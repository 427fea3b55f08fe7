"""Each kernel acts as the array that it represents: alone, stacked, jitted and vmapped."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.functional.linear.affine import linear, quantize_all
from jaxformer.functional.linear.kernels import (
    FEW_ROWS,
    Int8Kernel,
    PackedKernel,
    dense,
    for_small_steps,
    pack,
    product,
    quantize,
    quantize_table,
)
from jaxformer.functional.linear.low_rank import LowRankKernel, concatenate_kernels, init_low_rank
from tests.slow import mostly_slow

IN_DIM = 8
seeds = st.integers(0, 2**32 - 1)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def low_rank(array, frozen=lambda array: array, rank=2):
    down, up = (
        normal(1, *array.shape[:-1], rank),
        normal(2, *array.shape[:-2], rank, array.shape[-1]),
    )
    return LowRankKernel(frozen(array), down, up, 0.5)


KINDS = {
    "dense": lambda array: array,
    "packed": lambda array: pack(array, "float32", 2),
    "packed in 3": lambda array: pack(array, "float32", 3),
    "int8": quantize,
    "low rank": low_rank,
    "low rank on int8": lambda array: low_rank(array, quantize),
    "packed low rank": lambda array: for_small_steps(low_rank(array), "float32", 2),
}
each_kind = pytest.mark.parametrize(
    "kind",
    mostly_slow(
        KINDS, "dense", "packed", "int8", "low rank", slow=["packed in 3", "low rank on int8"]
    ),
)
compiled = jax.jit(product)  # few shapes, because each one compiles


def float64(x):
    return np.asarray(x, np.float64)


@each_kind
@given(
    seed=seeds,
    out_dim=st.sampled_from([1, 9]),
    rows=st.sampled_from([1, 10, 80]),  # above 64 rows another code path runs
)
def test_product_with_kernel_of_any_class_equals_dense_product(kind, seed, out_dim, rows):
    kernel, x = KINDS[kind](normal(seed, IN_DIM, out_dim)), normal(seed + 1, rows, IN_DIM)
    assert kernel.shape == (IN_DIM, out_dim)
    wanted = float64(x) @ float64(dense(kernel))
    np.testing.assert_allclose(compiled(x, kernel), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["packed", "packed in 3"])
@given(seed=seeds, out_dim=st.sampled_from([1, 4, 9]))
def test_packed_kernel_unpacks_to_the_original_array(kind, seed, out_dim):
    array = normal(seed, IN_DIM, out_dim)
    np.testing.assert_array_equal(dense(KINDS[kind](array)), array)


@given(
    seed=seeds,
    out_dim=st.sampled_from([1, 4, 9]),
    size=st.sampled_from([1e-20, 1.0, 1e20, 5e37]),
    shift=st.sampled_from([0.0, 3.0]),
    few_roundings=st.booleans(),
)
def test_int8_rounding_error_is_at_most_half_a_quantization_step(
    seed, out_dim, size, shift, few_roundings
):
    """The error of each weight is at most half a step, plus float32 rounding.

    A step is (largest − smallest weight of an output) / 254. If all weights of an output are equal,
    quantization preserves them exactly.
    """
    array = (np.array(normal(seed, IN_DIM, out_dim)) + np.float32(shift)) * np.float32(size)
    if few_roundings:  # one output has only two distinct weights, neighbouring floats
        array[:, -1] = np.where(array[:, -1] > array[0, -1], 1.0 + 2.0**-23, 1.0 + 2.0**-22)
    array[:, 0] = np.float32(shift) * np.float32(size)
    kernel = quantize(jnp.asarray(array))
    step = (float64(array).max(axis=0) - float64(array).min(axis=0)) / 254
    rounding = 1e-6 * abs(float64(array)).max(axis=0)
    assert (abs(float64(dense(kernel)) - array) <= 0.5 * step + rounding).all()
    np.testing.assert_array_equal(dense(kernel)[:, 0], array[:, 0])
    assert (np.asarray(kernel.scale) > 0).all()
    assert kernel.values.dtype == "int8" and abs(kernel.values.astype(int)).max() <= 127


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8, FEW_ROWS + 1])
def test_int8_kernels_are_not_converted_in_loops(rows):
    """A decoding loop carries no floating-point copy of them: it would be four times as large."""
    kernel = quantize(normal(0, 256, 4096))

    def loop(x, kernel):
        return jax.lax.fori_loop(0, 4, lambda _, x: x + product(x, kernel)[:, :256], x)

    compiled = jax.jit(loop).lower(normal(1, rows, 256), kernel).compile()
    (body,) = re.findall(r" while\((.*)\), condition", compiled.as_text())
    carried = re.search(rf"%{body.strip('%')} = \((.*?)\) tuple", compiled.as_text()).group(1)
    assert "s8[4096,256]" in carried and "f32[4096,256]" not in carried


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_products_with_stacked_kernels_in_scan_and_vmap_equal_a_loop(kind):
    """Three layers, run by scan, by vmap and one at a time."""
    arrays, x = normal(0, 3, IN_DIM, 5), normal(1, 4, IN_DIM)
    stacked = KINDS[kind](arrays)
    assert stacked.shape == (3, IN_DIM, 5)
    alone = [product(x, jax.tree.map(lambda leaf, i=i: leaf[i], stacked)) for i in range(3)]
    _, scanned = jax.lax.scan(lambda _, kernel: (0, product(x, kernel)), 0, stacked)
    mapped = jax.vmap(product, (None, 0))(x, stacked)
    for found in (scanned, mapped):
        np.testing.assert_allclose(found, np.stack(alone), rtol=1e-6, atol=1e-6)
    one = jax.tree.map(lambda leaf: leaf[1], stacked)
    np.testing.assert_allclose(dense(stacked)[1], dense(one), rtol=1e-6)


@pytest.mark.slow
@each_kind
def test_input_gradient_with_kernel_of_any_class_equals_dense_gradient(kind):
    kernel, x = KINDS[kind](normal(0, IN_DIM, 5)), normal(1, 3, IN_DIM)
    cotangent = normal(2, 3, 5)
    _, pull_back = jax.vjp(lambda x: product(x, kernel), x)
    wanted = float64(cotangent) @ float64(dense(kernel)).T
    np.testing.assert_allclose(pull_back(cotangent)[0], wanted, rtol=1e-5, atol=1e-5)


def test_low_rank_kernel_freezes_the_base_weights():
    """∂/∂A and ∂/∂B are those of x (W + s A B); the frozen kernel gets no gradient."""
    x, cotangent = normal(0, 3, IN_DIM), normal(1, 3, 5)
    array = normal(2, IN_DIM, 5)
    for frozen in (array, quantize(array)):
        kernel = low_rank(array, lambda _, frozen=frozen: frozen)

        def run(down, up, kernel=kernel):
            return product(x, LowRankKernel(kernel.frozen, down, up, kernel.scale))

        _, pull_back = jax.vjp(run, kernel.down, kernel.up)
        d_down, d_up = pull_back(cotangent)
        outer = 0.5 * float64(x).T @ float64(cotangent)
        np.testing.assert_allclose(d_down, outer @ float64(kernel.up).T, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(d_up, float64(kernel.down).T @ outer, rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda kernel: product(x, kernel).sum())(low_rank(array))
    assert not gradient.frozen.any() and gradient.down.any() and gradient.up.any()


def test_a_new_low_rank_kernel_leaves_the_product_unchanged():
    array, x = normal(0, IN_DIM, 5), normal(1, 3, IN_DIM)
    kernel = init_low_rank(jax.random.key(0), array, rank=3)
    np.testing.assert_array_equal(product(x, kernel), product(x, array))
    assert kernel.down.shape == (IN_DIM, 3) and kernel.down.std() > 0
    with pytest.raises(
        ValueError, match=r"rank is 6; it must be in 1 … 5 for a kernel of shape \[8, 5\]"
    ):
        init_low_rank(jax.random.key(0), array, rank=6)


@pytest.mark.parametrize("kinds", [("dense", "dense"), ("int8", "int8"), ("int8", "dense")])
def test_product_with_concatenated_kernels_equals_concatenated_products(kinds):
    """Kernels of one kind fuse into one. Kernels of different kinds do not (None)."""
    kernels = [KINDS[kind](normal(i, IN_DIM, 3 + i)) for i, kind in enumerate(kinds)]
    x, one = normal(9, 2, IN_DIM), concatenate_kernels(kernels)
    assert (one is None) == (len(set(kinds)) > 1)
    if one is not None:
        wanted = np.concatenate([product(x, kernel) for kernel in kernels], axis=-1)
        np.testing.assert_allclose(product(x, one), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["dense", "packed", "int8"])
def test_float32_results_are_not_rounded_to_the_operands_dtype(kind):
    """Logits of a bfloat16 model are float32, so `product(..., "float32")` must not round them."""
    array = normal(0, 64, 5)
    kernel = pack(array, "bfloat16", 2) if kind == "packed" else KINDS[kind](array)
    x = normal(1, 3, 64).astype("bfloat16")
    matrix = dense(kernel) if kind == "int8" else array.astype("bfloat16")
    y = product(x, kernel, "float32")
    assert y.dtype == "float32" and product(x, kernel).dtype == "bfloat16"
    np.testing.assert_allclose(y, float64(x) @ float64(matrix), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@given(seed=seeds, index=st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_lookup_in_quantized_table_equals_row_of_dequantized_table(seed, index):
    """As an embedding lookup and, transposed, as an output head. An invalid index gives NaN."""
    table = normal(seed, 7, IN_DIM)
    found = quantize_table(table)
    whole = dense(found.T).T
    np.testing.assert_allclose(whole, table, atol=float(abs(table).max()) / 254 * 1.001)
    np.testing.assert_allclose(found.take(jnp.array(index)), whole[jnp.array(index)], rtol=1e-6)
    assert np.isnan(found.take(jnp.array([7]))).all()


@pytest.mark.slow
def test_quantization_changes_kernels_but_not_biases_and_position_embeddings():
    params = {
        "embedding": {"tokens": normal(0, 7, IN_DIM), "positions": normal(1, 5, IN_DIM)},
        "blocks": {"up": {"kernel": normal(2, 3, IN_DIM, 4), "bias": normal(3, 3, 4)}},
    }
    found = quantize_all(params)
    assert isinstance(found["blocks"]["up"]["kernel"], Int8Kernel)
    assert found["blocks"]["up"]["bias"] is params["blocks"]["up"]["bias"]
    assert found["embedding"]["positions"] is params["embedding"]["positions"]
    layer = jax.tree.map(lambda x: x[1], found["blocks"]["up"])
    x = normal(4, 2, IN_DIM)
    wanted = linear(jax.tree.map(lambda x: x[1], params["blocks"]["up"]), x)
    np.testing.assert_allclose(linear(layer, x), wanted, atol=0.1)


def test_packing_weights_for_decoding_leaves_packed_and_int8_kernels_unchanged():
    packed, integers = pack(normal(0, 400, 5), "float32", 2), quantize(normal(0, 400, 5))
    assert for_small_steps(packed, "float32", 3) is packed
    assert for_small_steps(integers, "float32", 3) is integers
    assert isinstance(for_small_steps(normal(0, 400, 5), "float32", 2), PackedKernel)
    assert for_small_steps(normal(0, 100, 5), "bfloat16", 2).dtype == "bfloat16"
