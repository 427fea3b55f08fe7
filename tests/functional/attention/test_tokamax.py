"""The arguments of tokamax's kernel: by its documentation they mean what explicit attention does.

Without a GPU, a stand-in computes what tokamax documents, and so does tokamax's own implementation
in XLA where tokamax is installed.
"""

from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.doctor.targets import as_if_on, parse_target
from jaxformer.functional.attention import tokamax
from jaxformer.functional.attention.attend import attend
from jaxformer.functional.attention.cudnn import CuDNN
from jaxformer.functional.attention.key_ranges import is_packed, key_ranges
from jaxformer.functional.attention.masks import (
    All,
    Causal,
    DenseMask,
    Near,
    Packed,
    Padding,
    Prefix,
    Window,
)
from jaxformer.functional.attention.platforms import fused_kernels, platform_kernels
from jaxformer.functional.attention.scores import Alibi, Scores
from jaxformer.functional.attention.splash import Splash
from jaxformer.functional.attention.tokamax import Tokamax
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.placement import OneDevice
from tests.functional.attention import test_splash
from tests.functional.attention.fused import (
    arrays,
    compare_with_explicit,
    compiled_comparison,
    context_of,
)
from tests.slow import mostly_rare

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
INSTALLED = find_spec("tokamax") is not None


@pytest.fixture(autouse=True)
def in_float32(monkeypatch):
    """Lets the kernel accept float32, in which the stand-ins compute."""
    monkeypatch.setattr(tokamax, "DTYPES", (jnp.float32, *tokamax.DTYPES))


def documented(query, key, value, ranges, scale, cap):
    """Computes attention to a range of keys; NaN for a query whose range is empty."""
    low, high = (x[:, None, :, None] for x in ranges)
    key, value = (jnp.repeat(x, query.shape[1] // key.shape[1], axis=1) for x in (key, value))
    scores = scale * jnp.einsum("bhqd,bhkd->bhqk", query, key)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    index = jnp.arange(key.shape[-2])
    visible = (low <= index) & (index < high)
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, value)


KERNELS = {"documented": documented}
if INSTALLED:
    from tokamax._src.ops.attention.base import DotProductAttention

    # tokamax's implementation in XLA
    KERNELS["tokamax"] = partial(tokamax.tokamax_attention, implementation=DotProductAttention())


@pytest.fixture(params=KERNELS)
def compare(request):
    placement = OneDevice((Tokamax(9, KERNELS[request.param]),))
    return partial(compare_with_explicit, placement)


KERNEL = Tokamax(9, documented)
PLACEMENT = OneDevice((KERNEL,))
LENGTH = 12
PACKED = [[1] * 3 + [2] * 5 + [3] * 3 + [0], [0] * 2 + [1] * 7 + [2] * 3]
NOT_IN_RUNS = [[1] * 3 + [0] * 2 + [1] * 7, [1] * 4 + [0] * 3 + [1] * 2 + [2] * 3]
DENSE = [All(), Causal(), Causal() & Window(5), Near(3), Prefix(4), Window(6)]
DOCUMENTS = [
    Causal() & Packed(),
    Packed(),
    Near(3) & Packed(),
    Causal() & Window(3) & Packed(),
]


@pytest.mark.parametrize(
    "mask, keys", mostly_rare(product(DENSE, (12, 5, 20)), (DENSE[2], 12), (DENSE[2], 5)), ids=str
)
def test_tokamax_attention_without_padding_equals_unfused_attention(mask, keys, compare):
    compare(context_of(mask, LENGTH, keys), *arrays(0, LENGTH, keys))


@pytest.mark.parametrize("segment_ids", [PACKED, NOT_IN_RUNS], ids=["packed", "not in runs"])
@pytest.mark.parametrize("mask", mostly_rare(DOCUMENTS, DOCUMENTS[-1]), ids=str)
def test_tokamax_attention_within_packed_documents_equals_unfused_attention(
    mask, segment_ids, compare
):
    compare(context_of(mask, LENGTH, segment_ids=segment_ids), *arrays(1, LENGTH))


@pytest.mark.parametrize("mask", mostly_rare([Padding(), Causal() & Padding()], Padding()), ids=str)
def test_tokamax_attention_with_padding_equals_unfused_attention(mask, compare):
    segment_ids = [[0] * 3 + [1] * 9, [1] * 8 + [0] * 4]
    compare(context_of(mask, LENGTH, segment_ids=segment_ids), *arrays(2, LENGTH))


def test_tokamax_cross_attention_equals_unfused_attention(compare):
    segment_ids = np.array([[1, 1, 0, 0, 0], [0] * 5])  # the second source has no tokens
    context = context_of(Padding(), LENGTH, 5, segment_ids)
    compare(context, *arrays(3, LENGTH, 5))
    chosen = replace(context, implementation="fused", placement=PLACEMENT)
    assert not np.asarray(attend(*arrays(3, LENGTH, 5), chosen)[1]).any()


@pytest.mark.parametrize("scale, cap", mostly_rare([(0.3, 2.0), (None, 5.0)], (0.3, 2.0)))
def test_tokamax_attention_with_scale_and_softcap_equals_unfused_attention(scale, cap, compare):
    compare(context_of(Causal(), LENGTH, scores=Scores(scale, cap)), *arrays(5, LENGTH))


def sequences_of(ids):
    return st.lists(ids, min_size=LENGTH, max_size=LENGTH)


# Any ids, or documents in order with padding at both ends: 4 becomes padding.
in_order = sequences_of(st.integers(0, 4)).map(lambda sequence: [i % 4 for i in sorted(sequence)])
segment_ids = st.lists(sequences_of(st.integers(0, 2)) | in_order, min_size=2, max_size=2)
masks = st.sampled_from([*DOCUMENTS, Causal() & Padding(), Padding(), Causal() & Window(3)])


@given(mask=masks, ids=segment_ids, renumber=st.booleans())
def test_key_ranges_passed_to_tokamax_contain_exactly_the_unmasked_keys(mask, ids, renumber):
    """For any ids: if they are not numbered in order as in a model, too."""
    context = context_of(mask & Padding(), LENGTH, segment_ids=ids)
    if not renumber:
        queries, keys = (
            replace(x, segment_ids=jnp.asarray(ids)) for x in (context.queries, context.keys)
        )
        context = replace(context, queries=queries, keys=keys)
    ranges, index = key_ranges(context, 2), np.arange(LENGTH)
    found = (ranges.low[..., None] <= index) & (index < ranges.high[..., None])
    expected = np.broadcast_to(context.mask(context.queries, context.keys), found.shape)
    documents = np.asarray(context.keys.segment_ids)
    real = documents != 0
    padding_sees_padding = ~real[:, None, :] & (
        ~real[:, :, None] | ~real.any(axis=1)[:, None, None]
    )
    runs = documents if is_packed(context) else real.astype(int)
    assert bool(ranges.are_exact) == all(map(_is_in_runs, runs))
    if ranges.are_exact:
        np.testing.assert_array_equal(found & ~padding_sees_padding, expected)


def _is_in_runs(ids):
    """Whether each document is contiguous, and they are numbered in order."""
    numbers = [int(i) for i in ids if i]
    runs = [numbers[k] for k in range(len(numbers)) if k == 0 or numbers[k] != numbers[k - 1]]
    gap = any(
        i and any(later == i for later in ids[k + 1 :]) and ids[k + 1] != i
        for k, i in enumerate(ids[:-1])
    )
    return not gap and runs == sorted(set(runs))


@pytest.mark.parametrize("mask", [*DOCUMENTS, Causal() & Padding()], ids=str)
@given(seed=st.integers(0, 99), ids=segment_ids)
def test_tokamax_attention_on_random_segment_ids_equals_unfused_attention(mask, seed, ids):
    context = context_of(mask, LENGTH, segment_ids=ids)
    compiled_comparison(PLACEMENT, mask)(context.queries, context.keys, *arrays(seed, LENGTH))


def test_nan_in_masked_keys_and_values_does_not_propagate():
    context = context_of(Causal() & Packed(), LENGTH, segment_ids=PACKED)
    context = replace(context, implementation="fused", placement=PLACEMENT)
    padding = np.array(PACKED)[:, None, :, None] == 0
    query, key, value = (jnp.where(padding, jnp.nan, x) for x in arrays(8, LENGTH))
    output, pull_back = jax.vjp(lambda *x: attend(*x, context), query, key, value)
    assert np.isfinite(output).all()
    assert all(np.isfinite(x).all() for x in pull_back(jnp.ones_like(output)))


@pytest.mark.parametrize("kernel", [CuDNN(is_hopper=True), Splash(True), Tokamax(9, documented)])
@pytest.mark.parametrize("name", ["queries", "keys"])
def test_fused_kernels_reject_positions_in_descending_order(kernel, name):
    """`dot_product_attention` accepts positions in any order, of queries and of keys."""
    context = context_of(Causal(), LENGTH)
    backwards = replace(context, **{name: TokenInfo(LENGTH, jnp.arange(LENGTH)[::-1])})
    x = arrays(0, LENGTH, dtype=jnp.bfloat16)
    assert "positions" in kernel.unsupported_reason(*x, replace(backwards, in_order=False))


@pytest.mark.parametrize("kernel", [Splash(True), Tokamax(9, documented)])
def test_fused_kernel_rejects_restarting_positions_without_packing_mask(kernel):
    """Otherwise token 3 is next to token 0: both are the first of their documents."""
    segment_ids = [[1] * 3 + [2] * 9] * 2
    context = context_of(Causal() & Window(2) & Packed(), LENGTH, segment_ids=segment_ids)
    x = arrays(0, LENGTH, dtype=jnp.bfloat16)
    assert "positions" not in (kernel.unsupported_reason(*x, context) or "")
    unpacked = replace(context, mask=Causal() & Window(2) & Padding())
    assert "positions" in kernel.unsupported_reason(*x, unpacked)


@pytest.mark.parametrize("length, keys", [(0, 5), (5, 0)])
def test_attention_without_queries_or_keys_returns_zeros(length, keys):
    context = context_of(Padding(), length, keys, np.ones((2, keys), int))
    output = attend(*arrays(0, length, keys), replace(context, placement=PLACEMENT))
    assert output.shape == (2, 4, length, 8) and not np.asarray(output).any()


IN_DOCUMENTS = TokenInfo(12, jnp.arange(12), jnp.ones((2, 12), int))
LACKING = {
    "a bias of the scores": {"scores": Scores(bias=Alibi(4))},
    "one range of keys per query, not DenseMask": {"mask": DenseMask(np.ones((12, 12), bool))},
    "cached or explicit positions": {"queries": TokenInfo(12, jnp.arange(12)), "in_order": False},
    "if positions restart in each document": dict.fromkeys(("queries", "keys"), IN_DOCUMENTS)
    | {"mask": Prefix(3) & Packed()},
}


@pytest.mark.parametrize("message", LACKING)
def test_error_for_unsupported_attention_arguments_states_the_reason(message):
    context = replace(context_of(Causal(), LENGTH), placement=PLACEMENT, **LACKING[message])
    with pytest.raises(ValueError, match='attention="fused" is not possible: tokamax: ') as caught:
        attend(*arrays(0, LENGTH), replace(context, implementation="fused"))
    assert message in str(caught.value)
    expected = attend(*arrays(0, LENGTH), replace(context, implementation="explicit"))
    np.testing.assert_allclose(attend(*arrays(0, LENGTH), context), expected, atol=1e-5)


@pytest.mark.parametrize(
    "installed, generation, head_dim, message",
    [
        (None, 9, 64, "tokamax is not installed (pip install -e '.[kernels]', on Python 3.12"),
        (
            "0.0.9",
            9,
            64,
            "tokamax 0.0.9 does not work here; use tokamax 0.0.17: ImportError('no module')",
        ),
        ("0.0.17", 8, 64, "the kernel needs a Hopper or data-centre Blackwell GPU"),
        ("0.0.17", 9, 256, None),
        ("0.0.17", 9, 264, "the kernel needs a head_dim of at most 256, not 264"),
        ("0.0.17", 10, 192, None),
        ("0.0.17", 10, 200, "the kernel needs a head_dim of at most 192, not 200"),
    ],
)
def test_tokamax_kernel_reports_unsupported_version_and_gpu(
    installed, generation, head_dim, message, monkeypatch
):
    def version(name):
        assert name == "tokamax"
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    def classes():
        if installed == "0.0.9":
            raise ImportError("no module")

    monkeypatch.setattr(tokamax, "version", version)
    monkeypatch.setattr(tokamax, "_classes", classes)
    tokamax.missing.cache_clear()
    x = jnp.zeros((1, 2, 4, head_dim), jnp.bfloat16)
    context = context_of(Causal(), 4, scores=Scores(cap=2.0))
    reason = Tokamax(generation).unsupported_reason(x, x, x, context)
    tokamax.missing.cache_clear()
    assert reason is None if message is None else message in reason


def test_first_attention_kernel_that_supports_the_arguments_is_used():
    """cuDNN is preferred; for a cap, both reasons are in the error if tokamax does not run."""
    x = arrays(0, LENGTH, dtype=jnp.bfloat16)
    context = replace(context_of(Causal(), LENGTH), placement=OneDevice(platform_kernels("gpu", 8)))
    capped = replace(context, scores=Scores(cap=2.0), implementation="fused")
    with pytest.raises(ValueError, match=r"cuDNN: .* a soft cap .*; tokamax: the kernel needs a"):
        attend(*x, capped)
    supporting = OneDevice((*platform_kernels("gpu", 9)[:1], Tokamax(9, documented)))
    output = attend(*x, replace(capped, placement=supporting))
    expected = attend(*x, replace(capped, implementation="explicit"))
    np.testing.assert_allclose(output.astype(float), expected.astype(float), atol=2e-2)


def test_queries_and_keys_with_different_segment_ids_are_accepted(compare):
    queries, keys = (
        TokenInfo(LENGTH, None, jnp.array([x, x])) for x in ([1] * 5 + [2] * 7, [1] * 3 + [2] * 9)
    )
    context = context_of(Causal() & Packed(), LENGTH)
    compare(replace(context, queries=queries, keys=keys), *arrays(1, LENGTH))


def test_each_device_computes_attention_of_its_sequences_and_heads():
    """The test of the splash kernel, with this one; packed sequences with padding."""
    program = test_splash.ON_A_MESH.replace(
        "from tests.functional.attention.test_splash import INTERPRETED, PACKED",
        "from tests.functional.attention.test_splash import PACKED\n"
        "from tests.functional.attention.test_tokamax import KERNEL as INTERPRETED, tokamax\n"
        "tokamax.DTYPES = (np.float32,)",
    )
    test_splash.run_on_eight_devices(program)


@pytest.mark.skipif(
    not INSTALLED or jax.default_backend() != "gpu", reason="needs tokamax and a GPU"
)
@pytest.mark.parametrize("length, cap", [(256, 30.0), (200, None), (77, 5.0)])
@pytest.mark.parametrize("mask", DOCUMENTS, ids=str)
def test_tokamax_kernel_on_a_gpu_equals_unfused_attention(mask, length, cap):
    """On a GPU: the kernel computes what its documentation says."""
    ids = np.array([[1] * 50 + [2] * (length - 56) + [0] * 6, [0] * 6 + [3] * (length - 6)])
    context = context_of(mask, length, segment_ids=ids, scores=Scores(cap=cap))
    kernel = next(x for x in fused_kernels() if isinstance(x, Tokamax))
    x = arrays(0, length, dtype=jnp.bfloat16)
    compare_with_explicit(OneDevice((kernel,)), context, *x, tolerance=4e-3)


@pytest.mark.skipif(not INSTALLED, reason="needs tokamax, which needs Python 3.12")
@pytest.mark.parametrize("mask", [Causal() & Window(64) & Packed(), Causal()], ids=str)
def test_gpu_program_calls_tokamax_kernel_forward_and_backward(mask):
    """In the program for GPUs, which JAX lowers without one."""
    segment_ids = [[1] * 100 + [2] * 150 + [0] * 6] * 2
    context = context_of(mask, 256, segment_ids=segment_ids, scores=Scores(cap=30.0))
    context = replace(context, implementation="fused", placement=OneDevice((Tokamax(9),)))
    x = arrays(0, 256, dtype=jnp.bfloat16)

    def loss(arrays):
        return attend(*arrays, context).astype(jnp.float32).sum()

    with as_if_on(parse_target("gpu:h100:1")):
        traced = jax.jit(jax.grad(loss)).trace(tuple(x))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 3  # forward, and the gradients of q and of k and v
