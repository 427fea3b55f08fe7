"""The arguments of cuDNN's kernel: by their documentation they mean what explicit attention does.

Without a GPU, stand-ins compute what JAX documents. With one, the kernel itself runs too.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.doctor.targets import as_if_on, parse_target
from jaxformer.functional.attention import cudnn, platforms
from jaxformer.functional.attention.attend import attend
from jaxformer.functional.attention.cudnn import CuDNN, lengths_and_offsets, most_documents
from jaxformer.functional.attention.masks import All, Causal, Near, Packed, Padding, Prefix, Window
from jaxformer.functional.attention.private_cudnn import cudnn_attention
from jaxformer.functional.attention.scores import Alibi, Scores
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.placement import OneDevice
from tests.functional.attention.fused import arrays, compare_with_explicit, context_of
from tests.slow import mostly_rare

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]

PLACEMENT = OneDevice((CuDNN(is_hopper=True),))
compare = partial(compare_with_explicit, PLACEMENT)
ON_GPU = jax.default_backend() == "gpu"
original = jax.nn.dot_product_attention


def documented_sequences(*arrays, implementation, **options):
    """Computes what `jax.nn.dot_product_attention` documents, by its implementation in XLA.

    The output of a query without keys is NaN.
    """
    assert implementation == "cudnn"
    output = original(*arrays, implementation="xla", **options)
    lengths = options["key_value_seq_lengths"]
    return output if lengths is None else jnp.where(lengths[:, None, None, None], output, jnp.nan)


def documented_documents(
    query, key, value, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type
):
    """Computes attention in packed documents, as `fused_attention_stablehlo` documents it.

    Outputs that the kernel does not write are NaN.
    """
    assert key.shape[2] == query.shape[2], "jax multiplies offsets by the number of query heads"
    place, documents = jnp.arange(query.shape[1]), q_seqlen.shape[1]
    assert q_offsets.shape[1] == documents + 1

    def inside(lengths, offsets):  # [batch, documents, length]
        start, size = offsets[:, :documents, None], lengths[..., None]
        return (size > 0) & (place >= start) & (place < start + size)

    queries, keys = inside(q_seqlen, q_offsets), inside(kv_seqlen, kv_offsets)
    visible = jnp.einsum("bmq,bmk->bqk", queries, keys, preferred_element_type=int) > 0
    if mask_type == cudnn_attention.MaskType.PADDING_CAUSAL:
        visible &= place[:, None] >= place
    else:
        assert mask_type == cudnn_attention.MaskType.PADDING
    products = scale * jnp.einsum("bqhd,bkhd->bhqk", query, key)
    weights = jax.nn.softmax(jnp.where(visible[:, None], products, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.nan_to_num(weights), value) + jnp.where(
        queries.any(axis=1)[..., None, None], 0.0, jnp.nan
    )


@pytest.fixture
def documented(monkeypatch):
    """Replaces the kernel by what its documentation says, in float32."""
    monkeypatch.setattr(cudnn, "DTYPES", (jnp.float32, *cudnn.DTYPES))
    monkeypatch.setattr(jax.nn, "dot_product_attention", documented_sequences)
    monkeypatch.setattr(cudnn_attention, "dot_product_attention", documented_documents)


# With 70 tokens per sequence, the kernel supports at most two documents per sequence. With a third
# document, attention is blockwise.
LENGTH = 70
PACKED = [[1] * 30 + [2] * 40, [0] * 3 + [1] * 20 + [2] * 37 + [0] * 10]
OTHERWISE_PACKED = {
    "gaps": [[1] * 30 + [0] * 2 + [1] * 38, [1] * 70],
    "three documents": [[1] * 30 + [2] * 10 + [3] * 30, [1] * 70],
}
DENSE = [All(), Causal(), Causal() & Window(5)]


def segments_of(lengths, size=LENGTH):
    """Sequences with padding at the end."""
    return [[1] * length + [0] * (size - length) for length in lengths]


@pytest.mark.parametrize("mask", DENSE, ids=str)
def test_cudnn_attention_without_padding_equals_unfused_attention(mask, documented):
    compare(context_of(mask, 20), *arrays(0, 20))


@pytest.mark.parametrize(
    "mask", mostly_rare([Causal() & Packed(), Packed()], Causal() & Packed()), ids=str
)
def test_cudnn_attention_within_packed_documents_equals_unfused_attention(mask, documented):
    compare(context_of(mask, LENGTH, segment_ids=PACKED), *arrays(1, LENGTH))


@pytest.mark.parametrize("segment_ids", OTHERWISE_PACKED.values(), ids=OTHERWISE_PACKED)
def test_cudnn_attention_on_non_contiguous_documents_equals_unfused_attention(
    segment_ids, documented
):
    context = context_of(Causal() & Packed(), LENGTH, segment_ids=segment_ids)
    compare(context, *arrays(1, LENGTH))


@pytest.mark.parametrize(
    "queries, keys",
    [
        ([2] * 20 + [1] * 20 + [2] * 30, None),  # one document around another
        ([1] * 30 + [2] * 40, [1] * 20 + [2] * 50),
    ],
    ids=["in two parts", "keys of other documents"],
)
def test_cudnn_attention_on_unsorted_segment_ids_equals_unfused_attention(
    queries, keys, documented
):
    """`dot_product_attention` passes the numbers of its caller on, a model those in order."""
    queries, keys = (TokenInfo(LENGTH, None, jnp.array([x, x])) for x in (queries, keys or queries))
    context = replace(context_of(Causal() & Packed(), LENGTH), queries=queries, keys=keys)
    compare(context, *arrays(1, LENGTH))


@pytest.mark.parametrize(
    "mask", mostly_rare([Padding(), Causal() & Padding()], Causal() & Padding()), ids=str
)
@pytest.mark.parametrize("left", [0, 4])
def test_cudnn_attention_with_padding_equals_unfused_attention(mask, left, documented):
    """A sequence of padding alone gives zeros; padding at the beginning is computed blockwise."""
    segment_ids = np.roll(segments_of([13, 20], 20), left, axis=-1)
    compare(context_of(mask, 20, segment_ids=segment_ids), *arrays(2, 20))
    compare(context_of(mask, 20, segment_ids=segments_of([0, 20], 20)), *arrays(2, 20))


def test_cudnn_cross_attention_to_padded_source_equals_unfused_attention(documented):
    context = context_of(Padding(), 3, 9, segment_ids=segments_of([5, 0], 9))
    compare(context, *arrays(3, 3, 9))
    compare(context_of(All(), 3, 9), *arrays(3, 3, 9))


def test_nan_in_masked_keys_and_values_does_not_propagate(documented):
    query, key, value = arrays(4, LENGTH)
    context = context_of(Causal() & Packed(), LENGTH, segment_ids=PACKED)
    poisoned = [x.at[1, :, :3].set(np.nan).at[1, :, 60:].set(np.nan) for x in (query, key, value)]

    def output(*arrays):
        return attend(*arrays, replace(context, implementation="fused", placement=PLACEMENT))

    np.testing.assert_array_equal(output(*poisoned), output(query, key, value))
    for gradient in jax.grad(lambda x: output(*x).sum())(tuple(poisoned)):
        assert np.isfinite(gradient).all()


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5), before=st.integers(0, 9))
def test_lengths_and_offsets_of_documents_are_computed_from_segment_ids(lengths, before):
    size, most = 640, most_documents(640)
    starts = before + np.cumsum([0, *lengths[:-1]])
    documents = np.zeros((1, size), int)
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True), 1):
        documents[0, start : start + length] = number
    found = lengths_and_offsets(jnp.asarray(documents))
    absent = [-1] * (most - len(lengths))
    assert found[0].tolist() == [[*lengths, *absent]]
    assert found[1].tolist() == [[*starts, *absent, -1]]


LACKING = {
    "a soft cap of the scores": {"scores": Scores(cap=2.0)},
    "a bias of the scores": {"scores": Scores(bias=Alibi(4))},
    "does not support the mask Near": {"mask": Near(3)},
    "does not support the mask Prefix": {"mask": Prefix(3)},
    "only together with the causal mask": {"mask": Window(3)},
    "a sliding window together with padding": {
        "mask": Causal() & Window(3),
        "keys": TokenInfo(20, None, jnp.ones((2, 20), int)),
    },
    "cached or explicit positions": {"queries": TokenInfo(20, jnp.arange(20)), "in_order": False},
    "20 queries and 19 keys": {"keys": TokenInfo(19)},
}


@pytest.mark.parametrize("message", LACKING)
def test_error_for_unsupported_attention_arguments_states_the_reason(message, documented):
    change = LACKING[message]
    context = replace(context_of(Causal(), 20), implementation="fused", placement=PLACEMENT)
    context = replace(context, **change)
    with pytest.raises(ValueError, match='attention="fused" is not possible') as caught:
        attend(*arrays(0, 20, context.keys.length), context)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "head_dim, is_hopper, message",
    [
        (136, False, "a multiple of 8 and at most 128, not 136"),
        (136, True, None),
        (264, True, "a multiple of 8 and at most 256, not 264"),
        (12, True, "not 12"),
    ],
)
def test_largest_head_dim_of_cudnn_attention_depends_on_the_gpu(head_dim, is_hopper, message):
    x = jnp.zeros((1, 2, 4, head_dim), jnp.bfloat16)
    context = context_of(Causal(), 4)
    reason = CuDNN(is_hopper).unsupported_reason(x, x, x, context)
    assert reason is None if message is None else message in reason


def test_cudnn_attention_over_packed_documents_needs_a_hopper_gpu():
    context = context_of(Causal() & Packed(), LENGTH, segment_ids=PACKED)
    x = jnp.zeros((2, 4, LENGTH, 8), jnp.bfloat16)
    assert "only on Hopper" in CuDNN(False).unsupported_reason(x, x, x, context)
    assert CuDNN(True).unsupported_reason(x, x, x, context) is None


CALL = "__cudnn$fmhaSoftmax"
LOWERED = {
    "dense": (Causal(), None),
    "windowed": (Causal() & Window(128), None),
    "padded": (Causal() & Padding(), segments_of([100, 256], 256)),
    "packed": (Causal() & Packed(), [[1] * 100 + [2] * 156] * 2),
}


@pytest.mark.parametrize("name", LOWERED)
def test_gpu_program_calls_cudnn_kernel_forward_and_backward(name):
    """In the program for GPUs, which XLA lowers without one."""
    mask, segment_ids = LOWERED[name]
    context = context_of(mask, 256, segment_ids=segment_ids)
    context = replace(context, implementation="fused", placement=PLACEMENT)
    x = arrays(0, 256, heads=4, kv_heads=2, dtype=jnp.bfloat16)

    def loss(arrays):
        return attend(*arrays, context).astype(jnp.float32).sum()

    with as_if_on(parse_target("gpu:h100:1")):
        traced = jax.jit(jax.grad(loss)).trace(tuple(x))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"@{CALL}(" in text and f"@{CALL}Backward(" in text
    assert ("PADDING_CAUSAL" in text) == (segment_ids is not None)
    documents = most_documents(256) if name == "packed" else 1
    assert f"max_seg_per_batch\\22: {documents}" in text
    assert f"sliding_window_length\\22: {128 if name == 'windowed' else 0}" in text


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", LOWERED)
def test_cudnn_kernel_on_a_gpu_equals_unfused_attention(name):
    """On a GPU: the kernel computes what its documentation says."""
    assert isinstance(platforms.fused_kernels()[0], CuDNN)
    mask, segment_ids = LOWERED[name]
    context = context_of(mask, 256, segment_ids=segment_ids)
    x = arrays(0, 256, dtype=jnp.bfloat16)
    compare(context, *x, tolerance=4e-3)
