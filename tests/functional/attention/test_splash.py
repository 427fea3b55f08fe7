"""The splash kernel, run on the CPU: its values and gradients are those of explicit attention."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.functional.attention import platforms, splash
from jaxformer.functional.attention.attend import attend
from jaxformer.functional.attention.masks import (
    All,
    Causal,
    DenseMask,
    Mask,
    Near,
    Packed,
    Padding,
    Prefix,
    Window,
)
from jaxformer.functional.attention.scores import Alibi, Scores
from jaxformer.functional.attention.splash import Splash
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.placement import OneDevice
from jaxformer.models.sharding import activations
from tests.functional.attention.fused import (
    arrays,
    compare_with_explicit,
    compiled_comparison,
    context_of,
)
from tests.properties import tiny
from tests.slow import mostly_rare

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]

INTERPRETED = Splash(interpret=True)
PLACEMENT = OneDevice((INTERPRETED,))
LENGTH = 12


compare = partial(compare_with_explicit, PLACEMENT)

PACKED = [[1] * 5 + [2] * 70 + [3] * 60 + [0] * 5, [0] * 3 + [1] * 100 + [2] * 37]
GAPS = [[1] * 5 + [0] * 2 + [1] * 133, [1] * 70 + [0] * 3 + [1] * 30 + [2] * 37]


DENSE = [All(), Causal(), Causal() & Window(5), Near(3), Prefix(4), Window(6)]


@pytest.mark.parametrize(
    "mask, length",
    mostly_rare(list(product(DENSE, (12, 128, 140, 300))), (DENSE[2], 140)),
    ids=str,
)
def test_splash_attention_without_padding_equals_unfused_attention(mask, length):
    compare(context_of(mask, length), *arrays(0, length))


DOCUMENTS = [
    Causal() & Packed(),
    Packed(),
    Near(3) & Packed(),
    Causal() & Window(5) & Packed(),
]


@pytest.mark.parametrize("segment_ids", [PACKED, GAPS], ids=["packed", "gaps"])
@pytest.mark.parametrize("mask", mostly_rare(DOCUMENTS, DOCUMENTS[-1]), ids=str)
def test_splash_attention_within_packed_documents_equals_unfused_attention(mask, segment_ids):
    compare(context_of(mask, 140, segment_ids=segment_ids), *arrays(1, 140))


@pytest.mark.parametrize("mask", [Padding(), Causal() & Padding()], ids=str)
def test_splash_attention_with_padding_equals_unfused_attention(mask):
    segment_ids = [[0] * 7 + [1] * 133, [1] * 100 + [0] * 40]
    compare(context_of(mask, 140, segment_ids=segment_ids), *arrays(2, 140))


@pytest.mark.parametrize(
    "length, keys", mostly_rare([(12, 5), (5, 140), (128, 129), (3, 128)], (3, 128))
)
def test_splash_cross_attention_equals_unfused_attention(length, keys):
    segment_ids = np.ones((2, keys), int)
    segment_ids[0, 2:] = 0
    segment_ids[1] = 0  # a source without tokens: its queries give zeros
    context = context_of(Padding(), length, keys, segment_ids)
    compare(context, *arrays(3, length, keys))
    output = attend(
        *arrays(3, length, keys), replace(context, implementation="fused", placement=PLACEMENT)
    )
    assert not np.asarray(output[1]).any()


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 1), (6, 3)])
def test_splash_grouped_query_attention_equals_unfused_attention(heads, kv_heads):
    compare(context_of(Causal(), 20), *arrays(4, 20, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize(
    "scale, cap", mostly_rare([(0.3, 2.0), (None, 5.0), (1.0, None)], (0.3, 2.0))
)
def test_splash_attention_with_scale_and_softcap_equals_unfused_attention(scale, cap):
    compare(context_of(Causal(), 20, scores=Scores(scale, cap)), *arrays(5, 20))


def test_products_of_bfloat16_accumulate_in_float32():
    inputs = arrays(6, 140, dtype=jnp.bfloat16)
    compare(context_of(Causal(), 140), *inputs, tolerance=2e-2)


@dataclass(frozen=True)
class EveryThird(Mask):
    """A rule that the library does not have; some queries see no key."""

    def __call__(self, query, key):
        distance = query.position_ids()[..., :, None] - key.position_ids()[..., None, :]
        return (distance > 0) & (distance % 3 == 0)


@pytest.mark.parametrize(
    "length, keys", mostly_rare([(140, 140), (128, 128), (20, 140)], (128, 128))
)
def test_splash_attention_with_user_defined_mask_equals_unfused_attention(length, keys):
    context = context_of(EveryThird(), length, keys)
    query, key, value = arrays(7, length, keys)
    compare(context, query, key, value)
    found = attend(query, key, value, replace(context, implementation="fused", placement=PLACEMENT))
    assert not np.asarray(found[:, :, :3]).any()  # queries without keys


segment_ids = st.lists(st.integers(0, 2), min_size=2 * LENGTH, max_size=2 * LENGTH)


@pytest.mark.parametrize(
    "mask", [Causal() & Packed(), Causal() & Window(3) & Packed(), Causal() & Padding()], ids=str
)
@given(seed=st.integers(0, 99), ids=segment_ids)
def test_splash_attention_on_random_segment_ids_equals_unfused_attention(mask, seed, ids):
    context = context_of(mask, LENGTH, segment_ids=np.array(ids).reshape(2, LENGTH))
    compiled_comparison(PLACEMENT, mask)(context.queries, context.keys, *arrays(seed, LENGTH))


def test_nan_in_masked_keys_and_values_does_not_propagate():
    ids = [[1] * 8 + [0] * 4, [0] * 2 + [1] * 10]
    context = context_of(Causal() & Packed(), 12, segment_ids=ids)
    context = replace(context, implementation="fused", placement=PLACEMENT)
    padding = np.array(ids)[:, None, :, None] == 0
    query, key, value = (jnp.where(padding, jnp.nan, x) for x in arrays(8, 12))
    output, pull_back = jax.vjp(lambda *x: attend(*x, context), query, key, value)
    assert np.isfinite(output).all()
    assert all(np.isfinite(x).all() for x in pull_back(jnp.ones_like(output)))


IN_DOCUMENTS = TokenInfo(20, jnp.arange(20), jnp.ones((2, 20), int))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scores": Scores(bias=Alibi(4))}, "a bias of the scores"),
        ({"mask": DenseMask(np.ones((20, 20), bool))}, "DenseMask, which is not static"),
        ({"queries": TokenInfo(20, jnp.arange(20)), "in_order": False}, "explicit positions"),
        (
            dict.fromkeys(("queries", "keys"), IN_DOCUMENTS) | {"mask": Prefix(3) & Packed()},
            "a mask that depends only on distances between tokens if positions restart",
        ),
        (
            {"mask": EveryThird(), "keys": TokenInfo(20, None, jnp.ones((2, 20), int))},
            "padding or documents together with the mask EveryThird()",
        ),
    ],
)
def test_error_for_unsupported_attention_arguments_states_the_reason(change, message):
    context = replace(context_of(Causal(), 20), implementation="fused", placement=PLACEMENT)
    with pytest.raises(ValueError, match='attention="fused" is not possible') as caught:
        attend(*arrays(0, 20), replace(context, **change))
    assert message in str(caught.value)
    auto = replace(context, implementation="auto", **change)
    expected = attend(*arrays(0, 20), replace(auto, implementation="explicit"))
    np.testing.assert_allclose(attend(*arrays(0, 20), auto), expected, atol=1e-5)


@pytest.mark.parametrize("size, expected", [(1, 128), (129, 256), (640, 640), (1000, 1024)])
def test_splash_kernel_pads_sequences_to_whole_blocks(size, expected):
    assert splash.padded(size) == expected
    assert expected % splash.largest_block(expected) == 0


@dataclass(frozen=True)
class SameParity(Mask):
    """A rule that the library does not have; every query sees itself."""

    def __call__(self, query, key):
        return (query.position_ids()[..., :, None] - key.position_ids()[..., None, :]) % 2 == 0


def check_padding(mask, length, keys):
    """Asserts that the mask shows no padding if the plan says so; other calls have ids."""
    plan = splash.Plan(mask, length, keys, has_ids=False, cap=None, interpret=True)
    size = plan.sizes[1]
    for column in {keys, size - 1} if plan.hides_padding and size > keys else ():
        assert not plan.mask()[slice(0, length), slice(column, column + 1)].any()


@pytest.mark.parametrize("mask", [*DENSE, SameParity()], ids=str)
def test_splash_mask_without_segment_ids_hides_padding_for_any_sequence_length(mask):
    """Multiples of 128 also have padding, if they are not multiples of 256 or 512."""
    for length in range(1, 8193):
        check_padding(mask, length, length)


def test_source_mask_without_segment_ids_hides_padding_for_any_source_length():
    for keys in range(1, 8193):
        check_padding(All(), 128, keys)


@pytest.mark.parametrize(
    "mask, length, keys",
    mostly_rare(
        [
            *((mask, n, n) for mask in (*DENSE, SameParity()) for n in (1152, 1408, 1664)),
            *((All(), n, m) for n, m in ((128, 1152), (1152, 128), (1152, 1280))),
        ],
        (DENSE[4], 1152, 1152),
    ),
    ids=str,
)
def test_splash_attention_at_lengths_divisible_by_128_equals_unfused_attention(mask, length, keys):
    inputs = arrays(12, length, keys, heads=1, kv_heads=1, batch=1)
    compare(context_of(mask, length, keys), *inputs)


ON_A_MESH = """
import jax, numpy as np
from dataclasses import replace
from jaxformer.functional.attention.attend import attend
from jaxformer.functional.attention.masks import Causal, Packed
from jaxformer.models.sharding.activations import MeshPlacement, batch_axes
from jaxformer.models.sharding.parameters import make_mesh
from tests.functional.attention.fused import arrays, context_of
from tests.functional.attention.test_splash import INTERPRETED, PACKED

inputs = arrays(0, 140, heads=4, kv_heads=2, batch=4)
context = context_of(Causal() & Packed(), 140, segment_ids=PACKED * 2)
expected = attend(*inputs, replace(context, implementation="explicit"))

def loss(*inputs):
    output = attend(*inputs, replace(context, implementation="fused", placement=placement))
    return (output**2).sum(), output

for sizes in ({"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "tensor": 4}):
    with jax.set_mesh(make_mesh(sizes)):
        placement = MeshPlacement((INTERPRETED,), False, batch_axes(4, 2))
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
        gradients, output = compiled(*inputs)
    np.testing.assert_allclose(output, expected, atol=2e-5)
    wanted = jax.grad(lambda *x: (attend(*x, replace(context, implementation="explicit"))**2).sum(),
                      argnums=(0, 1, 2))(*inputs)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), gradients, wanted)
print("equal")
"""


def test_each_device_computes_attention_of_its_sequences_and_heads():
    """With tensor=4, which does not divide two key heads, the batch is sharded instead of heads."""
    run_on_eight_devices(ON_A_MESH)


def run_on_eight_devices(program):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "16"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "equal\n", done.stderr


def test_model_with_splash_kernel_equals_model_without_it(monkeypatch):
    """Logits and gradients of packed sequences, with windows in one layer and a soft cap."""
    for module in (platforms, activations):
        monkeypatch.setattr(module, "fused_kernels", lambda: (INTERPRETED,))
    options = {"positions": "rotary", "window": (3, None), "attention_softcap": 2.0}
    fused, explicit = (tiny.build(attention=name, **options) for name in ("fused", "explicit"))
    variables, tokens = tiny.weights(fused, 0), tiny.tokens(0, 2, LENGTH)
    segment_ids = np.array([[1] * 5 + [2] * 7, [0] * 2 + [3] * 8 + [0] * 2])
    read = variables, tiny.embeddings(1, 2, LENGTH, 8), segment_ids
    found, expected = (tiny.loss_and_gradients(model)(*read) for model in (fused, explicit))
    tiny.all_close(found, expected, 1e-4)
    logits = [tiny.apply(model)(variables, tokens, segment_ids) for model in (fused, explicit)]
    tiny.close(*logits, 1e-4, where=segment_ids != 0)


def test_splash_kernel_supports_forward_mode_differentiation():
    context = replace(context_of(Causal(), 20), implementation="fused", placement=PLACEMENT)
    query, key, value = arrays(0, 20)

    def tangent(implementation):
        used = replace(context, implementation=implementation)
        return jax.jvp(lambda x: attend(x, key, value, used), (query,), (query,))[1]

    np.testing.assert_allclose(tangent("fused"), tangent("explicit"), atol=1e-4)
